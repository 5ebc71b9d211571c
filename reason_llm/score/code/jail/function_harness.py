"""Calls functions of an untrusted program and runs assertions on them, inside the sandbox.

The tester forks the program's process, and only then reads the tests; the two exchange values as
JSON (``program_proxy``). So a program changes what values come back, never how they are compared or
counted. What remains: objects of the program's own classes stay over there, and the tests believe
its methods.

stdin: one JSON object, ``{"calls": [function, inputs]}`` or ``{"asserts": source, "entry_point"}``,
with ``timeout_seconds`` (CPU time of one call; three times that in wall time) and ``stop_early``.
stdout: one line for each call, ``{"value": …}`` or ``{"error": …}``; or one line with ``passed``,
``total`` and ``problem``.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

from . import pytest_substitute
from .array_checks import EACH, checked_loop
from .assert_source import HELPERS, PROGRAM_NAME, AssertionCounts, Stop, TestsSource, namespace_of
from .program_proxy import Program
from .program_server import LEETCODE_MARK, ProgramServer, builtin_names
from .values import as_json, write_line

_PR_SET_DUMPABLE = 4


def _assert_verdict(program: Program, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    source = request["asserts"]
    builtin = builtin_names(LEETCODE_MARK.removeprefix("class ") in source)
    tests = TestsSource(source, request["entry_point"], builtin)
    counts = AssertionCounts(request["stop_early"])
    try:
        program.load()
        problem = _run_tests(program, tests, counts, builtin)
    except Stop:
        problem = "a case failed"
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the tests' or the program's
        problem = f"{type(error).__name__}: {error}"
    if program.has_ended:
        problem = problem or "the program ended before its tests"
    num_missing = 0 if problem is None else max(1, tests.num_asserts - len(counts.ran))
    yield {**counts.score(num_missing), "problem": problem}


def _run_tests(
    program: Program, tests: TestsSource, counts: AssertionCounts, builtin: dict[str, Any]
) -> str | None:
    """Run the tests; return the reason if they fail as a whole, apart from single assertions."""
    if tests.is_unittest:
        return "classes of unittest are not run"
    entered: set[str] = set()
    sys.modules[PROGRAM_NAME] = _ProgramModule(program)
    sys.modules["pytest"] = pytest_substitute.module()
    program.gives_arrays, program.gives_all_numbers = tests.uses_numpy, tests.speaks_of_infinity
    lost = _LostErrors(tests.has_futures)
    namespace = {
        "__name__": "__main__",
        "__builtins__": builtin,
        EACH: functools.partial(checked_loop, program.shared.shortened),
        **namespace_of(counts, entered),
    }
    for name in tests.modules | tests.helpers:
        source = HELPERS.get(name, "numpy" if name == "np" else name)
        with contextlib.suppress(ImportError):
            module = importlib.import_module(source)
            namespace[name] = getattr(module, name) if name in tests.helpers else module
    namespace |= _program_values(program, {name: name for name in tests.asked} | tests.renamed)
    if tests.asks_for_candidate:
        namespace["candidate"] = _candidate(program, tests, builtin)
    exec(tests.code, namespace)
    for name in tests.functions.keys() - entered:
        if name != "check":
            _wait_for(namespace[name]())
        elif tests.entry_point is not None:
            _wait_for(namespace[name](_candidate(program, tests, builtin)))
    program.sync()
    if (error := lost.first()) is not None:
        return f"an error that the tests lost: {type(error).__name__}: {error}"
    # A program can end its tests early or keep them from running: no failure is not yet a pass.
    has_skipped = any(not numbers & counts.ran.keys() for numbers in tests.tests)
    if (
        tests.certain - counts.ran.keys()
        or has_skipped
        or (tests.asserts_values and not counts.ran)
    ):
        return "an assertion never ran"
    is_used = program.num_calls or (counts.ran and program.num_names)
    has_failed = counts.held != counts.ran
    return None if is_used or has_failed else "the tests call nothing of the program"


class _LostErrors:
    """Unreported errors: of a thread, of a future or a task that nobody asks."""

    def __init__(self, has_futures: bool) -> None:
        self._found: list[BaseException | None] = []
        self._unheard: set[Any] = set()
        threading.excepthook = lambda arguments: self._found.append(arguments.exc_value)
        if has_futures:
            self._look_at_futures()

    def _look_at_futures(self) -> None:
        def call_exception_handler(loop: Any, context: dict[str, Any]) -> None:
            self._found.append(context.get("exception"))

        asyncio = importlib.import_module("asyncio")
        asyncio.BaseEventLoop.call_exception_handler = call_exception_handler
        future_class = importlib.import_module("concurrent.futures").Future
        keep = future_class.set_exception

        def set_exception(future: Any, error: BaseException | None) -> None:
            self._unheard.add(future)  # before a thread that waits for it hears of it
            keep(future, error)

        future_class.set_exception = set_exception
        for name in ("result", "exception"):
            setattr(future_class, name, self._hearing(getattr(future_class, name)))

    def _hearing(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def hear(future: Any, timeout: float | None = None) -> Any:
            try:
                return function(future, timeout)
            finally:
                self._unheard.discard(future)

        return hear

    def first(self) -> BaseException | None:
        """The first of these errors, after every thread of the tests has ended."""
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        gc.collect()  # a task says so when it goes
        errors = [*self._found, *(future.exception() for future in list(self._unheard))]
        return next((error for error in errors if error is not None), None)


def _wait_for(result: Any) -> None:
    """Run the coroutines that a test, or each case of a parametrized test, has returned."""
    for test in result if isinstance(result, list) else [result]:
        if inspect.iscoroutine(test):
            importlib.import_module("asyncio").run(test)
        elif isinstance(test, list):
            _wait_for(test)


def _program_values(program: Program, names: dict[str, str]) -> dict[str, Any]:
    """Values of the program by the tests' names; those that it did not define are missing."""
    values = {}
    for key, name in names.items():
        with contextlib.suppress(NameError):
            values[key] = program.get(name)
    return values


def _candidate(program: Program, tests: TestsSource, builtin: dict[str, Any]) -> Any:
    """Object that the entry point names; evaluating it is no call by the tests."""
    entry_point = str(tests.entry_point)
    namespace = _program_values(program, {name: name for name in tests.asked_by_entry})
    # If the program defines no ``sum``, the built-in one does not replace it.
    namespace["__builtins__"] = {} if entry_point.isidentifier() else builtin
    num_calls = program.num_calls
    candidate = eval(entry_point, namespace)
    program.num_calls = num_calls
    return candidate


class _ProgramModule(types.ModuleType):
    """Module for ``import solution``: names of the program, fetched when they are used."""

    def __init__(self, program: Program) -> None:
        super().__init__(PROGRAM_NAME)
        self.__dict__["__program"] = program

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self.__dict__["__program"].get(name)
        except NameError as error:
            raise AttributeError(str(error)) from None


def _call_answers(program: Program, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    name, inputs = request["calls"]
    program.load()
    for arguments in inputs:
        try:
            value = program.call("solve", name, *arguments)
            program.sync()
            answer = {"value": as_json(value)}
        except Exception as error:  # noqa: BLE001 - the program's
            answer = {"error": f"{type(error).__name__}: {error}"}
        yield answer
        if program.has_ended or ("error" in answer and request["stop_early"]):
            return


def _start_program() -> Program:
    """Fork the program's process, in which the program runs at once."""
    # no exception of the tester's may be the program's
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
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
    for descriptor in (requests[0], answers[1], nothing):
        os.close(descriptor)
    program = Program(pid, answers[0], requests[1])
    program.start()
    return program


def main() -> None:
    """Start the program, then read the tests and run them."""
    program = _start_program()
    sys.path = [path for path in sys.path if path not in ("", os.getcwd())]  # noqa: PTH109
    sys.set_int_max_str_digits(0)
    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    request = json.load(sys.stdin)
    program.timeout_seconds = request["timeout_seconds"]
    # What the program gave may be slow to compare or to print: CPU time between two of its answers.
    program.on_answer = lambda: signal.setitimer(signal.ITIMER_PROF, request["timeout_seconds"])

    answers = _call_answers if "calls" in request else _assert_verdict
    try:
        for answer in answers(program, request):
            write_line(verdicts, answer)
    except Exception as error:  # noqa: BLE001 - the program did not load
        write_line(verdicts, {"error": f"{type(error).__name__}: {error}"})
    os._exit(0)
