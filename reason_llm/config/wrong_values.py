"""Messages about wrong values, in words for users and not those of pydantic."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any


def wrong(problem: Mapping[str, Any]) -> str:
    """What is wrong, ``must be a valid integer``, from one of a ValidationError's ``errors()``."""
    kind, message = str(problem["type"]), str(problem["msg"])
    if kind == "literal_error":
        return none_of(problem["input"], literals(problem))
    if kind == "missing":
        return "is missing"
    if kind == "extra_forbidden":
        return "is no option of it"
    if kind == "model_type":
        return "must be a section, {option: value}"
    message = re.sub(r"^(Value error, |Input |String )", "", message).replace("should", "must")
    return message[:1].lower() + message[1:]


def literals(problem: Mapping[str, Any]) -> list[str]:
    """The allowed names of a value; empty for another kind of error."""
    if problem["type"] != "literal_error":
        return []
    return str(problem["ctx"]["expected"]).replace("'", "").replace(" or ", ", ").split(", ")


def none_of(value: Any, names: Iterable[str]) -> str:
    """``is none of a, b, c; did you mean b?``."""
    known = list(names)
    told = f"is none of {', '.join(known)}" if len(known) > 1 else f"is not {known[0]}"
    near = nearest(value, known)
    return f"{told}; did you mean {near}?" if near else told


def nearest(value: Any, names: Iterable[str]) -> str | None:
    """The name with the most similar spelling; None if no name is similar."""
    near = difflib.get_close_matches(str(value)[:100].lower(), list(names), n=1)
    return near[0] if near else None
