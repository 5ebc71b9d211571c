"""Calls with a limit: in a thread of this process (``within``) and in other processes (``Pool``).

A call in a thread that takes longer is left behind, and ended by an exception at its next line of
Python. C code that never lets go of the interpreter's lock is not ended: others' patterns are
searched by ``regex``. What may hang in C code, fill the memory or must not see this process runs in
a ``Worker``: a fresh interpreter, not a fork of a process that may hold threads and a GPU. It reads
and writes messages, each JSON after its length in 8 bytes, and sets its own limits.
"""

import atexit
import ctypes
import json
import math
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from queue import Empty, LifoQueue, SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
MAX_ANSWER_BYTES = 256 << 20
WAKE_SECONDS = 1.0
"""A thread that waits looks for an interrupt so often: one that comes just before it waits does not
end the wait."""


class _Ended(BaseException):
    """Raised in a thread whose result is no longer awaited."""


def abandon(thread: threading.Thread) -> None:
    """Have the thread end at its next line of Python, unless it catches every exception."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Ended)
    )


def within(seconds: float | None, what: str, call: Callable[[], T]) -> T:
    """Result of ``call``; its exceptions are raised, and TimeoutError after ``seconds``, None for
    no limit. An interrupt of the thread that waits ends the wait alone: the call continues."""
    ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()

    def work() -> None:
        with suppress(_Ended):
            try:
                ended.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                ended.put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    until = math.inf if seconds is None else time.monotonic() + seconds
    while True:
        left = max(0.0, until - time.monotonic())
        try:
            result, error = ended.get(timeout=min(left, WAKE_SECONDS))
            break
        except Empty:
            if left <= WAKE_SECONDS:
                abandon(thread)
                raise TimeoutError(f"{what} took longer than {seconds:g} s") from None
    if error is not None:
        raise error
    value: T = result
    return value


class Died(RuntimeError):
    """A worker's process ended, or gave no answer in time and was ended.

    Args:
        code: exit code; the negative number of the signal that ended it.
        is_late: whether it gave no answer in time.
    """

    def __init__(self, problem: str, code: int = 0, is_late: bool = False) -> None:
        super().__init__(problem)
        self.code, self.is_late = code, is_late


class Worker:
    """A process that answers messages, started when it is first asked and after it has ended.

    Args:
        what: its name in errors.
        command: program and arguments. It runs in a new session: Ctrl-C is for this process.
        environment: all of its environment variables.
    """

    error: type[Died] = Died

    def __init__(
        self, what: str, command: Sequence[str], environment: Mapping[str, str] = {}
    ) -> None:
        self._what, self._command, self._environment = what, command, environment
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def start(self) -> None:
        """Start the process."""
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=self._environment,
            bufsize=0,
            start_new_session=True,
        )
        if self._is_killed:  # before it was made, or while
            self.close()
            raise self.error(f"{self._what} is closed")

    def exchange(self, message: Any, seconds: float) -> Any:
        """Return the answer to a message; raises Died if none comes in time."""
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin and self._process.stdout
        is_answered, body = False, json.dumps(message).encode()
        unsent = memoryview(struct.pack("<Q", len(body)) + body)
        try:
            while unsent:
                unsent = unsent[self._process.stdin.write(unsent) :]
            answer = _receive(self._process.stdout.fileno(), time.monotonic() + seconds)
            is_answered = True
        except TimeoutError as error:
            problem = f"{self._what} does not answer"
            raise self.error(problem, self.close(), is_late=True) from error
        except (OSError, EOFError, ValueError) as error:
            code = self.close()
            raise self.error(f"{self._what} ended (exit code {code})", code) from error
        finally:
            if not is_answered:  # or a late answer would be the next message's
                self.close()
        return answer

    def kill(self) -> None:
        """End the process, whatever it is doing, for good. Any thread may call it."""
        self._is_killed = True
        if (process := self._process) is not None:
            process.kill()

    def close(self) -> int:
        """End the process, which can be started again, and return its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode


W = TypeVar("W", bound=Worker)


class Pool(Generic[W]):
    """Workers that take turns, called ``what`` in errors. Usable from several threads at once."""

    def __init__(self, what: str, workers: Sequence[W]) -> None:
        self._what, self.workers, self.is_closed = what, workers, False
        self._idle: LifoQueue[W] = LifoQueue()
        for worker in reversed(workers):
            self._idle.put(worker)

    def call(self, ask: Callable[[W], T]) -> T:
        """Return what ``ask`` gives for an idle worker; block while there is none. A worker that
        dies is replaced once: its end from outside says nothing about the question. After an
        interrupt the call continues, so that no answer is left for the next question."""
        return within(None, self._what, lambda: self._call(ask))

    def _call(self, ask: Callable[[W], T]) -> T:
        worker = self._idle.get()
        try:
            for is_last in (False, True):
                try:
                    if not self.is_closed:
                        return ask(worker)
                except Died:
                    worker.close()
                    if is_last and not self.is_closed:
                        raise
        finally:
            self._idle.put(worker)
        raise worker.error(f"{self._what} is closed")

    def close(self) -> None:
        """End the workers, whatever they are doing: a call that runs or waits raises Died."""
        was_closed, self.is_closed = self.is_closed, True
        for worker in self.workers:
            worker.kill()
        if not was_closed:
            for worker in [self._idle.get() for _ in self.workers]:
                worker.close()
                self._idle.put(worker)


def serve(answer: Callable[[Any], Any]) -> None:
    """Answer messages until the input ends, as the process of a ``Worker``."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    while head := sys.stdin.buffer.read(8):
        message = json.loads(sys.stdin.buffer.read(struct.unpack("<Q", head)[0]))
        body = json.dumps(answer(message)).encode()
        os.write(replies, struct.pack("<Q", len(body)) + body)


def _receive(descriptor: int, deadline: float) -> Any:
    """A message; raises TimeoutError, EOFError at the end, or ValueError."""
    size = struct.unpack("<Q", _read_exactly(descriptor, 8, deadline))[0]
    if size > MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of {size} bytes")
    return json.loads(_read_exactly(descriptor, size, deadline))


def _read_exactly(descriptor: int, size: int, deadline: float) -> bytes:
    data = bytearray()
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    while len(data) < size:
        if not poller.poll(1000 * max(0.0, deadline - time.monotonic())):
            raise TimeoutError
        if not (part := os.read(descriptor, min(size - len(data), 1 << 20))):
            raise EOFError
        data += part
    return bytes(data)


_shared: dict[tuple[Hashable, ...], Any] = {}
_making = threading.RLock()
os.register_at_fork(after_in_child=_shared.clear)


def shared(make: Callable[..., T], *arguments: Hashable) -> T:
    """Return this process's own ``make(*arguments)``, created at the first call and closed by its
    method ``close`` at exit. A fork gets another one, since it would read its parent's answers."""
    key = (make, *arguments)
    with _making:
        if key not in _shared:
            worker: Any = make(*arguments)
            process = os.getpid()
            atexit.register(lambda: worker.close() if os.getpid() == process else None)
            _shared[key] = worker
        result: T = _shared[key]
    return result
