"""The sandbox's walls: a program sees and reaches no file, process, network or privilege of the
host."""

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from code_rewards import AMPLE, says_no
from conftest import ROOT as PROJECT
from reason_llm.score.code.sandbox import Sandbox

# --- files


@pytest.mark.parametrize(
    "path",
    [
        *("/etc/passwd", "/etc/shadow", "/proc/1/environ", "/proc/self/environ", "/proc/mounts"),
        *("/sys/kernel", "/dev/kmsg", "/dev/mem", "/dev/sda", "/home", "/var", "/run"),
        *("/../../etc/passwd", str(PROJECT / "README.md"), str(Path.home() / ".bashrc")),
        str(PROJECT / "reason_llm"),
    ],
)
def test_the_hosts_files_are_not_there(sandbox: Sandbox, path: str) -> None:
    assert "No such file" in says_no(sandbox, f"os.stat({path!r})").stdout


def test_only_what_a_program_needs_can_be_seen(sandbox: Sandbox) -> None:
    ended = sandbox.run("import os; print(os.listdir('/dev'), os.listdir('/etc'))")
    assert ended.stdout in (
        f"{devices} {etc}\n"
        for devices in [sandbox.run("import os; print(os.listdir('/dev'))").stdout.strip()]
        for etc in ("['ld.so.cache']", "[]")
    )
    assert "kmsg" not in ended.stdout


def test_the_projects_files_cannot_be_written_or_deleted(sandbox: Sandbox, tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    mine.chmod(0o666)
    tmp_path.chmod(0o777)
    says_no(sandbox, f"open({str(mine)!r}, 'w')")
    says_no(sandbox, f"os.remove({str(mine)!r})")
    says_no(sandbox, "open(os.__file__, 'a')")
    says_no(sandbox, "os.remove(sys.executable)")
    says_no(sandbox, "os.mkdir('/new')")
    assert mine.read_text() == "mine"
    assert Path(os.__file__).exists()


def test_nothing_that_can_be_seen_can_be_changed(sandbox: Sandbox) -> None:
    """Each mount is read-only, and so is what lies at its top: how much lies below does not count,
    as that differs from one machine to another. ``/dev/shm`` is ``/tmp`` by another name, which is
    the program's own, and is counted and gone with it."""
    program = (
        "import itertools, os\n"
        "tops = ['/' + name for name in os.listdir('/') if name != 'tmp']\n"
        "tops += [top + '/' + name for top in tops if os.path.isdir(top)\n"
        "         for name in itertools.islice(os.listdir(top), 50)]\n"
        "tops = [top for top in tops if os.path.realpath(top) != '/tmp']  # /dev/shm\n"
        "changed = [top for top in tops if os.path.lexists(top) and not os.path.islink(top)\n"
        "           and not os.statvfs(top).f_flag & os.ST_RDONLY]\n"
        "def attempt(function, *arguments):\n"
        "    try: function(*arguments)\n"
        "    except OSError: return\n"
        "    changed.append((function.__name__, *arguments))\n"
        "for top in tops:\n"
        "    attempt(os.remove, top)\n"
        "    attempt(os.rmdir, top)\n"
        "    attempt(os.rename, top, top + '_')\n"
        "    attempt(os.chmod, top, 0o777)\n"
        "    attempt(os.mkdir, top + '/new')\n"
        "print(len(tops) > 10, changed)\n"
    )
    assert sandbox.run(program, limits=AMPLE).stdout == "True []\n"


def test_nothing_is_left_for_the_next_program(sandbox: Sandbox) -> None:
    sandbox.run("open('/tmp/left', 'w').write('x'); open('left', 'w').write('x')")
    assert sandbox.run("import os; print(os.listdir('/tmp'))").stdout == "['program.py']\n"


def test_no_descriptor_of_the_host_is_inherited(sandbox: Sandbox) -> None:
    program = (
        "import os\n"
        "found = []\n"
        "for n in range(1000):\n"
        "    try: os.fstat(n); found.append(n)\n"
        "    except OSError: pass\n"
        "print(found)\n"
    )
    assert sandbox.run(program).stdout == "[0, 1, 2]\n"


def test_the_environment_of_the_host_is_not_there(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_KEY", "hidden")
    with Sandbox("auto", num_workers=1) as own:
        names = own.run("import os; print(*sorted(os.environ))").stdout.split()
    assert names == [
        *("HOME", "LANG", "LD_LIBRARY_PATH", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PATH"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONPATH", "PYTHONUTF8"),
    ]


# --- other processes, the network, privileges


def test_a_socket_cannot_be_opened(sandbox: Sandbox) -> None:
    for family in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET", "AF_VSOCK"):
        says_no(sandbox, f"socket.socket(socket.{family}, socket.SOCK_DGRAM)")
    says_no(sandbox, "socket.create_connection(('127.0.0.1', 80), 1)")
    says_no(sandbox, "socket.getaddrinfo('example.org', 80)")


def test_the_parent_cannot_be_killed(sandbox: Sandbox) -> None:
    program = (
        "import os, signal\n"
        "for number in (9, 15, 2, 19, 11):\n"
        "    os.kill(os.getppid(), number)\n"
        "    os.kill(1, number)\n"
        "try: os.kill(-1, 9)\n"
        "except ProcessLookupError: pass\n"
        "print('alive', os.getppid(), os.getpgid(0) == os.getpid())\n"
    )
    ended = sandbox.run(program, limits=AMPLE)
    assert (ended.stdout, ended.status) == ("alive 1 True\n", 0)
    says_no(sandbox, f"os.kill({os.getpid()}, 9)")


def test_a_daemon_ends_with_its_program(sandbox: Sandbox) -> None:
    program = (
        "import os, signal, time\n"
        "incoming, outgoing = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        for number in (1, 2, 13, 15): signal.signal(number, signal.SIG_IGN)\n"
        "        while True:\n"
        "            os.write(1, b'.')\n"
        "            os.write(outgoing, b'.')\n"
        "            time.sleep(0.01)\n"
        "    os._exit(0)\n"
        "os.wait()\n"
        "os.read(incoming, 1)\n"
    )
    ended = sandbox.run(program, limits=AMPLE)
    assert ended.stdout.startswith(".")
    assert (ended.status, ended.limit) == (0, None)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the numbers are of x86_64")
def test_the_kernel_refuses_what_no_program_needs(sandbox: Sandbox) -> None:
    """By number; a program that the filter lets through is told of its arguments instead."""
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
refused = (
    165, 166, 155, 161, 272, 308, 101, 310, 311, 312, 321, 298, 323, 248, 249, 250, 303, 304, 319,
    29, 68, 64, 103, 163, 135, 425, 426, 427, 428, 429, 430, 431, 432, 433, 438, 442, 447,
)
print([n for n in refused if (libc.syscall(n, 0, 0, 0, 0, 0, 0), ctypes.get_errno()) != (-1, 1)])
"""
    assert sandbox.run(program).stdout == "[]\n"


def test_the_kernel_holds_every_limit(sandbox: Sandbox) -> None:
    program = """
import resource
for name in "CPU AS NPROC FSIZE STACK NOFILE CORE MEMLOCK MSGQUEUE".split():
    print(*resource.getrlimit(getattr(resource, f"RLIMIT_{name}", 12)))
"""
    limits = replace(AMPLE, memory_bytes=1 << 30)
    wanted = [61, 1 << 30, 12, 8 << 20, 64 << 20, 128, 0, 0, 0]
    found = sandbox.run(program, limits=limits).stdout
    assert found == "".join(f"{value} {value}\n" for value in wanted)
    found = sandbox.run(program, limits=replace(limits, memory_bytes=48 << 20)).stdout
    assert found.splitlines()[4] == f"{48 << 20} {48 << 20}"


@pytest.mark.parametrize(
    "call",
    [
        "call('unshare', 0x10000000)",
        "call('unshare', 0x00020000)",
        "call('mount', b'none', b'/tmp', b'tmpfs', 0, None)",
        "call('umount2', b'/tmp', 2)",
        "call('chroot', b'/tmp')",
        "call('ptrace', 16, 1, 0, 0)",
        "call('syscall', 56, 0x10000000 | 17, 0, 0, 0, 0)",
        "call('syscall', 435, 0, 0)",
        "call('syscall', 0x40000000 | 39)",
        "call('syscall', 250, 0, -3, 1)",
        "os.setuid(0)",
        "os.setgroups([0])",
        "os.nice(-5)",
        "os.mknod('/tmp/disk', 0o60600, os.makedev(254, 0))",
        "os.chown('/tmp/program.py', 0, 0)",
        "socket.sethostname('x')",
    ],
)
def test_a_privilege_cannot_be_had(sandbox: Sandbox, call: str) -> None:
    says_no(sandbox, call)
