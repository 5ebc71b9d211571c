"""Multiple choice: the choices of a row, as they are written into the prompt, and the letter of a
gold answer that is given as a letter, an index or a text."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product, takewhile
from string import ascii_uppercase
from typing import Any

from reason_llm.data.cells import Cells
from reason_llm.data.messages import shown
from reason_llm.errors import DataError

COLUMNS = ("choices", "options", "endings")
_MARKS = (
    *(". ", ") ", ": ", "] ", " - ", " ", "\n", "\t", ").", "):", ")", ".", ":"),
    *(".\n", ")\n", ":\n", "]\n", "**. ", ".** ", "** ", "**: ", ")** "),
)
"""Marks that may stand between the label of a choice and its text in a prompt."""
ASK = "Answer with the {} of the right choice."
"""Last sentence of a prompt with choices whose gold answer is a label."""


@dataclass(frozen=True, slots=True)
class Choices:
    """Labels and texts of the choices, in their order."""

    labels: tuple[str, ...]
    texts: tuple[str, ...]
    numbers: tuple[str, ...] = ()
    """Further names of the choices in a gold answer: the numbers of their columns, from 1 on."""

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

    def label(self, where: str, gold: Any) -> str:
        """The label of a gold answer: a label, the text of a choice, the number of its column, or,
        of choices without numbered columns, an index from 0.

        Raises:
            DataError: it is none, or could be two of them.
        """
        text = str(gold).strip()
        named = text.strip("().").casefold()
        for label in self.labels:
            if label.casefold() == named:
                return label
        pairs = zip(self.labels, self.texts, strict=True)
        found = {label for label, choice in pairs if choice.strip() == text}
        is_index = not isinstance(gold, bool) and text.isdecimal() and len(text) < 4
        if self.numbers:
            if is_index and text in self.numbers and (isinstance(gold, int) or not found):
                found.add(self.labels[self.numbers.index(text)])
        elif is_index and int(text) < len(self.labels) and (isinstance(gold, int) or not found):
            found.add(self.labels[int(text)])
        if len(found) != 1:
            what = "could be any of the choices" if found else "is none of the choices"
            if self.numbers and not found:
                what = (
                    "is neither the number of a choice's column, from 1 on, nor any of the choices"
                )
            raise DataError(
                f"{where}: the gold answer {shown(gold)} {what} "
                f"{', '.join(sorted(found) or self.labels)}; write the letter into the row, set "
                "data.columns.answer to the column that has it, or name the choices in "
                "data.columns.ignore"
            )
        return found.pop()


def read_choices(cells: Cells) -> Choices | None:
    """The choices of a row: a list, ``{"text": […], "label": […]}``, texts by letter, or columns
    ``A`` and ``B``, ``opa`` and ``opb``, ``option1`` and ``option2`` and so on. None for a row
    without."""
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
    for prefix, labels in product(("", "op", "option", "option_"), (ascii_uppercase, "123456789")):
        if not prefix and labels != ascii_uppercase:
            continue  # a column named 1 is anything
        each = (cells.find((f"{prefix}{label}",), filled=True) for label in labels)
        there = [name for name in takewhile(lambda name: name is not None, each) if name]
        if len(there) > 1 and not (prefix == "" and any(name.islower() for name in there)):
            texts = tuple(str(cells[name]) for name in there)
            numbers = tuple(labels[: len(there)]) if labels.isdecimal() else ()
            return Choices(tuple(ascii_uppercase[: len(there)]), texts, numbers)
    return None


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
        texts = [str(each).strip() for each in value]
        labels = [*ascii_uppercase[: len(texts)]]
        starts = [text[:2] for text in texts]
        if all(
            s[:1] == a and s[1:] in (")", ".", ":") for a, s in zip(labels, starts, strict=False)
        ):
            texts = [text[2:].strip() for text in texts]
    else:
        return None
    is_short = all(len(label) <= 3 for label in labels)
    if len(labels) < 2 or len(labels) != len(texts) or len({*labels}) < len(labels) or not is_short:
        return None
    return Choices(tuple(labels), tuple(texts))


def _is_labelled(value: Any) -> bool:
    return isinstance(value, Mapping) and {"text", "label"} <= value.keys()
