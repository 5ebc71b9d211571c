"""The pool of comparison workers against inputs that hang it, fill its memory or kill it.

1. A comparison that hangs ends at its limit, and it alone.    2. A killed worker is replaced.
3. Threads share a pool.                                       4. Workers end with their parent.
5. Memory is limited.                                          6. A worker loads no more.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest

from conftest import ROOT, children_of, is_alive, is_run_by, until
from reason_llm import workers
from reason_llm.score.math import math_worker
from reason_llm.score.math.answer_text import Question, decide
from reason_llm.score.math.answer_tree import Tree
from reason_llm.score.math.judge import Judge, default_judge
from reason_llm.workers import Died

EASY, WRONG = ("(x+1)^2", "x^2+2x+1"), ("(x+1)^2", "x^2+2x+1.01")
LONG_SECONDS = 60
"""No machine needs so long, and a hang takes longer."""
ONE = ["num", "1"]
BILLION = ["pow", ["num", "10"], ["num", "9"]]
HANGS = [
    ["pow", ["num", "9"], ["pow", ["num", "9"], ["pow", ["num", "9"], ["num", "9"]]]],
    ["call", "factorial", BILLION],
    ["call", "binom", BILLION, ["mul", ["num", "5"], ["pow", ["num", "10"], ["num", "8"]]]],
]
"""Trees that ``decide`` would keep from the workers, since they are too large."""


@pytest.fixture(scope="module")
def shared_judge() -> Iterator[Judge]:
    with Judge(num_workers=1) as judge:
        yield judge


@pytest.fixture
def judge(shared_judge: Judge) -> Judge:
    """A judge whose worker runs already; a worker takes half a second to start."""
    assert equivalent_many(shared_judge, [EASY]) == [True]
    shared_judge.num_timed_out = 0
    return shared_judge


@pytest.fixture
def idle_judge() -> Iterator[Judge]:
    """A judge whose worker has not been started."""
    with Judge(num_workers=1) as judge:
        yield judge


def worker_of(judge: Judge) -> int:
    """The process of the judge's only worker."""
    process = judge.pool.workers[0]._process
    assert process is not None
    return process.pid


def equivalent_many(
    judge: Judge, pairs: Sequence[tuple[str, str]], seconds: float = LONG_SECONDS
) -> list[bool]:
    """A verdict for each (gold, answer): by the text, else by a worker."""
    decided = [decide(gold, answer) for gold, answer in pairs]
    return [
        judge.compare(each, seconds) if isinstance(each, Question) else each for each in decided
    ]


def children() -> set[int]:
    """Ids of the comparison workers of this process that run."""
    return {each.pid for each in children_of(os.getpid()) if is_run_by(each, "math_worker")}


@pytest.mark.parametrize(
    "answer", [HANGS[0], *(pytest.param(answer, marks=pytest.mark.long) for answer in HANGS[1:])]
)
def test_a_hang_ends_at_its_limit_and_costs_its_own_item_only(judge: Judge, answer: Tree) -> None:
    with ThreadPoolExecutor(1) as threads:
        hung = threads.submit(judge.compare, Question(ONE, answer), 0.3)
        judged = equivalent_many(judge, [EASY, WRONG], LONG_SECONDS)
    assert hung.result() is False
    assert judged == [True, False]
    assert judge.num_timed_out == 1


def test_letters_in_large_exponents_need_little_time(judge: Judge) -> None:
    pairs = [("2^{10^6x}", "1+2^{10^6x}"), ("x^{n^{30}}", "x^{n^{30}}-y"), ("4^{n^9}", "2^{2n^9}")]
    assert equivalent_many(judge, pairs) == [False, False, True]


def test_a_worker_killed_from_outside_is_replaced(judge: Judge) -> None:
    os.kill(worker_of(judge), signal.SIGKILL)
    assert equivalent_many(judge, [EASY, WRONG], LONG_SECONDS) == [True, False]


def test_a_stopped_worker_is_replaced(judge: Judge) -> None:
    os.kill(worker_of(judge), signal.SIGSTOP)
    (verdict,) = equivalent_many(judge, [EASY], 0.05)
    assert verdict is False
    assert judge.num_timed_out == 1
    assert equivalent_many(judge, [EASY], LONG_SECONDS) == [True]


def test_a_worker_without_a_processor_is_waited_for(
    judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of processor time: what others take of it changes no verdict."""
    monkeypatch.setattr("reason_llm.score.math.judge._PATIENCE", 1000)
    worker = worker_of(judge)
    os.kill(worker, signal.SIGSTOP)
    goes_on = threading.Timer(1.0, os.kill, (worker, signal.SIGCONT))
    goes_on.start()
    assert equivalent_many(judge, [EASY], 0.5) == [True]
    goes_on.join()


def test_a_worker_outlives_an_interrupt(judge: Judge) -> None:
    worker = worker_of(judge)
    os.kill(worker, signal.SIGINT)
    assert equivalent_many(judge, [WRONG, EASY], LONG_SECONDS) == [False, True]
    assert worker_of(judge) == worker


@pytest.mark.parametrize("which", [0, 1], ids=["while it starts", "while it compares"])
def test_an_interrupt_costs_no_later_verdict(
    idle_judge: Judge, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    """The reply that nobody waited for is not taken for the next question's."""
    main, read, waited = threading.main_thread(), workers._receive, threading.Event()
    replies = count()

    def interrupted(*arguments: Any) -> Any:
        if next(replies) == which:
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            waited.wait(LONG_SECONDS)
        return read(*arguments)

    monkeypatch.setattr(workers, "_receive", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            equivalent_many(idle_judge, [EASY])
    finally:
        signal.signal(signal.SIGINT, before)
        waited.set()
    assert equivalent_many(idle_judge, [WRONG, EASY, WRONG]) == [False, True, False]


def test_what_ends_with_the_judge_has_no_verdict(
    idle_judge: Judge, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count()

    def ends(*arguments: Any) -> None:
        """Once from outside, and once by ``close``, which then waits for this comparison."""
        idle_judge.pool.is_closed = next(asked) == 1
        raise Died("it ended")

    monkeypatch.setattr(idle_judge.pool.workers[0], "ask", ends)
    with ThreadPoolExecutor(1) as threads:
        verdict = threads.submit(idle_judge.compare, Question(ONE, ONE))
        with pytest.raises(RuntimeError, match="the judge is closed"):
            verdict.result(LONG_SECONDS)
    with pytest.raises(RuntimeError, match="the judge is closed"):
        idle_judge.compare(Question(ONE, ONE))


@pytest.mark.long
def test_ctrl_c_while_a_worker_starts_is_for_its_parent_alone() -> None:
    code = f"""
import os, signal, threading, time
from reason_llm.score.math.judge import Judge, Question
signal.signal(signal.SIGINT, lambda *_: None)
def interrupt():
    for _ in range(40):
        os.killpg(0, signal.SIGINT)
        time.sleep(0.05)
threading.Thread(target=interrupt).start()
with Judge(num_workers=1) as judge:
    print(judge.compare(Question({ONE!r}, {ONE!r})))
"""
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, process_group=0
    )
    assert shown.stdout == "True\n", shown.stderr


def test_threads_share_a_pool() -> None:
    pairs = [(f"(x+{n})^2", f"x^2+{2 * n}x+{n * n + n % 2}") for n in range(1, 9)]
    with Judge(num_workers=2) as judge, ThreadPoolExecutor(3) as threads:
        runs = [threads.submit(equivalent_many, judge, pairs) for _ in range(3)]
        assert all(run.result() == [False, True] * 4 for run in runs)


def test_closing_ends_the_workers_even_while_they_hang() -> None:
    before = children()
    judge = Judge(num_workers=1)
    with ThreadPoolExecutor(1) as threads:
        run = threads.submit(judge.compare, Question(ONE, HANGS[0]), 10 * LONG_SECONDS)
        assert until(lambda: bool(children() - before))
        judge.close()
        assert run.exception(timeout=LONG_SECONDS) is not None or not run.result()
    assert children() <= before


def test_a_worker_that_is_being_made_as_the_judge_closes_is_ended_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, judge = children(), Judge(num_workers=1)
    popen = subprocess.Popen

    def closing(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        made = popen(*arguments, **options)
        judge.pool.is_closed = True  # as ``close`` does, which then waits for this comparison
        judge.pool.workers[0].kill()
        return made

    monkeypatch.setattr(subprocess, "Popen", closing)
    with pytest.raises(RuntimeError, match="the judge is closed"):
        judge.compare(Question(ONE, ONE))
    judge.close()
    assert children() <= before


def test_the_text_alone_decides_without_a_worker() -> None:
    before = children()
    with Judge() as judge:
        verdicts = equivalent_many(judge, [("3", "3.0"), ("3", "4"), ("yes", "Yes"), ("x", "x")])
        assert verdicts == [True, False, True, True]
        assert children() <= before


def test_a_fork_has_a_judge_of_its_own_and_leaves_its_parent_s_workers() -> None:
    code = f"""
import os, sys, warnings
from reason_llm.score.math.judge import Question, default_judge
judge, one = default_judge(), Question({ONE!r}, {ONE!r})
judge.compare(one)
(worker,) = [each._process for each in judge.pool.workers if each._process]
warnings.simplefilter("ignore")
child = os.fork()
if child == 0:
    print(default_judge() is judge, default_judge().compare(one), flush=True)
    sys.exit(0)
os.waitpid(child, 0)
print(worker.poll(), judge.compare(one), default_judge() is judge)
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert shown.stdout.split() == ["False", "True", "None", "True", "True"], shown.stderr


def test_there_is_one_default_judge() -> None:
    with ThreadPoolExecutor(4) as threads:
        assert len({id(j) for j in threads.map(lambda _: default_judge(), range(8))}) == 1


@pytest.mark.long
@pytest.mark.parametrize("asked", ["judge.compare(hang, 0.5)", "None"], ids=["hangs", "waits"])
def test_workers_end_with_their_parent_at_their_limit_at_the_latest(asked: str) -> None:
    code = (
        "import sys, time; from reason_llm.score.math.judge import Judge, Question\n"
        f"import threading; judge = Judge(1); hang = Question({ONE!r}, {HANGS[0]!r})\n"
        f"judge.compare(Question({ONE!r}, {ONE!r})); worker = judge.pool.workers[0]._process.pid\n"
        f"threading.Thread(target=lambda: {asked}).start(); time.sleep(0.3)\n"
        "print(worker, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert until(lambda: not is_alive(worker))


def test_the_memory_of_a_worker_is_limited() -> None:
    code = (
        "from reason_llm.score.math import math_worker\n"
        "math_worker._limit_this_process(); bytearray(math_worker.MEMORY_BYTES)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "MemoryError" in run.stderr


def test_what_does_not_fit_in_memory_is_refused_and_the_worker_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fills_memory(gold: Tree, answer: Tree) -> bool:
        if gold == ONE:
            raise MemoryError
        return True

    monkeypatch.setattr(math_worker, "same", fills_memory)
    assert math_worker.compare((ONE, ["num", "2"], 9)) is False
    assert math_worker.compare((["var", "x"], ["var", "y"], 9)) is True


def test_a_worker_loads_no_torch_and_nothing_of_ours_but_the_mathematics() -> None:
    code = (
        "import sys; import reason_llm.score.math.math_worker\n"
        "print({'torch', 'transformers', 'pydantic', 'httpx'} & set(sys.modules))\n"
        "ours = {name for name in sys.modules if name.startswith('reason_llm.')}\n"
        "print({name for name in ours if not name.startswith('reason_llm.score')}\n"
        "      - {'reason_llm.workers'})"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["set()", "set()"]
