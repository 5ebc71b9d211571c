"""The pool of comparison workers against inputs that hang it, fill its memory or kill it.

1. A comparison that hangs ends at its limit, and it alone.    2. A killed worker is replaced.
3. Threads share a pool.                                       4. No worker outlives its parent.
5. Memory is limited.                                          6. A worker loads nothing of ours.
"""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reason_llm.score.math import math_worker
from reason_llm.score.math.judge import Judge, Verdict, default_judge

ROOT = Path(__file__).resolve().parents[3]
SCORE = str(ROOT / "reason_llm" / "score" / "math")
EASY, WRONG = ("(x+1)^2", "x^2+2x+1"), ("(x+1)^2", "x^2+2x+2")
LONG_SECONDS = 60
"""No machine needs so long, and a hang takes longer."""
HANGS = ["9^{9^{9^{9}}}", "(10^{8})!", "\\binom{10^9}{5 \\cdot 10^8}"]


@pytest.fixture
def judge() -> Iterator[Judge]:
    with Judge(num_workers=1) as judge:
        yield judge


def children() -> set[int]:
    """Ids of the comparison workers of this process that run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            command = stat.with_name("cmdline").read_text()
        except OSError:
            continue  # it ended meanwhile
        if fields[1] == str(os.getpid()) and fields[0] != "Z" and "math_worker" in command:
            found.add(int(stat.parent.name))
    return found


@pytest.mark.parametrize("answer", HANGS)
def test_a_hang_ends_at_its_limit_and_costs_its_own_item_only(judge: Judge, answer: str) -> None:
    start = time.monotonic()
    verdicts = judge.equivalent_many([("\\sqrt{2}", answer), EASY, WRONG], timeout_seconds=2)
    assert verdicts == [Verdict(False, "timed_out"), Verdict(True), Verdict(False)]
    assert time.monotonic() - start < LONG_SECONDS
    assert judge.num_timed_out == 1


def test_a_worker_killed_from_outside_is_replaced(judge: Judge) -> None:
    before = children()
    assert judge.equivalent_many([EASY]) == [Verdict(True)]
    (worker,) = children() - before
    os.kill(worker, signal.SIGKILL)
    assert judge.equivalent_many([EASY, WRONG]) == [Verdict(True), Verdict(False)]


def test_a_stopped_worker_is_replaced(judge: Judge) -> None:
    before = children()
    judge.equivalent_many([EASY])
    (worker,) = children() - before
    os.kill(worker, signal.SIGSTOP)
    (verdict,) = judge.equivalent_many([EASY], timeout_seconds=0.5)
    assert verdict == Verdict(False, "timed_out")
    assert judge.equivalent_many([EASY]) == [Verdict(True)]


def test_a_worker_outlives_an_interrupt(judge: Judge) -> None:
    before = children()
    judge.equivalent_many([EASY])
    (worker,) = children() - before
    os.kill(worker, signal.SIGINT)
    assert judge.equivalent_many([WRONG, EASY]) == [Verdict(False), Verdict(True)]
    assert children() - before == {worker}


def test_ctrl_c_while_a_worker_starts_is_for_its_parent_alone() -> None:
    code = f"""
import os, signal, threading, time
from reason_llm.score.math.judge import Judge
signal.signal(signal.SIGINT, lambda *_: None)
def interrupt():
    for _ in range(40):
        os.killpg(0, signal.SIGINT)
        time.sleep(0.05)
threading.Thread(target=interrupt).start()
with Judge(num_workers=1) as judge:
    print(judge.equivalent_many([{EASY!r}])[0].ending)
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, process_group=0, timeout=60
    )
    assert shown.stdout == "judged\n", shown.stderr


def test_threads_share_a_pool() -> None:
    pairs = [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n + n % 2}") for n in range(1, 9)]
    with Judge(num_workers=2) as judge, ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(judge.equivalent_many, pairs) for _ in range(3)]
        assert all([v.equivalent for v in run.result()] == [False, True] * 4 for run in runs)


def test_closing_ends_the_workers_even_while_they_hang() -> None:
    before = children()
    judge = Judge(num_workers=1)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(judge.equivalent_many, [("1", HANGS[0])], 10 * LONG_SECONDS)
        while not children() - before:
            time.sleep(0.01)
        start = time.monotonic()
        judge.close()
        assert run.exception(timeout=LONG_SECONDS) is not None or run.result()[0].ending == "died"
    assert time.monotonic() - start < LONG_SECONDS
    assert children() == before


def test_the_text_alone_decides_without_a_worker() -> None:
    before = children()
    with Judge() as judge:
        verdicts = judge.equivalent_many([("3", "3.0"), ("3", "4"), ("yes", "Yes"), ("x", "x")])
        assert [v.equivalent for v in verdicts] == [True, False, True, True]
        assert children() == before


def test_there_is_one_default_judge() -> None:
    with ThreadPoolExecutor(4) as threads:
        assert len({id(j) for j in threads.map(lambda _: default_judge(), range(8))}) == 1


def test_workers_die_with_their_parent() -> None:
    code = (
        "import sys, time; from reason_llm.score.math.judge import Judge; import threading\n"
        f"judge = Judge(2); hangs = [('1', {HANGS[0]!r})]\n"
        f"ask = lambda: judge.equivalent_many(hangs, {10 * LONG_SECONDS})\n"
        "judge.equivalent_many([('x+1', '1+x')]); threading.Thread(target=ask).start()\n"
        "time.sleep(0.3); print('\\n'.join(str(w._process.pid) for w in judge._workers))\n"
        "sys.stdout.flush(); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    end = time.monotonic() + LONG_SECONDS
    while time.monotonic() < end and is_running(worker):
        time.sleep(0.02)
    assert not is_running(worker)


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_the_memory_of_a_worker_is_limited() -> None:
    code = (
        f"import sys; sys.path.insert(0, {SCORE!r}); import math_worker\n"
        "math_worker._limit_this_process(); bytearray(math_worker.MEMORY_BYTES)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert "MemoryError" in run.stderr


def test_what_does_not_fit_in_memory_is_refused_and_the_worker_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fills_memory(gold: str, answer: str) -> bool:
        if gold == "1":
            raise MemoryError
        return True

    monkeypatch.setattr(math_worker, "same", fills_memory)
    replies = io.StringIO()
    math_worker.serve(['["1", "2"]', '["x", "y"]'], replies)
    assert replies.getvalue().split() == ["false", "true"]


def test_a_worker_loads_nothing_of_ours_and_no_torch() -> None:
    code = (
        f"import sys; sys.path.insert(0, {SCORE!r}); import math_worker\n"
        "print({'torch', 'reason_llm', 'transformers', 'pydantic'} & set(sys.modules))"
    )
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "set()"
