"""A real terminal that a test types into and reads from: tmux."""

import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from conftest import ROOT


class Terminal:
    """A tmux of its own with one command in it; the test is skipped where there is none.

    Args:
        raw: a file for all that the command writes.
    """

    def __init__(
        self, folder: Path, command: str, width: int = 80, raw: Path | None = None
    ) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("tmux is not installed")
        self.socket = str(folder / "tmux")
        # The command waits for its output to be recorded.
        start = folder / "start"
        shown = f"while [ ! -e {start} ]; do sleep 0.05; done; {command}; echo ended $?; cat"
        self.tmux("new-session", "-d", "-x", str(width), "-y", "40", shown)
        if raw is not None:
            self.tmux("pipe-pane", "-o", f"cat > {raw}")
        start.touch()

    def tmux(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", self.socket, *arguments],
            capture_output=True, text=True, check=True, cwd=ROOT, timeout=20,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        ).stdout  # fmt: skip

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-l", line)
        self.tmux("send-keys", "Enter")

    def wait(self, text: str, times: int = 1, styles: bool = False) -> str:
        """The screen, once it holds the text."""
        for _ in range(600):
            shown = self.tmux("capture-pane", "-p", "-J", *(["-e"] if styles else []))
            if shown.count(text) >= times:
                return shown
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not come:\n{shown}")

    def close(self) -> None:
        self.tmux("kill-server")
