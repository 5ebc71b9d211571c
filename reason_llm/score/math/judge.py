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
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from reason_llm.score.math.answer_text import Question

MAX_WORKERS = 16
TIMEOUT_SECONDS = 5.0
_START_SECONDS = 60.0
_ENVIRONMENT = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PYTHONHOME",
                "PYTHONPATH", "OMP_NUM_THREADS")  # fmt: skip
"""All that a worker gets of ours: no tokens, no keys."""
_WORKER = Path(__file__).with_name("math_worker.py")
_MAKING = threading.Lock()

Ending = Literal["judged", "timed_out", "died"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of one comparison."""

    equivalent: bool
    ending: Ending = "judged"
    """``timed_out``: it exceeded its limit; ``died``: two workers in a row died of it. Both are not
    equivalent."""


class _Worker:
    """One process of ``math_worker.py``, owned by one thread."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, also while this one starts
        )
        try:
            is_ready = self._reply(_START_SECONDS)
        except TimeoutError:
            is_ready = None
        if not is_ready:
            self.kill()
            raise RuntimeError(
                f"the comparison worker did not start (exit code {self.reap()}); "
                f"run `{sys.executable} -P {_WORKER}` to see why"
            )

    def ask(self, question: Question, timeout_seconds: float) -> bool | None:
        """The worker's verdict; None if it died.

        Raises:
            TimeoutError: it gave none in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps([question.gold, question.answer])}\n".encode())
        except BrokenPipeError:
            return None
        return self._reply(timeout_seconds)

    def _reply(self, timeout_seconds: float) -> bool | None:
        assert self._process.stdout is not None
        line, end = b"", time.monotonic() + timeout_seconds
        while not line.endswith(b"\n"):
            poll = select.poll()
            poll.register(self._process.stdout, select.POLLIN)
            if not poll.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError
            chunk = os.read(self._process.stdout.fileno(), 64)
            if not chunk:
                return None
            line += chunk
        return bool(json.loads(line))

    def kill(self) -> None:
        """End the process, whatever it is doing. Any thread may call it."""
        self._process.kill()

    def reap(self) -> int:
        """Give back what the killed process held; its exit code."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait()


class _Own(threading.local):
    """What each thread of a pool keeps for itself."""

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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def compare(self, question: Question, timeout_seconds: float = TIMEOUT_SECONDS) -> Verdict:
        """Whether two trees are the same mathematical object."""
        return self._threads.submit(self._compare, question, timeout_seconds).result()

    def close(self) -> None:
        """Kill the workers; comparisons that run or wait are dropped."""
        self._is_closed = True
        with self._lock:
            for worker in self._workers:
                worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self._workers:
            worker.reap()
        self._workers.clear()

    def _compare(self, question: Question, timeout_seconds: float) -> Verdict:
        """Runs in a thread of the pool, which keeps its worker for the next item."""
        for _ in range(2):  # one that was killed from outside says nothing about the item
            worker = self._worker()
            try:
                verdict = worker.ask(question, timeout_seconds)
            except TimeoutError:
                self._drop(worker)
                with self._lock:
                    self.num_timed_out += 1
                return Verdict(False, "timed_out")
            if verdict is not None:
                return Verdict(verdict)
            self._drop(worker)
        return Verdict(False, "died")

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
        worker.kill()
        worker.reap()
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
