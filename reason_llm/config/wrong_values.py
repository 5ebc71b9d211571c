"""Messages about wrong values, reworded from pydantic's."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


def wrong(problem: Mapping[str, Any]) -> str:
    """Return the problem, such as ``must be a valid integer``, of an item of
    ``ValidationError.errors()``."""
    kind, message = str(problem["type"]), str(problem["msg"])
    if kind == "literal_error":
        return none_of(problem["input"], literals(problem))
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is not one of its options"
    if kind == "model_type":
        return "must be a section, {option: value}"
    message = re.sub(r"^(Value error, |Input |String )", "", message).replace("should", "must")
    return message[:1].lower() + message[1:]


def literals(problem: Mapping[str, Any]) -> list[str]:
    """Return the allowed names of a value; empty for other errors."""
    if problem["type"] != "literal_error":
        return []
    return str(problem["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")


def none_of(value: Any, names: Iterable[str]) -> str:
    """Return ``is not one of a, b, c; did you mean b?``."""
    known = list(names)
    message = f"is not one of {', '.join(known)}" if len(known) > 1 else f"is not {known[0]}"
    near = nearest(value, known)
    return f"{message}; did you mean {near}?" if near else message


def nearest(value: Any, names: Iterable[str]) -> str | None:
    """Return the name with the most similar spelling; None if no name is similar."""
    near = difflib.get_close_matches(str(value)[:100].lower(), list(names), n=1)
    return near[0] if near else None
