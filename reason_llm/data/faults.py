"""Errors of rows, counted by kind, with the first row of each."""

import re

from reason_llm.errors import DataError, raise_all

_PLACE = re.compile(r"([^\n]{1,4096}?):(\d{1,18})(?:#\d+)?: ")
_DIGITS = dict.fromkeys(map(ord, "0123456789"))


class Faults:
    """A ``Fault`` that keeps the errors; the same error of two readings of a file counts once."""

    def __init__(self) -> None:
        self.count = 0
        self._seen = set[int]()
        self._files = dict[str, int]()
        self._kinds = dict[str, tuple[int, tuple[int, int], DataError]]()
        """By kind: the number, and the first place with its error."""

    def __call__(self, error: DataError) -> None:
        """Keep an error."""
        text = str(error)
        if hash(text) in self._seen:
            return
        self._seen.add(hash(text))
        self.count += 1
        at = _PLACE.match(text)
        file = self._files.setdefault(at[1] if at else text, len(self._files))
        now = (1, (file, int(at[2]) if at else 0), error)
        count, place, first = self._kinds.get(kind := _kind(text), (0, *now[1:]))
        self._kinds[kind] = (count + 1, *(now[1:] if now[1] < place else (place, first)))

    def errors(self) -> list[DataError]:
        """The first of each kind, in the order of the rows, with the number of the others."""
        in_order = sorted(self._kinds.values(), key=lambda each: each[1])
        return [
            DataError(f"{error} (and {count - 1} more such rows)") if count > 1 else error
            for count, _, error in in_order
        ]

    def raise_all(self) -> None:
        """Raise the errors, if there are any."""
        raise_all(self.errors())


def _kind(error: str) -> str:
    """Return the common part of errors that differ only in row and value."""
    head, _, rest = error.partition(" is ")
    return (head + rest.rpartition("; expected")[2]).translate(_DIGITS)
