"""Calls that an interrupt must not cut in half."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def apart(call: Callable[[], T]) -> T:
    """Result of ``call``, made in a thread of its own; its exceptions are raised.

    Ctrl-C raises in the thread that waits here, and ends the wait alone: the call goes on. So a
    worker process is never left with a reply that nobody read, which would be taken for the next
    question's, and always comes back to its pool.
    """
    ended: Future[T] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            ended.set_exception(error)

    threading.Thread(target=run, name="apart", daemon=True).start()
    return ended.result()
