"""The processes that end with the head."""

import os
import subprocess
from pathlib import Path

from reason_llm.replicas import reaper


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
