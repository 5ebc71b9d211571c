"""Background writer: a thread that writes in the given order, so that the loop need not wait. After
a failed write nothing further is written, because a checkpoint says that everything before it is on
disk."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Self

from reason_llm.errors import Stopped


class BackgroundWriter:
    """Writer thread; all submitted writes are done when the ``with`` block ends. After a normal
    end, or one that a signal asked for, a failed write raises ``WriteError``."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "writer")
        self._pending: list[Future[None]] = []
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._pool.shutdown()
        except BaseException:  # an interrupt: the run's lock must outlast the last write
            self._pool.shutdown(cancel_futures=True)
            raise
        if error is None or isinstance(error, Stopped):
            self.wait()

    def submit(self, write: Callable[[], object]) -> None:
        """Call ``write`` after all earlier calls."""

        def unless_failed() -> None:
            if not self._has_failed:
                self._has_failed = True
                write()
                self._has_failed = False

        self._pending.append(self._pool.submit(unless_failed))

    def wait(self) -> None:
        """Wait until everything is written; raises what the first failed write did."""
        pending, self._pending = self._pending, []
        wait(pending)
        for call in pending:
            call.result()
