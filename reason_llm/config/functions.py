"""Names and digests of functions passed from Python, by which a resumed run recognises them."""

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from types import BuiltinFunctionType, CellType, FunctionType, MethodType
from typing import Any

PYTHON = "python:"
"""Prefix in the config of functions and rows passed from Python."""
MOST_DEPTH, MOST_PARTS = 6, 100_000
"""Limits of depth and number of the values of a function that the digest covers."""


def name_of(function: Callable[..., Any]) -> str:
    """Return ``my_rewards.py:is_brief`` for a function that can be loaded from its file, otherwise
    ``python:__main__.is_brief``, also for a lambda, a partial, a bound method or an object. Raises
    ValueError for a class."""
    if isinstance(function, type):
        raise ValueError(
            f"is the class {function.__name__}, not a function; pass an instance, as in "
            f"{function.__name__}()"
        )
    if isinstance(function, functools.partial):
        return f"{PYTHON}{name_of(function.func).rpartition(':')[2]}"
    if isinstance(function, MethodType):
        function = function.__func__
    if not isinstance(function, FunctionType):
        kind = type(function)
        name = getattr(function, "__name__", kind.__name__)  # TRL's objects have one
        return f"{PYTHON}{kind.__module__}.{name}"
    path = Path(function.__code__.co_filename)
    is_of_a_module = function.__module__ != "__main__" and function.__qualname__.isidentifier()
    if is_of_a_module and path.suffix == ".py" and path.is_file():
        path = path.absolute()
        here = Path.cwd()
        return (
            f"{path.relative_to(here) if path.is_relative_to(here) else path}:{function.__name__}"
        )
    name = function.__qualname__.replace("<locals>.", "").replace("<lambda>", "lambda")
    return f"{PYTHON}{function.__module__}.{name}"


def source_digest(function: Callable[..., Any]) -> str:
    """Return a digest of a function's source and the values that it holds: its closure, a partial's
    arguments, an object's attributes; of objects in them only numbers, text, and lists or dicts of
    these. Raises ValueError if the source cannot be read."""
    called: Any = function
    while isinstance(called, functools.partial):
        called = called.func
    if not isinstance(called, FunctionType | MethodType | BuiltinFunctionType):
        called = type(called)
    digest = hashlib.sha256(_source(called).encode(errors="surrogatepass"))
    for part in islice(_parts(function, 0), MOST_PARTS):
        digest.update(part.encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _source(function: Any) -> str:
    """Return the source of a function or a class; raise ValueError if it cannot be read."""
    try:
        if isinstance(function, FunctionType) and function.__code__.co_filename == "<string>":
            # From Python 3.13 on, inspect shows a line of python -c for what exec made.
            raise OSError("made by exec or python -c")
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError) as error:
        raise ValueError(
            f"is {type(function).__name__} {function.__name__}, whose source cannot be read (it "
            "was typed at Python's prompt or made by exec); write it into a file or a notebook's "
            "cell"
        ) from error


def _parts(value: Any, depth: int) -> Iterator[str]:
    """Yield text that changes with plain values and with functions in ``value``."""
    held: Iterable[Any] = ()
    match value:
        case None | bool() | int() | float() | str() | bytes():
            yield repr(value)
        case list() | tuple():
            held = value
        case set() | frozenset():
            yield from sorted(_parts([*value], depth))
        case dict():
            held = chain.from_iterable(value.items())
        case functools.partial():
            held = value.func, value.args, value.keywords
        case MethodType():
            held = value.__func__, value.__self__
        case FunctionType():
            with suppress(ValueError):  # without a source
                yield _source(value)
            code = value.__code__
            if value.__name__ == "<lambda>":  # several may share a line
                yield f"{code.co_code.hex()} {code.co_names}"
                yield from _parts(code.co_consts, depth)
            held = [
                cell.cell_contents for cell in value.__closure__ or () if cell != CellType()
            ]  # not of a variable that is set later
        case _:
            yield f"{type(value).__module__}.{type(value).__qualname__}"
            held = [getattr(value, "__dict__", {})]
    for each in held if depth < MOST_DEPTH else ():
        yield from _parts(each, depth + 1)
