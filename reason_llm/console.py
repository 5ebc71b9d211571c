"""What a run shows: a live bar on a terminal, plain lines elsewhere. The one place where logging is
set up.

What is shown holds words of others: file names, prompts, errors of rewards. All of it is made
printable, so that no terminal acts on it, and the environment's secrets are left out.
"""

import io
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from reason_llm.errors import printable, without_secrets


class Console:
    """Lines and progress bars.

    Args:
        mode: ``auto`` (bars on a terminal), ``plain`` (lines only) or ``quiet`` (warnings and
        errors only).
    """

    def __init__(self, mode: str) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(
                errors="backslashreplace"
            )  # where the terminal knows few letters
        self._rich = RichConsole(highlight=False, soft_wrap=True, emoji=False, markup=False)
        self._quiet = mode == "quiet"
        self._live = mode == "auto" and self._rich.is_terminal
        handler = RichHandler(console=self._rich, show_time=False, show_path=False, markup=False)
        handler.setFormatter(_Printable("%(message)s"))
        # On import it tells of CPU kernels that are nowhere asked for.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        logger = logging.getLogger("reason_llm")
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING if self._quiet else logging.INFO)

    def line(self, text: str) -> None:
        """One line, unless quiet."""
        if not self._quiet:
            self._rich.print(without_secrets(printable(text)))

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


class _Printable(logging.Formatter):
    """One line for each message, and nothing that a terminal would act on."""

    def format(self, record: logging.LogRecord) -> str:
        """The message alone."""
        return without_secrets(printable(record.getMessage()))
