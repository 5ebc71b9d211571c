"""Calls functions of others, inside the jail's walls: reads requests until its input ends.

The source is given to a bare Python (``checkers.py``); it imports nothing of ours. A request is
JSON after its length: ``{"prepare": key, "subject": pickle}`` loads an object, imports included,
and ``{"call": key, ...}`` calls it. Pickles come from the trainer; what goes back is plain JSON.

Calls are made in a fork, the caller. A caller in which text may have been evaluated, as Python's
own audit events tell before it happens, serves no further call: nothing that one answer does is
seen by the next. Without that a caller serves on, since a fork costs some milliseconds.

Source: PEP 578, and the audit events table of Python 3.11.
"""

import asyncio
import base64
import gc
import inspect
import json
import math
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from opcode import opmap
from typing import Any, NoReturn, SupportsFloat

MAX_ANSWER_BYTES = 1 << 20
MAX_NUMBERS = 1 << 16
GRACE_SECONDS = 1.0
OF_IMPORT, OF_TEXT = b"i", b"t"
PATIENCE = 10
"""A call to which others leave no processor may take so many times its processor time."""
EVALUATES = {
    "exec", "import", "code.__new__", "function.__new__", "marshal.load", "marshal.loads",
    "pickle.find_class", "object.__setattr__", "object.__delattr__",
}  # fmt: skip
"""Audit events without which no text is run as code; those of ctypes count, too."""
HARMLESS = {"Integer", "Float", "Rational", "Symbol", "sympy", "*"}
"""Names in code that sympy's parser makes of sums, which, storing nothing, changes nothing."""
STORES = {op for name, op in opmap.items() if name.startswith(("STORE_", "DELETE_"))}

Json = dict[str, Any]


def main() -> None:
    """Answer the requests on stdin until it ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what functions print is no answer
    _write(answers, {"ready": True})
    subjects: dict[str, Any] = {}
    caller: _Caller | None = None
    while (request := _read(0, math.inf)) is not None:
        if "prepare" in request:
            if caller is not None:
                caller.end()
                caller = None
            answer = _prepare(subjects, request)
            gc.collect()
            gc.freeze()  # forks share these pages
        else:
            caller = caller or _Caller(subjects)
            answer = caller.ask(request)
            if caller.is_spent:
                caller.end()
                caller = None
        _write(answers, answer)


def _prepare(subjects: dict[str, Any], request: Json) -> Json:
    try:
        subject = pickle.loads(base64.b64decode(request["subject"]))
        subjects[request["prepare"]] = subject() if request["is_maker"] else subject
    except Exception as error:  # noqa: BLE001 - the trainer hears of it
        return {"problem": _described(error)}
    return {"prepared": True}


class _Caller:
    """The fork that makes calls."""

    def __init__(self, subjects: dict[str, Any]) -> None:
        requests, self.ask_at = os.pipe()
        self.answer_at, answers = os.pipe()
        self.spent_at, spent = os.pipe()
        self.is_spent = False
        self.process = os.fork()
        if self.process == 0:
            _serve(subjects, requests, answers, spent)
        for descriptor in (requests, answers, spent):
            os.close(descriptor)

    def ask(self, request: Json) -> Json:
        """Result of a call, or the way it ended."""
        answer: Any = None
        is_late = False
        try:
            _write(self.ask_at, request)
            answer = _read(self.answer_at, time.monotonic() + PATIENCE * request["seconds"])
        except TimeoutError:
            is_late = True
        except (ValueError, OSError):
            pass
        events = os.read(self.spent_at, 2) if _is_ready(self.spent_at, 0) else b""
        self.is_spent = not isinstance(answer, dict) or bool(events)
        if not isinstance(answer, dict):
            code = self.end(0 if is_late else GRACE_SECONDS)
            is_late |= code in (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGKILL)
            return {"limit": "time"} if is_late else {"problem": f"its process ended ({code})"}
        if events not in (b"", OF_IMPORT):  # the text may have raised it, or written the answer
            answer.pop("of_walls", None)
        return answer

    def end(self, seconds: float = 0.0) -> int:
        """Kill the process unless it ends within these seconds, and return its exit code."""
        if not self.process:
            return 0
        until = time.monotonic() + seconds
        while not os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if time.monotonic() >= until:
                os.kill(self.process, signal.SIGKILL)
                break
            time.sleep(0.01)
        _, status = os.waitpid(self.process, 0)
        self.process = 0
        for descriptor in (self.ask_at, self.answer_at, self.spent_at):
            os.close(descriptor)
        return os.waitstatus_to_exitcode(status)


def _serve(subjects: dict[str, Any], requests: int, answers: int, spent: int) -> NoReturn:
    """Make calls until one may have evaluated text."""
    try:
        first, second, third = sorted((requests, answers, spent))
        for low, high in ((3, first), (first + 1, second), (second + 1, third), (third + 1, 128)):
            os.closerange(low, high)
        os.dup2(2, 0)
        for name in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):  # no process, no file
            resource.setrlimit(name, (0, 0))
        is_calling, seen = False, set[bytes]()

        def on_event(event: str, arguments: Any) -> None:
            if is_calling and event in ("os.kill", "os.killpg"):
                raise PermissionError("no process is to be ended from here")
            if is_calling and (event in EVALUATES or event.startswith("ctypes.")):
                if event == "exec" and _is_harmless(arguments[0]):
                    return
                kind = OF_IMPORT if event == "import" else OF_TEXT
                if kind not in seen:
                    seen.add(kind)
                    os.write(spent, kind)

        sys.addaudithook(on_event)
        while (request := _read(requests, math.inf)) is not None:
            subject = subjects[request["call"]]
            function = getattr(subject, request["method"]) if request["method"] else subject
            arguments, named = pickle.loads(base64.b64decode(request["arguments"]))
            _limit(request["seconds"])
            is_calling = True
            answer = _answer(function, arguments, named)
            is_calling = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            _write(answers, answer)
    finally:
        os._exit(0)


def _is_harmless(code: Any) -> bool:
    return (
        HARMLESS.issuperset(code.co_names)
        and not STORES.intersection(code.co_code[::2])
        and not any(isinstance(constant, type(code)) for constant in code.co_consts)
    )


def _answer(function: Any, arguments: Any, named: Any) -> Json:
    try:
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return {"value": _plain(result)}
    except BaseException as error:  # noqa: BLE001 - the trainer hears of it
        return {"problem": _described(error), "of_walls": _is_caused_by_walls(error)}


def _limit(seconds: float) -> None:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds) + 1  # where the signal is ignored
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(most, hard), hard))


async def _awaited(result: Any) -> Any:
    return await result


def _plain(value: Any) -> Any:
    """Numbers, None, and lists and mappings of these, as JSON has them."""
    if value is None:
        return None
    if isinstance(value, SupportsFloat):
        return float(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in islice(value.items(), MAX_NUMBERS)}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return [_plain(item) for item in islice(value, MAX_NUMBERS)]
    raise ValueError(f"it gave {str(value)[:60]!r}, which is not a number")


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _is_caused_by_walls(error: BaseException | None) -> bool:
    """Whether an error comes from the jail: no network, no files, no packages."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OSError | ImportError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _is_ready(descriptor: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    return bool(poller.poll(None if seconds == math.inf else 1000 * max(0.0, seconds)))


def _read(descriptor: int, deadline: float) -> Json | None:
    """A message; None at the end. TimeoutError if it is late, ValueError if it is invalid."""
    head = _read_exactly(descriptor, 8, deadline)
    if len(head) < 8:
        return None
    size = struct.unpack("<Q", head)[0]
    if deadline < math.inf and size > MAX_ANSWER_BYTES:
        raise ValueError
    body = _read_exactly(descriptor, size, deadline)
    message: Json | None = json.loads(body) if len(body) == size else None
    return message


def _read_exactly(descriptor: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        if not _is_ready(descriptor, deadline - time.monotonic()):
            raise TimeoutError
        if not (part := os.read(descriptor, min(size - len(data), 1 << 16))):
            break
        data += part
    return bytes(data)


def _write(descriptor: int, message: Json) -> None:
    body = json.dumps(message).encode()
    unsent = memoryview(struct.pack("<Q", len(body)) + body)
    while unsent:
        unsent = unsent[os.write(descriptor, unsent) :]


if __name__ == "__main__":
    main()
