"""The tester's side of the channel to an untrusted program: requests, and stand-ins for objects.

Everything that comes back is only a claim of the program. One request has one answer, which must
carry the random id of its request: a value (plain data of built-in types, or the number of an
object that stays with the program), an error, or a call of a function that the tests handed over.
So a program that writes to the channel itself can say what its functions could have returned, and
nothing else. ``StopIteration`` is an error unless it answers ``next``: it would end a loop of the
tests before their assertions.
"""

import builtins
import contextlib
import copy
import importlib
import inspect
import json
import operator
import os
import select
import signal
import time
import types
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from contextvars import ContextVar, copy_context
from itertools import islice
from threading import Lock
from typing import Any, NoReturn

from .shared import Shared, kind_of
from .values import DATA_TYPES, EXCEPTIONS, NotFinite, decode, encode, write_line

MAX_MESSAGE_BYTES = 16 << 20
MAX_LINEAGE = 32
"""Classes that an exception's class is taken to derive from."""
SPECIAL_ATTRIBUTES = {"__name__", "__qualname__", "__dict__", "__annotations__", "__wrapped__"}
"""Reserved names that tests may ask a program's object for. Libraries look up others and believe
them: numpy reads memory where ``__array_interface__`` points."""

PREDICATES = {
    name
    for kind in (str, bytes, int, float, set, frozenset)
    for name in dir(kind)
    if name.startswith("is") or name in ("startswith", "endswith")
}
"""Methods by which tests ask a plain value yes or no; an object may say yes to all."""

MAX_ITEMS = 1 << 16
"""Limit for iterating over an object of the other side: an iterator need not end."""


def _public(name: Any) -> str:
    if type(name) is not str or name.startswith("_"):
        raise AttributeError(str(name)[:80])
    return name


def _set_data(target: Any, name: Any, value: Any) -> None:
    """Set an attribute, but nothing that is called: that is the tests' own."""
    if callable(getattr(target, _public(name), None)):
        raise AttributeError(f"{name} is a method")
    setattr(target, name, value)


_OPERATORS = "getitem setitem delitem contains eq lt le gt ge add sub mul"
OPERATIONS: dict[str, Callable[..., Any]] = {
    "getattr": lambda target, name: getattr(target, _public(name)),
    "setattr": _set_data,
    "call": lambda target, /, *arguments, **named: target(*arguments, **named),
    "list": lambda target: list(islice(target, MAX_ITEMS)),
    **{f.__name__: f for f in (len, next, bool, str, repr, hash, copy.copy, copy.deepcopy)},
    **{name: getattr(operator, name) for name in _OPERATORS.split()},
}
"""Operations of a program on an object of a class that the tests define."""

Json = dict[str, Any]


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class ProgramEnded(Exception):
    """The program's process ended, hung, or broke the protocol; it is never asked again."""


class Program:
    """The process that runs the program.

    Args:
        incoming, outgoing: the tester's ends of two pipes.
        timeout_seconds: CPU time of one request; three times that in wall time.
    """

    def __init__(self, pid: int, incoming: int, outgoing: int) -> None:
        self.pid = pid
        self.incoming = incoming
        self.outgoing = outgoing
        self.timeout_seconds = 0.0
        self.unread = bytearray()
        self.callbacks: list[Callable[..., Any]] = []
        self.given: list[Any] = []
        self._plain: dict[int, Any] = {}
        self.shared = Shared(0, self._encoded, self._value)
        self.gives_arrays = False
        """Whether the tests speak of numpy; if not, arrays come as lists."""
        self.gives_all_numbers = True
        """Whether NaN and infinities come as what they are; if not, as ``NotFinite``."""
        self.exceptions: dict[str, type[Exception]] = {}
        self.on_answer: Callable[[], object] = lambda: None
        """Called with each answer."""
        self._asking = Lock()
        self._is_asked: ContextVar[bool] = ContextVar("is_asked", default=False)
        self.has_ended = False
        self.num_calls = self.num_items = self.num_names = 0
        self.loading = ""

    def start(self) -> None:
        """Let the program run, without waiting for it."""
        self.loading = self._request("load", (), {})

    def load(self) -> None:
        """Wait until the program has run; raises what it raised, or ProgramEnded."""
        self._answer(self.loading, "load")

    def get(self, name: str) -> Any:
        """The program's object of this name; NameError if nothing."""
        value = self._asked("get", (name,))
        self.num_names += 1
        is_class = isinstance(value, StandIn) and name.lstrip("_")[:1].isupper()
        return StandIn(self, value._number, is_class=True) if is_class else value

    def call(self, function: str, /, *arguments: Any, **named: Any) -> Any:
        """A function that ``program_server`` knows, in the program's process."""
        self.num_calls += 1
        self.num_items += function in ("next", "anext")
        if self.num_items > MAX_ITEMS:
            raise RuntimeError(f"the program gave more than {MAX_ITEMS} items one by one")
        return self._asked(function, arguments, named)

    def plain(self, container: "StandIn") -> Any:
        """Its value as ``list`` or the like has it, the same until something else is asked."""
        if container._number not in self._plain:
            self._plain[container._number] = self._asked("plain", (container,))
        return self._plain[container._number]

    def sync(self) -> None:
        """Hear from the program once more; ProgramEnded if it wrote unasked or is gone."""
        self._asked("sync")

    def _asked(
        self, function: str, arguments: tuple[Any, ...] = (), named: Json | None = None
    ) -> Any:
        """The tests' threads wait for each other, but not for the call that calls them back."""
        is_within = self._is_asked.get()
        with contextlib.nullcontext() if is_within else self._asking:
            self._is_asked.set(True)
            try:
                return self._answer(self._request(function, arguments, named or {}), function)
            finally:
                self._is_asked.set(is_within)

    def _request(self, function: str, arguments: tuple[Any, ...], named: Json) -> str:
        self._plain = self._plain if function == "plain" else {}
        number = os.urandom(16).hex()
        self._send(
            {
                "id": number,
                "function": function,
                "arguments": [self._encoded(item) for item in arguments],
                "named": {name: self._encoded(value) for name, value in named.items()},
                **self.shared.message(),
            }
        )
        return number

    def _answer(self, number: str, function: str) -> Any:
        while {"callback", "operation"} & (message := self._receive(number)).keys():
            self._call_back(number, message)
        if "error" in message:
            lineage, text = message["error"]
            raise self._error([str(name) for name in lineage], str(text), function)
        return self._value(message["value"], function)

    def _call_back(self, number: str, message: Json) -> None:
        """Serve a call of a function of the tests, or an operation on one of their objects."""
        arguments = [self._value(item) for item in message["arguments"]]
        named = {name: self._value(item) for name, item in message["named"].items()}
        if "callback" in message:
            function = self.callbacks[message["callback"]]
        else:
            function = OPERATIONS[message["operation"]]
            if not any(_is_of_tests(item) or isinstance(item, Iterator) for item in arguments[:1]):
                self._end("the program broke the protocol: an operation on no object of the tests")
        if message.get("operation") in ("next", "list"):
            self.shared.shortened[id(arguments[0])] = arguments[0]
        try:
            value = function(*arguments, **named)
            is_awaited = inspect.iscoroutine(value)
            if is_awaited:
                run = importlib.import_module("asyncio").run
                futures = importlib.import_module("concurrent.futures")
                # in a thread, as a loop of the tests may run in this one
                with futures.ThreadPoolExecutor(1) as thread:
                    value = thread.submit(copy_context().run, run, value).result()
            reply = {"value": self._encoded(value), "awaited": is_awaited, **self.shared.message()}
        except ProgramEnded:
            raise
        except Exception as error:  # noqa: BLE001 - the tests' own
            reply = {"error": [type(error).__name__, str(error)]}
        self._send({"id": number, **reply})

    def _error(self, lineage: list[str], message: str, function: str) -> Exception:
        """The exception that the tests see, of the nearest class that they can know."""
        ends = {"next": StopIteration, "anext": StopAsyncIteration}
        if function in ends and ends[function].__name__ in lineage:
            return ends[function]()
        if {"StopIteration", "StopAsyncIteration"} & set(lineage):
            return RuntimeError(f"the program raised {lineage[0]}: {message}")
        known = {**EXCEPTIONS, **self.exceptions}
        name = next((name for name in lineage if name in known), "Exception")
        kind = ProgramError if name == "Exception" else known[name]
        try:
            return kind(message)
        except TypeError:  # UnicodeDecodeError takes five arguments
            return ProgramError(f"{name}: {message}")

    def _send(self, message: Json) -> None:
        if self.has_ended:
            raise ProgramEnded("the program has ended")
        poller = select.poll()
        poller.register(self.incoming, select.POLLIN)
        if self.unread or any(event & select.POLLIN for _, event in poller.poll(0)):
            self._end("the program wrote to the channel unasked")
        try:  # the program reads before it answers; the limit on wall time ends a hang
            write_line(self.outgoing, message)
        except BrokenPipeError:
            self._end("the program has ended")

    def _receive(self, number: str) -> Json:
        """The next message, of the right form; its values are not read yet."""
        line = self._read_line()
        try:
            message = json.loads(line)
            if message["id"] != number:
                raise ValueError("an answer to no request")
            if {"callback", "operation"} & message.keys():
                known = range(len(self.callbacks)) if "callback" in message else OPERATIONS
                if message.get("callback", message.get("operation")) not in known:
                    raise ValueError("a call of nothing that was given")
                _ = [*message["arguments"]], {**message["named"]}
            elif "error" in message:
                lineage, _ = message["error"]
                if type(lineage) is not list:
                    raise ValueError("an error without a class")
            else:
                _ = message["value"]
            self.shared.take(message)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            self._end(f"the program broke the protocol: {error}")
        return dict(message)

    def _read_line(self) -> bytes:
        clock = (~self.pid << 3) | 2  # its CPU clock: clock_getcpuclockid(3)
        poller = select.poll()
        poller.register(self.incoming, select.POLLIN)
        started, started_cpu = time.monotonic(), time.clock_gettime(clock)
        while (end := self.unread.find(b"\n")) < 0:
            if poller.poll(20):
                part = os.read(self.incoming, 1 << 16)
                self.unread += part
                if not part or len(self.unread) > MAX_MESSAGE_BYTES:
                    self._end("too much came back" if part else "the program has ended")
                continue
            cpu = time.clock_gettime(clock) - started_cpu
            wall = time.monotonic() - started
            if cpu > self.timeout_seconds or wall > 3 * self.timeout_seconds:
                self._end("time limit")
        line = bytes(self.unread[:end])
        del self.unread[: end + 1]
        self.on_answer()
        return line

    def _end(self, why: str) -> NoReturn:
        self.has_ended = True
        os.kill(self.pid, signal.SIGKILL)
        raise ProgramEnded(why)

    def _encoded(self, value: Any) -> Any:
        return encode(value, self._to_program, first=self._first)

    def _first(self, value: Any) -> Any:
        if isinstance(value, Derived) and value == value._given:  # the tests did not change it
            return {"object": value._stand_in._number}
        return None if kind_of(value) is None else self.shared.refer(value)

    def _to_program(self, value: Any) -> Any:
        if isinstance(value, StandIn):
            return {"object": value._number}
        if isinstance(value, NotFinite):
            return encode(value.number, self._to_program)
        name = value.__name__ if isinstance(value, types.BuiltinFunctionType) else ""
        if name and vars(builtins).get(name) is value:
            # Its own one does the same there. Ours would do it here: ``eval`` is the tests' to use.
            return {"builtin": name}
        if isinstance(value, KeysView | ValuesView | ItemsView):
            return self._encoded(list(value))
        is_iterator = isinstance(value, Iterator)
        if is_iterator or _is_of_tests(value):
            return {"iterator" if is_iterator else "given": _place_of(value, self.given)}
        if not callable(value):
            raise TypeError(f"{type(value).__name__} cannot be given to the program")
        about = getattr(value, "__name__", "callback"), getattr(value, "__doc__", None)
        return {"callback": [_place_of(value, self.callbacks), *about]}

    def _value(self, encoded: Any, function: str = "") -> Any:
        """The program's value, made of built-in types and stand-ins."""
        try:
            if function == "make" and isinstance(encoded, dict) and "container" in encoded:
                return StandIn(self, int(encoded["container"]), is_container=True)
            if function == "get" and isinstance(encoded, dict) and "exception" in encoded:
                return self._exception([str(name) for name in encoded["exception"]])
            return decode(encoded, self._stand_in, DATA_TYPES)
        except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError) as error:
            self._end(f"the program broke the protocol: {error}")
        except (RecursionError, MemoryError) as error:
            self._end(f"the program sent too much: {error}")

    def _stand_in(self, kind: str | None, content: Any) -> Any:
        if kind is None:
            return content if self.gives_all_numbers else NotFinite(content)
        if kind == "given" and content in range(len(self.given)):
            return self.given[content]
        if kind == "shared":
            return self.shared.copies[content]
        if kind == "ndarray":  # a list where there is no numpy
            return content if self.gives_arrays or type(content) is list else content.tolist()
        if kind == "derived":
            value = self._value(content[1])
            if type(value) not in _DERIVED:  # not a number
                return value
            derived = _DERIVED[type(value)](value)
            derived._stand_in, derived._given = StandIn(self, int(content[0])), value
            return derived
        if kind not in ("object", "coroutine") or type(content) is not int:
            raise ValueError(f"a value of the unknown kind {kind!r}")
        stand_in = StandIn(self, content)
        return self._awaited(stand_in) if kind == "coroutine" else stand_in

    async def _awaited(self, coroutine: "StandIn") -> Any:
        """Concurrent ones are started before it is awaited."""
        self.call("begin", coroutine)
        await importlib.import_module("asyncio").sleep(0)
        return self.call("finish", coroutine)

    def _exception(self, lineage: list[str]) -> type[Exception]:
        """The tester's own class for one of the program's, so that tests can catch it."""
        kind: type[Exception] = ProgramError
        for name in reversed(lineage[:MAX_LINEAGE]):
            if name in self.exceptions:
                kind = self.exceptions[name]
            elif name not in ("object", "BaseException", "Exception"):
                builtin = EXCEPTIONS.get(name)
                kind = builtin or self.exceptions.setdefault(name, type(name, (kind,), {}))
        return kind


def _is_of_tests(value: Any) -> bool:
    """Whether this is an object of a class that the tests define."""
    return not isinstance(value, type) and type(value).__module__ == "__main__"


def _place_of(value: Any, objects: list[Any]) -> int:
    """The index of an object in a list, to which it is added if it is new."""
    number = next((n for n, item in enumerate(objects) if item is value), len(objects))
    if number == len(objects):
        objects.append(value)
    return number


class StandIn:
    """An object that lives in the program's process.

    It equals nothing but another such object: otherwise the program would be asked whether it is
    right. So it has no ``PREDICATES`` and no arithmetic with numbers of the tests, unless the tests
    made it of a class with a capital. Where that class derives from ``list`` or the like, the value
    by ``list`` says what it equals, its length, truth and items.
    """

    __slots__ = ("_is_class", "_is_container", "_is_tested", "_number", "_program")

    def __init__(
        self, program: Program, number: int, is_class: bool = False, is_container: bool = False
    ) -> None:
        values = (is_class, is_container, False, number, program)
        for name, value in zip(StandIn.__slots__, values, strict=True):
            object.__setattr__(self, name, value)

    def __call__(self, /, *arguments: Any, **named: Any) -> Any:
        """Call it in the program's process."""
        function = "make" if self._is_class else "call"
        result = self._program.call(function, self, *arguments, **named)
        if isinstance(result, StandIn) and self._is_class:
            object.__setattr__(result, "_is_tested", True)
        return result

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in SPECIAL_ATTRIBUTES:
            raise AttributeError(name)
        if name in PREDICATES and not (self._is_class or self._is_tested):
            raise AttributeError(f"{name}: this is an object of the program, no plain value")
        return self._program.call("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.call("setattr", self, name, value)

    def __instancecheck__(self, value: object) -> bool:
        own = value._stand_in if isinstance(value, Derived) else value
        return isinstance(own, StandIn) and bool(self._program.call("isinstance", own, self))

    def __enter__(self) -> Any:
        return self._program.call("getattr", self, "__enter__")()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """An error of the tests propagates; a program that would swallow it is ended."""
        lineage, text = _visible_error(error)
        if self._program.call("leave", self, lineage, text) and lineage:
            self._program._end("a context of the program swallows the error of its body")

    async def __anext__(self) -> Any:
        return self._program.call("anext", self)


def _visible_error(error: BaseException | None) -> tuple[list[str], str]:
    """The error as a context manager of the program sees it; empty for one that ends the tests."""
    is_hidden = not isinstance(error, Exception) or isinstance(error, AssertionError | ProgramEnded)
    return [] if is_hidden else [kind.__name__ for kind in type(error).__mro__], str(error)


def _query_method(
    function: str, result: Callable[[Any], Any] = lambda value: value
) -> Callable[..., Any]:
    of_plain: dict[str, Callable[[Any], Any]] = {"len": len, "bool": bool, "iter": iter}

    def ask(own: StandIn, *arguments: Any) -> Any:
        if own._is_container and function in of_plain:
            return of_plain[function](own._program.plain(own))
        return result(own._program.call(function, own, *arguments))

    return ask


def _contains(own: Any, item: Any) -> bool:
    if own._is_tested and not own._is_container:  # else its class's word counts nothing
        return bool(own._program.call("contains", own, item))
    return any(member is item or member == item for member in own)


def _comparison_method(function: str) -> Callable[..., Any]:
    def compare(own: StandIn, other: Any) -> Any:
        if own._is_container:
            return getattr(operator, function)(own._program.plain(own), other)
        is_one = isinstance(other, StandIn)
        return own._program.call(function, own, other) if is_one else NotImplemented

    return compare


def _arithmetic_method(function: str, is_reflected: bool = False) -> Callable[..., Any]:
    def compute(own: StandIn, *others: Any) -> Any:
        if not own._is_tested and not others:
            raise TypeError(f"bad operand type for {function}: an object of the program")
        if not own._is_tested and not isinstance(others[0], StandIn):
            return NotImplemented
        result = own._program.call(function, *((*others, own) if is_reflected else (own, *others)))
        if isinstance(result, StandIn):
            object.__setattr__(result, "_is_tested", own._is_tested)
        return result

    return compute


def _copy_method(function: str) -> Callable[..., Any]:
    def copied(own: StandIn, *memo: Any) -> Any:
        duplicate = own._program.call(function, own)
        for flag in ("_is_tested", "_is_container"):
            object.__setattr__(duplicate, flag, getattr(own, flag))
        return duplicate

    return copied


_QUERIES = "getitem setitem delitem iter next aiter"
_ARITHMETIC = "add sub mul truediv floordiv mod matmul pow neg abs and or xor"
_METHODS = {
    "len": _query_method("len", int),
    "bool": _query_method("bool", bool),
    "str": _query_method("str", str),
    "repr": _query_method("repr", str),
    "hash": _query_method("hash", int),
    "contains": _contains,
    **{name: _query_method(name) for name in _QUERIES.split()},
    **{name: _comparison_method(name) for name in ("eq", "lt", "le", "gt", "ge")},
    **{name: _arithmetic_method(name) for name in _ARITHMETIC.split()},
    **{name: _copy_method(name) for name in ("copy", "deepcopy")},
    **{f"r{name}": _arithmetic_method(name, True) for name in ("add", "sub", "mul", "matmul")},
}
for _name, _method in _METHODS.items():
    setattr(StandIn, f"__{_name}__", _method)


setattr(StandIn, "__doc__", property(lambda own: own._program.call("getattr", own, "__doc__")))  # noqa: B010


class Derived:
    """Plain data of a class of the program's that derives from ``list`` or the like: a value of
    that type here, and the program is asked for what that type does not have."""

    _stand_in: StandIn
    _given: Any  # its value as the program gave it

    def __getattr__(self, name: str) -> Any:
        return self._stand_in.__getattr__(name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is plain."""
        kind: Any = type(self).__bases__[1]
        return kind, (kind(self),)


_DERIVED: dict[type, Any] = {
    kind: type(kind.__name__, (Derived, kind), {})
    for kind in (list, dict, set, frozenset, deque, tuple, str, int, float)
}
