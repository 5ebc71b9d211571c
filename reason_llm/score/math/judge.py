"""Comparisons of answers with a time limit that really ends them.

sympy can hang, inside C code too, and can ask for all memory. So the comparisons run in worker
processes (``math_worker.py``): the kernel ends one at its limit of processor time, and its item
alone is judged not equivalent. The workers are fresh interpreters, not forks of a process that may
hold threads and a GPU. What the text alone decides never leaves this process.
"""

import atexit
import contextlib
import functools
import json
import os
import queue
import select
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

from reason_llm.errors import apart
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
    """One process of ``math_worker.py``, started when it is asked and has ended or never ran."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._is_killed = False

    def ask(self, question: Question, timeout_seconds: float) -> bool | None:
        """The worker's verdict; None if it died.

        Raises:
            TimeoutError: it gave none in so much processor time, or in ``_PATIENCE`` times as long.
        """
        process, verdict = self._process or self._start(), None
        asked = json.dumps([question.gold, question.answer, timeout_seconds])
        try:
            with contextlib.suppress(BrokenPipeError):
                assert process.stdin is not None
                process.stdin.write(f"{asked}\n".encode())
                verdict = _reply(process, _PATIENCE * timeout_seconds)
        finally:  # or a late reply would be the next question's
            code = self.end() if verdict is None else 0
        if code == -signal.SIGPROF:
            raise TimeoutError
        return verdict

    def _start(self) -> subprocess.Popen[bytes]:
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-c", _WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _ENVIRONMENT if name in os.environ},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for the run, also while this one starts
        )
        is_ready = False
        if self._is_killed:  # while it was made, when ``kill`` did not see it yet
            process.kill()
        with contextlib.suppress(TimeoutError):
            is_ready = bool(_reply(process, _START_SECONDS))
        if not is_ready:
            code = self.end()
            if self._is_killed:
                raise RuntimeError("the judge is closed")
            raise RuntimeError(
                f"the comparison worker did not start (exit code {code}); "
                f"run `{sys.executable} -P -c {shlex.quote(_WORKER)}` to see why"
            )
        return process

    def kill(self) -> None:
        """End the process, whatever it is doing, for good. Any thread may call it."""
        self._is_killed = True
        if (process := self._process) is not None:
            process.kill()

    def end(self) -> int:
        """Kill the process and give back what it held; its exit code."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        process.communicate()
        return process.returncode


def _reply(process: subprocess.Popen[bytes], wall_seconds: float) -> bool | None:
    """A line of the process; None where it has ended."""
    assert process.stdout is not None
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    if not poll.poll(wall_seconds * 1000):
        raise TimeoutError
    line = process.stdout.readline()
    return bool(json.loads(line)) if line else None


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
        self._workers = [_Worker() for _ in range(count)]
        self._idle: queue.LifoQueue[_Worker] = queue.LifoQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._lock = threading.Lock()
        self._is_closed = False
        self.num_timed_out = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def compare(self, question: Question, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
        """Whether two trees are the same mathematical object; False beyond the time limit, and
        where two workers in a row die of the comparison."""
        return apart(lambda: self._compare(question, timeout_seconds))

    def _compare(self, question: Question, timeout_seconds: float) -> bool:
        worker = self._idle.get()
        try:
            for _ in range(2):  # one that was killed from outside says nothing about the item
                verdict = None if self._is_closed else worker.ask(question, timeout_seconds)
                if verdict is not None:
                    return verdict
                if self._is_closed:
                    raise RuntimeError("the judge is closed")
        except TimeoutError:
            with self._lock:
                self.num_timed_out += 1
        finally:
            self._idle.put(worker)
        return False

    def close(self) -> None:
        """Kill the workers; a comparison that runs or waits raises RuntimeError."""
        was_closed, self._is_closed = self._is_closed, True
        for worker in self._workers:
            worker.kill()
        if not was_closed:
            for worker in [self._idle.get() for _ in self._workers]:
                worker.end()
                self._idle.put(worker)


@functools.cache
def _judge_of(process: int) -> Judge:
    judge = Judge()
    atexit.register(lambda: judge.close() if os.getpid() == process else None)
    return judge


def default_judge() -> Judge:
    """The process's own judge, made when first asked for and closed at exit. A fork has another
    one: it would read its parent's replies."""
    with _MAKING:
        return _judge_of(os.getpid())
