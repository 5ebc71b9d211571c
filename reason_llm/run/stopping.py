"""Handling of Ctrl-C and SIGTERM."""

import logging
import os
import signal
import sys
import threading
from types import FrameType
from typing import Self

from reason_llm.errors import Stopped

logger = logging.getLogger(__name__)


class StopSignal:
    """Signal handler of a run: the first signal is noted, the second one ends the process; in an
    interactive session it is a KeyboardInterrupt. Outside the main thread signals are left alone.
    """

    def __init__(self) -> None:
        self._received: signal.Signals | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):  # restored in this order
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @property
    def requested(self) -> bool:
        """Whether a signal was received."""
        return self._received is not None

    def check(self) -> None:
        """Raises Stopped if a signal was received; everything is on disk."""
        if self._received is not None:
            raise Stopped(128 + self._received)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None:
            if hasattr(sys, "ps1"):  # the prompt, of IPython's kernels, too
                raise KeyboardInterrupt
            if sys.stdout.isatty():
                os.write(1, b"\x1b[?25h")  # a progress bar hides the cursor
            os._exit(128 + number)
        self._received = signal.Signals(number)
        logger.warning(
            "%s: finishing the current work, then saving; a second signal ends at once",
            self._received.name,
        )
