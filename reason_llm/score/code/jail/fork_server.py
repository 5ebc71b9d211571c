"""Forks programs from a warm interpreter, within the walls. Started by ``launcher.py``, which sends
the program's streams; the source of a program goes to its own process only, so that this one never
holds anything of a program or of its tests, and each program starts from the same memory.
"""

import _socket
import atexit
import gc
import importlib
import json
import os
import signal
import sys
from array import array
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from . import isolation, seccomp

NUM_STREAMS = 5
"""Streams of a program: stdin, stdout, stderr and, for its init only, report and orders."""
_REPORT, _ORDERS = 3, 4

Json = dict[str, Any]


class ChildProgram:
    """A program that this interpreter runs, as the context of its run; gives ``compile``'s
    arguments.

    Args:
        leave: where the interpreter leaves its exit code, None where that is not known.
    """

    def __init__(self, source: str, file: str, leave: "_Exit") -> None:
        self.arguments, self._exit = (source, file, "exec"), leave

    def __enter__(self) -> tuple[str, str, str]:
        return self.arguments

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._exit.code = _exit_code(error)


def _exit_code(error: BaseException | None) -> int | None:
    """The exit code of an interpreter whose program ends so; None if that is not certain."""
    if error is None:
        return 0
    if type(error) is SystemExit:
        code = error.code
        return 0 if code is None else code & 0xFF if type(code) is int and code >= 0 else None
    is_plain = sys.excepthook is sys.__excepthook__ and isinstance(error, Exception)
    return 1 if is_plain else None


class _Exit:
    """The last function that ``atexit`` calls: does what the program can see of an interpreter's
    end, and leaves out what it cannot, freeing memory that all programs share: that would copy it
    first, and take longer than most programs. Where anything is unusual, it leaves the end to the
    interpreter."""

    def __init__(self) -> None:
        self.code: int | None = None
        self._collect, self._exit = gc.collect, os._exit

    def __call__(self) -> None:
        if self.code is None or "__main__" not in sys.modules:
            return
        for stream in (sys.stdout, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()  # its error leaves this function
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        for name in ("last_type", "last_value", "last_traceback"):
            vars(sys).pop(name, None)
        names = vars(sys.modules.pop("__main__"))
        for is_private in (True, False):  # as the interpreter does
            for name in [name for name in names if name.startswith("_") == is_private]:
                if name != "__builtins__":
                    names[name] = None
        self._collect()  # objects of the program say goodbye
        for stream in (sys.__stdout__, sys.__stderr__):
            with suppress(BaseException):
                if stream is not None:
                    stream.flush()
        self._exit(self.code)


def main() -> ChildProgram:
    """Start programs, one after another, until the launcher ends.

    Returns:
        In the process of a program, and only there: what its interpreter has to run.
    """
    channel = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, 0)
    setup = json.loads(channel.recv(1 << 16))
    isolation.die_with_parent()
    for name in setup["imports"]:
        importlib.import_module(name)
    sys.path_importer_cache.pop(os.getcwd(), None)  # noqa: PTH109
    if setup["isolated"]:
        isolation.hide_own_code()
    else:
        isolation.adopt_orphans()
    isolation.drop_bounding_set(may_read_all=not setup["isolated"])
    os.umask(0o022)
    _prepare_interpreter()
    leave = _Exit()
    atexit.register(leave)
    seccomp_filter = seccomp.compiled()
    gc.collect()
    gc.freeze()  # a collection in a program copies none of this memory
    channel.send(b"ready")
    size = _socket.CMSG_SPACE(NUM_STREAMS * array("i").itemsize)
    while True:
        scratch_bytes, ancillary, *_ = channel.recvmsg(32, size)
        if not ancillary:
            os._exit(0)
        streams = array("i", ancillary[0][2])
        init = isolation.fork_within() if setup["isolated"] else os.fork()
        if init == 0:
            channel.detach()  # its number is the program's stdin
            _start_program(setup, streams, int(scratch_bytes))
            return _become_program(setup, seccomp_filter, leave)
        for stream in streams:
            os.close(stream)
        channel.send(str(init).encode())
        channel.recv(16)  # the launcher has what it wants
        _end(setup["isolated"], init)
        channel.send(b"ended")


def _start_program(setup: Json, streams: Iterable[int], scratch_bytes: int) -> None:
    """Build the walls that are the same for all, start the program's process, bury the dead, report
    how the program ended. Returns in the program's process only."""
    try:
        for number, stream in enumerate(streams):  # sorted, and each above its new number
            os.dup2(stream, number, inheritable=number < _REPORT)
        os.closerange(NUM_STREAMS, isolation.MAX_FILES)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal without a handler
        if setup["isolated"]:
            isolation.enter_scratch(scratch_bytes)
            isolation.drop_privileges(setup["user"])
        else:
            isolation.die_with_parent()
        program = os.fork()
        if program == 0:
            os.close(_REPORT)  # a report that a program writes would be believed
            return
        for descriptor in (0, 1, 2, _ORDERS):
            os.close(descriptor)
        while True:
            pid, ended, usage = os.wait4(-1, 0)
            if pid == program:
                break
        code = os.waitstatus_to_exitcode(ended)
        report: Json = {"status": code, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    except BaseException as error:  # noqa: BLE001 - this process must never return
        report = {"error": f"{type(error).__name__}: {error}"}
    os.write(_REPORT, json.dumps(report).encode())
    os._exit(0)


def _become_program(setup: Json, seccomp_filter: bytes | None, leave: _Exit) -> ChildProgram:
    """Read what this process is to be, and build the last walls around it."""
    try:
        orders = json.loads(b"".join(iter(lambda: os.read(_ORDERS, 1 << 16), b"")))
        os.close(_ORDERS)
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        limits = orders["limits"]
        if not setup["isolated"]:
            os.chdir(orders["folder"])
            if setup["user"] is None:
                limits["processes"] += isolation.num_tasks_of_user()
            else:
                os.chown(".", setup["user"], setup["user"])
            isolation.drop_privileges(setup["user"], may_read_all=True)
        for name, content in orders["files"].items():
            with open(name, "wb") as file:  # noqa: PTH123
                file.write(content.encode(errors="replace"))
        isolation.limit(limits)
        if seccomp_filter is not None:
            seccomp.install(seccomp_filter)
        if (module := orders["module"]) is not None:
            return ChildProgram(f"from jail.{module} import main; main()", module, leave)
        for name in [name for name in sys.modules if name.partition(".")[0] == "jail"]:
            del sys.modules[name]
        with open("program.py", encoding="utf-8") as source:  # noqa: PTH123
            return ChildProgram(source.read(), "program.py", leave)
    except BaseException as error:  # noqa: BLE001 - this process must never return
        os.write(2, f"the sandbox cannot start the program: {error}\n".encode())
        os._exit(127)


def _prepare_interpreter() -> None:
    """Make this interpreter the one that programs expect.

    A legitimate recursion a thousand deep must work; Python's own bound is 1,000 frames. Without
    the site module, which would read more of the file system, exit and quit are defined here. There
    is no /proc, through which /dev/stdin would be found, and fewer processes may run than there are
    cores.
    """
    import _sitebuiltins
    import builtins
    import io

    sys.setrecursionlimit(10_000)
    sys.argv = ["program.py"]
    for name in ("exit", "quit"):
        setattr(builtins, name, _sitebuiltins.Quitter(name, "Ctrl-D"))
    # Many solutions of programming contests read their input with open("/dev/stdin").
    streams = {"/dev/stdin": 0, "/dev/stdout": 1, "/dev/stderr": 2}
    open_file, open_descriptor = open, os.open

    def stream(path: Any) -> int | None:
        path = os.fspath(path) if hasattr(path, "__fspath__") else path
        return os.dup(streams[path]) if isinstance(path, str) and path in streams else None

    def opened(file: Any, *arguments: Any, **named: Any) -> Any:
        descriptor = stream(file)
        return open_file(file if descriptor is None else descriptor, *arguments, **named)

    def opened_descriptor(path: Any, *arguments: Any, **named: Any) -> int:
        descriptor = stream(path)
        return open_descriptor(path, *arguments, **named) if descriptor is None else descriptor

    builtins.open = io.open = opened
    os.open = opened_descriptor
    os.cpu_count = lambda: 2


def _end(is_isolated: bool, init: int) -> None:
    """End everything; what was in a process namespace is gone when its init is reaped."""
    if is_isolated:
        os.kill(init, signal.SIGKILL)
        os.waitpid(init, 0)
        return
    while pids := descendants(os.getpid()):
        for signal_number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal_number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def descendants(pid: int) -> list[int]:
    """Processes below a process."""
    processes: list[int] = []
    unseen = [pid]
    while unseen:
        folder = f"/proc/{unseen.pop()}/task"
        with suppress(OSError):  # it ended meanwhile
            for thread in os.listdir(folder):  # noqa: PTH208
                with suppress(OSError), open(f"{folder}/{thread}/children") as file:  # noqa: PTH123
                    pids = [int(word) for word in file.read().split()]
                    processes += pids
                    unseen += pids
    return processes
