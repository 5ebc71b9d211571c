"""Runs Python programs that a model wrote, all of which are treated as hostile.

With ``score.sandbox: auto`` there is no network, no file of the host but the system's libraries,
this Python and a few packages, no process, environment or privilege of the host, and limits on
time, memory, processes, files and output. Not covered: holes in the kernel, side channels, the
machine's speed. With ``limits_only`` the limits alone remain: programs run as this user.
"""

import os
import sys
import sysconfig
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self

from reason_llm.errors import ConfigError
from reason_llm.score.code.jail import isolation, seccomp
from reason_llm.workers import Died, Pool, Worker

Mode = Literal["auto", "limits_only"]
Limit = Literal["time", "cpu", "memory", "processes", "output"]

PACKAGES = ("numpy", "numpy.libs", "scipy", "scipy.libs", "sympy", "mpmath", "networkx",
            "sortedcontainers")  # fmt: skip
"""Packages that are visible to programs, if they are installed."""

WARM = (
    *("array", "bisect", "collections.abc", "contextlib", "copy", "dataclasses", "datetime"),
    *("decimal", "fractions", "functools", "heapq", "itertools", "json", "math", "operator"),
    *("queue", "random", "re", "statistics", "string", "threading", "time", "typing"),
    "jail.function_harness",
)
"""Modules that are imported once, before any program is there."""

_FIRST_USER, _NUM_USERS = 61184, 4096  # a range that systemd hands out too, for moments
_GRACE_SECONDS = 10.0
_BOOTSTRAP = "import sys; sys.path.insert(0, {root!r}); " + (
    "from jail.launcher import main; main()"
)


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one program."""

    cpu_seconds: int = 6
    """CPU time of one process, in whole seconds."""
    wall_seconds: float = 12.0
    """Wall-clock time from start to end."""
    memory_bytes: int = 1 << 30
    """Address space of one process, and resident memory of all together."""
    processes: int = 32
    """Processes and threads at once."""
    file_bytes: int = 64 << 20
    """One file, and ``/tmp`` as a whole."""
    output_bytes: int = 16 << 20
    """Standard output and error together."""


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a program's run."""

    status: int
    """Exit code; the negative number of the signal that ended it."""
    stdout: str
    """Invalid UTF-8 is replaced by U+FFFD."""
    stderr: str
    """Its last 64 KiB."""
    limit: Limit | None
    """The limit at which the program was ended from outside; None if it ended without one."""


class SandboxError(Died):
    """The sandbox itself failed, twice; nothing is known of the program."""


class Sandbox:
    """A supervised pool of ``num_workers`` launchers; ``run`` may be called from many threads.

    ``with Sandbox("auto") as sandbox: sandbox.run("print(1)").stdout == "1\\n"``

    Raises:
        ConfigError: isolation is not available, and ``mode`` is ``auto``.
    """

    def __init__(self, mode: Mode = "auto", num_workers: int | None = None) -> None:
        self.num_workers = num_workers or min(os.cpu_count() or 1, 32)
        self._setup = setup_of(mode, _packages()) | {"imports": WARM}
        launchers = [Launcher(self._setup) for _ in range(self.num_workers)]
        self._pool = Pool("the sandbox", launchers)
        self.description = self._check(mode)

    def run(
        self,
        program: str,
        *,
        stdin: str = "",
        limits: Limits = Limits(),
        is_tester: bool = False,
    ) -> Finished:
        """Run ``python program.py`` in an empty folder and wait for its end, and for the end of all
        that it started. Blocks while all workers are busy.

        Args:
            stdin: its standard input; one that is not read does no harm.
            is_tester: run the tester of functions (``function_harness``) instead.

        Raises:
            SandboxError: it could not be run.
        """
        # Tests import the program as ``solution``.
        orders = {
            "files": {"solution.py" if is_tester else "program.py": program},
            "limits": asdict(limits),
            "module": "function_harness" if is_tester else None,
        }
        request = {"orders": orders, "stdin": stdin}
        return self._pool.call(lambda launcher: launcher.run(request))

    def close(self) -> None:
        """End the workers and whatever runs in them: ``run`` raises SandboxError."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _check(self, mode: Mode) -> str:
        """One line on what protects the host."""
        problem = self._problem()
        if problem is not None:
            self.close()
            raise refusal(mode, "program", problem)
        filtered = "seccomp filter" if seccomp.is_available() else "no seccomp filter"
        if mode == "limits_only":
            return f"code sandbox: limits only, {filtered}; programs can reach the host's files"
        return f"code sandbox: namespaces, {filtered}, {self.num_workers} workers"

    def _problem(self) -> str | None:
        """The reason why a first program does not run; None if it does."""
        if not sys.platform.startswith("linux"):
            return f"this is {sys.platform}, not Linux"
        try:
            ended = self.run("print('ready')")
        except SandboxError as error:
            return str(error)
        if ended.stdout == "ready\n":
            return None
        how = f"the {ended.limit} limit" if ended.limit else f"exit code {ended.status}"
        return f"a first program ended with {how}: {ended.stderr.strip()[-200:]}"


def refusal(mode: Mode, what: str, problem: str) -> ConfigError:
    """The error if programs cannot be isolated, or cannot run, on this machine."""
    advice = (
        f"isolated here ({problem}); allow user namespaces (sysctl -a | grep userns; Linux "
        "5.12 or later), or set score.sandbox=limits_only if every program is trusted"
    )
    if mode == "limits_only":
        advice = f"run here ({problem}); remove that cause"
    return ConfigError(f"score.sandbox={mode}: {what}s cannot be {advice}")


def setup_of(mode: Mode, packages: Mapping[str, Path], folders: int = 0) -> dict[str, Any]:
    """The first message to a launcher.

    Args:
        packages: files and folders that programs see, by name. Their Python finds modules in the
            folder of these names, and in those whose names are the first ``folders`` numbers.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    python = base / "bin" / version
    if not python.exists():
        python = Path(sys.executable)
    python = python.resolve()
    if mode == "limits_only":
        search_path = [packages[str(number)] for number in range(folders)]
        search_path += [path.parent for name, path in packages.items() if not name.isdecimal()]
        environment = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(map(str, search_path)))}
        return {"isolated": False, "python": str(python), "environment": environment}
    inside = isolation.PYTHON / "bin" / version
    libraries = {folder: base / folder for folder in ("lib", sys.platlibdir)}
    shown = {
        inside: python,
        **{isolation.PYTHON / name: path for name, path in libraries.items() if path.exists()},
        **{isolation.PACKAGES / name: path for name, path in packages.items()},
    }
    search_path = [isolation.PACKAGES / str(number) for number in range(folders)]
    search_path += [isolation.PACKAGES] if packages else []
    return {
        "isolated": True,
        "python": str(inside),
        "environment": {
            "PYTHONPATH": os.pathsep.join(map(str, search_path)),
            "LD_LIBRARY_PATH": str(isolation.PYTHON / "lib"),  # for a Python that is a library
        },
        "visible": {str(at): str(path.resolve()) for at, path in shown.items()},
    }


def _packages() -> dict[str, Path]:
    """Installed ``PACKAGES`` and their folders."""
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    shared = (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    folders = [Path(path) for path in (*installed, *shared)]
    visible = {
        name: next((path / name for path in folders if (path / name).is_dir()), None)
        for name in PACKAGES
    }
    return {name: path for name, path in visible.items() if path is not None}


class Launcher(Worker):
    """A launcher process, which imports ``jail`` and nothing else of the package.

    Args:
        setup: its first message, of ``setup_of``.
    """

    error = SandboxError

    def __init__(self, setup: dict[str, Any]) -> None:
        bootstrap = _BOOTSTRAP.format(root=str(Path(__file__).resolve().parent))
        super().__init__("the launcher", [sys.executable, "-I", "-S", "-B", "-c", bootstrap])
        self.setup = setup

    def run(self, request: dict[str, Any]) -> Finished:
        """Run a program; SandboxError if the launcher fails."""
        wait = request["orders"]["limits"]["wall_seconds"] + _GRACE_SECONDS
        if self.setup["isolated"]:
            return Finished(**self.exchange(request, wait))
        temporary = tempfile.TemporaryDirectory(prefix="reason_llm-", ignore_cleanup_errors=True)
        with temporary as folder:
            orders = {**request["orders"], "folder": folder}
            return Finished(**self.exchange({**request, "orders": orders}, wait))

    def start(self) -> None:
        """Start the process, up to the walls that all of its programs share."""
        try:
            super().start()
        except OSError as error:
            raise SandboxError(f"the launcher cannot be started: {error}") from error
        assert self._process is not None
        user = _FIRST_USER + self._process.pid % _NUM_USERS
        self.exchange({**self.setup, "user": user}, _GRACE_SECONDS)

    def exchange(self, message: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the answer to a message; SandboxError where it is an error, or there is none."""
        answer: dict[str, Any] = super().exchange(message, seconds)
        if "error" in answer:
            raise SandboxError(answer["error"])
        return answer
