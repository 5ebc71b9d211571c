"""The untrusted program's own process, inside the sandbox: runs the program and answers what the
tester asks of its functions and objects. Nothing here can be relied on once the program runs.

The tester's side, and what this protects: ``function_harness``.
"""

import contextlib
import functools
import json
import operator
import os
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from reason_llm.score.code.jail.values import decode, encode

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "call": lambda function, *arguments, **named: function(*arguments, **named),
    **{f.__name__: f for f in (getattr, setattr, len, bool, str, repr, iter, next)},
    **{
        f.__name__: f
        for f in (
            *(operator.getitem, operator.setitem, operator.delitem),
            *(operator.eq, operator.lt, operator.le, operator.gt, operator.ge),
            *(operator.add, operator.sub, operator.mul),
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


class _NotPlain(Exception):
    """An argument that the tester cannot be given back."""


def _refuse(value: Any) -> Any:
    raise _NotPlain


class ProgramServer:
    """Answers the tester's calls on the program's functions and objects."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming = os.fdopen(incoming, "rb")
        self.outgoing = outgoing
        self.objects: list[Any] = []

    def load(self) -> Any:
        """Run the program; what it defined, as pairs of a name and an encoded value."""
        module = types.ModuleType("solution")
        sys.modules["solution"] = module
        with open("solution.py", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            source = file.read()
        code = compile(source, "solution.py", "exec")
        if LEETCODE_MARK in source:
            exec(LEETCODE_PRELUDE, module.__dict__)
        before = dict(module.__dict__)
        exec(code, module.__dict__)
        self.namespace = module.__dict__
        return [
            [name, self._describe(value)]
            for name, value in list(self.namespace.items())
            if not name.startswith("__") and (name not in before or before[name] is not value)
        ]

    def _describe(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__}
        if isinstance(value, type) and issubclass(value, Exception):
            return {"exception": value.__name__}
        return encode(value, self._keep)

    def _keep(self, value: Any) -> Any:
        self.objects.append(value)
        return {"object": len(self.objects) - 1}

    def solve(self, name: str, *arguments: Any) -> Any:
        """A call by ``fn_name``: a function, or a method of a fresh ``Solution``."""
        solution: Any = self.namespace.get("Solution")
        is_method = isinstance(solution, type) and name in dir(solution)
        function = getattr(solution(), name) if is_method else self.namespace[name]
        result = function(*arguments)
        return list(result) if isinstance(result, Iterator | range) else result

    def run(self) -> None:
        """Load the program, then answer until the tester ends."""
        self._answer(self.load)
        for line in self.incoming:
            request = json.loads(line)
            name = request["function"]
            function = self.solve if name == "solve" else _FUNCTIONS[name]
            arguments = [decode(item, self._from_tester) for item in request["arguments"]]
            named = {k: decode(v, self._from_tester) for k, v in request["named"].items()}
            before = json.dumps(request["arguments"][1:])
            call = functools.partial(self._call, function, arguments, named)
            self._answer(call, before, arguments[1:])

    def _call(self, function: Callable[..., Any], given: list[Any], named: dict[str, Any]) -> Any:
        return encode(function(*given, **named), self._keep)

    def _answer(
        self, function: Callable[[], Any], before: str = "[]", arguments: list[Any] | None = None
    ) -> None:
        try:
            answer = {"value": function()}
            with contextlib.suppress(_NotPlain):
                after = [encode(argument, _refuse) for argument in arguments or []]
                if json.dumps(after) != before:
                    answer["changed"] = after
        except BaseException as error:  # noqa: BLE001 - the program's own
            answer = {"error": [type(error).__name__, str(error)[:500]]}
        self._send(answer)

    def _send(self, message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(self.outgoing, data) :]

    def _from_tester(self, kind: str, content: Any) -> Any:
        if kind == "object":
            return self.objects[content]

        def callback(*arguments: Any) -> Any:
            self._send(
                {"callback": content, "arguments": [encode(a, self._keep) for a in arguments]}
            )
            answer = json.loads(self.incoming.readline())
            return decode(answer["value"], self._from_tester)

        return callback
