"""Calls functions of an untrusted program and runs assertions on them, inside the sandbox.

Two processes, so that the program never shares one with its tests. The tester forks the program's
process first and only then reads the tests from stdin; the two exchange values as JSON. In the
tests' namespace each function and class of the program is a stand-in that sends its arguments over
and hands back the result as plain data, rebuilt from its own kind: an overridden ``__eq__``, a
patched builtin, ``os._exit(0)`` or a forged message in the program's process changes what values
come back, never how they are compared or counted. Expected values and the text of the tests are in
the tester only, which cannot be traced, and imports nothing from where the program can write.

What remains: results that are objects of the program's own classes stay over there, and the tests
see them through the program's methods, so a test that compares two such objects, or checks one
helper of the program with another, believes the program. Arguments are copies; what the call did to
lists, dicts and sets among them is done to the originals. Anything the program prints is dropped.

These files are sent into the sandbox and run there (``score/code_tests.py``).
stdin: one JSON object, ``{"calls": [function, inputs]}`` or ``{"asserts": source, "entry_point"}``,
with ``timeout_seconds`` (CPU time of one call; three times that in wall time) and ``stop_early``.
stdout: one line for each call, ``{"value": …}`` or ``{"error": …}``; or one line with ``passed``,
``total`` and ``problem``.
"""

import ast
import builtins
import ctypes
import importlib
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from reason_llm.score.code.jail.program_server import LEETCODE_MARK, LEETCODE_PRELUDE, ProgramServer
from reason_llm.score.code.jail.values import TYPES, as_json, decode, encode

MAX_MESSAGE_BYTES = 16 << 20
_PR_SET_DUMPABLE = 4
_MODULES = {"array", "bisect", "calendar", "cmath", "collections", "copy", "datetime", "decimal",
            "fractions", "functools", "hashlib", "heapq", "itertools", "json", "math", "numpy",
            "operator", "os", "random", "re", "statistics", "string", "sys", "time",
            "typing"}  # fmt: skip
"""Modules that tests may use because the program imported them."""


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class ProgramEnded(Exception):
    """The program's process ended, hung, or broke the protocol; it is never asked again."""


class _Program:
    """The tester's side: calls, and stand-ins for what the program defined."""

    def __init__(self, pid: int, incoming: int, outgoing: int, timeout_seconds: float) -> None:
        self.pid = pid
        self.incoming = incoming
        self.outgoing = outgoing
        self.timeout_seconds = timeout_seconds
        self.unread = bytearray()
        self.callbacks: list[Callable[..., Any]] = []
        self.exceptions: dict[str, type[Exception]] = {}
        self.has_ended = False
        self.num_calls = 0

    def load(self) -> dict[str, Any]:
        """The names that the program defined; it is running already."""
        return {name: decode(value, self._from_program) for name, value in self._receive()["value"]}

    def call(self, function: str, *arguments: Any, **named: Any) -> Any:
        """A function that ``program_server`` knows, in the program's process."""
        self.num_calls += 1
        request = {
            "function": function,
            "arguments": [encode(item, self._to_program) for item in arguments],
            "named": {name: encode(value, self._to_program) for name, value in named.items()},
        }
        self._send(request)
        answer = self._receive()
        while "callback" in answer:
            given = [decode(item, self._from_program) for item in answer["arguments"]]
            value = self.callbacks[answer["callback"]](*given)
            self._send({"value": encode(value, self._to_program)})
            answer = self._receive()
        for mine, changed in zip(arguments[1:], answer.get("changed", ()), strict=False):
            _take_over(mine, decode(changed, lambda kind, content: None))
        return decode(answer["value"], self._from_program)

    def _send(self, message: dict[str, Any]) -> None:
        if self.has_ended:
            raise ProgramEnded("the program has ended")
        data = memoryview(json.dumps(message).encode() + b"\n")
        try:
            while data:  # the program reads before it answers; a hang is the wall limit's
                data = data[os.write(self.outgoing, data) :]
        except BrokenPipeError:
            self._end("the program has ended")

    def _receive(self) -> dict[str, Any]:
        line = self._read_line()
        try:
            answer = json.loads(line)
            if "error" in answer:
                name, message = map(str, answer["error"])
            elif not {"value", "callback"} & answer.keys():
                raise ValueError("an answer of no known kind")
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            self._end(f"the program broke the protocol: {error}")
        if "error" in answer:
            kind = self.exceptions.get(name) or TYPES.get(name, ProgramError)
            if not issubclass(kind, Exception):
                kind = ProgramError
            raise kind(message)
        return dict(answer)

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
        return line

    def _end(self, why: str) -> NoReturn:
        self.has_ended = True
        os.kill(self.pid, signal.SIGKILL)
        raise ProgramEnded(why)

    def _to_program(self, value: Any) -> Any:
        if isinstance(value, _StandIn):
            return {"object": object.__getattribute__(value, "_number")}
        if not callable(value):
            raise TypeError(f"{type(value).__name__} cannot be given to the program")
        self.callbacks.append(value)
        return {"callback": len(self.callbacks) - 1}

    def _from_program(self, kind: str, content: Any) -> Any:
        if kind == "object":
            return _StandIn(self, int(content))
        if kind == "exception":
            made = type(str(content), (ProgramError,), {})
            return self.exceptions.setdefault(str(content), made)
        if kind == "module" and content in _MODULES:
            return importlib.import_module(content)
        return None


def _take_over(mine: Any, changed: Any) -> None:
    """Do to a list, dict or set of the tests what the program did to its copy."""
    if type(mine) is list and type(changed) is list:
        mine[:] = changed
    elif type(mine) is type(changed) and type(mine) in (dict, set):
        mine.clear()
        mine.update(changed)


class _StandIn:
    """An object that lives in the program's process.

    It equals nothing but another such object: otherwise the program would be asked whether it is
    right.
    """

    __slots__ = ("_number", "_program")

    def __init__(self, program: _Program, number: int) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "_number", number)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.call("call", self, *arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return self._program.call("getattr", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._program.call("setattr", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return self._program.call("getitem", self, key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._program.call("setitem", self, key, value)

    def __delitem__(self, key: Any) -> None:
        self._program.call("delitem", self, key)

    def __len__(self) -> int:
        return int(self._program.call("len", self))

    def __bool__(self) -> bool:
        return bool(self._program.call("bool", self))

    def __str__(self) -> str:
        return str(self._program.call("str", self))

    def __repr__(self) -> str:
        return str(self._program.call("repr", self))

    def __iter__(self) -> Any:
        return self._program.call("iter", self)

    def __next__(self) -> Any:
        return self._program.call("next", self)

    def __hash__(self) -> int:
        return hash(object.__getattribute__(self, "_number"))

    def _with_another(self, function: str, other: Any) -> Any:
        if not isinstance(other, _StandIn):
            return NotImplemented
        return self._program.call(function, self, other)

    def __eq__(self, other: object) -> Any:
        return self._with_another("eq", other)

    def __lt__(self, other: object) -> Any:
        return self._with_another("lt", other)

    def __le__(self, other: object) -> Any:
        return self._with_another("le", other)

    def __gt__(self, other: object) -> Any:
        return self._with_another("gt", other)

    def __ge__(self, other: object) -> Any:
        return self._with_another("ge", other)

    def __add__(self, other: object) -> Any:
        return self._with_another("add", other)

    def __sub__(self, other: object) -> Any:
        return self._with_another("sub", other)

    def __mul__(self, other: object) -> Any:
        return self._with_another("mul", other)


class _Stop(BaseException):
    """A case failed and no more need be run."""


class _Cases:
    """Counts the assertions; each ``assert X`` of the tests is ``__case__(X)`` when it runs."""

    def __init__(self, stop_early: bool) -> None:
        self.stop_early = stop_early
        self.passed = 0
        self.total = 0

    def __call__(self, value: Any) -> None:
        is_true = bool(value)  # may raise; the caller then says False
        self.total += 1
        self.passed += is_true
        if not is_true and self.stop_early:
            raise _Stop


class _Rewrite(ast.NodeTransformer):
    """``assert X`` becomes: try ``__case__(X)``, and where X raises, ``__case__(False)``."""

    def visit_Assert(self, node: ast.Assert) -> ast.Try:
        def case(value: ast.expr) -> ast.stmt:
            return ast.Expr(ast.Call(ast.Name("__case__", ast.Load()), [value], []))

        handler = ast.ExceptHandler(
            ast.Name("__exception__", ast.Load()), None, [case(ast.Constant(False))]
        )
        made = ast.Try([case(node.test)], [handler], [], [])
        return ast.fix_missing_locations(ast.copy_location(made, node))


def _run_asserts(program: _Program, request: dict[str, Any]) -> dict[str, Any]:
    cases = _Cases(request["stop_early"])
    source = request["asserts"]
    tree = ast.parse(source)
    num_written = sum(isinstance(node, ast.Assert) for node in ast.walk(tree))
    problem = None
    try:
        namespace = _namespace(program, source, request["entry_point"])
        namespace["__case__"] = cases
        exec(compile(_Rewrite().visit(tree), "tests.py", "exec"), namespace)
        if cases.total == 0:
            _call_tests(namespace, request["entry_point"])
    except _Stop:
        problem = "a case failed"
    except Exception as error:  # noqa: BLE001 - the tests' or the program's
        problem = f"{type(error).__name__}: {error}"
    if program.has_ended:
        problem = problem or "the program ended before its tests"
    elif program.num_calls == cases.total == 0:
        problem = problem or "the tests call nothing of the program"
    total = cases.total if problem is None else max(num_written, cases.total + 1)
    return {"passed": cases.passed, "total": total, "problem": problem}


def _namespace(program: _Program, source: str, entry_point: str | None) -> dict[str, Any]:
    """What the tests see. Names of the program never replace what the tests rely on: a program
    that defines ``abs`` or ``math`` would be asked whether it is right."""
    namespace: dict[str, Any] = {"__name__": "__main__", "__exception__": Exception}
    if LEETCODE_MARK.removeprefix("class ") in source:
        exec(LEETCODE_PRELUDE, namespace)
    defined = program.load()
    sys.modules["solution"] = types.ModuleType("solution")
    vars(sys.modules["solution"]).update(defined)
    for name, value in defined.items():
        is_stdlib = name in sys.stdlib_module_names and isinstance(value, _StandIn)
        is_taken = name in vars(builtins) or name in namespace or is_stdlib
        if name == entry_point or not is_taken:
            namespace[name] = value
    return namespace


def _call_tests(namespace: dict[str, Any], entry_point: str | None) -> None:
    """Tests that only define functions: HumanEval's ``check(candidate)``, pytest's ``test_…``."""
    check = namespace.get("check")
    if entry_point is not None and check is not None and not isinstance(check, _StandIn):
        check(eval(entry_point, namespace))
        return
    for name, value in list(namespace.items()):
        if name.startswith("test_") and not isinstance(value, _StandIn):
            value()


def _run_calls(
    program: _Program, request: dict[str, Any], write: Callable[[dict[str, Any]], None]
) -> None:
    name, inputs = request["calls"]
    program.load()
    for arguments in inputs:
        try:
            value = program.call("solve", name, *arguments)
            answer = {"value": as_json(value)}
        except Exception as error:  # noqa: BLE001 - the program's
            answer = {"error": f"{type(error).__name__}: {error}"}
        write(answer)
        if program.has_ended or ("error" in answer and request["stop_early"]):
            return


def main() -> None:
    """Fork the program's process, then read the tests and run them."""
    requests, answers = os.pipe(), os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    pid = os.fork()
    if pid == 0:
        for descriptor in (0, 1):
            os.dup2(nothing, descriptor)
        for descriptor in (requests[1], answers[0], nothing):
            os.close(descriptor)
        ProgramServer(requests[0], answers[1]).run()
        os._exit(0)
    os.close(requests[0])
    os.close(answers[1])
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.path = [path for path in sys.path if path not in ("", str(Path.cwd()))]
    sys.set_int_max_str_digits(0)
    verdicts = os.dup(1)
    os.dup2(nothing, 1)
    request = json.load(sys.stdin)
    program = _Program(pid, answers[0], requests[1], request["timeout_seconds"])

    def write(message: dict[str, Any]) -> None:
        data = memoryview(json.dumps(message).encode() + b"\n")
        while data:
            data = data[os.write(verdicts, data) :]

    try:
        if "calls" in request:
            _run_calls(program, request, write)
        else:
            write(_run_asserts(program, request))
    except Exception as error:  # noqa: BLE001 - the program did not load
        write({"error": f"{type(error).__name__}: {error}"})
    os._exit(0)
