"""Comparisons of answers with a time limit that really ends them.

sympy can hang, inside C code too, and can ask for all memory. So the comparisons run in worker
processes (``math_worker.py``): the kernel ends one at its limit of processor time, and its item
alone is judged not equivalent. The workers are fresh interpreters, not forks of a process that may
hold threads and a GPU. What the text alone decides never leaves this process.
"""

import os
import shlex
import signal
import sys
import threading
from pathlib import Path
from typing import Self

from reason_llm.score.math.answer_text import Question
from reason_llm.score.math.units import word_set
from reason_llm.workers import Died, Pool, Worker, shared

MAX_WORKERS = 16
TIMEOUT_SECONDS = 5.0
"""Processor time of a comparison."""
_PATIENCE = 10
"""A worker to which others leave no processor may take so many times its limit."""
_START_SECONDS = 60.0
_ENVIRONMENT = word_set(
    "PATH HOME TMPDIR LANG LC_ALL LD_LIBRARY_PATH PYTHONHOME PYTHONPATH OMP_NUM_THREADS"
)
"""The only environment variables of a worker: no tokens, no keys."""
_WORKER = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parents[3])!r}); import reason_llm; "
    "del sys.path[0]; from reason_llm.score.math.math_worker import main; main()"
)
"""Another folder's package of our name is not taken, and ours hides no library."""


class _ComparisonWorker(Worker):
    """One process of ``math_worker.py``."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        command = [sys.executable, "-P", "-c", _WORKER]
        super().__init__("the comparison worker", command, environment)

    def start(self) -> None:
        """Start the process and wait until it has loaded sympy."""
        super().start()
        try:
            self.exchange(None, _START_SECONDS)
        except Died as error:
            if self._is_killed:
                raise
            raise RuntimeError(
                f"the comparison worker did not start (exit code {error.code}); "
                f"run `{sys.executable} -P -c {shlex.quote(_WORKER)}` to see why"
            ) from error

    def ask(self, question: Question, timeout_seconds: float) -> bool:
        """The worker's verdict; TimeoutError if it gave none in so much processor time, or in
        ``_PATIENCE`` times as long, Died if it ended in another way."""
        request = [question.gold, question.answer, timeout_seconds]
        try:
            return bool(self.exchange(request, _PATIENCE * timeout_seconds))
        except Died as error:
            if error.is_late or error.code == -signal.SIGPROF:
                raise TimeoutError from error
            raise


class Judge:
    """A pool of comparison workers, started as they are needed, ended by ``close`` or ``with``.
    Usable from several threads at once.

    Args:
        num_workers: processes; None: one per CPU that this process may use, at most
            ``MAX_WORKERS``.
    """

    def __init__(self, num_workers: int | None = None) -> None:
        count = num_workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self.pool = Pool("the judge", [_ComparisonWorker() for _ in range(count)])
        self.num_timed_out = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def compare(self, question: Question, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
        """Whether two trees are the same mathematical object; False beyond the time limit, and
        where two workers in a row die of the comparison."""
        try:
            return self.pool.call(lambda worker: worker.ask(question, timeout_seconds))
        except TimeoutError:
            with self._lock:
                self.num_timed_out += 1
        except Died:
            if self.pool.is_closed:
                raise
        return False

    def close(self) -> None:
        """Kill the workers; a comparison that runs or waits raises RuntimeError."""
        self.pool.close()


def default_judge() -> Judge:
    """The process's own judge, made when first asked for and closed at exit."""
    return shared(Judge)
