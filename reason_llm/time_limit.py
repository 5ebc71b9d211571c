"""A time limit on a call into what others wrote.

The call runs in a thread of its own, which is left behind if it takes longer and dies with the
process. C code that never lets go of the interpreter's lock is not ended by this.
"""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class _Worker:
    """A thread that makes one call after another; starting one for each call takes 0.1 ms."""

    def __init__(self) -> None:
        self.calls: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self.ended: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            call = self.calls.get()
            try:
                self.ended.put((call(), None))
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self.ended.put((None, error))
            del call


_idle: list[_Worker] = []


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """What ``call`` gives; it raises what that raises.

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
        raise TimeoutError(f"{what} took longer than {seconds:g} s") from None
    _idle.append(worker)
    if error is not None:
        raise error
    found: T = result
    return found
