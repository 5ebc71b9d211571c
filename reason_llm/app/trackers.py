"""Trackers beside a run (TensorBoard, Weights & Biases, trackio): one process each, which follows
metrics.jsonl.

The file is the truth and the only way to a tracker: the run writes its records as ever and knows
nothing of what becomes of them, so a tracker that is broken, slow or hung costs one warning. What a
process does is in ``tracker_process``.
"""

import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from reason_llm.errors import ConfigError, one_line

OPENS = "open: "
"""Before the line of a tracker's process that says how it is opened."""
logger = logging.getLogger(__name__)


def check_installed(names: Sequence[str]) -> None:
    """Check that the package of each tracker is installed.

    Raises:
        ConfigError: with the command that installs it.
    """
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.trackers={name}: {name} is not installed; pip install -e '.[trackers]', or "
                "leave it out"
            )


class Trackers:
    """The trackers of a run, from ``start`` to the end of the ``with`` block.

    A process that follows a run sees its end, however that comes, by its standard input.

    Args:
        names: of ``log.trackers``.
    """

    GRACE_SECONDS = 10.0
    """What all trackers together may take after the run's end."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._watchers: dict[str, threading.Thread] = {}
        self._given_up: set[str] = set()

    def start(self, run_folder: Path, run_id: str) -> None:
        """Start to follow ``<run_folder>/metrics.jsonl``, from its first record."""
        for name in self._names:
            command = [sys.executable, "-m", "reason_llm.app.tracker_process", name]
            try:
                process = subprocess.Popen(
                    [*command, str(run_folder), run_id],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    errors="replace",
                    start_new_session=True,  # Ctrl-C is for the run
                )
            except OSError as error:
                self._warn(name, one_line(error))
                continue
            watcher = threading.Thread(target=self._watch, args=(name, process), daemon=True)
            self._processes[name], self._watchers[name] = process, watcher
            watcher.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the trackers write the rest, within ``GRACE_SECONDS``."""
        deadline = time.monotonic() + self.GRACE_SECONDS
        try:
            for process in self._processes.values():
                if process.stdin is not None:
                    process.stdin.close()
            for watcher in self._watchers.values():
                watcher.join(max(0.0, deadline - time.monotonic()))
        finally:
            for name, process in self._processes.items():
                if self._watchers[name].is_alive():
                    self._given_up.add(name)
                    os.killpg(process.pid, signal.SIGKILL)
                    self._warn(name, f"it was not done {self.GRACE_SECONDS:g} s after the run")
                self._watchers[name].join()

    def _watch(self, name: str, process: subprocess.Popen[str]) -> None:
        """Wait for the end of a tracker's process; its output says how the tracker is opened, and
        the reason of a failure."""
        with process:
            problem = ""
            for line in process.stdout or ():
                if line.startswith(OPENS):
                    logger.info("%s: %s", name, line.removeprefix(OPENS).strip())
                else:
                    problem += line
            code = process.wait()
        if code != 0 and name not in self._given_up:
            self._warn(name, problem.strip() or f"its process ended with code {code}")

    def _warn(self, name: str, problem: str) -> None:
        logger.warning(
            "the tracker %s stopped (%s); the run goes on, and metrics.jsonl has every record",
            *(name, problem),
        )
