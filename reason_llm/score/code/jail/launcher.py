"""Runs untrusted programs one after another, each behind its own walls. Started by
``sandbox.py``, one process for each worker; talks JSON with it through stdin and stdout.

    launcher            builds the root once, reads requests
      supervisor        one for each request, outside the walls: feeds, reads, counts, kills
        init            process 1 of the program's namespace: when it ends, all in there end
          the program   a fresh Python without privileges

A request with ``serve`` is the last one: its program takes over stdin and stdout, and limits the
calls that it makes itself (``check_server.py``).
"""

import base64
import contextlib
import json
import os
import select
import signal
import struct
import sys
import time
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from . import isolation, seccomp

_POLL_SECONDS = 0.02
_ERROR_BYTES = 64 << 10
_ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "PYTHONHASHSEED": "0",  # the same program prints the same, so that a resumed run is exact
    "PYTHONUTF8": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

Json = dict[str, Any]


def main() -> None:
    """Answer the requests on stdin until it ends, as it does when the other side dies."""
    setup = _read(sys.stdin.buffer)
    if setup is None:
        return
    os.umask(0o022)  # these files are for the program's user, who is another one
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    change_to = setup["user"] if os.geteuid() == 0 else None
    try:
        if setup["isolated"]:
            change_to = isolation.build_root(setup["visible"], setup["user"])
        _write(answers, {"ready": True})
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _write(answers, {"error": where + (error.strerror or str(error))})
        return
    while (request := _read(sys.stdin.buffer)) is not None:
        if request.get("serve"):
            _serve(setup, change_to, request, answers.fileno())
            return
        answers.write(_supervised(setup, change_to, request))
        answers.flush()


def _read(stream: BinaryIO) -> Json | None:
    head = stream.read(8)
    if len(head) < 8:
        return None
    message: Json = json.loads(stream.read(struct.unpack("<Q", head)[0]))
    return message


def _write(stream: BinaryIO, message: Json) -> None:
    body = json.dumps(message).encode()
    stream.write(struct.pack("<Q", len(body)) + body)
    stream.flush()


def _serve(setup: Json, change_to: int | None, request: Json, stdout: int) -> None:
    """Run a program that talks with the other side itself, until it ends."""
    if setup["isolated"]:
        isolation.unshare_processes()
    else:
        isolation.adopt_orphans()
    reported, status = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    init = os.fork()
    if init == 0:
        os.close(reported)
        _init(setup, change_to, request, [(0, -1), (-1, stdout), (-1, nothing), (-1, status)])
    for descriptor in (0, stdout, status, nothing):
        os.close(descriptor)  # so that its end is seen on the other side
    os.waitpid(init, 0)


def _supervised(setup: Json, change_to: int | None, request: Json) -> bytes:
    """The answer as it is sent, after its supervisor has ended."""
    incoming, outgoing = os.pipe()
    supervisor = os.fork()
    if supervisor == 0:
        with os.fdopen(outgoing, "wb") as stream:
            _write(stream, _answer(setup, change_to, request, outgoing))
        os._exit(0)
    os.close(outgoing)
    with os.fdopen(incoming, "rb") as stream:
        answer = stream.read()
    os.waitpid(supervisor, 0)
    return answer


def _answer(setup: Json, change_to: int | None, request: Json, outgoing: int) -> Json:
    try:
        isolation.die_with_parent()
        if setup["isolated"]:
            isolation.unshare_processes()
        else:
            isolation.adopt_orphans()
        pipes = [os.pipe() for _ in range(4)]
        init = os.fork()
        if init == 0:
            os.close(outgoing)
            _init(setup, change_to, request, pipes)
        return _Supervisor(setup, request, init, pipes).run()
    except Exception as error:  # noqa: BLE001 - the waiting side must hear of it
        return {"error": f"{type(error).__name__}: {error}"}


def _init(
    setup: Json, change_to: int | None, request: Json, pipes: list[tuple[int, int]]
) -> NoReturn:
    """Build the last walls, start the program, bury the dead, report how the program ended."""
    (stdin, _), (_, stdout), (_, stderr), (_, status) = pipes
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 gets no signal without a handler
        os.umask(0o022)
        if setup["isolated"]:
            isolation.enter_root(request["limits"]["file_bytes"])
            isolation.drop_privileges(change_to)
        else:
            isolation.die_with_parent()
            os.chdir(request["folder"])
            if change_to is not None:
                os.chown(".", change_to, change_to)
        contents = {n: text.encode(errors="replace") for n, text in request["files"].items()}
        contents |= {name: base64.b64decode(data) for name, data in request["bytes"].items()}
        for name, data in contents.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_bytes(data)
        program = os.fork()
        if program == 0:
            _become_program(setup, change_to, request, (stdin, stdout, stderr))
        os.closerange(0, status)
        os.closerange(status + 1, status + 64)
        while True:
            pid, ended, usage = os.wait4(-1, 0)
            if pid == program:
                break
        code = os.waitstatus_to_exitcode(ended)
        report: Json = {"status": code, "cpu_seconds": usage.ru_utime + usage.ru_stime}
    except BaseException as error:  # noqa: BLE001 - this process must never return
        report = {"error": f"{type(error).__name__}: {error}"}
    os.write(status, json.dumps(report).encode())
    os._exit(0)


def _become_program(
    setup: Json, change_to: int | None, request: Json, standard: tuple[int, int, int]
) -> NoReturn:
    try:
        os.setsid()
        for number, descriptor in enumerate(standard):
            os.dup2(descriptor, number)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # ignored by Python, and that is inherited
            signal.signal(number, signal.SIG_DFL)
        limits = request["limits"]
        if not setup["isolated"]:
            if change_to is None:
                limits["processes"] += isolation.num_tasks_of_user()
            isolation.drop_privileges(change_to, may_read_all=True)
        isolation.limit(limits)
        if seccomp.is_available():
            seccomp.install()
        environment = {**_ENVIRONMENT, **setup["environment"]}
        os.execve(setup["python"], [setup["python"], *request["arguments"]], environment)
    except BaseException as error:  # noqa: BLE001 - this process must never return
        os.write(2, f"the sandbox cannot start the program: {error}\n".encode())
        os._exit(127)


class _Supervisor:
    """Watches one program from outside until nothing of it is left."""

    def __init__(self, setup: Json, request: Json, init: int, pipes: list[tuple[int, int]]) -> None:
        (stdin, self.stdin), (self.stdout, out), (self.stderr, err), (self.status, end) = pipes
        for descriptor in (stdin, out, err, end):
            os.close(descriptor)
        self.is_isolated: bool = setup["isolated"]
        self.limits: dict[str, Any] = request["limits"]
        self.init = init
        self.unsent = memoryview(request["stdin"].encode(errors="replace"))
        self.output: dict[int, bytearray] = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.num_output_bytes = 0
        self.started = time.monotonic()

    def run(self) -> Json:
        """The answer: status, output, limit; or the error of a wall."""
        os.set_blocking(self.stdin, False)
        limit, report = self._watch()
        self._kill()
        for descriptor in self.output:
            while self._take(descriptor):
                pass
        ended = json.loads(report) if report else {"status": -signal.SIGKILL, "cpu_seconds": 0.0}
        if "error" in ended:
            return {"error": ended["error"]}
        if self.num_output_bytes > self.limits["output_bytes"]:
            limit = "output"
        elif limit is None and ended["status"] in (-signal.SIGKILL, -signal.SIGXCPU):
            # The kernel's own count for this limit is by clock ticks, and may be far off.
            is_spent = ended["cpu_seconds"] >= self.limits["cpu_seconds"] / 2
            limit = "cpu" if is_spent else None
        out, error = (bytes(data).decode(errors="replace") for data in self.output.values())
        return {"status": ended["status"], "stdout": out, "stderr": error, "limit": limit}

    def _watch(self) -> tuple[str | None, bytes]:
        """Which limit was hit, if any, and what init reported."""
        poller = select.poll()
        for descriptor in (self.stdout, self.stderr, self.status):
            poller.register(descriptor, select.POLLIN)
        if self.unsent:
            poller.register(self.stdin, select.POLLOUT)
        else:
            os.close(self.stdin)
        next_count = self.started + _POLL_SECONDS
        while True:
            for descriptor, _ in poller.poll(_POLL_SECONDS * 1000):
                if descriptor == self.status:
                    return None, os.read(self.status, 1 << 16)
                if descriptor == self.stdin:
                    if not self._feed():
                        poller.unregister(self.stdin)
                        os.close(self.stdin)
                elif not self._take(descriptor):
                    poller.unregister(descriptor)
            now = time.monotonic()
            if now - self.started > self.limits["wall_seconds"]:
                return "time", b""
            if self.num_output_bytes > self.limits["output_bytes"]:
                return "output", b""
            if now >= next_count:
                next_count = now + _POLL_SECONDS
                hit = self._count()
                if hit is not None:
                    return hit, b""

    def _feed(self) -> bool:
        try:
            self.unsent = self.unsent[os.write(self.stdin, self.unsent) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # the program does not read it
            return False
        return bool(self.unsent)

    def _take(self, descriptor: int) -> bool:
        """Read some output; False at its end. Output above the limit is dropped."""
        data = os.read(descriptor, 1 << 16)
        self.num_output_bytes += len(data)
        kept = self.output[descriptor]
        kept += data
        if descriptor == self.stdout:
            del kept[self.limits["output_bytes"] :]
        else:
            del kept[:-_ERROR_BYTES]  # the end of a traceback is the most useful part
        return bool(data)

    def _count(self) -> str | None:
        pids = _descendants(self.init)
        if len(pids) > self.limits["processes"] + 1:
            return "processes"
        if any(_cpu_seconds(pid) > self.limits["cpu_seconds"] for pid in pids):
            return "cpu"
        used = sum(map(_memory_bytes, pids))
        return "memory" if used > self.limits["memory_bytes"] else None

    def _kill(self) -> None:
        """End everything; what was in a process namespace is gone when its init is reaped."""
        if self.is_isolated:
            os.kill(self.init, signal.SIGKILL)
            os.waitpid(self.init, 0)
            return
        while pids := _descendants(os.getpid()):
            for signal_number in (signal.SIGSTOP, signal.SIGKILL):
                for pid in pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal_number)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _descendants(pid: int) -> list[int]:
    processes: list[int] = []
    unseen = [pid]
    while unseen:
        folder = Path(f"/proc/{unseen.pop()}/task")
        with contextlib.suppress(OSError):  # it ended meanwhile
            for thread in list(folder.iterdir()):
                with contextlib.suppress(OSError):
                    pids = [int(word) for word in (thread / "children").read_text().split()]
                    processes += pids
                    unseen += pids
    return processes


def _cpu_seconds(pid: int) -> float:
    try:
        return time.clock_gettime((~pid << 3) | 2)  # clock_getcpuclockid(3)
    except OSError:  # it ended meanwhile
        return 0.0


def _memory_bytes(pid: int) -> int:
    """Anonymous and shared memory that is resident; files are not counted."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it ended meanwhile
        return 0
    return sum(
        1024 * int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))
    )
