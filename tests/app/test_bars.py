"""What the console writes to a terminal, read by a terminal of the test's own: bars, lines above
them, and nothing left of the bars at the end. The clock is the test's."""

import io
import logging
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from conftest import ROOT
from hostile import HOSTILE
from reason_llm.app.console import Console, restored_output
from reason_llm.app.lines import left
from reason_llm.run import Begun
from terminals import ALLOWED, rows_of

WIDTH = 50


class Tty(io.StringIO):
    """A file that calls itself a terminal, and is standard output once a console was made."""

    is_terminal = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._monkeypatch = monkeypatch

    def isatty(self) -> bool:
        return self.is_terminal

    def console(self, mode: str = "auto", clock: Callable[[], float] = lambda: 0.0) -> Console:
        self._monkeypatch.setattr(sys, "stdout", self)  # after pytest has put its own there
        return Console(mode, clock)

    @property
    def rows(self) -> list[str]:
        return rows_of(self.getvalue(), WIDTH)


@pytest.fixture
def tty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("LINES", "40")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    with restored_output():
        yield Tty(monkeypatch)


def begun(name: str = "a run", step: int = 0) -> Begun:
    return Begun(Path("a_run"), "id", name, step, 9, [])


def warn(text: str) -> None:
    logging.getLogger("reason_llm").warning("careful: %s", text)


def words(row: str) -> str:
    return " ".join(re.sub("[━╸╺]+( *[━╸╺]+)?", "|", row).split())


def test_bars_of_the_phase_and_of_the_run_with_their_time_left(tty: Tty) -> None:
    now = 0.0
    console = tty.console(clock=lambda: now)
    with console.run(begun(step=2)):
        assert [words(row) for row in tty.rows] == ["loading | 0/?", "step | 2/9 a run --:--"]
        for step in (3, 4):
            with console.phase("sampling", 40) as progress:
                for _ in range(4):
                    now += 30
                    progress(600, 5)
            with console.phase("learning", 8) as progress:
                for _ in range(2):
                    now += 1
                    progress(0, 2)
            seconds = {"time/learning_seconds": 2.0, "time/total_seconds": 122.0}
            console.step({"step": step, "train/loss": 0.5} | seconds, None)
            if step == 3:
                assert words(tty.rows[-1]) == "step | 3/9 a run --:--"
        # Of learning, 2 items in the second between two reports; of the run, a step in 122 s.
        assert [words(row) for row in tty.rows] == [
            "step 3/9 loss 0.5 learning 2.0 s", "step 4/9 loss 0.5 learning 2.0 s",
            "learning | 4/8 00:02", "step | 4/9 a run 10:10",
        ]  # fmt: skip
        with console.phase("sampling", 40) as progress:
            for _ in range(2):
                now += 10
                progress(500, 10)
            console.step({"step": 4}, None)  # as an evaluation that is added to a step
        assert words(tty.rows[-2]) == "sampling | 20/40 50 tokens/s 00:20"
    assert tty.rows[-1] == "step 4/9  loss 0.5  learning 2.0 s"


def test_the_time_left_is_told_from_the_second_step_on_and_one_slow_step_changes_little(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first record is of the evaluation before training."""
    seconds = [500.0, 9.0, 10.0, 1000.0, 11.0]
    records = [{"step": step, "time/total_seconds": s} for step, s in enumerate(seconds)]
    found = [left(records[: n + 1], 60) for n in range(len(records))]
    assert found == ["", "", "about 9 min left", "about 10 min left", "about 10 min left"]
    assert left(records, 9) == "about 52 s left"
    assert left(records, 1000) == "about 2 h 54 min left"
    assert left(records, 4) == ""  # it has ended
    slower = [{"step": n, "time/total_seconds": float(n > 29) * 3 + 1} for n in range(40)]
    assert left(slower, 49) == "about 25 s left"  # of the last 20 steps 10 took 4 s, 10 took 1 s
    assert left([{"step": 9, "time/total_seconds": 89.0}] * 2, 10) == "about 89 s left"
    assert left([{"step": 9, "time/total_seconds": 90.0}] * 2, 10) == "about 2 min left"
    with restored_output():
        console = Console("plain")
        with console.run(replace(begun(step=3), records=records[:4])):  # one that goes on
            console.step(records[4] | {"train/loss": 0.5, "time/learning_seconds": 2.0}, None)
    assert capsys.readouterr().out.endswith("  learning 2.0 s  about 52 s left\n")


def test_lines_and_warnings_stand_above_and_the_bars_leave_nothing(tty: Tty) -> None:
    console = tty.console()
    console.line("before")
    with console.run(begun()):
        with console.phase("sampling", 4) as progress:
            progress(3, 1)
            warn(HOSTILE)
            print("printed", file=sys.stderr)
            console.line("a line")
        assert tty.rows[-4:-2] == ["printed", "a line"]
        assert len([row for row in tty.rows if "━" in row]) == 2
    with console.phase("alone", 2) as progress:
        progress(0, 1)
        console.line("the last line")
        assert words(tty.rows[-1]).startswith("alone |")
    assert "━" not in "".join(tty.rows)
    joined = "".join(tty.rows)
    assert joined.startswith("beforeWARNING  careful: ")
    assert joined.endswith("printeda linethe last line")
    assert r"\x1b]0;owned\x07" in joined
    assert all(c.isprintable() for c in ALLOWED.sub("", tty.getvalue()))


@pytest.mark.parametrize("no_color", [True, False])
def test_no_color_is_honoured(tty: Tty, monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    console = tty.console()
    with console.run(begun()), console.phase("sampling", 4) as progress:
        progress(3, 1)
        warn("a word")
    assert "sampling" in tty.getvalue()
    colours = re.findall(r"\x1b\[[\d;]*(?:3|4|9)\d[\d;]*m", tty.getvalue())
    assert bool(colours) != no_color


@pytest.mark.parametrize("width", [1, 2, 11, 20, 40, 79, 200])
def test_a_bar_is_one_row_of_any_terminal(
    tty: Tty, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    console = tty.console()
    with console.run(begun("\u6570\u5b66 " * 30)), console.phase("sampling", 0) as progress:
        progress(10**9, 10**6)
        console.line("x")
        rows = rows_of(tty.getvalue(), width)
        assert len(rows) <= 3 and all(cell_len(row) <= width for row in rows)
    assert rows_of(tty.getvalue(), width) == ["x"]


@pytest.mark.parametrize("mode", ["plain", "quiet", "auto"])
def test_without_bars_there_are_lines_alone(tty: Tty, mode: str) -> None:
    tty.is_terminal = mode != "auto"
    console = tty.console(mode)
    with console.run(begun()), console.phase("sampling", 4) as progress:
        progress(3, 1)
        console.line("a line")
        warn("a word")
    lines = [] if mode == "quiet" else ["a line"]
    assert tty.rows == [*lines, "WARNING  careful: a word"]
    assert "\x1b[2K" not in tty.getvalue()


def test_no_secret_of_the_environment_is_shown(tty: Tty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdefghij")
    console, text = tty.console(), "it is hf_0123456789abcdefghij!"
    console.line(text)
    warn(text)
    with console.run(begun(text)):
        pass
    assert "hf_0" not in tty.getvalue()
    assert "".join(tty.rows) == "it is <HF_TOKEN>!WARNING  careful: it is <HF_TOKEN>!"


HANGS_UP = """
import logging, sys
from pathlib import Path
from reason_llm.app.console import Console
from reason_llm.run import Begun
console = Console("auto")
with console.run(Begun(Path("a"), "id", "a", 0, 9, [])):
    console.line("the first line")
    sys.stdin.readline()
    with console.phase("sampling", 4) as progress:
        progress(3, 1)
        console.line("nobody reads this")
        logging.getLogger("reason_llm").warning("a word of warning")
console.line("nor this")
open(sys.argv[1], "w").write("done")
"""


def test_a_terminal_that_hangs_up_does_not_end_the_run(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS_UP, str(tmp_path / "done")],
        stdin=subprocess.PIPE, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    read = b""
    while b"the first line" not in read:
        read += os.read(ours, 1000)
    os.close(ours)
    _, errors = process.communicate("go on\n", timeout=600)
    assert process.returncode == 0, errors
    assert (tmp_path / "done").read_text() == "done"
    assert errors.splitlines() == [
        "standard output was closed; the run continues", "WARNING  a word of warning",
    ]  # fmt: skip
