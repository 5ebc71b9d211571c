"""Which processes hold a folder of a cluster, and what a second signal does."""

import os
import signal
import sys
import threading
from typing import Any

import pytest

from reason_llm.errors import Stopped
from reason_llm.run import stopping
from reason_llm.run.stopping import StopSignal


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    before = signal.getsignal(number)
    with StopSignal() as stop:
        stop.check()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert (stop.requested, ended) == (True, [])
        with pytest.raises(Stopped) as stopped:
            stop.check()
        os.kill(os.getpid(), number)
        assert ended == [128 + number] == [stopped.value.exit_code]
        monkeypatch.setattr(sys, "ps1", "> ", raising=False)
        with pytest.raises(KeyboardInterrupt):
            stop._note(number, None)
    assert signal.getsignal(number) == before
    kept: list[Any] = []

    def elsewhere() -> None:
        with StopSignal():
            kept.append(signal.getsignal(number))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert kept == [before]
