"""One set of rows as it is read, and the filters that all forms share.

Filters are for training rows only: a held-out set is judged whole. What they drop is counted;
everything else that cannot be used goes to ``fault``.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from reason_llm.config import DataSection, PassRateSection, Rows
from reason_llm.data.forms import Document, Example
from reason_llm.data.rows import EMPTY, Fault, Row, read_rows
from reason_llm.errors import DataError, printable

T = TypeVar("T")
"""The kind of example."""

_LAYOUT = re.compile(
    r"\\[\[\](),;: ]|\\(?:left|right|quad|qquad|displaystyle)(?![a-z])|[${}]"
    r"|(?<!\d)[.,;:?]|[.,;:?](?!\d)"
)


@dataclass(slots=True)
class ReadSet:
    """One file or Hub set, as far as it is read."""

    name: str
    """Of a held-out set; empty for that of ``data.eval`` and for training sets."""
    source: str
    num_rows: int = 0
    """Rows that were read, those left out included."""
    dropped: Counter[str] = field(default_factory=Counter)
    """How many rows each option left out."""

    @property
    def left_out(self) -> str:
        """``left out: 3 by data.pass_rate, 1 by data.deduplicate``; empty if nothing is."""
        counts = ", ".join(f"{count} by {option}" for option, count in self.dropped.items())
        return counts and f"left out: {counts}"


def read_examples(
    found: ReadSet,
    split: str,
    read: Callable[[str, Row], T],
    fault: Fault,
    limit: int | None = None,
    pass_rate: PassRateSection | None = None,
    given: Mapping[str, Rows] = EMPTY,
) -> Iterator[T]:
    """Rows of a set as examples.

    Args:
        found: counts the rows, and those that are dropped.
        split: of a Hub set.
        pass_rate: rows out of this range are dropped; None for none.
        given: rows that were given in Python, by their source's name.
        limit: so many rows are read at most; None for all.

    Raises:
        DataError: from ``fault``, which is given each row and file that cannot be used.
    """
    faults = 0

    def noted(error: DataError) -> None:
        nonlocal faults
        faults += 1
        fault(error)

    try:
        for where, row in islice(read_rows(found.source, split, noted, given), limit):
            found.num_rows += 1
            try:
                if pass_rate is not None and not _passes(where, row, pass_rate):
                    found.dropped["data.pass_rate"] += 1
                    continue
                example = read(where, row)
            except DataError as error:
                noted(error)
            else:
                yield example
        if not found.num_rows and not faults:
            raise DataError(f"{found.source} holds no rows; give a file with at least one")
    except DataError as error:
        noted(error)


@dataclass(slots=True)
class Questions:
    """The questions of all sets so far."""

    evaluated: dict[str, str] = field(default_factory=dict)
    """Where each question of a held-out set stands, by its key."""
    trained: set[str] = field(default_factory=set)
    """Keys of the training questions that were kept."""
    contamination: list[tuple[str, str]] = field(default_factory=list)
    """(training row, evaluation row) with the same question, those left out included."""

    def evaluate(self, example: Example) -> None:
        """Note the question of a held-out row."""
        self.evaluated.setdefault(question_key(example), example.where)

    def dropped_by(self, example: Example, section: DataSection) -> str | None:
        """The option that drops this training row; None for a row that is kept, and noted."""
        key = question_key(example)
        if key in self.trained and section.deduplicate:
            return "data.deduplicate"
        if section.contamination != "ignore" and key in self.evaluated:
            self.contamination.append((example.where, self.evaluated[key]))
            if section.contamination == "drop":
                return "data.contamination"
        self.trained.add(key)
        return None


def question_key(example: Example) -> str:
    """Key of a question, equal for two examples that ask the same: the text of their messages,
    without a system message, letter case, Unicode variants, and layout (white space, LaTeX's
    formula marks, braces, punctuation outside of numbers)."""
    if isinstance(example, Document):
        text = example.text
    else:
        text = "\n".join(
            message["content"] for message in example.messages if message["role"] != "system"
        )
    folded = _LAYOUT.sub("", unicodedata.normalize("NFKC", text).casefold())
    return "".join(folded.split()) or text


def contamination_warning(
    contamination: Sequence[tuple[str, str]], training: Sequence[ReadSet]
) -> str | None:
    """Warning about evaluation problems in the training sets; None without any."""
    if not contamination or any(each.dropped["data.contamination"] for each in training):
        return None
    ours, theirs = contamination[0]
    return printable(
        f"training rows that ask what an evaluation set asks: {len(contamination)}, such "
        f"as {ours}, which is {theirs}; set data.contamination to drop or ignore"
    )


def _passes(where: str, row: Row, wanted: PassRateSection) -> bool:
    """Whether the row's rate is in the range.

    Raises:
        DataError: it has none.
    """
    if wanted.column is None:
        return True
    if wanted.column not in row:
        raise DataError(
            f"{where}: lacks column {wanted.column!r}; it has {', '.join(map(str, row))}; set "
            "data.pass_rate.column to one of these"
        )
    value = row[wanted.column]
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if math.isnan(rate):
        raise DataError(
            f"{where}: {wanted.column!r} is {str(value)[:60]!r}; expected a number, which "
            "data.pass_rate compares"
        )
    return wanted.min <= rate <= wanted.max
