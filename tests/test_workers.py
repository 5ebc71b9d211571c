"""Calls with a time limit: what they give and raise, and that an endless one burns no processor."""

import contextlib
import os
import threading
import warnings

import pytest

from reason_llm.workers import within


def test_a_call_s_result_and_its_exception_come_through() -> None:
    assert within(60, "it", lambda: 7) == 7
    with pytest.raises(KeyError, match="x"):
        within(60, "it", lambda: {}["x"])


def test_an_endless_call_is_ended_and_takes_no_time_from_what_follows() -> None:
    running: list[threading.Thread] = []

    def endless() -> None:
        running.append(threading.current_thread())
        while True:
            with contextlib.suppress(Exception):  # as a careless reward does
                sum(range(1000))

    while not running:  # it may have had no processor so long
        with pytest.raises(TimeoutError, match=r"my_reward took longer than 0\.5 s"):
            within(0.5, "my_reward", endless)
    (thread,) = running
    thread.join(30)
    assert not thread.is_alive()
    assert within(60, "it", lambda: 8) == 8  # by another thread


def test_one_that_ends_late_is_not_taken_for_the_next_one_s_result() -> None:
    has_begun, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def late() -> str:
        with contextlib.suppress(BaseException):  # also what would end it
            has_begun.set()
            may_end.wait(60)
        has_ended.set()
        return "late"

    while not has_begun.is_set():
        with pytest.raises(TimeoutError):
            within(0.5, "it", late)
    assert [within(60, "it", lambda n=n: n) for n in range(3)] == [0, 1, 2]
    may_end.set()
    assert has_ended.wait(60)
    assert [within(60, "it", lambda n=n: n) for n in range(3)] == [0, 1, 2]


def test_a_fork_has_threads_of_its_own() -> None:
    assert within(60, "it", lambda: 7) == 7  # whose thread is idle now
    with warnings.catch_warnings():  # Python 3.12 warns of a fork beside threads
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            os._exit(within(60, "it", lambda: 8))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
