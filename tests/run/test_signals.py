"""Which processes hold a folder of a cluster, and what a second signal does."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from reason_llm.errors import Stopped
from reason_llm.replicas import reaper
from reason_llm.run import stopping
from reason_llm.run.stopping import StopSignal


def test_processes_of_a_folder_but_the_head(tmp_path: Path) -> None:
    """A folder of a longer name is another one."""
    (tmp_path / "ray").mkdir()
    with (tmp_path / "ray" / "log").open("w") as log:
        child = subprocess.Popen(["sleep", "60"], stdout=log)
        try:
            own, folder = os.getpid(), str(tmp_path / "ray")
            assert reaper.users_of(folder, own) == [child.pid]
            assert reaper.users_of(folder, child.pid) == []
            assert reaper.users_of(str(tmp_path / "ra"), 0) == []
        finally:
            child.kill()
            child.wait()


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
