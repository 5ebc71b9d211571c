"""Ends the processes that a local Ray cluster leaves behind when the head has ended or was killed.

    python reaper.py FOLDER

Runs as a separate program, which imports nothing of ours. Ray's daemons end without help some
seconds after their head is killed, two of its agents half a minute later, and its folder stays.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

GRACE_SECONDS = 4.0
"""Seconds that the cluster has to end."""
POLL_SECONDS = 0.1


def users_of(folder: str, head: int) -> list[int]:
    """Processes of this user but the head that have a file in the folder open, as all of Ray's have
    their logs.

    (Names and environments are overwritten by Ray's titles.)
    """
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            opened = [str(link.readlink()) for link in (process / "fd").iterdir()]
        except OSError:  # another user's, or gone
            continue
        is_head = int(process.name) == head
        if not is_head and any(file.startswith(f"{folder}/") for file in opened):
            processes.append(int(process.name))
    return processes


def main(folder: str) -> None:
    """Wait until the head closes stdin, by ending or on purpose, and clean up."""
    head = os.getppid()
    sys.stdin.buffer.read()
    until = time.monotonic() + GRACE_SECONDS
    while (left := users_of(folder, head)) and time.monotonic() < until + GRACE_SECONDS:
        for process in left if time.monotonic() > until else []:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(POLL_SECONDS)  # a process that is ending may still write into the folder
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
