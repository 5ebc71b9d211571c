"""The live part of a terminal: a few lines, made of numbers and the clock.

No terminal here: ``console`` owns it. Model text is data: cut first, then spelled out.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from rich.cells import cell_len, chop_cells
from rich.text import Text

from reason_llm.app import lines
from reason_llm.errors import printable, without_secrets
from reason_llm.rollout import Completion
from reason_llm.run import Record

LABEL = 10
"""Cells of the first column."""
ROLLOUT_LINES = 3
CURVES = {
    "score/reward": ("reward", "{:.3f}"),
    "train/loss": ("loss", "{:.4g}"),
    "eval/loss": ("held out", "{:.4g}"),
    "train/pair_accuracy": ("pairs", "{:.1%}"),
    "eval/pair_accuracy": ("held out", "{:.1%}"),
    "eval/accuracy": ("accuracy", "{:.1%}"),
}
"""(label, form) of what is drawn, by its key; the loss only where there is no reward."""
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.-~=+*#"


@dataclass(slots=True)
class Phase:
    """The current phase."""

    name: str
    total: int
    """Items it takes; 0 if nobody knows."""
    started: float
    items: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Screen:
    """State of the live part. Times are of ``time.perf_counter``."""

    name: str
    last_step: int
    """0: a phase alone, outside of a run."""
    step: int
    judged_by: str = "accuracy"
    """As in ``Begun``."""
    record: Record = field(default_factory=dict)
    """The newest value of each key."""
    rollout: Completion | None = None
    phase: Phase = field(default_factory=lambda: Phase("loading", 0, time.perf_counter()))
    step_started: float = field(default_factory=time.perf_counter)
    _curves: dict[str, "Curve"] = field(default_factory=lambda: {key: Curve() for key in CURVES})
    _step_seconds: "Mean" = field(default_factory=lambda: Mean())
    _phase_seconds: dict[str, "Mean"] = field(default_factory=dict)

    def begin_phase(self, name: str, total: int) -> Phase:
        """Start another phase."""
        self.phase = Phase(name, total, time.perf_counter())
        return self.phase

    def end_phase(self) -> None:
        """End the phase and record its seconds."""
        took = time.perf_counter() - self.phase.started
        self._phase_seconds.setdefault(self.phase.name, Mean()).add(took)

    def take(self, record: Record) -> None:
        """Take a record of metrics.jsonl, including those from before a resumption."""
        self.record = self.record | record
        for key, curve in self._curves.items():
            if key == "train/loss" and "score/reward" in record:
                continue
            if (value := record.get(key)) is not None and math.isfinite(value):
                curve.add(value)
        if record["step"] > 0:
            self._step_seconds.add(record["time/total_seconds"])

    def end_step(self, record: Record, rollout: Completion | None) -> None:
        """End a step that is on record."""
        self.take(record)
        self.rollout = rollout
        self.step, self.step_started = int(record["step"]), time.perf_counter()

    def phase_seconds_left(self, now: float) -> float | None:
        """Remaining seconds of the phase, from the mean of its earlier times, or from its progress
        the first time."""
        phase = self.phase
        elapsed = now - phase.started
        if before := self._phase_seconds.get(phase.name):
            return max(0.0, before.value - elapsed)
        if 0 < phase.items <= phase.total:
            return elapsed * (phase.total - phase.items) / phase.items
        return None

    def run_seconds_left(self, now: float) -> float | None:
        """Remaining seconds of the run, from the mean of the past steps, including evaluations."""
        if not self._step_seconds.count:
            return None
        left = (self.last_step - self.step) * self._step_seconds.value
        return max(0.0, left - (now - self.step_started))

    def lines(self, width: int, now: float, plain: bool = False, ascii_only: bool = False) -> Text:
        """All lines, cut to ``width`` cells.

        Args:
            plain: without colours, so that a bar's rest must be empty.
        """
        bars = _ASCII_BARS if ascii_only else _BARS
        shown = [
            self._phase_line(width, now, plain, ascii_only),
            *([self._run_line(width, now, plain, ascii_only)] if self.last_step else []),
            *(line for key in CURVES for line in self._curve(key, width, bars)),
            *self._watched(),
            *self._speed(),
            *self._memory(),
            *self._rollout(width),
        ]
        for line in shown:
            line.truncate(width, overflow="ellipsis" if not ascii_only else "crop")
        return Text("\n", no_wrap=True, end="").join(shown)

    def _phase_line(self, width: int, now: float, plain: bool, ascii_only: bool) -> Text:
        phase = self.phase
        elapsed = now - phase.started
        parts = [f"{min(phase.items, phase.total)}/{phase.total}"] if phase.total else []
        if phase.tokens:
            parts.append(f"{phase.tokens / max(elapsed, 1e-9):,.0f} tokens/s")
        left = self.phase_seconds_left(now)
        parts.append(shown_seconds(elapsed) if left is None else f"{shown_seconds(left)} left")
        done = phase.items / phase.total if phase.total else 0.0
        return _with_bar(phase.name, done, "  ".join(parts), width, plain, ascii_only)

    def _run_line(self, width: int, now: float, plain: bool, ascii_only: bool) -> Text:
        left = self.run_seconds_left(now)
        parts = [self.name, f"{self.step}/{self.last_step}"]
        parts += [] if left is None else [f"{shown_seconds(left)} left"]
        done = self.step / self.last_step
        return _with_bar("step", done, "  ".join(parts), width, plain, ascii_only)

    def _curve(self, key: str, width: int, bars: str) -> list[Text]:
        values = self._curves[key].values
        if not values:
            return []
        label, form = CURVES[key]
        if key == "eval/accuracy" and self.judged_by != "accuracy":
            label, form = "held out", "{:.3f}"
        last = form.format(self.record[key])
        curve = sparkline(values, width - LABEL - len(last) - 1, bars)
        return [_line(label, (curve, "cyan"), (f" {last}", ""))]

    def _watched(self) -> list[Text]:
        told = lines.watched(self.record)
        return [_line("learning", (", ".join(told), ""))] if told else []

    def _speed(self) -> list[Text]:
        record, parts = self.record, []
        if "sample/tokens_per_second" in record:
            parts.append(f"sampling {record['sample/tokens_per_second']:,.0f} tokens/s")
        tokens = record.get("sample/tokens", record.get("train/tokens"))
        if (seconds := record.get("time/learning_seconds")) and tokens is not None:
            parts.append(f"learning {tokens / seconds:,.0f} tokens/s")
        return [_line("speed", (", ".join(parts), ""))] if parts else []

    def _memory(self) -> list[Text]:
        pieces: list[tuple[str, str]] = []
        for phase in ("sampling", "learning"):
            if (peak := self.record.get(f"memory/{phase}_peak_gib")) is not None:
                planned = self.record[f"memory/{phase}_planned_gib"]
                text = f"{', ' if pieces else ''}{phase} {peak:.2f} of {planned:.2f} GiB planned"
                pieces.append((text, "red" if peak > planned else ""))
        return [_line("memory", *pieces)] if pieces else []

    def _rollout(self, width: int) -> list[Text]:
        if self.rollout is None:
            return []
        reward = 0.0 if self.rollout.reward is None else self.rollout.reward
        text = f"reward {reward:.3g}: {cut(self.rollout.text)}"
        rows = chop_cells(text, max(2, width - LABEL))
        if len(rows) > ROLLOUT_LINES:
            rows = [rows[0], "...", *rows[-ROLLOUT_LINES + 2 :]]
        return [_line("rollout" if n == 0 else "", (row, "dim")) for n, row in enumerate(rows)]


@dataclass(slots=True)
class Mean:
    """Running mean."""

    count: int = 0
    value: float = 0.0

    def add(self, value: float) -> None:
        """Another one."""
        self.count += 1
        self.value += (value - self.value) / self.count


@dataclass(slots=True)
class Curve:
    """A series of any length, as at most ``MOST`` means of equally many values each."""

    MOST: ClassVar[int] = 1024
    values: list[float] = field(default_factory=list)
    _each: int = 1
    _next: Mean = field(default_factory=Mean)

    def add(self, value: float) -> None:
        """The next value; it shows once its share is whole."""
        self._next.add(value)
        if self._next.count < self._each:
            return
        self.values.append(self._next.value)
        self._next = Mean()
        if len(self.values) == self.MOST:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values, self._each = [(a + b) / 2 for a, b in pairs], 2 * self._each


def cut(text: str, limit: int = 1000) -> str:
    """Beginning and end of a model's text on one line, safe for a terminal."""
    text = without_secrets(text)
    if len(text) > 2 * limit:
        text = f"{text[:limit]} ... {text[-limit:]}"
    return printable(" ".join(text.split()))


def sparkline(values: Sequence[float], width: int, bars: str = _BARS) -> str:
    """Bars of the values, at most ``width`` of them, each the mean of its share; empty without
    room."""
    if width < 1 or not values:
        return ""
    count = min(width, len(values))
    edges = [len(values) * n // count for n in range(count + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    if high == low:
        return bars[len(bars) // 2] * count
    top = len(bars) - 1
    return "".join(bars[round((mean - low) / (high - low) * top)] for mean in means)


def shown_seconds(seconds: float) -> str:
    """``0:07``, ``12:34`` or ``25:01:02``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _line(label: str, *pieces: tuple[str, str]) -> Text:
    return Text.assemble((f"{label:<{LABEL}}", "bold"), *pieces, no_wrap=True, end="")


def _with_bar(
    label: str, done: float, text: str, width: int, plain: bool, ascii_only: bool
) -> Text:
    room = width - LABEL - cell_len(text) - 2
    if room < 5:
        return _line(label, (text, ""))
    filled = round(min(1.0, done) * room)
    full, rest = "#" if ascii_only else "━", " " if plain or ascii_only else "━"
    return _line(
        label, (full * filled, "green"), (rest * (room - filled), "bright_black"), (f"  {text}", "")
    )
