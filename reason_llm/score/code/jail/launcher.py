"""Runs untrusted programs one after another, each behind its own walls. Started by
``sandbox.py``, one process for each worker; talks JSON with it through stdin and stdout.

    launcher            builds the root once, reads requests; outside: feeds, reads, counts
      fork server       a warm Python inside the root; holds nothing of any request
        init            process 1 of the program's namespaces: when it ends, all in there end
          the program   a fork of that Python without privileges

A request with ``serve`` is the last one: its program takes over stdin and stdout, and limits the
calls that it makes itself (``check_server.py``).
"""

import json
import os
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from . import isolation
from .fork_server import descendants

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
_CODE = Path(__file__).parents[1]
"""The folder in which the fork server finds this package."""
_FORK = """
with __import__("jail.fork_server", fromlist=["main"]).main() as _program:
    exec(compile(*globals().pop("_program")))
"""

Json = dict[str, Any]


def main() -> None:
    """Answer the requests on stdin until it ends, as it does when the other side dies."""
    setup = read(sys.stdin.buffer)
    if setup is None:
        return
    os.umask(0o022)  # these files are for the program's user, who is another one
    answers = os.dup(1)
    os.dup2(2, 1)
    change_to = setup["user"] if os.geteuid() == 0 else None
    try:
        if setup["isolated"]:
            change_to = isolation.build_root(setup["visible"], _CODE, setup["user"])
        server = _ForkServer(setup, change_to)
        write(answers, {"ready": True})
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        write(answers, {"error": where + (error.strerror or str(error))})
        return
    while (request := read(sys.stdin.buffer)) is not None:
        if request.get("serve"):
            nothing = os.open(os.devnull, os.O_RDWR)
            _, reported = server.start(request, [0, answers, nothing])
            os.read(reported, 1)  # nothing comes before its end
            return
        write(answers, _Supervisor(server, request).run())


def read(stream: BinaryIO) -> Json | None:
    """A message; None at the end."""
    head = stream.read(8)
    if len(head) < 8:
        return None
    message: Json = json.loads(stream.read(struct.unpack("<Q", head)[0]))
    return message


def write(descriptor: int, message: Json) -> None:
    """Write a message after its length."""
    body = json.dumps(message).encode()
    write_all(descriptor, struct.pack("<Q", len(body)) + body)


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    unsent = memoryview(data)
    while unsent:
        unsent = unsent[os.write(descriptor, unsent) :]


class _ForkServer:
    """The process that starts programs.

    Args:
        change_to: id of the user that programs run under; None: this one.

    Raises:
        OSError: it does not start.
    """

    def __init__(self, setup: Json, change_to: int | None) -> None:
        self.channel, its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if os.fork() == 0:
            self._become(setup, its_end)
        its_end.close()
        first = {"isolated": setup["isolated"], "user": change_to, "imports": setup["imports"]}
        self.channel.send(json.dumps(first).encode())
        if (answer := self.channel.recv(1 << 12)) != b"ready":
            raise OSError(answer.decode() or "the fork server ended as it started")

    def _become(self, setup: Json, channel: socket.socket) -> NoReturn:
        try:
            os.dup2(channel.fileno(), 0)
            for number in (1, 2):  # a program's are pipes too; nobody reads these
                os.dup2(os.pipe()[1], number)
            isolation.limit_fork_server()
            if setup["isolated"]:
                isolation.enter_root()
            else:
                os.chdir(_CODE)
            environment = {**_ENVIRONMENT, **setup["environment"]}
            os.execve(setup["python"], [setup["python"], "-s", "-S", "-c", _FORK], environment)
        except BaseException as error:  # noqa: BLE001 - this process must never return
            channel.send(f"{type(error).__name__}: {error}".encode())
        os._exit(127)

    def start(self, request: Json, standard: list[int]) -> tuple[int, int]:
        """Start a program with these streams, which are closed here.

        Returns:
            Process id of its init, and a descriptor to read how it ended.
        """
        reported, report = os.pipe()
        orders, to_init = os.pipe()
        streams = [*standard, report, orders]
        scratch_bytes = request["orders"]["limits"]["file_bytes"]
        socket.send_fds(self.channel, [str(scratch_bytes).encode()], streams)
        for descriptor in streams:
            os.close(descriptor)
        init = int(self.channel.recv(16))
        # Only now: the fork server, and what it forks next, have seen nothing of it.
        with suppress(BrokenPipeError):  # its report says why
            write_all(to_init, json.dumps(request["orders"]).encode())
        os.close(to_init)
        return init, reported

    def end(self) -> None:
        """End what was started; nothing of it is left."""
        self.channel.send(b"end")
        if self.channel.recv(16) != b"ended":
            raise EOFError


class _Supervisor:
    """Watches one program from outside until nothing of it is left."""

    def __init__(self, server: _ForkServer, request: Json) -> None:
        (stdin, self.stdin), (self.stdout, out), (self.stderr, err) = (os.pipe() for _ in range(3))
        self.server = server
        self.limits: dict[str, Any] = request["orders"]["limits"]
        self.unsent = memoryview(request["stdin"].encode(errors="replace"))
        self.output: dict[int, bytearray] = {self.stdout: bytearray(), self.stderr: bytearray()}
        self.num_output_bytes = 0
        self.init, self.status = server.start(request, [stdin, out, err])
        self.started = time.monotonic()

    def run(self) -> Json:
        """The answer: status, output, limit; or the error of a wall."""
        os.set_blocking(self.stdin, False)
        limit, report = self._watch()
        self.server.end()
        for descriptor in self.output:
            while self._take(descriptor):
                pass
            os.close(descriptor)
        os.close(self.status)
        self._close_stdin()
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
        """The limit that was hit, if any, and the report of init."""
        poller = select.poll()
        for descriptor in (self.stdout, self.stderr, self.status):
            poller.register(descriptor, select.POLLIN)
        if self.unsent:
            poller.register(self.stdin, select.POLLOUT)
        else:
            self._close_stdin()
        next_count = self.started + _POLL_SECONDS
        while True:
            for descriptor, _ in poller.poll(_POLL_SECONDS * 1000):
                if descriptor == self.status:
                    return None, os.read(self.status, 1 << 16)
                if descriptor == self.stdin:
                    if not self._feed():
                        poller.unregister(self.stdin)
                        self._close_stdin()
                elif not self._take(descriptor):
                    poller.unregister(descriptor)
            # Checked after each read: a program that prints without end never leaves the poll idle.
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

    def _close_stdin(self) -> None:
        if self.stdin >= 0:
            os.close(self.stdin)
        self.stdin = -1

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
        buffer = self.output[descriptor]
        buffer += data
        if descriptor == self.stdout:
            del buffer[self.limits["output_bytes"] :]
        else:
            del buffer[:-_ERROR_BYTES]  # the end of a traceback is the most useful part
        return bool(data)

    def _count(self) -> str | None:
        pids = descendants(self.init)
        if len(pids) > self.limits["processes"] + 1:
            return "processes"
        if any(_cpu_seconds(pid) > self.limits["cpu_seconds"] for pid in pids):
            return "cpu"
        used = sum(map(_memory_bytes, pids))
        return "memory" if used > self.limits["memory_bytes"] else None


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
