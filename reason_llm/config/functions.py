"""Names of functions that are given in Python, by which a run knows them again when it goes on."""

import hashlib
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

PYTHON = "python:"
"""Prefix in the config of functions and rows that were given in Python."""


def name_of(function: Callable[..., Any]) -> str:
    """``my_rewards.py:is_brief`` for a function that can be loaded from its file, else
    ``python:__main__.is_brief``.

    Raises:
        ValueError: it cannot be told from another one later.
    """
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise ValueError(
            f"is {_shown(function)} and no function made with def, so a run that goes on could not "
            "tell it from another; call it in a function of a module or a notebook's cell"
        )
    if function.__closure__:
        raise ValueError(
            f"is the function {function.__name__}, which takes "
            f"{', '.join(function.__code__.co_freevars)} from the function around it, so a run "
            "that goes on could not tell it from another; make them defaults of its parameters"
        )
    path = Path(function.__code__.co_filename)
    is_of_a_module = function.__module__ != "__main__" and function.__qualname__.isidentifier()
    if is_of_a_module and path.suffix == ".py" and path.is_file():
        path = path.absolute()
        here = Path.cwd()
        return (
            f"{path.relative_to(here) if path.is_relative_to(here) else path}:{function.__name__}"
        )
    return f"{PYTHON}{function.__module__}.{function.__qualname__.replace('<locals>.', '')}"


def source_digest(function: Callable[..., Any]) -> str:
    """Digest of a function's source, with which a change is noticed.

    Raises:
        ValueError: it has no source that can be read.
    """
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError) as error:
        raise ValueError(
            f"is {_shown(function)}, whose source cannot be read (it was typed at Python's prompt "
            "or made by exec); write it into a file or a notebook's cell"
        ) from error
    return hashlib.sha256(textwrap.dedent(source).encode()).hexdigest()[:16]


def _shown(function: Any) -> str:
    name = getattr(function, "__name__", None)  # anything that can be called may come
    return f"{type(function).__name__} {name}" if name else f"a {type(function).__name__}"
