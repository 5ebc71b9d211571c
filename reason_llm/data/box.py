"""The content of the last ``\\boxed{}``, which gold solutions and completions mark as final."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*(?:\{|(?=[A-Za-z0-9\\]))")
"""Where a box begins."""
_ONE_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z0-9]")


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` (or ``\\fbox``), nested braces kept; None if there
    is none or it is not closed.

    TeX's own forms ``\\boxed {7}`` and ``\\boxed 7`` count too.

    Example: ``"so \\\\boxed{\\\\frac{1}{2}}" -> "\\\\frac{1}{2}"``
    """
    boxes = list(BOX.finditer(text))
    if not boxes:
        return None
    start = boxes[-1].end()
    if not boxes[-1][0].endswith("{"):
        token = _ONE_TOKEN.match(text, start)
        return token[0] if token else None
    depth = 1
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start:position].strip()
    return None
