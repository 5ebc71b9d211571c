"""Calls functions of others, inside the jail's walls: reads requests until its input ends.

The source is given to a bare Python (``checkers.py``); it imports nothing of ours. A request is
JSON after its length: ``{"prepare": key, "subject": pickle}`` loads an object, imports included,
and ``{"call": key, ...}`` calls it. Pickles come from the trainer; what goes back is plain JSON.

Each call is made in a fork of its own, so that nothing that one answer does is seen by the next.
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
from typing import Any, NoReturn, SupportsFloat

MAX_ANSWER_BYTES = 1 << 20
MAX_NUMBERS = 1 << 16
PATIENCE = 10
"""A call to which others leave no processor may take so many times its processor time."""

Json = dict[str, Any]


def main() -> None:
    """Answer the requests on stdin until it ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what functions print is no answer
    _write(answers, {"ready": True})
    subjects: dict[str, Any] = {}
    while (request := _read(0, math.inf)) is not None:
        serve = _prepare if "prepare" in request else _call
        _write(answers, serve(subjects, request))


def _prepare(subjects: dict[str, Any], request: Json) -> Json:
    try:
        subject = pickle.loads(base64.b64decode(request["subject"]))
        subjects[request["prepare"]] = subject() if request["is_maker"] else subject
    except Exception as error:  # noqa: BLE001 - the trainer hears of it
        return {"problem": _described(error)}
    gc.collect()
    gc.freeze()  # forks share these pages
    return {"prepared": True}


def _call(subjects: dict[str, Any], request: Json) -> Json:
    """Result of a call, or the way it ended."""
    answer_at, answers = os.pipe()
    evaluated_at, evaluated = os.pipe()
    process = os.fork()
    if process == 0:
        _serve(subjects, request, answers, evaluated)
    os.close(answers)
    os.close(evaluated)
    answer: Any = None
    is_late = False
    try:
        answer = _read(answer_at, time.monotonic() + PATIENCE * request["seconds"])
    except TimeoutError:
        is_late = True
    except (ValueError, OSError):
        pass
    has_evaluated = _is_ready(evaluated_at, 0) and os.read(evaluated_at, 1)
    os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(answer_at)
    os.close(evaluated_at)
    if not isinstance(answer, dict):
        is_late |= code in (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGKILL)
        return {"limit": "time"} if is_late else {"problem": f"its process ended ({code})"}
    if has_evaluated:  # the text may have raised it, or written the answer
        answer.pop("of_walls", None)
    return answer


def _serve(subjects: dict[str, Any], request: Json, answers: int, evaluated: int) -> NoReturn:
    """Make a call, within limits of time; say before it happens that text is evaluated."""
    try:
        first, second = sorted((answers, evaluated))
        for low, high in ((3, first), (first + 1, second), (second + 1, 128)):
            os.closerange(low, high)
        os.dup2(2, 0)
        for name in (resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):  # no process, no file
            resource.setrlimit(name, (0, 0))
        seconds, hard = request["seconds"], resource.getrlimit(resource.RLIMIT_CPU)[1]
        most = math.ceil(seconds) + 1  # where the signal is ignored
        resource.setrlimit(resource.RLIMIT_CPU, (min(most, hard), hard))
        subject = subjects[request["call"]]
        function = getattr(subject, request["method"]) if request["method"] else subject
        arguments, named = pickle.loads(base64.b64decode(request["arguments"]))

        def on_event(event: str, details: Any) -> None:
            if event in ("os.kill", "os.killpg"):
                raise PermissionError("no process is to be ended from here")
            if event == "exec" and not details[0].co_filename.startswith("/"):  # of no file
                os.write(evaluated, b"t")

        sys.addaudithook(on_event)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        _write(answers, _answer(function, arguments, named))
    finally:
        os._exit(0)


def _answer(function: Any, arguments: Any, named: Any) -> Json:
    try:
        result = function(*arguments, **named)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
        return {"value": _plain(result)}
    except BaseException as error:  # noqa: BLE001 - the trainer hears of it
        return {"problem": _described(error), "of_walls": _is_caused_by_walls(error)}


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
