"""Alarms that a run raised while it ran, also those that ended: ``alarms.jsonl`` in its folder."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson
from pydantic import TypeAdapter, ValidationError

from reason_llm.files import read_bounded, write_atomically

FILE = "alarms.jsonl"
MOST_BYTES = 4 * 2**20


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
    """Alarms of the run, oldest first; those that cannot be read are passed over."""
    found: list[Raised] = []
    if (folder / FILE).exists():
        for line in read_bounded(folder / FILE, MOST_BYTES).splitlines():
            with suppress(ValidationError):  # a write that a kill cut short
                found.append(_RAISED.validate_json(line))
    return found


def write(folder: Path, raised: Sequence[Raised]) -> None:
    """Write all alarms of the run."""
    lines = b"".join(orjson.dumps(asdict(each)) + b"\n" for each in raised)
    write_atomically(folder / FILE, lines)


def told(now: Sequence[str], before: Sequence[Raised]) -> str:
    """``no alarms``, or ``alarms: none now, 3 raised before, at steps 6, 9 and 12``, of the titles
    of those that are raised at the end and those that ended."""
    if not now and not before:
        return "no alarms"
    text = f"alarms: {'; '.join(now) if now else 'none now'}"
    if not before:
        return text
    *first, last = dict.fromkeys(str(each.step) for each in before)
    at = f"steps {', '.join(first)} and {last}" if first else f"step {last}"
    return f"{text}, {len(before)} raised before, at {at}"
