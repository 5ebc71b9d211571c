"""The untrusted program's own process, inside the sandbox: runs the program and answers what the
tester asks of its functions and objects. Nothing here can be relied on once the program runs.

The tester's side of the channel, and what the tester makes of an answer: ``program_proxy``.
"""

import builtins
import copy
import functools
import importlib
import inspect
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from .shared import Shared, kind_of
from .values import DATA_TYPES, TYPES, decode, encode, write_line

_loops: list[Any] = []
_tasks: dict[int, Any] = {}


def _loop() -> Any:
    """The one loop that the program's coroutines run in."""
    if not _loops:
        _loops.append(importlib.import_module("asyncio").new_event_loop())
    return _loops[0]


def begin(coroutine: Any) -> None:
    """Let a coroutine run whenever the loop does."""
    _tasks[id(coroutine)] = _loop().create_task(coroutine)


def finish(coroutine: Any) -> Any:
    """Result of a coroutine that was started."""
    return _loop().run_until_complete(_tasks[id(coroutine)])


def anext(values: Any) -> Any:
    """The next of an asynchronous iterator, waited for."""
    return _loop().run_until_complete(_coroutine(values.__anext__()))


async def _ready(value: Any) -> Any:
    return value


async def _coroutine(awaitable: Any) -> Any:
    return await awaitable


async def _all_of(values: Any) -> list[Any]:
    return [value async for value in values]


def plain(value: Any) -> Any:
    """The value of an object as the built-in class below its own has it."""
    kind = _base(value)
    if kind in (int, float, str):
        return kind.__getnewargs__(value)[0]
    return dict(dict.items(value)) if kind is dict else kind(kind.__iter__(value))


_BASES: tuple[Any, ...] = (list, dict, set, frozenset, deque, tuple, str, int, float)


def _base(value: Any) -> Any:
    """The class of plain data that the value's class, one of the program's, derives from."""
    is_own = type(value).__module__ == "solution"
    return next((kind for kind in _BASES if is_own and isinstance(value, kind)), None)


_OPERATORS = (
    "getitem setitem delitem contains eq lt le gt ge add sub mul truediv floordiv mod matmul pow "
    "neg abs and or xor"
)
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("make", "call"), lambda of, /, *arguments, **named: of(*arguments, **named)),
    "plain": plain,
    "sync": lambda: None,
    **{f.__name__: f for f in (getattr, setattr, len, bool, str, repr, hash, iter, next)},
    **{f.__name__: f for f in (isinstance, begin, finish, aiter, anext, copy.copy, copy.deepcopy)},
    **{name: getattr(operator, f"__{name}__") for name in _OPERATORS.split()},
}

LEETCODE_MARK = "class Solution"
# What LeetCode has imported before such a class is read; pow and abs stay the built-in ones.
LEETCODE_PRELUDE = """
import bisect, collections, datetime, functools, heapq, itertools, math, operator, random, re
import string, sys
from typing import *
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from operator import *
from string import *
from builtins import abs, pow
"""

Json = dict[str, Any]


def builtin_names(is_leetcode: bool) -> dict[str, Any]:
    """Names that a namespace finds without defining them; for LeetCode's form with those imported
    there. They are no names of the program."""
    prelude: dict[str, Any] = {}
    if is_leetcode:
        exec(LEETCODE_PRELUDE, prelude)
        del prelude["__builtins__"]
    return {**vars(builtins), **prelude}


def _lineage(kind: type) -> list[str]:
    return [base.__name__ for base in kind.__mro__]


class Given:
    """Proxy of an iterator or an instance of the tests' classes; the tester does all operations."""

    __slots__ = ("_ask", "_number")

    def __init__(self, ask: Callable[..., Any], number: int) -> None:
        object.__setattr__(self, "_ask", ask)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._ask("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._ask("setattr", self, name, value)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call it where it is."""
        return self._ask("call", self, *arguments, named=named)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list", self))

    def __copy__(self) -> Any:
        return self._ask("copy", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._ask("deepcopy", self)


class GivenIterator(Given):
    """An iterator of the tests: its items come one by one, as they may have no end."""

    __slots__ = ()

    def __iter__(self) -> "GivenIterator":
        return self

    def __next__(self) -> Any:
        return self._ask("next", self)


def _operation(name: str) -> Callable[..., Any]:
    return lambda target, *arguments: target._ask(name, target, *arguments)


_OPERATIONS = "len bool str repr hash getitem setitem delitem contains eq lt le gt ge add sub mul"
for _name in _OPERATIONS.split():
    setattr(Given, f"__{_name}__", _operation(_name))


class ProgramServer:
    """Answers the tester's requests, one after another."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming = os.fdopen(incoming, "rb")
        self.outgoing = outgoing
        self.objects: list[Any] = []
        self.given: dict[int, Given] = {}
        self.callbacks: dict[int, Callable[..., Any]] = {}
        self.shared = Shared(
            1,
            lambda value: encode(value, self._keep, DATA_TYPES, self._shared),
            lambda content: decode(content, self._from_tester, TYPES),
        )
        self.request = ""
        self.namespace: dict[str, Any] = {}

    def run(self) -> None:
        """Answer until the tester ends."""
        for line in self.incoming:
            self._answer(json.loads(line))

    def load(self) -> None:
        """Run the program."""
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        self.namespace = module.__dict__
        with open("solution.py", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            source = file.read()
        self.namespace["__builtins__"] = builtin_names(LEETCODE_MARK in source)
        exec(compile(source, "solution.py", "exec"), self.namespace)

    def get(self, name: str) -> Any:
        """Object that the program defined under a name."""
        if name not in self.namespace:
            raise NameError(f"name {name!r} is not defined")
        return self.namespace[name]

    def leave(self, context: Any, lineage: list[str], text: str) -> Any:
        """Leave a context, perhaps with an error of that class and text."""
        if not lineage:
            return context.__exit__(None, None, None)
        known = {**TYPES, **self.namespace}
        error = next(known[name] for name in lineage if name in known)(text)
        return context.__exit__(type(error), error, None)

    def solve(self, name: str, *arguments: Any) -> Any:
        """A call by ``fn_name``: a function, or a method of a fresh ``Solution``."""
        solution: Any = self.namespace.get("Solution")
        is_method = isinstance(solution, type) and name in dir(solution)
        function = getattr(solution(), name) if is_method else self.get(name)
        result = function(*arguments)
        if inspect.isawaitable(result):
            result = _loop().run_until_complete(_coroutine(result))
        elif inspect.isasyncgen(result):
            result = _loop().run_until_complete(_all_of(result))
        is_many = isinstance(result, Iterator | KeysView | ValuesView | ItemsView | range)
        return list(result) if is_many else result

    def _answer(self, request: Json, is_within: bool = False) -> None:
        self.request = request["id"]
        answer: Json = {"id": self.request}
        try:
            answer["value"] = self._encoded(self._result(request), request["function"])
        except BaseException as error:  # noqa: BLE001 - the program's own
            answer["error"] = [_lineage(type(error)), str(error)[:500]]
        try:
            answer |= self.shared.message(is_end=not is_within)
        except BaseException as error:  # noqa: BLE001 - what it put into a list of the tests
            answer["error"] = [_lineage(type(error)), str(error)[:500]]
        write_line(self.outgoing, answer)

    def _result(self, request: Json) -> Any:
        methods = {f.__name__: f for f in (self.load, self.get, self.leave, self.solve)}
        name = request["function"]
        function = methods[name] if name in methods else _FUNCTIONS[name]
        self.shared.take(request)
        arguments = [decode(item, self._from_tester, TYPES) for item in request["arguments"]]
        named = {k: decode(v, self._from_tester, TYPES) for k, v in request["named"].items()}
        return function(*arguments, **named)

    def _encoded(self, value: Any, function: str = "") -> Any:
        if function == "get" and isinstance(value, type):
            is_exception = issubclass(value, Exception)
            return {"exception": _lineage(value)} if is_exception else self._keep(value)
        if function == "make" and _base(value) not in (None, int, float, str):
            return {"container": self._keep(value)["object"]}
        return encode(value, self._keep, DATA_TYPES, self._first)

    def _first(self, value: Any) -> Any:
        """The form of a list of the tests, or of an object whose class derives from plain data."""
        if self.shared.has(value):
            return self.shared.refer(value)
        if _base(value) is None:
            return None
        return {"derived": [self._keep(value)["object"], self._encoded(plain(value))]}

    def _shared(self, value: Any) -> Any:
        """The form of an item of a shared list: mutable items are shared, too."""
        is_new = kind_of(value) is not None and _base(value) is None
        return self.shared.refer(value) if is_new else self._first(value)

    def _keep(self, value: Any) -> Any:
        if isinstance(value, Given):
            return {"given": value._number}
        self.objects.append(value)
        kind = "coroutine" if inspect.iscoroutine(value) else "object"
        return {kind: len(self.objects) - 1}

    def _from_tester(self, kind: str | None, content: Any) -> Any:
        match kind:
            case None | "ndarray":
                return content
            case "object":
                return self.objects[content]
            case "shared":
                return self.shared.copies[content]
            case "builtin":
                return getattr(builtins, content)
            case "given" | "iterator":
                ask = functools.partial(self._ask, "operation")
                stand_in = (Given if kind == "given" else GivenIterator)(ask, content)
                return self.given.setdefault(content, stand_in)
        # One function object per callback, since programs compare functions and use them as keys.
        number, name, doc = content
        if number in self.callbacks:
            return self.callbacks[number]

        def callback(*arguments: Any, **named: Any) -> Any:
            return self._ask("callback", number, *arguments, named=named)

        callback.__name__ = callback.__qualname__ = name
        callback.__doc__ = doc
        self.callbacks[number] = callback
        return callback

    def _ask(self, what: str, which: Any, *arguments: Any, named: Json | None = None) -> Any:
        """Answer of the tester to a callback or an operation; it may call the program first."""
        request = self.request
        message = {
            "id": request,
            what: which,
            "arguments": [self._encoded(argument) for argument in arguments],
            "named": {name: self._encoded(value) for name, value in (named or {}).items()},
            **self.shared.message(),
        }
        write_line(self.outgoing, message)
        while "function" in (answer := json.loads(self.incoming.readline())):
            self._answer(answer, is_within=True)
        self.request = request
        self.shared.take(answer)
        if "error" in answer:
            name, message = answer["error"]
            raise TYPES.get(name, RuntimeError)(message)
        value = decode(answer["value"], self._from_tester)
        return _ready(value) if answer.get("awaited") else value
