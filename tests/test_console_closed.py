"""A reader of standard output that goes away, as ``| head -1`` does."""

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

LOUD = """
import logging
from reason_llm.app.console import Console
console = Console("plain")
for number in range(20000):
    console.line(f"line {number}")
logging.getLogger("reason_llm").warning("a word of warning")
open("DONE", "w").write("done")
"""


def closed_early(command: list[str]) -> tuple[int, str]:
    """The exit code and standard error of a program of whose output one line is read."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    return process.wait(), error


@pytest.mark.long
def test_what_runs_goes_on_and_its_warnings_are_seen(tmp_path: Path) -> None:
    done = tmp_path / "done"
    code, error = closed_early([sys.executable, "-c", LOUD.replace("DONE", str(done))])
    assert code == 0
    assert done.read_text() == "done"
    told = [line for line in error.splitlines() if "kernels" not in line]
    assert told == [
        "standard output was closed; the run continues", "WARNING  a word of warning",
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("switch", ["--plan", "--data-check"])
def test_what_only_prints_ends_as_other_programs_do(switch: str) -> None:
    code, error = closed_early([sys.executable, "scripts/train.py", switch])
    assert code == 128 + 13
    assert "Traceback" not in error
    assert "BrokenPipe" not in error
