"""The error classes. Every message is one line: the cause, the value, the fix.

Commands print a ``ReasonError`` without a traceback and exit with code 2; any other exception is a
bug of ours. Each class also inherits the standard library's nearest error.
"""

import os
import re
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


class ReasonError(Exception):
    """Base of every error that a user can fix."""


class ConfigError(ReasonError, ValueError):
    """A config file, an option or a combination of options is wrong."""


class DataError(ReasonError, ValueError):
    """A data file or one of its rows cannot be used."""


class ModelError(ReasonError, ValueError):
    """A model folder, a tokenizer or an architecture cannot be used."""


class NotAsWritten(ReasonError, ValueError):
    """A file has another SHA-256 than was noted when it was written, or is missing."""


class RolloutBufferError(ReasonError, ValueError):
    """The rollout buffer is damaged or belongs to another run."""


class CheckpointError(ReasonError, ValueError):
    """A run directory or checkpoint is damaged or belongs to another run."""


class BusyError(ReasonError, BlockingIOError):
    """Another process holds the buffer or the run directory."""


class WriteError(ReasonError, OSError):
    """A path of the config cannot be written."""


class RewardError(ReasonError, RuntimeError):
    """A reward raised or returned no number."""


class TrainingError(ReasonError, ArithmeticError):
    """Learning cannot continue: a loss or a gradient is not finite."""


class OutOfMemory(TrainingError, MemoryError):
    """A phase needs more memory than there is."""


class Stopped(KeyboardInterrupt):
    """A signal asked for the end, and everything is saved; the exit code is 128 plus its number."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def raise_all(errors: Iterable[ReasonError]) -> None:
    """Raise the first of several different errors, if any, with the others as its notes."""
    distinct = dict[str, ReasonError]()
    for error in errors:
        distinct.setdefault(str(error), error)
    first, *others = distinct.values() or (None,)
    if first is not None:
        for other in others:
            first.add_note(str(other))
        raise first


def one_line(error: BaseException) -> str:
    """An exception's text without line breaks and without the operating system's error number, of
    characters that JSON takes."""
    has_number = isinstance(error, OSError) and error.strerror and error.filename is None
    try:
        text = str(error.strerror) if has_number else str(error)  # type: ignore[attr-defined]
    except Exception as problem:  # noqa: BLE001  (classes of others may have any text)
        text = f"its text raised {type(problem).__name__}"
    return " ".join(text.split()).encode(errors="replace").decode()


def clear_frames(error: BaseException) -> None:
    """Drop the local variables of the frames of an error and of the errors before it, which hold
    activations and views of the weights. Frames that still run keep theirs."""
    left, done = [error], set()
    while left:
        current = left.pop()
        done.add(id(current))
        traceback.clear_frames(current.__traceback__)
        before = (current.__context__, current.__cause__)
        left += [other for other in before if other is not None and id(other) not in done]


MAX_SHOWN_CHARACTERS = 2000
_SECRET = re.compile(
    r"(^|_)(TOKEN|API_?KEY|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)", re.IGNORECASE
)
"""Words in the names of environment variables that hold secrets."""
_SHORTEST_SECRET = 8


def shown(error: Exception | str) -> str:
    """Text of an error for printing: one line, printable, bounded, without secrets."""
    text = without_secrets(printable(str(error)))
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def printable(text: str, keep: str = "") -> str:
    """The text with control characters spelled out, except those to ``keep``."""
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def secrets() -> dict[str, str]:
    """Values of the environment's tokens, keys and passwords with their names, longest first."""
    values = {
        value: name
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET and _SECRET.search(name)
    }
    return dict(sorted(values.items(), key=lambda item: -len(item[0])))


def without_secrets(text: str, known: dict[str, str] | None = None) -> str:
    """The text with the names in place of the values of ``secrets()``, which are ``known``."""
    for value, name in (secrets() if known is None else known).items():
        text = text.replace(value, f"<{name}>")
    return text


def tree_without_secrets(value: Any) -> Any:
    """``without_secrets`` of every text and key in a value of dicts and lists."""
    known = secrets()
    return with_texts(value, lambda text: without_secrets(text, known)) if known else value


def with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A value of dicts and lists with every text and key changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {with_texts(k, change): with_texts(item, change) for k, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(item, change) for item in value]
    return value
