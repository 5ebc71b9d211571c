"""Commands with a ``sample.environment``: the data check, the chat, the evaluation, resuming."""

import io
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, TINY, small_config
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from reason_llm.data import load_data
from reason_llm.errors import DataError
from reason_llm.loop import train
from reason_llm.model import adapters
from reason_llm.model.base import Model
from reason_llm.run import SILENT
from reason_llm.run.start.prepare import prepare

Call = Callable[..., tuple[int, str, str]]
GAME = """
class Game:
    def reset(self, **row): ...
    def step(self, text): return '', True
"""
ASKING = """
class Asks:
    def reset(this, level, question, start=0, **row): ...
    def step(self, text): ...

class Easy(Asks):
    def reset(self, **row): ...

class Sums:
    def reset(self): ...
    def add(self, a: int) -> int:
        '''Add.

        Args:
            a: A number.
        '''
"""
IMPORTING = """
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hints


class Asks:
    def reset(self, **row):
        self.total = 0

    def step(self, text):
        from later import answer

        return answer(hints.HINT)
"""


@pytest.fixture
def run_folder(small_run: Callable[..., Config], model: Model, tmp_path: Path) -> Path:
    """A run's folder with an adapter that was made up."""
    folder = tmp_path / "runs" / "small"
    adapters.snapshot(model.policy).write(folder / "adapter")
    test_set = str(ROOT / "data" / "arithmetic_test.jsonl")
    config = small_run(data__eval=test_set, sample__engine="transformers", eval__limit=2)
    (folder / "resolved_config.yaml").write_text(to_yaml(config))
    return folder


def test_a_run_in_an_environment_says_that_a_chat_plays_none(
    monkeypatch: pytest.MonkeyPatch, script: Call, run_folder: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"What is 3 + 4?")))
    config = (path := run_folder / "resolved_config.yaml").read_text()
    path.write_text(config.replace("environment: null", "environment: mine.py:Game"))
    code, shown, error = script("chat.py", run_folder, "--max-new-tokens", "4")
    assert (code, bool(shown), error.count("\n")) == (0, True, 1)
    assert error.startswith("a chat does not play sample.environment: each answer is one turn")


def test_a_changed_environment_is_another_evaluation(
    script: Call, run_folder: Path, tmp_path: Path
) -> None:
    (path := tmp_path / "game.py").write_text(GAME)
    asked = ("evaluate.py", run_folder, "--sample.environment", f"{path}:Game", "--out")
    assert script(*asked, tmp_path / "out")[0] == 0
    lines = (tmp_path / "out" / "problems.jsonl").read_bytes().splitlines()
    assert orjson.loads(lines[0])["greedy"]["finish_reason"] == "environment"
    path.write_text(GAME.replace("return '', True", "return 1 / 0"))
    assert "the environment failed in 2 completions" in script(*asked, tmp_path / "other")[1]
    before = (tmp_path / "out" / "problems.jsonl").read_bytes()
    code, said, _ = script(*asked, tmp_path / "out")
    assert (code, "out was renamed to" in said) == (0, True)
    assert (tmp_path / "out.old-1" / "problems.jsonl").read_bytes() == before


def test_a_data_check_of_an_environment(tmp_path: Path, script: Call) -> None:
    """Columns that ``reset`` needs, and a chat template that must be able to write tools."""
    shutil.copytree(TINY, tmp_path / "model")
    rows = [{"question": "Q", "answer": "1", "level": 1}, {"question": "Q", "answer": "1"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (its := tmp_path / "its.py").write_text(ASKING)
    tree = {
        "model": {"path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "a.jsonl")},
    }
    (config := tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    asked = ("train.py", config, "--data-check", "--sample.environment")
    code, shown, _ = script(*asked, f"{its}:Asks")
    assert (code, "a.jsonl:2: lacks column 'level', which reset of" in shown) == (2, True)
    code, shown, errors = script(*asked, f"{its}:Sums")
    assert code == 2 and "offers tools to the model, and the chat template of" in shown + errors


def test_all_columns_that_a_row_lacks_are_told_at_once(
    tmp_path: Path, small_run: Callable[..., Config], tokenizer: Any
) -> None:
    (its := tmp_path / "its.py").write_text(ASKING)
    row = {"question": "What is 1 + 2?", "answer": "3"}
    faults: list[DataError] = []

    def told(row: dict[str, Any], environment: Any, *columns: str) -> str:
        (rows := tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        options = {"sample__environment": environment, "data__train": str(rows)}
        load_data(small_run(**options), tokenizer, 4000, faults.append, columns)
        return str(faults.pop(0)) if faults else ""

    lacks = "column 'level', which reset of the environment asks for"
    unit, price = (f"column '{name}', which a custom reward asks for" for name in ("unit", "price"))
    message = f":1: lacks {lacks}, and {price}, and {unit}; it has question, answer; add"
    assert message in told(row, f"{its}:Asks", "unit", "price", "answer")
    assert told({**row, "level": 1}, f"{its}:Asks") == ""
    named = {"asks": f"{its}:Asks", "easy": f"{its}:Easy"}
    assert told({**row, "environment": "easy"}, named) == ""
    assert f"lacks {lacks}; it has" in told({**row, "environment": "asks"}, named)


def test_a_module_that_the_environments_file_imports_is_another_experiment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    own = tmp_path / "own"
    own.mkdir()
    (own / "asks.py").write_text(IMPORTING)
    (own / "hints.py").write_text("import json, torch\nfrom words import HINT\n")
    (own / "words").mkdir()
    (own / "words" / "__init__.py").write_text("from .one import HINT\n")
    (own / "words" / "one.py").write_text("HINT = 'again'\n")
    (own / "later.py").write_text("def answer(hint):\n    return hint\n")
    config = small_config(tmp_path, run__steps=1, sample__max_new_tokens=40, data__limit=8,
                          sample__environment=f"{own / 'asks.py'}:Asks", sample__turns=2,
                          sample__turn_tokens=4)  # fmt: skip
    train(config)
    config, key = config.with_options({"run.steps": 2}), "score.custom_sha256.sample.environment"
    with caplog.at_level(logging.WARNING):
        prepare(config, SILENT)
        assert "another experiment" not in caplog.text
        for name in ("hints", "later", "words", "words.one"):
            file = own.joinpath(*name.split("."))
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            before = file.read_text()
            file.write_text(before + "# changed\n")
            caplog.clear()
            prepare(config, SILENT)
            (line,) = [each for each in caplog.messages if "another experiment" in each]
            assert line.startswith(f"the run resumes with {key} imports {name}: '"), line
            file.write_text(before)
