"""Output of a run: lines and, on a terminal, progress bars below them. The only place where logging
is set up.

Untrusted text is escaped, and the environment's secrets are removed. The number of bars is fixed
while they are shown: if their height changed while another thread prints, a bar would stay on the
terminal and a warning above it would be erased."""

import io
import logging
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from rich.console import Console as RichConsole
from rich.file_proxy import FileProxy
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress as Bars,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from reason_llm.app import lines
from reason_llm.errors import printable, without_secrets
from reason_llm.files import discard_output
from reason_llm.rollout import Group
from reason_llm.run import Begun, Progress, Record, Watch

REFRESHES_PER_SECOND = 2
MAX_NAME_CELLS = 24
"""Width of the run's name before its progress bar."""


@contextmanager
def restored_output() -> Iterator[None]:
    """Restore the logging and output settings that a ``Console`` changes for the process."""
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


class Console(Watch):
    """Lines and progress bars of a run.

    Args:
        mode: ``auto`` (bars on a terminal), ``plain`` (lines only) or ``quiet`` (warnings only).
        clock: seconds, for the bars' speed and time left.
    """

    def __init__(self, mode: str, clock: Callable[[], float] = time.monotonic) -> None:
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
        self._clock = clock
        self._bars: Bars | None = None
        self._last_step = 0
        self._recent = deque[Record](maxlen=lines.RECENT_STEPS)
        self._judged_by = "accuracy"
        # Its import warns about missing CPU kernels, which nothing here uses.
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        logger = logging.getLogger("reason_llm")
        logger.handlers = [_Lines(self._rich)]
        logger.setLevel(logging.WARNING if self._quiet else logging.INFO)

    def line(self, text: str) -> None:
        """Print one line, unless quiet."""
        if not self._quiet:
            self._rich.print(_safe(text))

    @contextmanager
    def run(self, begun: Begun) -> Iterator[None]:
        """Show the bars of the phase and of the run; lines and warnings go above them."""
        self._last_step, self._judged_by = begun.last_step, begun.judged_by
        self._recent = deque(begun.records, maxlen=lines.RECENT_STEPS)
        with self._shown("loading", 0) as bars:
            name, total = _safe(begun.name), begun.last_step
            bars.add_task("step", total=total, completed=begun.step, note=name)
            bars.start()
            yield

    def step(self, record: Record, group: Group | None) -> None:
        """Print the line of a step and move the run's bar; the group is not shown."""
        self._recent.append(record)
        if "time/learning_seconds" in record or "score/reward" in record:
            time_left = "" if self._live else lines.left(self._recent, self._last_step)
            line = lines.of_step(record, self._last_step, self._judged_by)
            self.line(f"{line}  {time_left}".rstrip())
        elif measurements := lines.judged(record, self._judged_by):
            self.line(f"before training: {', '.join(measurements)}")
        if self._bars is not None:
            self._bars.update(self._bars.task_ids[-1], completed=record["step"], refresh=True)

    @contextmanager
    def phase(self, name: str, total: int) -> Iterator[Progress]:
        """Show a bar of ``total`` items (0: unknown); yield a function to call with the tokens and
        items done."""
        if self._bars is None:
            with self._shown(name, total) as bars:
                bars.start()
                yield _advance(bars)
            return
        self._bars.tasks[0].total = total or None
        self._bars.reset(self._bars.task_ids[0], description=name, note="")
        yield _advance(self._bars)

    @contextmanager
    def _shown(self, phase: str, total: int) -> Iterator[Bars]:
        """Create the bars with that of a phase; the caller starts them."""
        one_line, narrow = Column(no_wrap=True), Column(no_wrap=True, max_width=MAX_NAME_CELLS)
        bars = Bars(
            TextColumn("[bold]{task.description}", table_column=one_line),
            BarColumn(bar_width=None),
            MofNCompleteColumn(table_column=one_line),
            TextColumn("{task.fields[note]}", markup=False, table_column=narrow),
            TimeRemainingColumn(compact=True, elapsed_when_finished=True, table_column=one_line),
            console=self._rich,
            refresh_per_second=REFRESHES_PER_SECOND,
            speed_estimate_period=math.inf,  # a step may take longer than rich's 30 seconds
            transient=True,
            get_time=self._clock,
            disable=not self._live,
            expand=True,
        )
        bars.add_task(phase, total=total or None, note="")
        self._bars = bars
        try:
            yield bars
        finally:
            self._bars = None
            bars.stop()


def _advance(bars: Bars) -> Progress:
    """Return the callback that advances the phase's progress bar and its tokens per second."""
    phase, tokens_done = bars.tasks[0], 0

    def advance(tokens: int, items: int) -> None:
        nonlocal tokens_done
        tokens_done += tokens
        speed = f"{tokens_done / max(phase.elapsed or 0.0, 1e-9):,.0f} tokens/s"
        bars.update(phase.id, advance=items, note=speed if tokens_done else "")

    return advance


def _safe(text: str) -> str:
    return without_secrets(printable(text))


class _Output(RichConsole):
    """Standard output; if its reader or terminal is gone, warnings go to standard error."""

    is_closed = False

    def __exit__(self, *error: object) -> None:
        """Write what was printed in the block."""
        try:
            super().__exit__(*error)
        except OSError:  # EIO, of a terminal that hung up
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Report it once on standard error and discard all further output."""
        self.quiet = self.is_closed = True
        discard_output()
        _on_standard_error("standard output was closed; the run continues")


def _on_standard_error(text: str) -> None:
    # While bars are shown, rich passes standard error on to standard output.
    errors = sys.stderr.rich_proxied_file if isinstance(sys.stderr, FileProxy) else sys.stderr
    with suppress(OSError):  # the same terminal may have hung up
        errors.write(f"{text}\n")


class _Lines(logging.Handler):
    """Log records as printable lines, never wrapped, because scripts search pipes for them."""

    def __init__(self, console: "_Output") -> None:
        super().__init__()
        self._rich = console

    def emit(self, record: logging.LogRecord) -> None:
        """``WARNING  the message``."""
        style = f"logging.level.{record.levelname.lower()}"
        text = _safe(record.getMessage())
        if not self._rich.is_closed:
            self._rich.print(Text.assemble((f"{record.levelname:<8}", style), " ", text))
        elif record.levelno > logging.INFO:
            _on_standard_error(f"{record.levelname:<8} {text}")
