"""Names and digests of functions passed from Python, by which a resumed run recognises them."""

import functools
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
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
    digest = hashlib.sha256()
    for part in islice(_parts(function, 0), MOST_PARTS):
        digest.update(part.encode(errors="surrogatepass"))
    return digest.hexdigest()[:16]


def _parts(function: Any, depth: int) -> Iterator[str]:
    """Yield the source of a function and the values that it holds."""
    held: Sequence[Any] = ()
    of = function
    if isinstance(function, functools.partial):
        yield from _parts(function.func, depth)
        yield from _held([function.args, function.keywords], depth)
        return
    if isinstance(function, MethodType):
        of, held = function.__func__, [function.__self__]
    elif isinstance(function, FunctionType):
        if function.__name__ == "<lambda>":  # several may share a line
            code = function.__code__
            yield f"{code.co_code.hex()} {code.co_names}"
            yield from _held(code.co_consts, depth)
        held = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    elif not isinstance(function, BuiltinFunctionType):
        of, held = type(function), [getattr(function, "__dict__", {})]
    try:
        if isinstance(of, FunctionType) and of.__code__.co_filename == "<string>":
            # From Python 3.13 on, inspect shows a line of python -c for what exec made.
            raise OSError("made by exec or python -c")
        yield textwrap.dedent(inspect.getsource(of))
    except (OSError, TypeError) as error:
        raise ValueError(
            f"is {_shown(function)}, whose source cannot be read (it was typed at Python's prompt "
            "or made by exec); write it into a file or a notebook's cell"
        ) from error
    yield from _held(held, depth)


def _is_filled(cell: CellType) -> bool:
    try:
        _ = cell.cell_contents
    except ValueError:  # of a variable that is set later
        return False
    return True


def _held(values: Sequence[Any], depth: int) -> Iterator[str]:
    """Yield text that changes with plain values and with functions among them."""
    for value in values if depth < MOST_DEPTH else ():
        match value:
            case None | bool() | int() | float() | str() | bytes():
                yield repr(value)
            case list() | tuple():
                yield from _held(value, depth + 1)
            case set() | frozenset():
                yield from sorted(_held(list(value), depth + 1))
            case dict():
                for key, each in value.items():
                    yield from _held([key, each], depth + 1)
            case FunctionType() | MethodType() | functools.partial():
                with suppress(ValueError):  # without a source
                    yield from list(_parts(value, depth + 1))
            case _:
                kind = type(value)
                yield f"{kind.__module__}.{kind.__qualname__}"
                yield from _held([getattr(value, "__dict__", {})], depth + 1)


def _shown(function: Any) -> str:
    name = getattr(function, "__name__", None)  # anything that can be called may come
    return f"{type(function).__name__} {name}" if name else f"a {type(function).__name__}"
