"""Comparisons of answers with a time limit that really ends them.

sympy can hang, inside C code too, where a signal or a thread cannot end it, and can ask for all
memory. So the comparisons run in a pool of worker processes (``math_worker.py``): one that exceeds
its limit is killed and replaced, and its item alone is judged not equivalent. Each worker belongs
to one thread of the pool. What the text alone decides never leaves this process.

The workers are fresh interpreters, not forks of a process that may hold threads and a GPU. They die
with the thread that owns them.
"""

import atexit
import functools
import json
import os
import select
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from reason_llm.score.math.answer_text import Question
from reason_llm.score.math.units import word_set

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
_MAKING = threading.Lock()


class _Worker:
    """One process of ``math_worker.py``, owned by one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, also while this one starts
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._questions, self._replies = self._process.stdin, self._process.stdout
        try:
            is_ready = self._reply(_START_SECONDS)
        except TimeoutError:
            is_ready = None
        if not is_ready:
            raise RuntimeError(
                f"the comparison worker did not start (exit code {self.end()}); "
                f"run `{sys.executable} -P -c {shlex.quote(_WORKER)}` to see why"
            )

    def ask(self, question: Question, timeout_seconds: float) -> bool | None:
        """The worker's verdict; None if it died.

        Raises:
            TimeoutError: it gave none in so much processor time, or in ``_PATIENCE`` times as long.
        """
        try:
            self._questions.write(f"{json.dumps([question.gold, question.answer])}\n".encode())
        except BrokenPipeError:
            return None
        return self._reply(timeout_seconds)

    def _reply(self, timeout_seconds: float) -> bool | None:
        poll = select.poll()
        poll.register(self._replies, select.POLLIN)
        used, latest = self._used_seconds(), time.monotonic() + _PATIENCE * timeout_seconds
        left = timeout_seconds
        while not poll.poll(max(left, 0.01) * 1000):
            left = min(used + timeout_seconds - self._used_seconds(), latest - time.monotonic())
            if left <= 0:
                raise TimeoutError
        line = self._replies.readline()
        return bool(json.loads(line)) if line else None

    def _used_seconds(self) -> float:
        """Processor time of the process so far."""
        try:
            return time.clock_gettime((~self._process.pid << 3) | 2)  # clock_getcpuclockid(3)
        except OSError:  # it died, which the next poll tells
            return 0.0

    def kill(self) -> None:
        """End the process, whatever it is doing. Any thread may call it."""
        self._process.kill()

    def end(self) -> int:
        """Kill the process and give back what it held; its exit code."""
        self.kill()
        self._questions.close()
        self._replies.close()
        return self._process.wait()


class _Own(threading.local):
    """Values that each thread of a pool keeps for itself."""

    worker: _Worker | None = None


class Judge:
    """A pool of comparison workers, started as they are needed, ended by ``close`` or ``with``.

    Usable from several threads at once.
    """

    def __init__(self, num_workers: int | None = None) -> None:
        """
        Args:
            num_workers: processes; None: one per CPU that this process may use, at most
                ``MAX_WORKERS``.
        """
        count = num_workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="judge")
        self._own = _Own()
        self._lock = threading.Lock()
        self._workers: set[_Worker] = set()
        self._is_closed = False
        self.num_timed_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def compare(self, question: Question, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
        """Whether two trees are the same mathematical object; False beyond the time limit, and
        where two workers in a row die of the comparison."""
        return self._threads.submit(self._compare, question, timeout_seconds).result()

    def close(self) -> None:
        """Kill the workers; comparisons that run or wait are dropped."""
        self._is_closed = True
        with self._lock:
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _compare(self, question: Question, timeout_seconds: float) -> bool:
        """Runs in a thread of the pool, which keeps its worker for the next item."""
        for _ in range(2):  # one that was killed from outside says nothing about the item
            worker = self._worker()
            try:
                verdict = worker.ask(question, timeout_seconds)
            except TimeoutError:
                self._drop(worker)
                with self._lock:
                    self.num_timed_out += 1
                return False
            if verdict is not None:
                return verdict
            self._drop(worker)
        return False

    def _worker(self) -> _Worker:
        worker = self._own.worker
        if worker is None:
            worker = self._own.worker = _Worker()
            with self._lock:
                self._workers.add(worker)
                if self._is_closed:
                    worker.kill()
        return worker

    def _drop(self, worker: _Worker) -> None:
        worker.end()
        with self._lock:
            self._workers.discard(worker)
        self._own.worker = None


@functools.cache
def _judge_of_this_process() -> Judge:
    judge = Judge()
    atexit.register(judge.close)
    return judge


def default_judge() -> Judge:
    """The process's own judge, made when first asked for and closed at exit."""
    with _MAKING:
        return _judge_of_this_process()
