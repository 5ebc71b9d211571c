"""Writes happen in their order, and none after one that failed."""

import threading
from typing import Any

import pytest

from reason_llm.errors import Stopped, WriteError
from reason_llm.run.store.writer import BackgroundWriter


def test_in_order_and_none_after_a_failure() -> None:
    written: list[str] = []

    def fail() -> None:
        raise WriteError("the disk is full")

    with pytest.raises(WriteError, match="full"), BackgroundWriter() as writer:
        writer.submit(lambda: written.append("a"))
        writer.submit(lambda: written.append("b"))
        writer.wait()
        assert written == ["a", "b"]
        writer.submit(fail)
        writer.submit(lambda: written.append("c"))
    assert written == ["a", "b"]


def test_a_failure_is_told_when_it_is_waited_for() -> None:
    def fail() -> None:
        raise WriteError("the disk is full")

    with pytest.raises(KeyError), BackgroundWriter() as writer:
        writer.submit(fail)
        with pytest.raises(WriteError, match="full"):
            writer.wait()
        raise KeyError


def test_a_run_that_a_signal_ends_tells_of_what_could_not_be_written() -> None:
    def fail() -> None:
        raise WriteError("the disk is full")

    with pytest.raises(WriteError), BackgroundWriter() as writer:
        writer.submit(fail)
        raise Stopped(130)
    with pytest.raises(KeyError), BackgroundWriter() as writer:  # what is worse comes first
        writer.submit(fail)
        raise KeyError


def test_an_interrupted_end_waits_for_the_write_under_way_and_leaves_the_others() -> None:
    """The run's lock is free after it: nothing may be written any more."""
    writer, written = BackgroundWriter(), list[str]()
    begun, goes_on = threading.Event(), threading.Event()
    shutdown, calls = writer._pool.shutdown, list[dict[str, Any]]()

    def interrupted(**options: Any) -> None:
        calls.append(options)
        if len(calls) == 1:
            raise KeyboardInterrupt
        shutdown(wait=False, **options)
        goes_on.set()
        shutdown()

    def under_way() -> None:
        begun.set()
        goes_on.wait(300)
        written.append("under way")

    writer._pool.shutdown = interrupted  # type: ignore[method-assign, assignment]
    with pytest.raises(KeyboardInterrupt), writer:
        writer.submit(under_way)
        writer.submit(lambda: written.append("later"))
        begun.wait(300)
    assert written == ["under way"]
