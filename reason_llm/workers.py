"""Time limit on calls into code and patterns of unknown origin, each in a thread of its own. A call
that takes longer is left behind, and ended by an exception at its next line of Python. C code that
never lets go of the interpreter's lock is not ended: others' patterns are searched by ``regex``.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class _Ended(BaseException):
    """Raised in a thread whose result is no longer awaited."""


def abandon(thread: threading.Thread) -> None:
    """Have the thread end at its next line of Python, unless it catches every exception."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(_Ended)
    )


class _Worker:
    """A thread that makes one call after another: starting one takes 0.1 ms."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            while True:
                call = self.calls.get()
                try:
                    self.ended.put((call(), None))
                except _Ended:
                    raise
                except BaseException as error:  # noqa: BLE001 - handed to the caller
                    self.ended.put((None, error))
                del call
        except _Ended:
            return


_idle: list[_Worker] = []
os.register_at_fork(after_in_child=_idle.clear)  # where their threads are not


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """Result of ``call`` within the limit; its exceptions are raised.

    Raises:
        TimeoutError: ``what`` took longer.
    """
    try:
        worker = _idle.pop()
    except IndexError:
        worker = _Worker()
    worker.calls.put(call)
    try:
        result, error = worker.ended.get(timeout=seconds)
    except Empty:
        abandon(worker.thread)
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from None
    _idle.append(worker)
    if error is not None:
        raise error
    found: T = result
    return found
