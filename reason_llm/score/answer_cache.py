"""Answers of judges on disk, so that a resumed run asks nothing twice.

One line of JSON for each, ``{"sha256": <of the rest>, "key": <64 hexadecimal digits>, "value":
<number>}``, appended as it comes. What a kill cut short is asked again. Not here: what the key is
made of.
"""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from threading import Lock

import orjson

from reason_llm.files import check_seal, open_to_append, parsed_object, read_bounded, sealed

MAX_BYTES = 256 << 20
"""Largest size of the file; later answers are not kept."""

log = logging.getLogger(__name__)


class AnswerCache:
    """Numbers by key in a file, or without a path in memory. Usable from several threads."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = Lock()
        self._under_way: dict[str, Lock] = {}
        self._known: dict[str, float] | None = None

    def answer(self, key: str, ask: Callable[[], float]) -> float:
        """The number of this key, else the result of ``ask``, which is stored. One of several
        threads with a key asks. Raises what ``ask`` raises, and OSError for a bad or too large
        file."""
        with self._lock:
            of_key = self._under_way.setdefault(key, Lock())
        with of_key:
            with self._lock:
                value = self._read().get(key)
            if value is None:
                value = ask()
                with self._lock:
                    self._keep(key, value)
        with self._lock:
            self._under_way.pop(key, None)
        return value

    def _keep(self, key: str, value: float) -> None:
        self._read()[key] = value
        if self.path is None:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = b"\n" + sealed(orjson.dumps({"key": key, "value": value}))  # after any cut line
        with open_to_append(self.path) as file:
            if file.tell() + len(line) < MAX_BYTES:
                file.write(line)

    def _read(self) -> dict[str, float]:
        """All that is known, from the file on the first call."""
        if self._known is None:
            values: dict[str, float] = {}
            if self.path is not None and self.path.exists():
                content = read_bounded(self.path, MAX_BYTES)
                lines = [line for line in content.split(b"\n") if line]
                for line in lines:
                    values |= _parsed(line)
                if len(values) < len(lines):
                    problem = "has damaged or duplicate lines; what is missing is asked again"
                    log.warning(f"{self.path} {problem}")
            self._known = values
        return self._known


def _parsed(line: bytes) -> dict[str, float]:
    """The key and its number in a line; nothing where it is damaged."""
    try:
        check_seal(line, must_carry=True)
        value = parsed_object(line)
        key, number = value["key"], float(value["value"])
    except (ValueError, TypeError, KeyError):
        return {}
    return {key: number} if isinstance(key, str) and math.isfinite(number) else {}
