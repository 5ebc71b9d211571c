"""``benchmark.py gpu``: every system at the same work, in turn, each in a process of its own.

Rounds pair the systems: what a machine does to one, it does to all of that round. A system that
fails, dies or takes too long is a row with the reason, never an end.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.work import Kind, Outcome, Work, read_outcome, write
from benchmarks.worker import LEARNERS

LADDER = (1024, 2048, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152, 65536, 98304, 131072)
"""Contexts that are tried, in tokens."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured, and how often."""

    systems: tuple[str, ...]
    kinds: tuple[Kind, ...]
    work: Work
    """Of the speeds; its model is the one of everything."""
    rounds: int
    caps_gib: tuple[float, ...]
    ladder: tuple[int, ...]
    group: int
    """Completions of the one prompt with which a context is tried."""
    most_seconds: float
    """A system may take for one piece of work."""


@dataclass(slots=True)
class Results:
    """All that came of it."""

    speeds: dict[tuple[Kind, str], list[Outcome]]
    """One for each round."""
    contexts: dict[tuple[Kind, str, float], "Longest"]


@dataclass(frozen=True, slots=True)
class Longest:
    """The longest context that fits under a cap."""

    tokens: int
    """0: not even the shortest that is tried."""
    used_gib: float
    """Of the GPU, at its largest, with that context."""
    reason: str
    """Why the next one does not fit; empty if all do."""


SCRIPT = Path(__file__).resolve().parents[1] / "benchmark.py"


MOST_TRACE_CHARACTERS = 20_000
"""Of the end of a process's own words, where it failed."""


def run(settings: Settings, say: Callable[[str], None], keep: Callable[[Results], None]) -> Results:
    """Speeds first, then contexts; everything is kept as it is measured."""
    results = Results({}, {})
    for number in range(settings.rounds):
        for kind in settings.kinds:
            for system in settings.systems:
                outcome = measure(system, replace(settings.work, kind=kind), settings.most_seconds)
                results.speeds.setdefault((kind, system), []).append(outcome)
                keep(results)
                said = outcome.error or "measured"
                say(f"round {number + 1} of {settings.rounds}: {kind} {system}: {said}")
                if outcome.trace:
                    say(outcome.trace)
    for cap in settings.caps_gib:
        for kind in settings.kinds:
            for system in (s for s in settings.systems if s in LEARNERS):
                found = longest_context(settings, kind, system, cap)
                results.contexts[kind, system, cap] = found
                keep(results)
                say(f"under {cap:g} GiB: {kind} {system}: {found.tokens} tokens ({found.reason})")
    return results


def make_model(shape: str, folder: Path) -> str:
    """Its folder; made in a process of its own, so that nothing of it stays on the GPU."""
    subprocess.run([sys.executable, str(SCRIPT), "model", shape, str(folder)], check=True)
    return str(folder)


def longest_context(settings: Settings, kind: Kind, system: str, cap: float) -> Longest:
    """By bisection over the ladder: each trial is one real step with one group."""
    work = replace(settings.work, kind=kind, completions=settings.group)
    tried: dict[int, Outcome] = {}

    def fits(tokens: int) -> bool:
        outcome = measure(system, work.at_context(tokens, cap), settings.most_seconds)
        if outcome.error is None and (used := outcome.values["largest_gib"][0]) > cap:
            outcome.error = f"used {used:.1f} GiB"
        tried[tokens] = outcome
        return outcome.error is None

    index = last_that_fits(settings.ladder, fits)
    tokens = settings.ladder[index] if index >= 0 else 0
    used = tried[tokens].values["largest_gib"][0] if tokens else 0.0
    beyond = settings.ladder[index + 1] if index + 1 < len(settings.ladder) else None
    reason = "" if beyond is None else f"{beyond}: {tried[beyond].error}"
    return Longest(tokens, used, reason)


def last_that_fits(ladder: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The index of the last rung that fits, if all below it do; -1 if none does."""
    least, most = -1, len(ladder) - 1
    while least < most:
        middle = (least + most + 1) // 2
        least, most = (middle, most) if fits(ladder[middle]) else (least, middle - 1)
    return least


def measure(system: str, work: Work, most_seconds: float) -> Outcome:
    """One system at one piece of work, in a process of its own; one that is ended before keeps the
    steps that it measured."""
    with TemporaryDirectory() as folder:
        given, found = Path(folder) / "work.json", Path(folder) / "outcome.json"
        write(work, given)
        command = [sys.executable, str(SCRIPT), "worker", system, str(given), str(found)]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, timeout=most_seconds)
        except subprocess.TimeoutExpired:
            outcome = read_outcome(found) if found.exists() else Outcome()
            outcome.error = outcome.error or f"took more than {most_seconds:g} s"
            return outcome
        outcome = read_outcome(found) if found.exists() else Outcome()
        if ended.returncode and outcome.error is None:
            lines = [line for line in ended.stderr.splitlines() if line.strip()]
            last = (lines or ["it said nothing"])[-1]
            outcome.error = f"ended with {ended.returncode}: {last.strip()[:300]}"
            outcome.trace = ended.stderr[-MOST_TRACE_CHARACTERS:]
        return outcome
