"""The content of the last ``\\boxed{}``, which gold solutions and completions mark as final."""

import re

BOX = re.compile(r"\\(?:boxed|fbox)\s*+(?:\{|(?=[A-Za-z0-9\\]))")
"""Where a box begins."""
_ONE_TOKEN = re.compile(r"\\[A-Za-z]++|[A-Za-z0-9]")
_BRACE = re.compile(r"[{}]")


def has_box(text: str) -> bool:
    """Whether a box begins anywhere in the text."""
    return BOX.search(text) is not None


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}`` (or ``\\fbox``), nested braces kept; None if there
    is none or it is not closed.

    TeX's own forms ``\\boxed {7}`` and ``\\boxed 7`` count too.

    Example: ``"so \\\\boxed{\\\\frac{1}{2}}" -> "\\\\frac{1}{2}"``
    """
    last = None
    for box in BOX.finditer(text):
        last = box
    if last is None:
        return None
    start = last.end()
    if not last[0].endswith("{"):
        token = _ONE_TOKEN.match(text, start)
        return token[0] if token else None
    depth = 1
    for brace in _BRACE.finditer(text, start):
        position = brace.start()
        if text[position - 1] == "\\":
            continue
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start:position].strip()
    return None
