"""Alarms that a run raised while it ran, also those that ended: ``alarms.jsonl`` in its folder."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from reason_llm.files import read_bounded, write_atomically

FILE = "alarms.jsonl"
MAX_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Raised:
    """An alarm when it was raised."""

    step: int
    title: str
    text: str
    advice: str
    charts: tuple[str, ...]
    steps: tuple[int, int] | None


_RAISED = TypeAdapter(Raised)


def read(folder: Path) -> list[Raised]:
    """Alarms of the run, oldest first; unreadable lines are skipped."""
    alarms: list[Raised] = []
    if (folder / FILE).exists():
        for line in read_bounded(folder / FILE, MAX_BYTES).splitlines():
            with suppress(ValidationError):  # a write that a kill cut short
                alarms.append(_RAISED.validate_json(line))
    return alarms


def write(folder: Path, raised: Sequence[Raised]) -> None:
    """Write all alarms of the run."""
    lines = b"".join(orjson.dumps(asdict(alarm)) + b"\n" for alarm in raised)
    write_atomically(folder / FILE, lines)


def summary(now: Sequence[str], before: Sequence[Raised]) -> str:
    """``no alarms``, or ``alarms: none now, 3 raised before, at steps 6, 9 and 12``."""
    if not now and not before:
        return "no alarms"
    text = f"alarms: {'; '.join(now) if now else 'none now'}"
    if not before:
        return text
    *first, last = dict.fromkeys(str(alarm.step) for alarm in before)
    at = f"steps {', '.join(first)} and {last}" if first else f"step {last}"
    return f"{text}, {len(before)} raised before, at {at}"
