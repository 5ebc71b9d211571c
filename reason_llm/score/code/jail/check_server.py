"""Calls functions of others, inside the jail's walls: reads requests until its input ends.

A request is JSON after its length: ``{"prepare": key, "subject": pickle}`` loads an object, imports
included, and ``{"call": key, ...}`` calls it. Pickles come from the trainer; what goes back is
plain JSON.

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
import sys
import time
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NoReturn, SupportsFloat

from . import isolation
from .launcher import read, write, write_all

MAX_ANSWER_BYTES = 1 << 20
MAX_NUMBERS = 1 << 16
EVALUATED = b"!"
"""Stands before an answer once text has been evaluated."""
PATIENCE = 10
"""A call to which others leave no processor may take so many times its processor time."""

Json = dict[str, Any]


def main() -> None:
    """Answer the requests on stdin until it ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what functions print is no answer
    write(answers, {"ready": True})
    subjects: dict[str, Any] = {}
    while (request := read(sys.stdin.buffer)) is not None:
        serve = _prepare if "prepare" in request else _call
        write(answers, serve(subjects, request))


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
    process = os.fork()
    if process == 0:
        _serve(subjects, request, answers)
    os.close(answers)
    data, is_late = _read_to_end(answer_at, time.monotonic() + PATIENCE * request["seconds"])
    os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    os.close(answer_at)
    try:
        answer: Any = json.loads(data.lstrip(EVALUATED))
    except (ValueError, RecursionError):
        answer = None
    if is_late or not isinstance(answer, dict):
        is_late |= code in (-signal.SIGPROF, -signal.SIGXCPU)
        return {"limit": "time"} if is_late else {"problem": f"its process ended ({code})"}
    if data.startswith(EVALUATED):  # the text may have raised it, or written the answer
        answer.pop("of_walls", None)
    return answer


def _serve(subjects: dict[str, Any], request: Json, answers: int) -> NoReturn:
    """Make a call, within limits of time; say before it happens that text is evaluated."""
    try:
        os.closerange(3, answers)
        os.closerange(answers + 1, isolation.MAX_FILES)
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
                os.write(answers, EVALUATED)

        sys.addaudithook(on_event)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        answer = json.dumps(_answer(function, arguments, named))
        write_all(answers, answer.encode())
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


def _read_to_end(descriptor: int, deadline: float) -> tuple[bytes, bool]:
    """All that is written there, and whether it is late or too large."""
    data = bytearray()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while poller.poll(1000 * max(0.0, deadline - time.monotonic())):
        if not (part := os.read(descriptor, 1 << 16)):
            return bytes(data), False
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            break
    return bytes(data), True
