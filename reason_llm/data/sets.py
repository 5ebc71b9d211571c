"""One set of rows as it is read, and the filters that all forms share.

Filters are for training rows only: a held-out set is judged whole. What they drop is counted;
everything else that cannot be used goes to ``fault``.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

from reason_llm.config import DataSection, PassRateSection
from reason_llm.data.forms import Document, Example
from reason_llm.data.own_code import place_of
from reason_llm.data.rows import Fault, Row, check_made, read_rows
from reason_llm.data.time_limit import within
from reason_llm.errors import ConfigError, DataError, one_line, printable

NUM_SKIPPED_SHOWN = 3
PREPROCESS_SECONDS = 60.0
"""Of one row."""
Preprocess = Callable[[Row], Any]
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
    skipped: list[str] = field(default_factory=list)
    """What was wrong with the first rows that ``data.on_bad_row`` left out."""

    @property
    def left_out(self) -> str:
        """``left out: 3 by data.pass_rate, 1 by data.deduplicate``; empty if nothing is."""
        counts = ", ".join(f"{count} by {option}" for option, count in self.dropped.items())
        return counts and f"left out: {counts}"

    @property
    def notes(self) -> list[str]:
        """What was left out, and the first rows that could not be used."""
        told = [f"{self.source}: {self.left_out}"] if self.dropped else []
        return told + [f"  {error}" for error in self.skipped]

    def skip(self, error: DataError) -> None:
        """Count a row that cannot be used."""
        self.dropped["data.on_bad_row"] += 1
        if len(self.skipped) < NUM_SKIPPED_SHOWN:
            self.skipped.append(printable(str(error)))


def read_examples(
    found: ReadSet,
    section: DataSection,
    read: Callable[[str, Row], T],
    fault: Fault,
    *,
    is_training: bool,
    limit: int | None = None,
    preprocess: Preprocess | None = None,
) -> Iterator[T]:
    """Rows of a set as examples.

    Args:
        found: counts the rows, and those that are dropped.
        is_training: whether rows may be dropped.
        preprocess: what each row goes through first; None for nothing.
        limit: so many rows are read at most; None for all.

    Raises:
        DataError: from ``fault``, which is given each row and file that cannot be used.
    """
    faults = 0
    bad_row = fault_of_rows(found, section, fault, is_training)

    def noted(error: DataError) -> None:
        nonlocal faults
        faults += 1
        bad_row(error)

    split = section.split if is_training else "test"
    try:
        for where, row in islice(read_rows(found.source, split, noted, section.given), limit):
            found.num_rows += 1
            try:
                if preprocess is not None:
                    made = _preprocessed(where, row, preprocess, str(section.preprocess))
                    if made is None:
                        found.dropped["data.preprocess"] += 1
                        continue
                    row = made
                if is_training and not _passes(where, row, section.pass_rate):
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
        fault(error)


def fault_of_rows(found: ReadSet, section: DataSection, fault: Fault, is_training: bool) -> Fault:
    """What a row of this set that cannot be used goes to."""
    return found.skip if is_training and section.on_bad_row == "skip" else fault


def check_columns_of(section: DataSection, sets: Collection[str]) -> None:
    """Check that ``data.columns_of`` names sets that there are.

    Args:
        sets: their names and sources.

    Raises:
        ConfigError: it names another.
    """
    for name in section.columns_of:
        if name not in sets:
            raise ConfigError(
                f"data.columns_of names {name!r:.200}, which is no set of this run; name one of "
                f"{', '.join(filter(None, sets))}"
            )


def _preprocessed(where: str, row: Row, function: Preprocess, name: str) -> Row | None:
    """The row as the user's function returns it.

    Raises:
        DataError: it failed, or returned something else.
    """
    try:
        made = within(PREPROCESS_SECONDS, f"data.preprocess={name}", lambda: function(dict(row)))
    except (Exception, SystemExit) as error:
        place = place_of(error)
        raise DataError(
            f"{where}: data.preprocess={name} failed ({type(error).__name__}: "
            f"{one_line(error)[:200]}{f' at {place}' if place else ''}); fix it"
        ) from error
    if made is None:
        return None
    if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
        raise DataError(
            f"{where}: data.preprocess={name} returned {str(made)[:60]!r}; expected a dict of "
            "columns, or None to drop the row"
        )
    check_made(f"{where}: data.preprocess={name} returned a row that cannot be used", made)
    return made


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
