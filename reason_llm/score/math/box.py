"""The content of the last ``\\boxed{}``, which gold solutions and completions mark as final."""

import re
from dataclasses import dataclass

BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?:\{|(?=[A-Za-z0-9\\]))")
"""Where a box begins."""
_ONE_TOKEN = re.compile(r"\\[A-Za-z]++|[A-Za-z0-9]")
_BRACE = re.compile(r"[{}]")


@dataclass(frozen=True, slots=True)
class Box:
    """A box in a text: ``text[start:end]``, and ``text[content]`` within it."""

    start: int
    end: int
    content: slice


def boxes(text: str) -> list[Box]:
    """All boxes that are closed, in the order of where they begin; some may stand in others."""
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text):
        position = brace.start()
        if text[position - 1] == "\\":
            continue
        if brace[0] == "{":
            opened.append(position)
        elif opened:
            closing[opened.pop()] = position
    found = []
    for box in BOX.finditer(text):
        if not box[0].endswith("{"):
            if token := _ONE_TOKEN.match(text, box.end()):
                found.append(Box(box.start(), token.end(), slice(*token.span())))
        elif (end := closing.get(box.end() - 1)) is not None:
            found.append(Box(box.start(), end + 1, slice(box.end(), end)))
    return found


def has_box(text: str) -> bool:
    """Whether a box begins anywhere in the text."""
    return BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` (or ``\\fbox``), nested braces kept; None if there
    is none or it is not closed.

    TeX's own forms ``\\boxed {7}`` and ``\\boxed 7`` count too.

    Example: ``"so \\\\boxed{\\\\frac{1}{2}}" -> "\\\\frac{1}{2}"``
    """
    begins = [box.start() for box in BOX.finditer(text)]
    closed = boxes(text)
    if not closed or closed[-1].start != begins[-1]:
        return None
    return text[closed[-1].content].strip()
