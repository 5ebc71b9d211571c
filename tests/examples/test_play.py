"""``examples/play.py``: one rollout with written turns, of which the prompt, the replies and the
rewards are those of a run."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import trl

from conftest import ROOT, TINY


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("play", ROOT / "examples" / "play.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_game_is_played_to_its_end(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (ROOT / "data" / "wordle_train.jsonl").read_text().splitlines()
    word = json.loads(rows[0])["answer"]
    other = "abc" if word != "abc" else "abd"
    played = example.play(str(ROOT / "configs" / "wordle_tiny.yaml"), [other, word])
    assert (played.finish_reason, played.rewards["environment"]) == ("environment", 1.0)
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("<|user|>WORDLE") and shown[1] == other and shown[3] == word


def test_a_rollout_that_has_not_ended_says_so(example: Any) -> None:
    with pytest.raises(SystemExit, match="waits for another turn"):
        example.play(str(ROOT / "configs" / "wordle_tiny.yaml"), ["hhh"])


def test_a_tool_is_called_and_its_result_is_read(
    example: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights: a tokenizer and a template that knows tools."""
    model = tmp_path / "model"
    shutil.copytree(TINY, model, ignore=shutil.ignore_patterns("*.safetensors"))
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    shutil.copy(template, model / "chat_template.jinja")
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 6 * 7?", "answer": "42"}\n')
    config = {
        "model": {"path": str(model), "context_tokens": 8192},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "sample": {"environment": f"{ROOT / 'examples' / 'tools.py'}:Calculator"},
        "score": {"rewards": ["boxed"]},
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(config))
    arguments = {"expression": "6 * 7"}
    calls = [
        f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
        for name in ("calculate", "compute")
    ]
    played = example.play(str(tmp_path / "mine.yaml"), [*calls, "It is \\boxed{42}."])
    assert (played.finish_reason, played.rewards["boxed"]) == ("stop", 1.0)
    assert (played.environment["calls"], played.environment["failed_calls"]) == (2, 1)
    described, *rest = capsys.readouterr().out.split(calls[0])
    assert "Compute an arithmetic expression." in described
    assert "<tool_response>\n42\n</tool_response>" in rest[0]
    assert "Tool compute not found." in rest[0]
