"""Python values as JSON, so that two processes that do not trust each other can exchange them.

Reading a message runs no code of the other side: only the kinds below are ever made.
"""

import builtins
import cmath
import collections
import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from decimal import Decimal
from typing import Any

TYPES: dict[str, type] = {
    name: value for name, value in vars(builtins).items() if isinstance(value, type)
}
"""Kinds of values that tests may hand to a program."""
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
"""Types that a program may return to its tests: plain data and exceptions."""
MAX_BITS, MAX_EXPONENT = 1 << 20, 1 << 16
"""Limits of integers and of decimals: above them a comparison or a print takes seconds."""
MAX_JSON_BITS = 14_000
"""Beyond it, no JSON that is read with Python's own bound holds the integer."""
_DTYPES = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
           "float16", "float32", "float64", "complex64", "complex128"}  # fmt: skip
"""Types of arrays that are sent as arrays; others are sent as lists."""
_LIBRARY = {"Fraction": "fractions", "Decimal": "decimal", "date": "datetime",
            "datetime": "datetime", "deque": "collections", "Counter": "collections"}  # fmt: skip
"""Plain data of the standard library, by its module."""


class NotFinite:
    """NaN or infinity that the tests do not mention; it raises when compared or counted with."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __bool__(self) -> bool:
        raise ValueError(f"the program gave {self.number}")

    def __eq__(self, other: object) -> bool:
        raise ValueError(f"the program gave {self.number}")

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return str(self.number)


def encode(
    value: Any,
    other: Callable[[Any], Any],
    types: Mapping[str, type] = TYPES,
    first: Callable[[Any], Any] = lambda value: None,
) -> Any:
    """Plain data as JSON: ``(1, {2}) -> {"tuple": [1, {"set": [2]}]}``; ``other`` gives the form of
    any other value, and ``first`` that of values which must not be sent as plain data."""
    if value is None or isinstance(value, bool):
        return value
    if type(value) not in (int, float, str) and (form := first(value)) is not None:
        return form
    # Subclasses are sent as their plain value, so that the receiver runs none of their methods.
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return _int(int(value))
    if isinstance(value, float):
        return float(value)

    def listed(items: Iterable[Any]) -> list[Any]:
        return [encode(item, other, types, first) for item in items]

    if isinstance(value, list):
        return listed(value)
    for kind in (tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: listed(value)}
    if isinstance(value, dict):
        kind_name = "Counter" if type(value) is collections.Counter else "dict"
        return {kind_name: [listed(pair) for pair in value.items()]}
    if isinstance(value, slice | range):
        return {type(value).__name__: listed((value.start, value.stop, value.step))}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes" if isinstance(value, bytes) else "bytearray": value.hex()}
    if isinstance(value, type) and types.get(value.__name__) is value:
        return {"type": value.__name__}
    kind = type(value)
    if _LIBRARY.get(kind.__name__) == kind.__module__:
        if kind.__name__ == "Fraction":
            return {"Fraction": [_int(value.numerator), _int(value.denominator)]}
        return {kind.__name__: listed(value) if kind.__name__ == "deque" else str(value)}
    if kind.__module__ == "numpy" and callable(getattr(value, "tolist", None)):
        content = encode(value.tolist(), other, types)
        is_whole = kind.__name__ == "ndarray" and value.dtype.name in _DTYPES
        return {"ndarray": [value.dtype.name, list(value.shape), content]} if is_whole else content
    return other(value)


def _int(number: int) -> Any:
    if number.bit_length() > MAX_BITS:
        raise OverflowError(f"an integer of {number.bit_length()} bits")
    # beyond 4,300 digits, Python refuses to write decimals
    return number if number.bit_length() < 10_000 else {"int": hex(number)}


def decode(
    value: Any, other: Callable[[str | None, Any], Any], types: Mapping[str, type] = TYPES
) -> Any:
    """Inverse of ``encode``; ``other`` gets the kind and content that ``encode``'s ``other`` made,
    None and a number that is not finite, or ``"ndarray"`` and an array.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError: the other
            side sent nonsense.
    """
    if isinstance(value, list):
        return [decode(item, other, types) for item in value]
    if isinstance(value, float) and not cmath.isfinite(value):
        return other(None, value)
    if not isinstance(value, dict):
        return value
    # A fixed list of kinds and no pickle: a message must not be able to make anything else.
    ((kind, content),) = value.items()
    if kind in ("tuple", "set", "frozenset"):
        return TYPES[kind](decode(item, other, types) for item in content)
    if kind == "dict":
        return {decode(k, other, types): decode(v, other, types) for k, v in content}
    if kind == "int":
        return _bounded(int(content, 16))
    if kind == "ndarray":
        name, shape, values = content
        return other(kind, _array(name, shape, decode(values, other, types)))
    if kind in ("slice", "range"):
        return TYPES[kind](*(decode(part, other, types) for part in content))
    if kind == "complex":
        number = complex(*content)
        return number if cmath.isfinite(number) else other(None, number)
    if kind in ("bytes", "bytearray"):
        return (bytes if kind == "bytes" else bytearray).fromhex(content)
    if kind == "type":
        return types[content]
    if kind not in _LIBRARY:
        return other(kind, content)
    result = _of_library(kind, decode(content, other, types))
    is_finite = not isinstance(result, Decimal) or result.is_finite()
    return result if is_finite else other(None, result)


def _bounded(number: Any) -> int:
    if type(number) is not int or number.bit_length() > MAX_BITS:
        raise ValueError("an integer that is none or too large")
    return number


def _array(name: str, shape: list[int], values: Any) -> Any:
    """An array, or the lists that it was where there is no numpy."""
    if name not in _DTYPES:
        raise ValueError(f"an array of {name!r}")
    try:
        numpy = importlib.import_module("numpy")
    except ImportError:
        return values
    return numpy.array(values, dtype=name).reshape([_bounded(size) for size in shape])


def _of_library(name: str, content: Any) -> Any:
    kind = getattr(importlib.import_module(_LIBRARY[name]), name)
    if name == "Fraction":
        numerator, denominator = map(_bounded, content)
        return kind(numerator, denominator)
    if name == "Counter":
        return kind(dict(content))
    value = kind.fromisoformat(content) if _LIBRARY[name] == "datetime" else kind(content)
    if name == "Decimal" and value.is_finite() and abs(value.adjusted()) > MAX_EXPONENT:
        raise ValueError("a decimal that is too large")
    return value


def write_line(descriptor: int, message: dict[str, Any]) -> None:
    """Write a message as a line of JSON."""
    data = memoryview(json.dumps(message).encode() + b"\n")
    while data:
        data = data[os.write(descriptor, data) :]


def as_json(value: Any) -> Any:
    """Decoded value in JSON's form: a tuple or deque is a list, a key is text. A value without a
    JSON form becomes an object that equals nothing that tests expect."""
    if isinstance(value, list | tuple | collections.deque):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        words = {"None": "null", "True": "true", "False": "false"}
        converted = {
            key if isinstance(key, str) else words.get(str(key), str(key)): as_json(item)
            for key, item in value.items()
        }
        return converted if len(converted) == len(value) else {"not JSON": "two keys of one text"}
    is_written = not isinstance(value, int) or value.bit_length() <= MAX_JSON_BITS
    if value is None or (isinstance(value, bool | int | float | str) and is_written):
        return value
    return {"not JSON": type(value).__name__}
