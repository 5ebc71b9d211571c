"""What a run shows: a live bar on a terminal, plain lines elsewhere. The one place where logging is
set up."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Console:
    """Lines and progress bars.

    Args:
        mode: ``auto`` (bars on a terminal), ``plain`` (lines only) or ``quiet`` (warnings and
        errors only).
    """

    def __init__(self, mode: str) -> None:
        self._rich = RichConsole(highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._quiet = mode == "quiet"
        self._live = mode == "auto" and self._rich.is_terminal
        handler = RichHandler(console=self._rich, show_time=False, show_path=False, markup=False)
        # On import it tells of CPU kernels that are nowhere asked for.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        logger = logging.getLogger("reason_llm")
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING if self._quiet else logging.INFO)

    def line(self, text: str) -> None:
        """One line, unless quiet."""
        if not self._quiet:
            self._rich.print(text)

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Callable[[int, int], None]]:
        """A bar over ``total`` items while the phase lasts; call what it yields with (tokens,
        items) done."""
        if not self._live:
            yield lambda tokens, items: None
            return
        columns = (
            TextColumn("{task.description:>10}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"), TimeRemainingColumn(),
        )  # fmt: skip
        with Progress(*columns, console=self._rich, transient=True) as bar:
            task = bar.add_task(name, total=total, speed="")
            started, tokens_so_far = time.perf_counter(), 0

            def advance(tokens: int, items: int) -> None:
                nonlocal tokens_so_far
                tokens_so_far += tokens
                seconds = time.perf_counter() - started
                speed = (
                    f"{tokens_so_far / max(seconds, 1e-9):,.0f} tokens/s" if tokens_so_far else ""
                )
                bar.update(task, advance=items, speed=speed)

            yield advance
