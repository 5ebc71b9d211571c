"""``scripts/train.py CONFIG --data-check``, and a run over several sets."""

import json
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import Config
from reason_llm.run.store import metrics
from reason_llm.score.code import code_tests
from stages import OF_FORM

TRAIN = ROOT / "scripts" / "train.py"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Call:
    """--data-check on a config of ``data`` with a model that has no weights."""
    shutil.copytree(TINY, tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()

    def call(data: dict, *arguments: str, **sections: Any) -> tuple[int, str, str]:
        of_form = OF_FORM[data.get("form", "problems")]
        tree = {"model": {"path": str(tmp_path / "model")}, "data": data, **of_form, **sections}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
        config = str(tmp_path / "config.yaml")
        monkeypatch.setattr(sys, "argv", [str(TRAIN), config, "--data-check", *arguments])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(TRAIN), run_name="__main__")
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return call


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_what_a_clean_check_tells(tmp_path: Path, call: Call) -> None:
    rows = [{"question": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(20)]
    train = lines(tmp_path / "a.jsonl", *rows, {"question": "\x1b[2Jred\nthen", "answer": "\x07"})
    other = lines(tmp_path / "b.jsonl", rows[3], rows[3])
    sources = [train, {"source": other, "weight": 3}]
    code, shown, errors = call(
        {"train": sources, "system_prompt": "none", "deduplicate": True},
        eval={
            "sets": {"x": lines(tmp_path / "c.jsonl", {"problem": "New", "answer": "5"}, rows[0])}
        },
    )
    assert (code, errors) == (2, "")  # nothing is left of b.jsonl
    assert f"{other}: no row is left; left out: 2 by data.deduplicate" in shown
    code, shown, errors = call(
        {"train": sources, "system_prompt": "none", "template": "plain_chat"},
        eval={"sets": {"x": str(tmp_path / "c.jsonl")}},
    )
    assert (code, errors) == (0, "")
    assert f"train {train}, 25.0% of the prompts: 21 rows, 21 taken\n" in shown
    assert f"train {other}, 75.0% of the prompts: 2 rows, 2 taken\n" in shown
    assert f"eval x {tmp_path / 'c.jsonl'}: 2 rows, 2 taken\n  prompt tokens: min " in shown
    assert "warning: training rows that ask what an evaluation set asks: 1, such as" in shown
    first, last = (
        f"--- {train}:1\nUser: What is 0 + 1?\n\nAssistant:\n--- gold answer: 1\n",
        "no errors",
    )
    assert first in shown
    assert shown.endswith(f"{last}\n")
    assert shown.count("--- gold answer: ") == 3
    assert not (tmp_path / "runs").exists()


def test_escape_sequences_are_spelled_out(tmp_path: Path, call: Call) -> None:
    row = {"question": "\x1b[2Jred\nthen", "answer": "\x9b7"}
    code, shown, _ = call({"train": lines(tmp_path / "a.jsonl", row), "system_prompt": "none"})
    assert code == 0
    assert "\\x1b[2Jred\nthen" in shown
    assert "gold answer: \\x9b7" in shown
    assert "\x1b" not in shown


def test_the_first_ten_errors(tmp_path: Path, call: Call) -> None:
    good = {"question": "What is 1 + 1?", "answer": "2"}
    train = lines(tmp_path / "a.jsonl", good, *[{"question": f"\x1b{n}"} for n in range(12)])
    held_out = str(tmp_path / "none.jsonl")
    code, shown, errors = call({"train": train, "eval": held_out})
    assert (code, errors) == (2, "")
    told = shown.partition("13 errors, the first 10:\n")[2].splitlines()
    assert len(told) == 10
    assert told[0].strip().startswith(f"data file {held_out} does not exist")
    assert told[1].strip().startswith(f"{train}:2: lacks any of the columns 'gt_answer'")
    assert f"train {train}: 13 rows, 1 taken" in shown


def test_rows_to_learn_from_show_what_is_learned(tmp_path: Path, call: Call) -> None:
    pair = {"prompt": "Q\x1b[2J", "chosen": "good one", "rejected": "bad", "margin": 0.5}
    train = lines(tmp_path / "a.jsonl", pair, pair | {"chosen": "bad"})
    code, shown, _ = call({"train": train, "form": "preferences", "system_prompt": "none"})
    assert code == 2  # for the second row
    assert shown.startswith(f"train {train}: 2 rows, 1 taken as 2 rows of tokens\n  row tokens: ")
    assert "  learned tokens: min " in shown
    assert "first 1 rows: 1 end with an end token, 1 have the ids of their text" in shown
    asked = "<|im_start|>user\nQ\\x1b[2J<|im_end|>\n<|im_start|>assistant\n\n"
    assert f", value 0.5\n{asked}--- learned, 9 tokens:\ngood one<|im_end|>\n" in shown
    assert f"tokens\n{asked}--- learned, 4 tokens:\nbad<|im_end|>\n1 errors" in shown
    assert f"  {train}:2: 'chosen' and 'rejected' are the same text; remove the row\n" in shown


def test_parts_between_turns_are_read_and_not_learned(tmp_path: Path, call: Call) -> None:
    talk = [
        {"role": role, "content": content}
        for role, content in (("user", "Q"), ("assistant", "A"), ("user", "R"), ("assistant", "B"))
    ]
    train = lines(tmp_path / "a.jsonl", {"messages": talk}, {"messages": talk[:2]})
    problems = lines(tmp_path / "b.jsonl", {"question": "Q", "answer": "1"})
    data = {"train": train, "form": "demonstrations", "system_prompt": "none", "eval": problems}
    code, shown, _ = call(data)
    assert code == 0
    assert (
        "--- learned, 2 tokens:\nA<|im_end|>\n--- read, 10 tokens:\n\n"
        "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n\n"
        "--- learned, 2 tokens:\nB<|im_end|>\n"
    ) in shown
    assert f"eval {problems}: 1 rows, 1 taken\n" in shown
    assert f"ask what an evaluation set asks: 2, such as {train}:1" in shown
    assert shown.endswith("no errors\n")


def test_a_long_document_is_shown_in_part(tmp_path: Path, call: Call) -> None:
    train = lines(tmp_path / "a.jsonl", {"text": "0123456789" * 300})
    code, shown, _ = call({"train": train, "form": "texts", "max_tokens": 2000})
    assert code == 0
    assert "1 rows, 2 taken\n" in shown
    assert "… and 999 tokens more\n" in shown
    assert len(shown) < 3500


def test_wrong_options_are_one_line(tmp_path: Path, call: Call) -> None:
    train = lines(tmp_path / "a.jsonl", {"prompt": "Q", "chosen": "good one", "rejected": "bad"})
    for data, named in (
        ({"template": "r0_zero"}, "data.template='r0_zero'"),
        ({"form": "preferences", "max_tokens": 9999}, "data.max_tokens=9999 is not from 2 to "),
    ):
        code, shown, errors = call({"train": train, **data})
        assert (code, shown, errors.count("\n")) == (2, "", 1)
        assert errors.startswith(f"error: {named}")


def test_a_column_that_a_custom_reward_asks_for(tmp_path: Path, call: Call) -> None:
    row = {"question": "Q", "answer": "1"}
    train = lines(tmp_path / "a.jsonl", row | {"unit": "m"}, row)
    (tmp_path / "mine.py").write_text("def has_unit(completion, unit):\n    return 1.0\n")
    rewards = [{"custom": f"{tmp_path / 'mine.py'}:has_unit"}]
    code, shown, _ = call({"train": train}, score={"rewards": rewards})
    assert (code, "a.jsonl:2: lacks column 'unit'" in shown) == (2, True)


def test_a_run_over_several_sets_tells_each_accuracy(
    small_run: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    train, test = (ROOT / "data" / f"arithmetic_{name}.jsonl" for name in ("train", "test"))
    part = tmp_path / "part.jsonl"
    part.write_text("".join(train.read_text().splitlines(keepends=True)[:8]))
    config = small_run(
        data__train=[{"source": str(train), "weight": 3}, str(part)],
        eval={"sets": {"sums": str(test), "seen": str(part)}, "limit": 8},
        run__steps=2,
    )
    training.run_training(config, Console("plain"))
    shown = capsys.readouterr().out
    folder = config.run.directory / "small"
    records = metrics.read(folder / "metrics.jsonl")
    assert records[0]["eval/accuracy"] == records[0]["eval/sums/accuracy"]
    assert "eval/seen/completion_tokens" in records[-1]
    summary = orjson.loads((folder / "summary.json").read_bytes())
    assert list(summary["accuracy_of_sets"]) == ["sums", "seen"]
    sums, seen = (records[0][f"eval/{name}/accuracy"] for name in ("sums", "seen"))
    assert f"held-out accuracy {sums:.1%} (sums {sums:.1%}, seen {seen:.1%})" in shown
    assert (folder / "curves.png").stat().st_size > 10_000
    assert "what an evaluation set asks: 16, such as" in " ".join(shown.split())


def test_code_rows_are_checked_without_a_sandbox(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise AssertionError("a sandbox is started")

    monkeypatch.setattr(code_tests, "Sandbox", refuse)
    good = {"prompt": "Write add.", "test_list": ["assert add(1, 2) == 3"]}
    bad = {"prompt": "Write add.", "test": "assert add("}
    source = lines(tmp_path / "a.jsonl", good, bad)
    rewards = [{"name": "code_tests_fraction"}, {"name": "code_tests", "weight": 0.1}]
    code, shown, errors = call({"train": source}, score={"rewards": rewards})
    assert (code, errors) == (2, "")
    assert "2 rows, 1 taken" in shown
    assert "no valid Python" in shown
