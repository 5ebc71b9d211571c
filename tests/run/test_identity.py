"""What changes the bits of a run that goes on: a change of how text is read is refused, a change of
the user's own code is told, each by its name."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from conftest import ROOT, TINY, small_config
from reason_llm.config import CommandLine, Config
from reason_llm.errors import CheckpointError
from reason_llm.evaluate import make_request, run_evaluation
from reason_llm.loop import train
from reason_llm.run import SILENT
from reason_llm.run.start.prepare import prepare


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Config, Path]:
    """A run of one step over a copy of the tiny model, and that copy."""
    folder = tmp_path_factory.mktemp("identity")
    shutil.copytree(TINY, folder / "base")
    config = small_config(folder, model__path=str(folder / "base"), run__steps=1,
                          sample__max_new_tokens=4, data__limit=8)  # fmt: skip
    train(config)
    return config.with_options({"run.steps": 2}), folder / "base"


def one_end_more(base: Path) -> None:
    file = base / "generation_config.json"
    value = json.loads(file.read_bytes())
    ends = value["eos_token_id"]
    value["eos_token_id"] = [*(ends if isinstance(ends, list) else [ends]), 40]
    file.write_text(json.dumps(value))


def two_tokens_swapped(base: Path) -> None:
    """Two that no prompt has."""
    file = base / "tokenizer.json"
    value = json.loads(file.read_bytes())
    vocabulary = value["model"]["vocab"]
    first, second = "~", "|"
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(value))


def another_template(base: Path) -> None:
    """The same prompts, and other later turns."""
    file = base / "chat_template.jinja"
    file.write_text(file.read_text() + "{# #}")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (one_end_more, r"model\.end_token_ids: \[\d+\] -> \[\d+, 40\]"),
        (two_tokens_swapped, r"model\.files_sha256\.tokenizer\.json: '\w+' -> '\w+'"),
        (another_template, r"data\.template_sha256: '\w+' -> '\w+'"),
    ],
)
def test_a_run_does_not_go_on_where_text_is_read_otherwise(
    change: Callable[[Path], None], told: str, begun: tuple[Config, Path]
) -> None:
    config, base = begun
    assert prepare(config, SILENT).state.step == 1
    kept = {file: file.read_bytes() for file in base.iterdir()}
    change(base)
    try:
        with pytest.raises(CheckpointError, match=rf"another config \({told}\); set that back"):
            prepare(config, SILENT)
    finally:
        for file, content in kept.items():
            file.write_bytes(content)
    assert prepare(config, SILENT).state.step == 1


@pytest.mark.long
def test_code_that_comes_with_a_model_and_a_teachers_scale_count_too(tmp_path: Path) -> None:
    base, taught = tmp_path / "base", tmp_path / "teacher"
    shutil.copytree(TINY, base)
    (base / "modeling_mine.py").write_text("")
    options = {"run__steps": 1, "sample__max_new_tokens": 4, "data__limit": 8}
    train(small_config(tmp_path, run__name="first", model__path=str(base), **options))
    shutil.copytree(tmp_path / "runs" / "first" / "adapter", taught)
    (taught / "digests.json").unlink()
    config = small_config(
        tmp_path, model__path=str(base), model__trust_remote_code=True, algorithm={"name": "opd"},
        teacher__adapter=str(taught), **options | {"sample__completions_per_prompt": 1},
    )  # fmt: skip
    train(config)
    for file, change, told in (
        (base / "modeling_mine.py", "# changed\n", r"model\.files_sha256\.modeling_mine\.py: '"),
        (taught / "adapter_config.json", '"lora_alpha": 7', r"teacher\.adapter_sha256: '"),
    ):
        before = file.read_text()
        file.write_text(re.sub(r'"lora_alpha": \d+', change, before) or change)
        with pytest.raises(CheckpointError, match=rf"another config \({told}"):
            prepare(config.with_options({"run.steps": 2}), SILENT)
        file.write_text(before)


@pytest.mark.parametrize("change", [one_end_more, two_tokens_swapped])
def test_an_evaluation_does_not_go_on_either(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    base = shutil.copytree(TINY, tmp_path / "base")
    sets = [f"sums={ROOT / 'data' / 'arithmetic_test.jsonl'}"]
    options = {"data.limit": 2, "eval.limit": 2, "sample.max_new_tokens": 4}
    values = {"sets": sets, "out": [str(tmp_path / "out")]}
    request = make_request(CommandLine(str(base), options, set(), values))
    assert run_evaluation(request, SILENT) == run_evaluation(request, SILENT)
    change(base)
    before = (tmp_path / "out" / "problems.jsonl").read_bytes()
    run_evaluation(request, SILENT)
    assert (tmp_path / "out.old-1" / "problems.jsonl").read_bytes() == before
