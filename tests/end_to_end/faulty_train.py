"""Run the real scripts/train.py, with a fault at a named place.

    faulty_train.py REQUEST     one run in this process; REQUEST is a line of JSON (``Request``)
    faulty_train.py             serve such lines from stdin: each run is a process of its own,
                                forked after the imports, which take longer than the runs do

Served, a line ``{"pid"}`` answers when the run has begun and ``{"status", "left"}`` when it has
ended: ``left`` is what still runs of the processes that it started.
"""

import ctypes
import errno
import fnmatch
import functools
import importlib
import logging
import os
import resource
import runpy
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypedDict

import orjson

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "scripts" / "train.py"
PR_SET_CHILD_SUBREAPER = 36
LEFT_SECONDS = 20.0
"""How long what a run started may outlive it."""
ERRORS = {"ENOSPC", "EROFS", "EIO", "EDQUOT", "EACCES"}


class Request(TypedDict):
    arguments: list[str]
    log: str
    """Gets what the run prints."""
    trace: str
    """Gets a line for each thing done: ``sampled ID...``, ``updated``, ``struck``."""
    environment: dict[str, str]
    places: list[str]
    """``module:name`` or ``module:Class.name``, before its call; with ``after `` in front, when
    it has returned. ``open GLOB``, ``rename GLOB``: before a file is opened for writing, or
    renamed."""
    call: int
    """Of all calls of these places, counted together."""
    kind: str
    """Empty for none."""
    target: str
    """What some kinds act on."""


class Fault:
    """What happens at a place, and when."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.calls = 0
        self.lock = threading.Lock()

    def passed(self, path: str = "") -> None:
        """One of the places was come to; ``path`` is the file that it is about."""
        with self.lock:
            self.calls += 1
            is_now = self.calls == self.request["call"]
        if is_now:
            note(self.request, "struck")
            strike(self.request["kind"], self.request["target"], path)


def strike(kind: str, target: str, path: str) -> None:
    """Do it."""
    if kind in ("SIGKILL", "SIGTERM", "SIGINT"):
        os.kill(os.getpid(), signal.Signals[kind])
    elif kind in ("SIGTERM twice", "SIGINT twice"):
        for _ in range(2):
            os.kill(os.getpid(), signal.Signals[kind.split()[0]])
            time.sleep(0.2)
        time.sleep(2)
        os.abort()  # a second signal ends at once
    elif kind == "SIGINT to the group":
        os.killpg(0, signal.SIGINT)
    elif kind in ERRORS:
        number = getattr(errno, kind)
        raise OSError(number, os.strerror(number), path or None)
    elif kind == "MemoryError":
        raise MemoryError
    elif kind == "torch.OutOfMemoryError":
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    elif kind == "RuntimeError":
        raise RuntimeError("it fell over")
    elif kind == "file size limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(target), resource.RLIM_INFINITY))
    elif kind == "torn write":
        os.truncate(path, Path(path).stat().st_size // 2)
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "disk full":
        fill(Path(target))
    elif kind == "broken reward":
        Path(target).touch()
    elif kind == "clock set back":
        set_clock_back()
    else:
        raise AssertionError(f"no such fault: {kind}")


def fill(folder: Path) -> None:
    """Leave not a byte."""
    with (folder / "filler").open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def set_clock_back() -> None:
    """A year, for all that asks Python's clock."""
    year = 365 * 24 * 3600
    then, then_ns = time.time, time.time_ns
    time.time = lambda: then() - year
    time.time_ns = lambda: then_ns() - year * 10**9


def note(request: Request, line: str) -> None:
    """Into the trace, where no fault reaches it."""
    handle = os.open(request["trace"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, f"{line}\n".encode())
    os.close(handle)


def wrap(place: str, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Have the function at ``place`` called between the two; ``after`` gets its arguments, too."""
    module_name, _, path = place.partition(":")
    owner: Any = importlib.import_module(module_name)
    *parents, name = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        result = original(*args, **kwargs)
        after(*args)
        return result

    setattr(owner, name, wrapped)


def nothing(*args: Any) -> None:
    pass


def install(request: Request) -> None:
    """The trace and the fault."""

    def sampled(sampler: Any, prompts: Any, params: Any, *args: Any) -> None:
        if params.num_completions > 1:  # not an evaluation
            note(request, " ".join(["sampled", *(prompt.id for prompt in prompts)]))

    wrap("reason_llm.sample.transformers_sampler:TransformersSampler.sample", nothing, sampled)
    wrap("reason_llm.train.phase:Learner._update", nothing, lambda *args: note(request, "updated"))
    if not request["kind"]:
        return
    fault = Fault(request)
    for place in request["places"]:
        word, _, pattern = place.rpartition(" ")
        if word == "after":
            wrap(pattern, nothing, lambda *args: fault.passed())
        elif word:
            sys.addaudithook(functools.partial(audit, fault, word, pattern))
        elif pattern != "start":
            wrap(pattern, fault.passed, nothing)
    if request["places"] == ["start"]:
        fault.passed()


def audit(fault: Fault, word: str, pattern: str, event: str, arguments: tuple[Any, ...]) -> None:
    """Tell the fault of files that are opened for writing or renamed."""
    if event == "open" and word == "open":
        path, mode, flags = arguments
        writes = mode in ("wb", "ab", "w", "a") or (mode is None and flags & 3)
        if writes and isinstance(path, str | os.PathLike) and fnmatch.fnmatch(path, pattern):
            fault.passed(str(path))
    elif event == "os.rename" and word == "rename" and fnmatch.fnmatch(arguments[1], pattern):
        fault.passed(str(arguments[0]))


def become(request: Request) -> None:
    """This process is the run from here on."""
    with Path(request["log"]).open("ab") as log:
        for standard in (1, 2):
            os.dup2(log.fileno(), standard)
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    sys.argv = [str(TRAIN), *request["arguments"]]
    install(request)
    runpy.run_path(str(TRAIN), run_name="__main__")


def serve() -> None:
    """Runs, one after another."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    for name in ("reason_llm.loop", "reason_llm.command_line", "matplotlib.figure", "bitsandbytes"):
        importlib.import_module(name)
    # What outlives a run becomes a child of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    for line in sys.stdin:
        request: Request = orjson.loads(line)
        assert len(list(Path("/proc/self/task").iterdir())) == 1, (
            "a fork takes no other thread along"
        )
        run = os.fork()
        if run == 0:
            os.setpgid(0, 0)
            with Path(os.devnull).open() as empty:
                os.dup2(empty.fileno(), 0)
            become(request)
            return
        answer(pid=run)
        status = os.waitpid(run, 0)[1]
        answer(status=os.waitstatus_to_exitcode(status), left=wait_for_all())


def answer(**values: Any) -> None:
    sys.stdout.buffer.write(orjson.dumps(values) + b"\n")
    sys.stdout.flush()


def wait_for_all() -> list[str]:
    """The command lines of children that did not end in time."""
    deadline = time.monotonic() + LEFT_SECONDS
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if pid == 0 and time.monotonic() > deadline:
            children = Path("/proc/self/task").glob("*/children")
            pids = [pid for file in children for pid in file.read_text().split()]
            return [Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ") for pid in pids]
        if pid == 0:
            time.sleep(0.02)


if __name__ == "__main__":
    if len(sys.argv) == 1:
        serve()
    else:
        become(orjson.loads(sys.argv[1]))
