"""Hostile programs in the real sandbox: each ends within its limits, the host is unharmed, nothing
of it is left, and the next program runs as if it had never been."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from code_rewards import AMPLE, says_no
from conftest import ROOT, descendants, is_alive, until
from reason_llm import workers
from reason_llm.errors import ConfigError
from reason_llm.score.code import sandbox as sandbox_module
from reason_llm.score.code.jail import isolation
from reason_llm.score.code.sandbox import Sandbox, SandboxError

ONE_CPU_SECOND = replace(AMPLE, cpu_seconds=1)
BRIEF = replace(AMPLE, wall_seconds=0.5)


def is_asleep_program(pid: int) -> bool:
    """A program in the sandbox, not one of those that watch it: the second process of its
    namespace."""
    try:
        return "\t2\n" in Path(f"/proc/{pid}/status").read_text().partition("\nNSpid:")[2][:40]
    except OSError:
        return False


def programs() -> list[int]:
    """The programs that run in this process's sandboxes, those ending among them."""
    return [pid for pid in descendants(os.getpid()) if is_asleep_program(pid)]


def kill_programs_but(others: set[int]) -> None:
    """Kill those that this test began, one that has answered and is not buried yet among them."""
    for program in set(programs()) - others:
        with suppress(ProcessLookupError):
            os.kill(program, signal.SIGKILL)


# --- what must work


def test_a_program_gets_its_input(sandbox: Sandbox) -> None:
    ended = sandbox.run("import sys; print(input()); sys.exit(3)", stdin="ä\n")
    assert (ended.stdout, ended.status, ended.limit) == ("ä\n", 3, None)


def test_a_program_is_main_and_starts_with_an_empty_namespace(sandbox: Sandbox) -> None:
    ended = sandbox.run("print(__name__, sorted(n for n in globals() if n[0] != '_'))")
    assert ended.stdout == "__main__ []\n"


def test_a_traceback_is_kept(sandbox: Sandbox) -> None:
    ended = sandbox.run("x = 1\n1 / 0\n")
    assert ended.status == 1
    assert 'program.py", line 2' in ended.stderr
    assert ended.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_a_thousand_levels_of_recursion_work(sandbox: Sandbox) -> None:
    program = "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\nprint(f(1000))\n"
    assert sandbox.run(program).stdout == "1000\n"
    endless = sandbox.run("def f():\n    return f()\nf()\n")
    assert "RecursionError" in endless.stderr


def test_threads_processes_and_numpy_work(sandbox: Sandbox) -> None:
    program = (
        "import subprocess, sys, threading, numpy\n"
        "t = threading.Thread(target=lambda: print(numpy.arange(3).sum(), flush=True))\n"
        "t.start(); t.join()\n"
        "print(subprocess.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)\n"
    )
    assert sandbox.run(program).stdout == "3\nb'1\\n'\n"


def test_the_same_program_prints_the_same(sandbox: Sandbox) -> None:
    outputs = {sandbox.run("print({'a', 'b', 'c', 'd', 'e'})").stdout for _ in range(3)}
    assert len(outputs) == 1


def test_many_run_at_once_and_do_not_wait_for_each_other(sandbox: Sandbox) -> None:
    others = set(programs())  # such as a server of checkers, or one that is just ending
    with ThreadPoolExecutor(8) as threads:
        slow = threads.submit(sandbox.run, "import time\nwhile True: time.sleep(1)", limits=AMPLE)
        outputs = list(threads.map(lambda n: sandbox.run(f"print({n})").stdout, range(20)))
        assert not slow.done()
        assert outputs == [f"{n}\n" for n in range(20)]
        assert until(lambda: kill_programs_but(others) or slow.done())
        assert (slow.result().status, slow.result().limit) == (-9, None)


def test_a_launcher_that_died_is_replaced(sandbox: Sandbox) -> None:
    for launcher in descendants(os.getpid()):
        with suppress(ProcessLookupError):  # a program that has ended since
            os.kill(launcher, 9)
    assert sandbox.run("print(1)").stdout == "1\n"


@pytest.mark.parametrize("which", [0, 1, 2], ids=["size", "body", "next size"])
def test_an_interrupt_costs_no_later_program(monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """The answer that nobody waited for is not taken for the next program's."""
    main, read, waited = threading.main_thread(), workers._read_exactly, threading.Event()
    reads = count()

    def interrupted(*arguments: Any) -> bytes:
        if next(reads) == which:
            signal.pthread_kill(main.ident or 0, signal.SIGINT)
            waited.wait(300)
        return read(*arguments)

    with Sandbox("auto", 1) as sandbox:
        monkeypatch.setattr(workers, "_read_exactly", interrupted)
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                for n in range(2):
                    sandbox.run(f"print({n})")
        finally:
            signal.signal(signal.SIGINT, before)
            waited.set()
        assert [sandbox.run(f"print({n})").stdout for n in "78"] == ["7\n", "8\n"]


def test_a_late_answer_is_no_later_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launcher that does not answer in time, twice; the start between reads two parts."""
    read, is_late = workers._read_exactly, iter([True, False, False, True])

    def late(*arguments: Any) -> bytes:
        if next(is_late, False):
            raise TimeoutError
        return read(*arguments)

    with Sandbox("auto", 1) as sandbox:
        monkeypatch.setattr(workers, "_read_exactly", late)
        with pytest.raises(SandboxError, match="does not answer"):
            sandbox.run("print(1)")
        assert next(is_late, None) is None
        assert sandbox.run("print(2)").stdout == "2\n"


def test_closing_ends_what_runs_and_may_be_repeated() -> None:
    made = Sandbox("auto", num_workers=1)
    (launcher,) = made._pool.workers
    with ThreadPoolExecutor(1) as threads:
        runs = threads.submit(made.run, "while True: pass", limits=replace(AMPLE, cpu_seconds=600))
        process = launcher._process
        assert process is not None
        assert until(lambda: any(map(is_asleep_program, descendants(process.pid))))
        made.close()
        with pytest.raises(SandboxError):
            runs.result(300)
    made.close()
    with pytest.raises(SandboxError, match="the sandbox is closed"):
        made.run("print(1)")
    assert launcher._process is None


def test_launchers_outlive_the_thread_that_started_them() -> None:
    with Sandbox("auto", num_workers=3) as own:
        workers = own._pool.workers

        def all_are_started() -> bool:
            with ThreadPoolExecutor(3) as threads:
                list(threads.map(lambda n: own.run("import time; time.sleep(0.1)"), range(3)))
            return all(each._process for each in workers)

        assert until(all_are_started)
        launchers = [each._process.pid for each in workers]
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(lambda n: own.run("pass"), range(3)))
        assert [each._process.pid for each in workers] == launchers


def test_launchers_end_when_the_run_is_killed() -> None:
    code = (
        "import os\n"
        "from reason_llm.score.code.sandbox import Sandbox\n"
        "made = Sandbox('auto', num_workers=1)\n"
        "print(made._pool.workers[0]._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    (launcher,) = map(int, killed.stdout.split())
    assert until(lambda: not is_alive(launcher))


def test_what_runs_dies_with_its_launcher() -> None:
    others = set(programs())
    with Sandbox("auto", num_workers=1) as own, ThreadPoolExecutor(1) as threads:
        launcher = own._pool.workers[0]._process.pid
        ended = threads.submit(own.run, "import time\nwhile True: time.sleep(1)", limits=AMPLE)
        assert until(lambda: any(map(is_asleep_program, descendants(launcher))))
        # The program that the sandbox began with may not be buried yet.
        assert until(lambda: len(descendants(launcher)) == 3)
        running = descendants(launcher)
        os.kill(launcher, 9)
        assert until(lambda: not any(map(is_alive, running)))
        assert until(lambda: kill_programs_but(others) or ended.done())  # it is asked again
        assert ended.result().status == -9


# --- limits


@pytest.mark.parametrize(
    ("program", "limit"),
    [
        ("while True: pass", "cpu"),
        ("import time; time.sleep(100)", "time"),
        ("input()\nwhile True: print('x' * 1000)", "output"),
        ("input()\nimport sys\nwhile True: sys.stdout.write('x' * 1000)", "output"),
        ("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
    ],
)
def test_an_endless_program_is_ended(sandbox: Sandbox, program: str, limit: str) -> None:
    limits = {"time": BRIEF, "cpu": ONE_CPU_SECOND, "output": AMPLE}[limit]
    ended = sandbox.run(program, stdin="go\n", limits=limits)
    assert (ended.limit, ended.status) == (limit, -9)
    assert len(ended.stdout) <= 1 << 20


def test_signals_may_be_caught_and_ignored(sandbox: Sandbox) -> None:
    program = (
        "import signal, time\n"
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\n"
    )
    spinning = sandbox.run(
        program + "while True:\n try:\n  while True: pass\n except: pass\n", limits=ONE_CPU_SECOND
    )
    assert (spinning.limit, spinning.status) == ("cpu", -9)
    sleeping = sandbox.run(program + "while True: time.sleep(1)\n", limits=BRIEF)
    assert (sleeping.limit, sleeping.status) == ("time", -9)


def test_a_fork_bomb_stays_within_its_processes(sandbox: Sandbox) -> None:
    polite = (
        "import os, time\nn = 0\n"
        "try:\n"
        "    while n < 1000:\n"
        "        if os.fork() == 0: time.sleep(100)\n"
        "        n += 1\n"
        "except OSError as error: print(n <= 12, error.errno)\n"
    )
    assert sandbox.run(polite, limits=AMPLE).stdout == "True 11\n"
    bomb = "import os\nwhile True:\n try: os.fork()\n except OSError: pass\n"
    assert sandbox.run(bomb, limits=BRIEF).limit == "time"


def test_a_thread_bomb_stays_within_its_processes(sandbox: Sandbox) -> None:
    program = (
        "import threading, time\nn = 0\n"
        "try:\n"
        "    while n < 1000: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()"
        "; n += 1\n"
        "except RuntimeError as error: print(n <= 12, error)\n"
    )
    assert sandbox.run(program, limits=AMPLE).stdout == "True can't start new thread\n"


@pytest.mark.parametrize("statement", ["b'x' * (1 << 30)", "[0] * (1 << 28)"])
def test_one_process_cannot_take_more_memory(sandbox: Sandbox, statement: str) -> None:
    ended = sandbox.run(f"a = {statement}", limits=AMPLE)
    assert ended.status == 1
    assert "MemoryError" in ended.stderr


def test_all_processes_together_cannot_take_more_memory(sandbox: Sandbox) -> None:
    program = (
        "import os, time\nfor _ in range(8): os.fork()\na = bytearray(60 << 20)\ntime.sleep(99)\n"
    ).replace("range(8)", "range(3)")
    assert sandbox.run(program, limits=AMPLE).limit == "memory"


@pytest.mark.parametrize(
    "name", ["memfd_create(b'x', 0)", "shmget(0, 1 << 30, 0o1600)", "msgget(0, 0o1600)"]
)
def test_memory_that_nobody_counts_cannot_be_had(sandbox: Sandbox, name: str) -> None:
    function, _, arguments = name.partition("(")
    says_no(sandbox, f"call('{function}', {arguments}")


def test_tmp_can_be_filled_and_is_empty_again(sandbox: Sandbox) -> None:
    program = (
        "for n in range(10):\n"
        "    with open(f'/tmp/{n}', 'wb') as file: file.write(b'x' * (4 << 20))\n"
    )
    ended = sandbox.run(program, limits=AMPLE)
    assert "No space left on device" in ended.stderr
    inodes = "for n in range(10**6): open(f'/tmp/{n}', 'w').close()"
    assert "No space left on device" in sandbox.run(inodes, limits=AMPLE).stderr


def test_one_file_cannot_grow_without_end(sandbox: Sandbox) -> None:
    ended = sandbox.run("open('/tmp/x', 'wb').truncate(1 << 40)", limits=AMPLE)
    assert "File too large" in ended.stderr


def test_limits_cannot_be_raised(sandbox: Sandbox) -> None:
    for name in ("RLIMIT_CPU", "RLIMIT_AS", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_NOFILE"):
        says_no(sandbox, f"resource.setrlimit(resource.{name}, (-1, -1))")


def test_input_that_is_not_read_does_no_harm(sandbox: Sandbox) -> None:
    ended = sandbox.run("print(1)", stdin="x" * (8 << 20), limits=AMPLE)
    assert (ended.stdout, ended.limit) == ("1\n", None)
    asleep = sandbox.run("import time; time.sleep(9)", stdin="x" * (8 << 20), limits=BRIEF)
    assert asleep.limit == "time"


def test_zombies_are_buried(sandbox: Sandbox) -> None:
    program = (
        "import os, time\n"
        "def fork():\n"
        "    while True:\n"
        "        try: return os.fork()\n"
        "        except BlockingIOError: time.sleep(0.01)\n"  # until init has had the processor
        "for _ in range(400):\n"
        "    if fork() == 0:\n"
        "        if fork() == 0: os._exit(0)\n"  # orphaned: init's to bury
        "        os._exit(0)\n"
        "    os.wait()\n"
        "print('done')\n"
    )
    assert sandbox.run(program, limits=AMPLE).stdout == "done\n"


# --- what comes out


def test_standard_output_may_be_closed_or_replaced(sandbox: Sandbox) -> None:
    ended = sandbox.run("import os, sys; print(1, flush=True); os.close(1); os.close(2)")
    assert ended.stdout == "1\n"
    replaced = sandbox.run("import io, sys; sys.stdout = io.StringIO(); print('gone')")
    assert (replaced.stdout, replaced.status) == ("", 0)
    assert sandbox.run("import os; os.close(0); os.close(1); os.close(2)").status == 0


def test_output_need_be_neither_text_nor_lines(sandbox: Sandbox) -> None:
    ended = sandbox.run("import os; os.write(1, b'a\\xff\\xfe\\x00b')")
    assert ended.stdout == "a\ufffd\ufffd\x00b"
    assert sandbox.run("print('x' * 10**6, end='')", limits=AMPLE).stdout == "x" * 10**6


def test_what_is_sent_need_be_neither(sandbox: Sandbox) -> None:
    assert sandbox.run("print(repr(input()))", stdin="\ud800").stdout == "'?'\n"
    assert sandbox.run("print('\ud800')").stdout == "?\n"
    assert "null bytes" in sandbox.run("print(1)\x00").stderr


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("import os; os._exit(0)", 0),
        ("import os; os.abort()", -6),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import ctypes; ctypes.string_at(0)", -11),
        ("def f(:", 1),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
    ],
)
def test_the_status_tells_how_it_ended(sandbox: Sandbox, program: str, status: int) -> None:
    ended = sandbox.run(program)
    assert (ended.status, ended.limit) == (status, None)


# --- without walls


def test_limits_only_has_limits_and_says_so(tmp_path: Path) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    with Sandbox("limits_only", num_workers=1) as own:
        assert "limits only" in own.description
        assert own.run("print(input())", stdin="1\n").stdout == "1\n"
        assert own.run("while True: pass", limits=ONE_CPU_SECOND).limit == "cpu"
        assert own.run("import time; time.sleep(100)", limits=BRIEF).limit == "time"
        assert own.run("while True: print('x' * 1000)", limits=AMPLE).limit == "output"
        assert "MemoryError" in own.run("b'x' * (1 << 30)", limits=AMPLE).stderr
        assert own.run("import os; print('SECRET' in os.environ)").stdout == "False\n"
        assert own.run("print(open('program.py').read()[:5])").stdout == "print\n"
        bomb = (
            "import os, time\nn = 0\n"
            "try:\n"
            "    while n < 100:\n"
            "        if os.fork() == 0: time.sleep(100)\n"
            "        n += 1\n"
            "except OSError as error: print(n <= 12)\n"
        )
        if os.geteuid() == 0:
            assert own.run(bomb, limits=AMPLE).stdout == "True\n"
            assert own.run(f"open({str(mine)!r}, 'w')").status == 1
        assert "not permitted" in own.run("import socket; socket.socket()").stderr
        daemon = (
            "import os, time\n"
            "if os.fork() == 0:\n    os.setsid()\n"
            "    while True: time.sleep(1)\n"
        )  # fmt: skip
        assert own.run(daemon).status == 0
        launcher = own._pool.workers[0]._process.pid
        assert until(lambda: len(descendants(launcher)) == 1)  # its fork server


def test_where_isolation_cannot_be_had_it_is_refused() -> None:
    """In a process that may make no namespaces, as in many containers."""
    code = (
        "import ctypes\n"
        "from reason_llm.errors import ConfigError\n"
        "from reason_llm.score.code.jail import seccomp\n"
        "from reason_llm.score.code.sandbox import Sandbox\n"
        "ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)\n"
        "seccomp.install(seccomp.compiled())\n"
        "try: Sandbox('auto', num_workers=1)\n"
        "except ConfigError as error: print(error)\n"
        "with Sandbox('limits_only', num_workers=1) as own: print(own.run('print(1)').stdout)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    message, one = shown.stdout.splitlines()[:2]
    assert one == "1"
    for part in (
        "score.sandbox=auto: programs cannot be isolated here (unshare: Operation not",
        "userns",
        "score.sandbox=limits_only",
    ):
        assert part in message


def test_the_refusal_names_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, request: object) -> None:
        raise SandboxError("mount_setattr: Function not implemented")

    monkeypatch.setattr(sandbox_module.Launcher, "run", fail)
    with pytest.raises(ConfigError) as caught:
        Sandbox("auto", num_workers=1)
    assert str(caught.value) == (
        "score.sandbox=auto: programs cannot be isolated here (mount_setattr: Function not "
        "implemented); allow user namespaces (sysctl -a | grep userns; Linux 5.12 or later), or "
        "set score.sandbox=limits_only if every program is trusted"
    )


def test_a_path_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_module, "_packages", lambda: {"numpy": Path("/nowhere/numpy")})
    with pytest.raises(ConfigError, match="/nowhere/numpy"):
        Sandbox("auto", num_workers=1)


# --- where Python, its packages and the project lie

INSIDE = """
import sys, os, sortedcontainers
print(sys.executable, sortedcontainers.__file__, sortedcontainers.WHERE)
print(sorted(set(os.listdir('/')) - {'lib', 'lib32', 'lib64', 'usr', 'etc', 'dev'}))
print(os.listdir('/tmp'))
"""


def copied_python(place: Path) -> Path:
    """A copy of the Python that runs this, as far as programs need it."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    (place / "bin").mkdir(parents=True)
    shutil.copy2((base / "bin" / version).resolve(), place / "bin" / version)
    ignored = shutil.ignore_patterns(
        *("test", "tests", "site-packages", "dist-packages", "idlelib", "ensurepip", "tkinter"),
        *("__pycache__", "config-*"),
    )
    own, copied = base / "lib" / version, place / "lib" / version
    shutil.copytree(own, copied, ignore=ignored, ignore_dangling_symlinks=True)
    for library in (base / "lib").glob("libpython*.so*"):  # of a Python built with --enable-shared
        shutil.copy2(library, place / "lib" / library.name)
    return place / "bin" / version


@pytest.mark.parametrize("where", ["tmp", "link", "memory"])
def test_python_and_the_project_may_lie_anywhere(where: str, tmp_path: Path) -> None:
    """Under ``/tmp``, behind a link, on another file system: a clone, its environment and the
    Python itself."""
    memory = Path("/dev/shm")
    if where == "memory" and not (memory.is_dir() and os.access(memory, os.W_OK)):
        pytest.skip("no file system in memory")
    place = tmp_path / "place"
    if where == "memory":
        place = memory / f"reason_llm-test-{os.getpid()}"
    place.mkdir()
    try:
        shown = place
        if where == "link":
            shown = tmp_path / "link"
            shown.symlink_to(place)
        python = copied_python(shown / "python")
        packages = shown / "venv" / "site-packages"
        (packages / "sortedcontainers").mkdir(parents=True)
        (packages / "sortedcontainers" / "__init__.py").write_text("WHERE = 'here'")
        compiled = shutil.ignore_patterns("__pycache__")  # other workers write there meanwhile
        shutil.copytree(ROOT / "reason_llm", shown / "clone" / "reason_llm", ignore=compiled)
        paths = [str(packages), str(shown / "clone"), *sys.path]
        code = (
            f"import sys; sys.path[:0] = {paths!r}\n"
            "from reason_llm.score.code import sandbox\n"
            f"assert sandbox.__file__.startswith({str(shown)!r})\n"
            f"assert sys.base_prefix.startswith({str(shown)!r}), sys.base_prefix\n"
            "sandbox.sysconfig.get_path = lambda name: '/nowhere'\n"
            "with sandbox.Sandbox('auto', num_workers=1) as own:\n"
            f"    print(own.run({INSIDE!r}))\n"
        )
        ended = subprocess.run([python, "-c", code], capture_output=True, text=True)
        assert ended.stderr == ""
        assert f"stdout={expected_inside()!r}" in ended.stdout
    finally:
        shutil.rmtree(place)


def expected_inside() -> str:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"{isolation.PYTHON}/bin/{version} {isolation.PACKAGES}/sortedcontainers/__init__.py here\n"
        "['packages', 'python', 'tmp']\n['program.py']\n"
    )
