"""What is wrong with a value, in the words of a reader and not of the library that found it."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_KINDS = {
    "int": "is no whole number",
    "float": "is no number",
    "finite": "is no finite number",
    "bool": "is neither true nor false",
    "string": "is no text",
    "list": "is no list",
    "tuple": "is no list",
    "dict": "is no mapping {name: value}",
    "model": "is no section; write its options below it",
    "path": "is no path",
}
"""By the first word of the kind of error."""
_BOUNDS = {
    "greater_than_equal": ("must be at least", "ge"),
    "greater_than": ("must be above", "gt"),
    "less_than_equal": ("must be at most", "le"),
    "less_than": ("must be below", "lt"),
}


def wrong(first: Mapping[str, Any]) -> str:
    """What is wrong, ``is no whole number``, from one of a ValidationError's ``errors()``."""
    kind, context = str(first["type"]), first.get("ctx", {})
    if kind in ("value_error", "assertion_error"):
        return str(first["msg"]).removeprefix("Value error, ")
    if kind == "literal_error":
        return none_of(first["input"], literals(first))
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]:g}"
    if kind == "too_short":
        return f"is too short; it must have at least {context['min_length']}"
    if kind == "too_long":
        return f"is too long; it may have at most {context['max_length']}"
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is no option of it"
    return _KINDS.get(kind.partition("_")[0], "is not what the option takes")


def literals(first: Mapping[str, Any]) -> list[str]:
    """The names of which a value must be one; empty for another kind of error."""
    if first["type"] != "literal_error":
        return []
    return str(first["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")


def none_of(value: Any, names: Iterable[str]) -> str:
    """``is none of a, b, c; did you mean b?``."""
    known = list(names)
    told = f"is none of {', '.join(known)}" if len(known) > 1 else f"is not {known[0]}"
    near = nearest(value, known)
    return f"{told}; did you mean {near}?" if near else told


def nearest(value: Any, names: Iterable[str]) -> str | None:
    """The name that is spelled nearly as the value is; None without one."""
    near = difflib.get_close_matches(str(value)[:100].lower(), list(names), n=1)
    return near[0] if near else None
