"""Python values as JSON, so that two processes that do not trust each other can exchange them.

Reading a message runs no code of the other side: only the kinds below are ever made.
"""

import builtins
import importlib
from collections.abc import Callable, Mapping
from typing import Any

TYPES: dict[str, type] = {
    name: value for name, value in vars(builtins).items() if isinstance(value, type)
}
"""What tests may hand to a program."""
EXCEPTIONS = {
    name: kind
    for name, kind in TYPES.items()
    if issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration)
}
DATA_TYPES = {
    **EXCEPTIONS,
    **{kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, bytearray)},
    **{kind.__name__: kind for kind in (list, tuple, set, frozenset, dict)},
}
"""What a program may hand to its tests: the types of plain data, and exceptions."""
_LIBRARY = {"Fraction": "fractions", "Decimal": "decimal", "date": "datetime",
            "datetime": "datetime", "deque": "collections"}  # fmt: skip
"""Plain data of the standard library, by its module."""


def encode(value: Any, other: Callable[[Any], Any], types: Mapping[str, type] = TYPES) -> Any:
    """Plain data as JSON, ``{"kind": …}`` where JSON has no form for it; ``other`` gives the form
    of anything else.

    Example: ``(1, {2}) -> {"tuple": [1, {"set": [2]}]}``
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        number = int(value)  # beyond 4,300 digits, Python refuses to write decimals
        return number if number.bit_length() < 10_000 else {"int": hex(number)}
    if isinstance(value, float):
        return float(value)
    if isinstance(value, list):
        return [encode(item, other, types) for item in value]
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, other, types) for item in value]}
    if isinstance(value, dict):
        pairs = value.items()
        return {"dict": [[encode(k, other, types), encode(v, other, types)] for k, v in pairs]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, type) and types.get(value.__name__) is value:
        return {"type": value.__name__}
    kind = type(value)
    if _LIBRARY.get(kind.__name__) == kind.__module__:
        is_list = kind.__name__ == "deque"
        return {kind.__name__: encode(list(value), other, types) if is_list else str(value)}
    if type(value).__module__ == "numpy" and callable(getattr(value, "tolist", None)):
        return encode(value.tolist(), other, types)
    return other(value)


def decode(value: Any, other: Callable[[str, Any], Any], types: Mapping[str, type] = TYPES) -> Any:
    """The opposite; ``other`` is given the kind and content of what ``encode``'s ``other`` made.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError: the other
            side sent nonsense.
    """
    if isinstance(value, list):
        return [decode(item, other, types) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in ("tuple", "set", "frozenset"):
        return TYPES[kind](decode(item, other, types) for item in content)
    if kind == "dict":
        return {decode(k, other, types): decode(v, other, types) for k, v in content}
    if kind == "int":
        return int(content, 16)
    if kind == "complex":
        return complex(*content)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind == "type":
        return types[content]
    return (
        _of_library(kind, decode(content, other, types))
        if kind in _LIBRARY
        else (other(kind, content))
    )


def _of_library(name: str, content: Any) -> Any:
    kind = getattr(importlib.import_module(_LIBRARY[name]), name)
    return kind.fromisoformat(content) if _LIBRARY[name] == "datetime" else kind(content)


def as_json(value: Any) -> Any:
    """What ``decode`` made as JSON has it: a tuple is a list, a key is text. What JSON has no form
    for is an object that equals nothing that tests expect."""
    if isinstance(value, list | tuple):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {_key(key): as_json(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return {"not JSON": type(value).__name__}


def _key(key: Any) -> str:
    if isinstance(key, bool) or key is None:
        return {None: "null", True: "true", False: "false"}[key]
    return str(key)
