"""Replacement for pytest, which the sandbox lacks: ``raises``, ``approx``, ``fail`` and
``mark.parametrize``. Other marks change nothing. Not here: fixtures, classes, ``skip``.
"""

import contextlib
import math
import re
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


@contextlib.contextmanager
def _raised(expected: Any, match: str | None) -> Iterator[types.SimpleNamespace]:
    """A context that fails unless its body raises one of these; with the error as ``value``."""
    raised = types.SimpleNamespace(value=None)
    try:
        yield raised
    except expected as error:
        assert match is None or re.search(match, str(error)), f"raised {error}"
        raised.value = error
    else:
        raise AssertionError(f"no {expected} was raised")


def raises(expected: Any, *call: Any, match: str | None = None, **named: Any) -> Any:
    """``with raises(ValueError, match="below"): …``, or ``raises(ValueError, function, 3)``."""
    context = _raised(expected, match)
    if not call:
        return context
    with context as raised:
        call[0](*call[1:], **named)
    return raised


class approx:
    """``== approx(0.3)``: numbers, and lists, tuples, dicts and arrays of them."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:
        self.expected, self.rel, self.abs = expected, rel, abs

    def __eq__(self, actual: object) -> bool:
        return self._same(self.expected, actual)

    __hash__ = None  # type: ignore[assignment]
    __array_ufunc__ = None  # so that numpy leaves the comparison to ``__eq__``

    def _same(self, expected: Any, actual: Any) -> bool:
        expected, actual = (
            side.tolist() if type(side).__name__ == "ndarray" else side
            for side in (expected, actual)
        )
        if isinstance(expected, Mapping) and isinstance(actual, Mapping):
            return expected.keys() == actual.keys() and all(
                self._same(expected[key], actual[key]) for key in expected
            )
        if isinstance(expected, list | tuple) and isinstance(actual, list | tuple):
            return len(expected) == len(actual) and all(map(self._same, expected, actual))
        if isinstance(expected, int | float) and isinstance(actual, int | float):
            return math.isclose(expected, actual, rel_tol=self.rel, abs_tol=self.abs)
        return type(expected) is type(actual) and bool(expected == actual)


def _fail(reason: str = "") -> None:
    raise AssertionError(reason)


def _param(*values: Any, **ignored: Any) -> Any:
    return values if len(values) != 1 else values[0]


class _Mark:
    def __getattr__(self, name: str) -> Any:
        return self._same

    @staticmethod
    def _same(*arguments: Any, **named: Any) -> Any:
        is_bare = len(arguments) == 1 and isinstance(arguments[0], types.FunctionType) and not named
        return arguments[0] if is_bare else lambda function: function

    @staticmethod
    def parametrize(names: str | Sequence[str], values: Sequence[Any], **ignored: Any) -> Any:
        """The test once for each of the values; several marks make every combination."""
        parts = names.replace(" ", "").split(",") if isinstance(names, str) else list(names)
        rows = [[value] if len(parts) == 1 else list(value) for value in values]
        cases = [dict(zip(parts, row, strict=True)) for row in rows]
        return lambda test: lambda **named: [test(**named, **case) for case in cases]


def module() -> types.ModuleType:
    """Module for ``import pytest``."""
    pytest = types.ModuleType("pytest")
    pytest.__dict__.update(raises=raises, approx=approx, fail=_fail, mark=_Mark(), param=_param)
    return pytest
