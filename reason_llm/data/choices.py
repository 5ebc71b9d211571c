"""Multiple choice: the choices of a row, as they are written into the prompt, and the letter of a
gold answer that is given as a letter, an index or a text."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from string import ascii_uppercase
from typing import Any

from reason_llm.data.cells import Cells
from reason_llm.data.messages import shown
from reason_llm.data.rows import is_empty
from reason_llm.errors import DataError

COLUMNS = ("choices", "options", "endings")
_DIGITS = ("0123456789", "123456789")
FAMILIES = [
    (stem, labels, tuple(f"{stem}{mark}{label}" for label in labels))
    for stem, mark, labels in product(
        ("", "op", "option", "choice", "ending", "answer", "sol"),
        ("", "_", " "),
        (ascii_uppercase, *_DIGITS),
    )
    # A column named 1 is anything, and answer1 one of several answers.
    if labels == ascii_uppercase or stem not in ("", "answer")
    if stem or not mark
]
"""Columns with one choice each."""
_FIRST = frozenset(names[0].casefold() for _, _, names in FAMILIES)
"""The first column of each family, as ``Cells.folded`` has it."""
_LABELLED = re.compile(r"[(\[]?(?:([A-Za-z])[)\].:]|(\d{1,2})(?:[)\]]|[.:](?!\d)))\s*+(?=\S)")
"""Label before the text of a choice: ``A)``, ``(b)``, ``1.``"""
COUNTED = "a number as the gold answer counts the choices from {}"
_MARKS = (
    *(". ", ") ", ": ", "] ", " - ", " ", "\n", "\t", ").", "):", ")", ".", ":"),
    *(".\n", ")\n", ":\n", "]\n", "**. ", ".** ", "** ", "**: ", ")** "),
)
"""Marks that may stand between the label of a choice and its text in a prompt."""
WRONG = ("distractor", "incorrect", "wrong_answer", "wrong answer", "wrong_option")
"""Beginnings of the names of columns with wrong choices alone: SciQ's and GPQA's."""
ASK = "Answer with the {} of the right choice."
"""Last sentence of a prompt with choices whose gold answer is a label."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Labels and texts of the choices, in their order."""

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    """Numbers of the choices in a gold answer, from 1 on, if their columns or texts have them."""

    def are_labelled_in(self, written: str) -> bool:
        """Whether every choice stands in a text already, after its label: ``(A) Wood``, ``A. Wood``
        or ``A: Wood``."""
        return all(
            any(f"{label}{mark}{text}" in written for mark in _MARKS)
            for label, text in zip(self.labels, self.texts, strict=True)
        )

    @property
    def text(self) -> str:
        """The lines that are written into the prompt: ``A. Paris``."""
        return "\n".join(f"{a}. {b}" for a, b in zip(self.labels, self.texts, strict=True))

    @property
    def request(self) -> str:
        """The sentence that asks for a label."""
        return ASK.format("number" if all(map(str.isdecimal, self.labels)) else "letter")

    def label(self, where: str, gold: Any, is_index: bool = False) -> tuple[str, str]:
        """The label of a gold answer, and why it is in doubt: a label, the text of a choice or
        both, the number of its column, or, of choices without numbers, an index from 0.

        Args:
            is_index: whether a number is an index from 0, whatever the columns' numbers are.

        Raises:
            DataError: it is none, or could be two of them.
        """
        if isinstance(gold, float) and gold.is_integer():  # of a column that lacks some
            gold = int(gold)
        text = str(gold).strip().casefold()
        own = () if is_index else self.numbers
        counted = COUNTED.format(1 if own else 0)
        for label in self.labels:
            if label.casefold() == text.strip("().") and not (is_index and label in self.numbers):
                return label, counted if label in own else ""
        mark = _LABELLED.match(text)
        both = (mark[1] or mark[2], text[mark.end() :]) if mark else ("", text)
        pairs = [
            (label, choice.strip().casefold())
            for label, choice in zip(self.labels, self.texts, strict=True)
        ]
        found = {a for a, choice in pairs if choice == text or (a.casefold(), choice) == both}
        numbers = own or tuple(map(str, range(len(self.labels))))
        is_number = text in numbers and (isinstance(gold, int) or not found)
        doubt = "" if found else counted
        if is_number:
            found.add(self.labels[numbers.index(text)])
        if len(found) != 1:
            what = "could be any of the choices" if found else "is not one of the choices"
            if own and not found:
                what = "is neither the number of a choice, from 1 on, nor any of the choices"
            raise DataError(
                f"{where}: the gold answer {shown(gold)} {what} "
                f"{', '.join(sorted(found) or self.labels)}; write the letter into the row, set "
                "data.columns.answer to the column that has it, or name the choices in "
                "data.columns.ignore"
            )
        return found.pop(), doubt


def read_choices(cells: Cells) -> Choices | None:
    """The choices of a row: a list, ``{"text": […], "label": […]}``, texts by letter, or columns
    ``A`` and ``B``, ``opa`` and ``opb``, ``option1`` and ``option2``, ``Choice A`` and ``Choice B``
    and so on. None for a row without."""
    column = cells.find(COLUMNS, filled=True)
    if column is not None:
        value = cells[column]
        if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = None
        if (found := _choices(value)) is not None:
            return found
        raise DataError(
            f"{cells.where}: column {column!r} is {shown(cells[column])}; expected a list "
            'of texts, as {"text": […], "label": […]} or as texts by letter; fix it, or name '
            "it in data.columns.ignore"
        )
    if _FIRST.isdisjoint(cells.folded):
        return None
    for stem, labels, names in FAMILIES:
        each = (cells.find((name,), filled=True) for name in names)
        there = [name for name in takewhile(lambda name: name is not None, each) if name]
        if len(there) > 1 and not (stem == "" and any(name.islower() for name in there)):
            texts = tuple(str(cells[name]) for name in there)
            numbers = tuple(labels[: len(there)]) if labels[0] == "1" else ()
            return Choices(tuple(ascii_uppercase[: len(there)]), texts, numbers)
    return None


def check_no_wrong_choices(cells: Cells) -> None:
    """Raise DataError for a row without choices that has a column with a wrong one."""
    for name, value in cells.row.items():
        if str(name).casefold().startswith(WRONG) and not is_empty(value):
            raise DataError(
                f"{cells.where}: column {name!r} is {shown(value)}, a wrong choice, and no column "
                "has all choices in their order; make a column 'choices' by data.preprocess, or "
                "name such columns in data.columns.ignore to ask without choices"
            )


def _choices(value: Any) -> Choices | None:
    if isinstance(value, Mapping) and {"text", "label"} <= value.keys():
        labels, texts = value["label"], value["text"]
        if not isinstance(labels, list) or not isinstance(texts, list):
            return None
        labels, texts = [*map(str, labels)], [*map(str, texts)]
    elif isinstance(value, Mapping):
        labels = [str(key) for key, text in value.items() if text is not None]
        texts = [str(text) for text in value.values() if text is not None]
    elif isinstance(value, list) and all(_is_labelled(each) for each in value):
        labels = [str(each["label"]) for each in value]
        texts = [str(each["text"]) for each in value]
    elif isinstance(value, list) and all(isinstance(v, str | int | float) for v in value):
        labels, texts = _labelled([str(each).strip() for each in value])
    else:
        return None
    is_short = all(len(label) <= 3 for label in labels)
    if len(labels) < 2 or len(labels) != len(texts) or len({*labels}) < len(labels) or not is_short:
        return None
    is_counted = isinstance(value, list) and labels[0] == "1" and not _is_labelled(value[0])
    return Choices(tuple(labels), tuple(texts), tuple(labels) if is_counted else ())


def _labelled(texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """The labels of the choices in a list, and their texts without them: letters, unless each text
    begins with its number."""
    marks = [_LABELLED.match(text) for text in texts]
    own = [(mark[1] or mark[2]).upper() if mark else "" for mark in marks]
    for labels in ([*ascii_uppercase[: len(texts)]], [str(n + 1) for n in range(len(texts))]):
        if own == labels:
            return labels, [t[mark.end() :] for t, mark in zip(texts, marks, strict=True) if mark]
    return [*ascii_uppercase[: len(texts)]], [*texts]


def _is_labelled(value: Any) -> bool:
    return isinstance(value, Mapping) and {"text", "label"} <= value.keys()
