"""Calls with a limit on memory and on processor time, in a forked process: of programs that come
with a model, such as a chat template.

The process is a copy of this one without its threads, files and signals. It serves one call after
another, as a fork takes milliseconds, and dies with this one. Its address space may grow by
``MOST_BYTES`` from where it begins, so that what fills the memory ends in a ``MemoryError`` there
and takes nothing from anybody else.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import struct
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

MOST_BYTES = 1 << 30
"""Of memory, beyond what this process has."""
MOST_ANSWER_BYTES = 256 << 20
POLL_SECONDS = 0.2
PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("<Q")
Answer = tuple[Any, ...]
"""Of texts, numbers and None."""


class Confined:
    """A process that makes calls of one function.

    Args:
        call: what it makes of the arguments of ``ask``. It raises nothing but MemoryError.
    """

    def __init__(self, call: Callable[..., Answer]) -> None:
        asked, self._asks = os.pipe()
        self._answers, answered = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():  # of other threads, whose locks the child does not need
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if self._process == 0:
            _serve(call, asked, answered, parent)
        os.close(asked)
        os.close(answered)
        self.end = weakref.finalize(self, _end, parent, self._process, self._asks, self._answers)

    @property
    def lives(self) -> bool:
        """Whether it can be asked: it ends with the thread that made it, and after an error."""
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self.end.alive and os.waitid(os.P_PID, self._process, how) is None

    def ask(self, seconds: float, *arguments: Any) -> Answer:
        """What ``call`` makes of the arguments.

        Raises:
            TimeoutError: it took more of the processor's time. The process is ended.
            MemoryError: it took more memory, or its process was ended from outside.
        """
        try:
            _write(self._asks, json.dumps(arguments).encode())
            begun = self._processor_seconds()
            while not select.select([self._answers], [], [], POLL_SECONDS)[0]:
                if self._processor_seconds() - begun > seconds:
                    raise TimeoutError
            answer: list[Any] | None = json.loads(_read(self._answers, MOST_ANSWER_BYTES))
        except BaseException as error:
            self.end()
            if isinstance(error, OSError | EOFError) and not isinstance(error, TimeoutError):
                raise MemoryError from error
            raise
        if answer is None:
            raise MemoryError
        return tuple(answer)

    def _processor_seconds(self) -> float:
        stat = Path(f"/proc/{self._process}/stat").read_text().rpartition(")")[2].split()
        return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def _end(parent: int, process: int, *handles: int) -> None:
    if os.getpid() != parent:  # a copy of this process
        return
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    for handle in handles:
        os.close(handle)


def _serve(call: Callable[..., Answer], asked: int, answered: int, parent: int) -> None:
    """Answer until nobody asks; never returns."""
    try:
        gc.freeze()  # what is this process's parent's is not ended here
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            return
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        opened = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208
        for handle in opened:
            if handle > 2 and handle not in (asked, answered):
                _close(handle)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + MOST_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        while True:
            arguments = json.loads(_read(asked, 1 << 62))
            try:
                answer = json.dumps(call(*arguments)).encode()
            except MemoryError:
                answer = b"null"
            _write(answered, answer if len(answer) <= MOST_ANSWER_BYTES else b"null")
            del arguments, answer
    finally:
        os._exit(0)


def _close(handle: int) -> None:
    try:
        os.close(handle)
    except OSError:  # the listing's own
        return


def _write(handle: int, content: bytes) -> None:
    left = memoryview(_LENGTH.pack(len(content)) + content)
    while left:
        left = left[os.write(handle, left) :]


def _read(handle: int, most_bytes: int) -> bytes:
    """Raises:
    EOFError: the other side is gone, or says more than ``most_bytes``.
    """
    (length,) = _LENGTH.unpack(_read_exactly(handle, _LENGTH.size))
    if length > most_bytes:
        raise EOFError
    return _read_exactly(handle, length)


def _read_exactly(handle: int, length: int) -> bytes:
    found = bytearray()
    while len(found) < length:
        part = os.read(handle, min(length - len(found), 1 << 20))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
