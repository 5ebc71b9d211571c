"""The untrusted program's own process, inside the sandbox: runs the program and answers what the
tester asks of its functions and objects. Nothing here can be relied on once the program runs.

The tester's side of the channel, and what the tester makes of an answer: ``program_proxy``.
"""

import asyncio
import builtins
import contextlib
import functools
import inspect
import json
import operator
import os
import sys
import types
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import Any

from .values import DATA_TYPES, TYPES, decode, encode, write_line

_loops: list[asyncio.AbstractEventLoop] = []
_tasks: dict[int, Any] = {}


def _loop() -> asyncio.AbstractEventLoop:
    """The one loop that the program's coroutines run in."""
    if not _loops:
        _loops.append(asyncio.new_event_loop())
    return _loops[0]


def begin(coroutine: Any) -> None:
    """Let a coroutine run whenever the loop does."""
    _tasks[id(coroutine)] = _loop().create_task(coroutine)


def finish(coroutine: Any) -> Any:
    """What a coroutine that was begun returns."""
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


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, /, *arguments, **named: function(*arguments, **named),
    "sync": lambda: None,
    **{f.__name__: f for f in (getattr, setattr, len, bool, str, repr, hash, iter, next)},
    "isinstance": isinstance,
    **{f.__name__: f for f in (begin, finish, aiter, anext)},
    **{
        f.__name__: f
        for f in (
            *(operator.getitem, operator.setitem, operator.delitem),
            *(operator.eq, operator.lt, operator.le, operator.gt, operator.ge),
            *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
            abs,
        )
    },
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
    """What a namespace finds without defining it; for LeetCode's form with what is imported there.

    These are no names of the program: one that defines nothing has no ``gcd`` to be called.
    """
    prelude: dict[str, Any] = {}
    if is_leetcode:
        exec(LEETCODE_PRELUDE, prelude)
        del prelude["__builtins__"]
    return {**vars(builtins), **prelude}


class _NotPlain(Exception):
    """An argument that the tester cannot be given back."""


def _lineage(kind: type) -> list[str]:
    """The names of an exception's class and of all that it derives from, nearest first."""
    return [base.__name__ for base in kind.__mro__]


def _refuse(value: Any) -> Any:
    if type(value) is Given:
        return {"given": value._number}
    raise _NotPlain


class Given:
    """An object of a class that the tests define. It stays with them; what is done to it is."""

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

    def __call__(self, *arguments: Any) -> Any:
        """Call it where it is."""
        return self._ask("call", self, *arguments)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._ask("list", self))

    def __copy__(self) -> Any:
        return self._ask("copy", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._ask("deepcopy", self)


def _operation(name: str) -> Callable[..., Any]:
    return lambda given, *arguments: given._ask(name, given, *arguments)


for _name in ("len", "bool", "str", "repr", "hash", "getitem", "setitem", "delitem", "contains",
              "eq", "lt", "le", "gt", "ge", "add", "sub", "mul"):  # fmt: skip
    setattr(Given, f"__{_name}__", _operation(_name))


class ProgramServer:
    """Answers the tester's requests, one after another."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming = os.fdopen(incoming, "rb")
        self.outgoing = outgoing
        self.objects: list[Any] = []
        self.given: dict[int, Given] = {}
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
        """What the program defined under that name."""
        if name not in self.namespace:
            raise NameError(f"name {name!r} is not defined")
        return self.namespace[name]

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

    def _answer(self, request: Json) -> None:
        own = {f.__name__: f for f in (self.load, self.get, self.solve)}
        name = request["function"]
        function = own[name] if name in own else _FUNCTIONS[name]
        before = json.dumps(request["arguments"][1:])
        answer: Json = {"id": request["id"]}
        self.request = request["id"]
        try:
            arguments = [decode(item, self._from_tester, TYPES) for item in request["arguments"]]
            named = {k: decode(v, self._from_tester, TYPES) for k, v in request["named"].items()}
            answer["value"] = self._encoded(function(*arguments, **named), is_name=name == "get")
            with contextlib.suppress(_NotPlain):
                after = [encode(argument, _refuse) for argument in arguments[1:]]
                if json.dumps(after) != before:
                    answer["changed"] = after
        except BaseException as error:  # noqa: BLE001 - the program's own
            answer = {"id": request["id"], "error": [_lineage(type(error)), str(error)[:500]]}
        write_line(self.outgoing, answer)

    def _encoded(self, value: Any, is_name: bool = False) -> Any:
        if is_name and isinstance(value, type):
            is_exception = issubclass(value, Exception)
            return {"exception": _lineage(value)} if is_exception else self._keep(value)
        return encode(value, self._keep, DATA_TYPES)

    def _keep(self, value: Any) -> Any:
        if type(value) is Given:
            return {"given": value._number}
        self.objects.append(value)
        kind = "coroutine" if inspect.iscoroutine(value) else "object"
        return {kind: len(self.objects) - 1}

    def _from_tester(self, kind: str | None, content: Any) -> Any:
        match kind:
            case None:
                return content
            case "object":
                return self.objects[content]
            case "builtin":
                return getattr(builtins, content)
            case "given":
                ask = functools.partial(self._ask, "operation")
                return self.given.setdefault(content, Given(ask, content))

        def callback(*arguments: Any) -> Any:
            return self._ask("callback", content, *arguments)

        return callback

    def _ask(self, what: str, which: Any, *arguments: Any) -> Any:
        """What the tester answers to a callback or an operation; it may call the program in turn
        before it does."""
        request = self.request
        given = [self._encoded(argument) for argument in arguments]
        write_line(self.outgoing, {"id": request, what: which, "arguments": given})
        while "function" in (answer := json.loads(self.incoming.readline())):
            self._answer(answer)
        self.request = request
        if "error" in answer:
            name, message = answer["error"]
            raise TYPES.get(name, RuntimeError)(message)
        value = decode(answer["value"], self._from_tester)
        return _ready(value) if answer.get("awaited") else value
