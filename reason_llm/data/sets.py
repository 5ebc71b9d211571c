"""Sets of data, everything that a run loads, and when two rows ask the same."""

import hashlib
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from string import digits, whitespace

import numpy as np
import orjson

from reason_llm.data.attachments import Attachments, attached
from reason_llm.data.forms import Example, PlainProblem, TextDocument
from reason_llm.data.packed import Joined, Prompts, Units
from reason_llm.errors import DataError, printable
from reason_llm.rollout import Prompt, TokenRow

NUM_SKIPPED_SHOWN = 3
NUM_IGNORED_SHOWN = 40

_LAYOUT = re.compile(
    r"\\[\[\](),;: ]|\\(?:left|right|quad|qquad|displaystyle)(?![a-z])|[${}]"
    r"|(?<!\d)[.,;:?]|[.,;:?](?!\d)"
)
_SPACE = re.compile(r"(?<!\d)\s|\s(?!\d)")
"""White space but for one between two digits, where ``1 23`` is not ``12 3``."""
_OTHER = re.compile(r"\\|(?![\0-\x7f])[\d\s]")
"""A command of LaTeX, a digit that is not ASCII, or white space."""
_MARKS = b".,;:?${}"
_DROPPED = f"{whitespace}\x1c\x1d\x1e\x1f".encode() + _MARKS
_DIGITS_AND_LAYOUT = bytes(
    ord("0" if chr(byte) in digits else "," if byte in _DROPPED else "x") for byte in range(256)
)
_BETWEEN_DIGITS = re.compile(rb"0(,+)(?=0)")
"""Layout between two digits, in bytes translated by ``_DIGITS_AND_LAYOUT``."""
_KEPT = {bytes([mark]): 0xF8 + n for n, mark in enumerate(b" .,;:?")}
"""Stand-ins for layout that stays in a text: bytes that UTF-8 does not have."""
_FOLDED = bytes.maketrans(bytes(_KEPT.values()), b"".join(_KEPT))


@dataclass(slots=True)
class DataSet:
    """One file or Hub set: what was read, what was dropped, and what is left."""

    name: str
    """Its name in ``eval.sets``; empty for all other sets."""
    source: str
    form: str
    """The form of the rows, as ``data.form``."""
    is_training: bool = False
    """Whether rows may be dropped."""
    share: float | None = None
    """Share of the training set's rows that are held out, of the set that has them."""
    num_rows: int = 0
    """Rows that were read, those left out included."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of rows that each option dropped."""
    skipped: list[str] = field(default_factory=list)
    """The errors of the first rows that ``data.on_bad_row`` dropped."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Columns, and members of messages, that are not read: rows where they have content."""
    handed: Counter[str] = field(default_factory=Counter)
    """Columns that nothing reads but reward functions that take ``**kwargs``: rows, as above."""
    doubts: dict[str, list[str]] = field(default_factory=dict)
    """Rows that may mean something else than it seems, by the reason."""
    contradictions: dict[str, str] = field(default_factory=dict)
    """Two places with different gold answers, for each question that has such."""
    origins: dict[str, None] = field(default_factory=dict)
    """Columns of the sides of preferences; a line for each way that the rows have."""
    prompts: Prompts = field(default_factory=Prompts)
    """The prompts, of sets of the forms problems and prompts."""
    units: Units = field(default_factory=Units)
    """Of the other forms: one row each, of preferences the chosen and the rejected one."""
    attachments: Attachments | None = None
    """Reader of the rows' attachments; None where no row has one."""

    @property
    def is_asked(self) -> bool:
        """Whether its rows become prompts instead of rows to learn from."""
        return self.form in ("problems", "prompts")

    @property
    def rows(self) -> list[TokenRow]:
        """The rows of all units."""
        return [row for unit in self.units for row in unit]

    @property
    def size(self) -> int:
        """Number of prompts or units."""
        return len(self.prompts) + len(self.units)

    @property
    def left_out(self) -> str:
        """``left out: 3 by data.preprocess, 1 by data.deduplicate``; empty without dropped rows."""
        counts = ", ".join(f"{count} by {option}" for option, count in self.dropped.items())
        return counts and f"left out: {counts}"

    @property
    def notes(self) -> list[str]:
        """Lines on dropped rows, and the first rows that could not be used."""
        title = self.source if self.is_training else f"{self.source}, held out"
        lines = [f"{title}: {self.left_out}"] if self.dropped else []
        lines += [f"  {error}" for error in self.skipped]
        return lines + [f"{self.source}: {line}" for line in self.readings]

    @property
    def readings(self) -> list[str]:
        """A line of the columns that are ignored, one of those that only reward functions get, and
        one per reason to doubt a gold answer."""
        lines = []
        for what, columns in (
            ("ignored columns", self.ignored),
            ("columns that only the reward functions get", self.handed),
        ):
            named = [f"{name or repr(name)} ({_rows(count)})" for name, count in columns.items()]
            if (more := len(named) - NUM_IGNORED_SHOWN) > 0:
                named[NUM_IGNORED_SHOWN:] = [f"and {more} more"]
            if named:
                lines.append(f"{what}: {', '.join(named)}")
        for doubt, places in self.doubts.items():
            says, has_fix, fix = doubt.partition("; ")
            rows = _rows(len(places))
            rows = rows if self.is_training else rows.replace(" row", " held-out row")
            lines.append(f"{says} in {rows}, the first is {places[0]}{has_fix}{fix}")
        if self.contradictions:
            count, first = len(self.contradictions), next(iter(self.contradictions.values()))
            has = "1 question has" if count == 1 else f"{count:,} questions have"
            lines.append(f"{has} different gold answers: {first}; correct or remove the wrong one")
        return list(map(printable, lines))

    def skip(self, error: DataError) -> None:
        """Count a row that cannot be used."""
        self.dropped["data.on_bad_row"] += 1
        if len(self.skipped) < NUM_SKIPPED_SHOWN:
            self.skipped.append(printable(str(error)))


PromptOf = Mapping[tuple[int, ...], tuple[int, ...]]
"""Token ids of a reader's prompt by those of the policy's."""


@dataclass(frozen=True, slots=True)
class Data:
    """All data from which a run learns and by which it is judged."""

    training: list[DataSet]
    weights: list[float]
    """The weights of the training sets."""
    held_out: list[DataSet]
    """The problems of ``data.eval`` and ``eval.sets``."""
    held_out_rows: DataSet | None = None
    """The rows of ``eval.rows``, of the training rows' form."""
    contamination: list[tuple[str, str]] = field(default_factory=list)
    """(training row, held-out row) with the same question, those left out included."""
    reader_prompts: Mapping[str, PromptOf] = field(default_factory=dict)
    """The prompts of ``Config.reader_prompts`` for the training prompts, by the reader."""
    digests: tuple[str, str | None] = ("", None)
    """Digests of the training sets: texts and answers, or token ids and values; and the columns
    that rewards read, None without any. Empty unless ``load_kept`` read the data."""

    @property
    def attachments(self) -> Attachments | None:
        """Reader of the attachments of all sets; None where no row has one."""
        rows = [self.held_out_rows] if self.held_out_rows else []
        sets = [*self.training, *self.held_out, *rows]
        return next((each.attachments for each in sets if each.attachments is not None), None)

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Prompts of all training sets, one set after the other."""
        return Joined([data_set.prompts for data_set in self.training])

    def shortest(self, count: int) -> list[Prompt]:
        """The training prompts with the fewest tokens; those with the fewest bytes where some are
        tokenised when they are drawn."""
        sets = [data_set.prompts for data_set in self.training]
        lengths = np.concatenate([each.lengths for each in sets])
        if not lengths.all():
            lengths = np.concatenate([each.sizes for each in sets])
        return [self.prompts[n] for n in np.argsort(lengths, kind="stable")[:count].tolist()]

    @property
    def units(self) -> Sequence[tuple[TokenRow, ...]]:
        """Units of all training sets, one set after the other."""
        return Joined([data_set.units for data_set in self.training])

    @property
    def sizes(self) -> list[int]:
        """Prompts or units in each training set."""
        return [data_set.size for data_set in self.training]

    @property
    def num_held_out(self) -> int:
        """Number of prompts, rows and pairs that are held out. A smaller share of the training set
        is a part of a larger one, so only the larger counts."""
        rows = [self.held_out_rows] if self.held_out_rows else []
        held_out = [*self.held_out, *rows]
        shares = [each.size for each in held_out if each.share is not None]
        return sum(each.size for each in held_out if each.share is None) + max(shares, default=0)

    @property
    def held_out_prompts(self) -> Sequence[Prompt]:
        """Prompts of all held-out sets."""
        return Joined([data_set.prompts for data_set in self.held_out])

    def with_digests(self) -> "Data":
        """The data with ``digests``."""
        content, columns, has_columns = hashlib.sha256(), hashlib.sha256(), False
        for data_set in self.training:
            for _, text, answer, extra in data_set.prompts.without_ids():
                content.update(orjson.dumps((text, answer)))
                columns.update(orjson.dumps(extra))
                has_columns = has_columns or bool(extra)
            for row in chain.from_iterable(data_set.units):
                of_row = (row.ids, sum(row.trained), row.value)
                content.update(orjson.dumps((*of_row, *(a.sha256 for a in row.attachments))))
            for digest in (content, columns):
                digest.update(b"\n")
        column_digest = columns.hexdigest()[:16] if has_columns else None
        return replace(self, digests=(content.hexdigest()[:16], column_digest))

    def notes(self) -> list[str]:
        """Lines for each set from which rows were dropped or whose columns are ignored, and of
        labels all alike; the same line of several sets once."""
        held_out = [*self.held_out, *([self.held_out_rows] if self.held_out_rows else [])]
        lines = [line for data_set in self.training for line in data_set.notes]
        lines += [line for each in held_out for line in each.notes]
        lines += [
            f"{each.source}: {100 * each.share:.4g}% of its rows are held out, the same in every "
            f"run: {_rows(each.size)}; {_rows(self.training[0].size)} for training"
            for each in held_out
            if each.share is not None
        ]
        sets = [each for each in self.training if each.form == "labels"]
        labels = {value for each in sets for value in set(each.units.values)}
        if len(labels) == 1:
            kind = "good" if labels == {1.0} else "bad"
            lines.append(f"all {sum(self.sizes)} rows are labelled {kind}; KTO needs good and bad")
        lines = list(dict.fromkeys(lines))
        return lines if self.attachments is None else [*lines, self.attachments.line]

    def contamination_warning(self) -> str | None:
        """Warning about held-out questions in the training sets; None without any."""
        dropped = any(data_set.dropped["data.contamination"] for data_set in self.training)
        if not self.contamination or dropped:
            return None
        ours, theirs = self.contamination[0]
        return printable(
            f"training rows with questions of an evaluation set: {len(self.contamination)}, such "
            f"as {ours}, which asks the same as {theirs}; set data.contamination to drop or ignore"
        )


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count:,} rows"


def question_key(example: Example) -> bytes:
    """Digest of a question, equal for two examples that ask the same: the text of their messages,
    without a system message, letter case, Unicode variants, and layout (white space but for one
    between digits, LaTeX's formula marks, braces, punctuation outside of numbers); and their
    attachments. A row that leaves the question to its environment asks like no other."""
    digests = ""
    if isinstance(example, (PlainProblem, TextDocument)):
        text = example.text
    else:
        asked = [each for each in example.messages if each["role"] != "system"]
        text = "\n".join([each["content"] for each in asked])
        digests = "".join([each.sha256 for each in attached(example.messages)])
    key = folded(text) + digests.encode() or (text or example.where).encode()
    return blake2b(key, digest_size=16).digest()


def folded(text: str) -> bytes:
    """A text without what ``question_key`` does not look at."""
    text = unicodedata.normalize("NFKC", text).casefold()
    if "\\" in text if text.isascii() else _OTHER.search(text):
        return _SPACE.sub("", " ".join(_LAYOUT.sub("", text).split())).encode()
    kept = bytearray(text.encode())
    for found in _BETWEEN_DIGITS.finditer(kept.translate(_DIGITS_AND_LAYOUT)):
        start, end = found.span(1)
        layout = bytes(kept[start:end])
        if layout in _KEPT or layout.strip(_MARKS):  # one mark, or white space, which is a space
            kept[start] = _KEPT.get(layout, _KEPT[b" "])
    return bytes(kept.translate(_FOLDED, _DROPPED))
