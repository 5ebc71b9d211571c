"""A row that remembers which of its columns were read, and what the others are: named as ignored,
or refused where the task is another one without them."""

from collections.abc import Collection, Sequence
from datetime import date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any

from reason_llm.config import ColumnsSection
from reason_llm.data.attachments import MEDIA
from reason_llm.data.messages import TRAIN_FLAGS, Note, shown
from reason_llm.data.rows import Row, is_empty
from reason_llm.errors import DataError

WEIGHT_COLUMNS = ("weight", "sample_weight", "loss_weight", "loss_scale", "loss_mask")
_NEVER_IGNORED = {
    **dict.fromkeys(MEDIA, "the model would be asked without it"),
    **dict.fromkeys(WEIGHT_COLUMNS, "every row counts the same"),
    "plus_input": "only the base tests would be run; evalplus's sets of the Hub have all of them",
    "history": "the model would be asked without the earlier turns",  # LLaMA-Factory's
}
"""Columns without which the task is another one, in lower case."""


def _as_text(value: Any) -> Any:
    """A decimal number, a date or bytes of UTF-8, as Parquet has them, as text; any other value,
    and bytes of an image, unchanged."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, date) and not isinstance(value, datetime):
        return value.isoformat()
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _is_untrained(name: str, value: Any) -> bool:
    """Whether a column says that the row is not trained."""
    trains = TRAIN_FLAGS.get(name.casefold())
    return trains is not None and str(value).casefold() == str(not trains).casefold()


@lru_cache(maxsize=4)
def _folded(columns: tuple[str, ...]) -> dict[str, str]:
    """The first of these columns for each name in lower case, without blanks around it."""
    return {str(name).strip().casefold(): name for name in reversed(columns)}


@lru_cache(maxsize=64)
def _spelled(columns: tuple[str, ...], names: tuple[str, ...]) -> list[str]:
    """The columns that have these names, in the names' order; in any letter case where none has the
    name itself."""
    there, folded = frozenset(columns), _folded(columns)
    found = (name if name in there else folded.get(name.casefold()) for name in names)
    return [name for name in found if name is not None]


class Cells:
    """The columns of one row.

    Args:
        where: file and line, for errors.
        columns: the options by which columns are found and ignored.
    """

    def __init__(self, where: str, row: Row, columns: ColumnsSection) -> None:
        self.where = where
        self.columns = columns
        dropped = {name.casefold() for name in columns.ignore}
        self.row = {n: _as_text(v) for n, v in row.items() if str(n).casefold() not in dropped}
        self._folded = _folded((*self.row,))
        self._read: set[str] = set()
        self._members: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        """The value of a column, which counts as read from now on."""
        self._read.add(name)
        return self.row[name]

    def get(self, name: str) -> Any:
        """The value of a column, which counts as read; None for one that is not there."""
        return self[name] if name in self.row else None

    def is_read(self, name: str) -> bool:
        """Whether the value of a column was read."""
        return name in self._read

    def __contains__(self, name: object) -> bool:
        return name in self.row

    @property
    def folded(self) -> Collection[str]:
        """The names of all columns in lower case, without blanks around them."""
        return self._folded.keys()

    def find(self, names: Sequence[str], filled: bool = False) -> str | None:
        """The first of these columns that the row has, in any letter case, with a value other than
        null; with ``filled``, one that says something. None if there is none.

        A column that is null in every candidate's place is found, so that the error shows it.
        """
        null = None
        for spelled in _spelled((*self.row,), (*names,)):
            value = self.row[spelled]
            if value is not None and not (filled and is_empty(value)):
                return spelled
            null = spelled if null is None else null
        return None if filled else null

    def column(self, named: str | None, usual: Sequence[str], option: str) -> str:
        """The row's name of a column that ``option`` names, or that has a usual name."""
        candidates = (named,) if named is not None else usual
        if (found := self.find(candidates)) is not None:
            return found
        names = ", ".join(map(repr, candidates))
        wanted = f"any of the columns {names}" if len(candidates) > 1 else f"column {names}"
        fix = f"set {option} to one of these, or make such a column by data.preprocess"
        if option == "data.form":
            fix = (
                "make such columns by data.preprocess, or set data.form to the form that the rows "
                "have"
            )
        raise DataError(
            f"{self.where}: lacks {wanted}; it has {', '.join(map(str, self.row))}; {fix}"
        )

    @property
    def note(self) -> Note:
        """Takes a member of a message that is ignored."""
        return lambda member: self._members.setdefault(member)

    def ignored(self) -> tuple[str, ...]:
        """Columns and members of messages with content that were not read.

        Raises:
            DataError: the task is another one without such a column.
        """
        unread = [
            str(name)
            for name, value in self.row.items()
            if name not in self._read and not is_empty(value)
        ]
        for name in unread:
            if _is_untrained(name, self.row[name]):
                raise DataError(
                    f"{self.where}: column {name!r} is {shown(self.row[name])}, so the row is not "
                    "to be trained; drop such rows in data.preprocess, which returns None for "
                    "them, or name it in data.columns.ignore"
                )
            why = _NEVER_IGNORED.get(name.casefold())
            is_one = name.casefold() in WEIGHT_COLUMNS and self.row[name] in (1, "1", "1.0")
            if why is not None and not is_one:
                raise DataError(
                    f"{self.where}: column {name!r} is {shown(self.row[name])}, which is not "
                    f"supported: {why}; take other rows, or name it in data.columns.ignore if the "
                    "task does not need it"
                )
        return (*unread, *self._members)
