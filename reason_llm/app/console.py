"""Output of a run: lines and, on a terminal, a live part below them. The only place where logging
is set up.

What is shown holds words of others: file names, prompts, errors of rewards. All of it is made
printable, so that no terminal acts on it, and the environment's secrets are left out.
"""

import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from reason_llm.app import lines
from reason_llm.app.screen import Screen
from reason_llm.errors import printable, without_secrets
from reason_llm.files import discard_output
from reason_llm.rollout import Group
from reason_llm.run import Begun, Progress, Record

REFRESHES_PER_SECOND = 2


@contextmanager
def restored_output() -> Iterator[None]:
    """After the block, what a ``Console`` sets up for the whole process is as it was before."""
    names = ("reason_llm", "bitsandbytes")
    before = [(logger, logger.handlers, logger.level) for logger in map(logging.getLogger, names)]
    output = sys.stdout
    errors = output.errors if isinstance(output, io.TextIOWrapper) else None
    try:
        yield
    finally:
        for logger, handlers, level in before:
            logger.handlers = handlers
            logger.setLevel(level)
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors=errors)


class Console:
    """Lines and the live part of a run.

    Args:
        mode: ``auto`` (live on a terminal), ``plain`` (lines only) or ``quiet`` (warnings and
        errors only).
    """

    def __init__(self, mode: str) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # whatever a terminal cannot show
            sys.stdout.reconfigure(errors="backslashreplace")
        # In a notebook rich would write a block of HTML for each line.
        self._rich = _Output(
            highlight=False, soft_wrap=True, emoji=False, markup=False, force_jupyter=False
        )
        self._quiet = mode == "quiet"
        # A notebook calls itself a terminal by FORCE_COLOR, and cannot move its cursor.
        is_terminal = self._rich.is_terminal and self._rich.file.isatty()
        self._live = mode == "auto" and is_terminal and not self._rich.is_dumb_terminal
        self._screen: Screen | None = None
        self._last_step = 0
        self._judged_by = "accuracy"
        handler = _Lines(self._rich)
        # On import it tells of CPU kernels that are nowhere asked for.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        logger = logging.getLogger("reason_llm")
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING if self._quiet else logging.INFO)

    def line(self, text: str) -> None:
        """Print one line, unless quiet."""
        if not self._quiet:
            self._rich.print(without_secrets(printable(text)))

    @contextmanager
    def run(self, begun: Begun) -> Iterator[None]:
        """Show the live part, if there is one, while the block runs; lines and warnings go above
        it."""
        self._last_step, self._judged_by = begun.last_step, begun.judged_by
        with self._shown(
            Screen(begun.name, begun.last_step, begun.step, judged_by=begun.judged_by)
        ):
            if self._screen is not None:
                for record in begun.records:
                    self._screen.take(record)
            yield

    def step(self, record: Record, group: Group | None) -> None:
        """Print the line of a step and update the live part.

        Args:
            group: whose last completion is shown; None before training, and in a stage that
                samples nothing.
        """
        is_step = "time/learning_seconds" in record or "score/reward" in record
        if is_step:
            self.line(lines.of_step(record, self._last_step, self._judged_by))
        elif told := lines.judged(record, self._judged_by):
            self.line(f"before training: {', '.join(told)}")
        if self._screen is not None and not is_step:
            self._screen.take(record)
        elif self._screen is not None:
            self._screen.end_step(record, None if group is None else group.completions[-1])

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Progress]:
        """A bar over ``total`` items while the phase lasts, in the live part or, outside of a run,
        as all of it; call what it yields with (tokens, items) done."""
        if self._screen is None:
            with self._shown(Screen("", 0, 0)):
                yield self._begin(name, total)
            return
        yield self._begin(name, total)
        self._screen.end_phase()

    def _begin(self, name: str, total: int) -> Progress:
        if self._screen is None:
            return lambda tokens, items: None
        phase = self._screen.begin_phase(name, total)

        def advance(tokens: int, items: int) -> None:
            phase.tokens += tokens
            phase.items += items

        return advance

    @contextmanager
    def _shown(self, screen: Screen) -> Iterator[None]:
        if not self._live:
            yield
            return
        self._screen = screen
        try:
            with Live(
                get_renderable=self._renderable,
                console=self._rich,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
                vertical_overflow="crop",
            ):
                yield
        finally:
            self._screen = None

    def _renderable(self) -> Text:
        if self._screen is None:
            return Text()
        return self._screen.lines(
            self._rich.width,
            time.perf_counter(),
            plain=self._rich.no_color or self._rich.color_system is None,
            ascii_only=not self._rich.encoding.startswith("utf"),
        )


class _Output(RichConsole):
    """Standard output that survives the end of its reader: the run continues, with its warnings on
    standard error."""

    is_closed = False

    def on_broken_pipe(self) -> None:
        """Report it once on standard error and discard all further output."""
        self.quiet = self.is_closed = True
        discard_output()
        sys.stderr.write("standard output was closed; what is running goes on\n")


class _Lines(logging.Handler):
    """Log records as printable lines. They are never wrapped, because scripts search pipes for
    them."""

    def __init__(self, console: RichConsole) -> None:
        super().__init__()
        self._rich = console

    def emit(self, record: logging.LogRecord) -> None:
        """``WARNING  the message``."""
        style = f"logging.level.{record.levelname.lower()}"
        text = without_secrets(printable(record.getMessage()))
        if isinstance(self._rich, _Output) and self._rich.is_closed:
            sys.stderr.write(f"{record.levelname:<8} {text}\n" if record.levelno > 20 else "")
            return
        self._rich.print(Text.assemble((f"{record.levelname:<8}", style), " ", text))
