"""What a run itself leaves for its report, and what it makes of a report that fails."""

import getpass
import platform
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from conftest import ROOT
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.report.payload import examine
from reason_llm.app.report.runs import read_run
from reason_llm.config import Config
from reason_llm.files import read_object

QUIET = Console("quiet")


def test_a_run_ends_with_a_report_of_all_its_rollouts(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    data = str(ROOT / "data" / "arithmetic_test.jsonl")
    training.run_training(small_run(run__steps=2, data__eval=data, eval__limit=8), QUIET)
    folder = tmp_path / "runs" / "small"
    assert (folder / "report.html").read_bytes().startswith(b"<!doctype html>")
    found = examine(read_run(folder, "small"))
    assert found.run.summary is not None
    assert found.run.num_held_out == 8
    assert found.rollouts.num_rollouts == 2 * 4 * 4
    assert found.token_notice is None
    assert not found.run.notices


@pytest.mark.long
def test_environment_tells_of_the_machine_and_of_no_one_else(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    training.run_training(small_run(run__steps=1), QUIET)
    path = tmp_path / "runs" / "small" / "environment.json"
    [first] = orjson.loads(path.read_bytes())["starts"]
    assert first["step"] == 0
    assert first["packages"]["torch"].startswith("2.")
    assert first["machine"]["python"] == platform.python_version()
    assert first["machine"]["host_gib"] > 0
    assert first["data"]["training"][0]["rows"] == 64
    assert {line["name"] for line in first["plan"]} >= {"KV cache", "activations"}
    text = path.read_text().replace(str(ROOT), "")  # the config names this one
    assert platform.node() not in text
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    assert getpass.getuser() not in text
    training.run_training(small_run(run__steps=2), QUIET)  # goes on: nothing has changed
    assert [each["step"] for each in orjson.loads(path.read_bytes())["starts"]] == [0]
    training.run_training(
        small_run(
            run__steps=3, eval__limit=4, data__eval=str(ROOT / "data" / "arithmetic_test.jsonl")
        ),
        QUIET,
    )
    starts = orjson.loads(path.read_bytes())["starts"]
    assert [each["step"] for each in starts] == [0, 2]
    assert starts[1]["data"]["held_out"][0]["prompts"] == 4


def test_a_report_that_fails_is_a_warning_and_the_run_is_whole(
    small_run: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "runs" / "small"
    training.run_training(small_run(run__steps=1), QUIET)
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    summary = training.run_training(small_run(run__steps=2), QUIET)
    assert "no report was written: WriteError" in caplog.text
    assert read_object(folder / "summary.json") == summary
    assert summary["steps"] == 2
