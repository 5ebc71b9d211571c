"""Scoring functions that others wrote, called in the sandbox with text that a model wrote.

Checkers of published packages evaluate, parse and search such text as they like: those of the
reward ``gym``, of TRL, of a taskset. They are called in the jail of ``sandbox.py``: no network, no
file but the libraries and the installed packages, limits on time and memory. A worker imports a
package once (``jail/check_server.py``), so that a call costs no start of Python, and each call is
made in a fork, so that no answer changes how the next is scored. An answer that a checker evaluates
can still lie about its own reward.
"""

import base64
import hashlib
import importlib.util
import io
import logging
import math
import os
import pickle
import sys
import sysconfig
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import dill

from reason_llm.errors import printable
from reason_llm.score.code.jail import check_server
from reason_llm.score.code.sandbox import Launcher, Limits, Mode, SandboxError, refusal, setup_of
from reason_llm.workers import Pool, shared

log = logging.getLogger(__name__)
T = TypeVar("T")
CHECK_SECONDS = 5.0
"""Processor time of a call, without imports."""
IMPORT_SECONDS = 120.0
MAX_WORKERS = 8
_LIMITS = Limits(cpu_seconds=1 << 30, memory_bytes=4 << 30, file_bytes=1 << 20)
"""Limits of a worker over all its calls. Each call has a time limit of its own."""
_PACKAGES = ("site-packages", "dist-packages")


class CheckerError(RuntimeError):
    """A checker cannot be called at all: it needs what the sandbox lacks."""


class Checkers:
    """A pool of workers, started as they are needed. Usable from several threads at once.

    Args:
        mode: as of ``Sandbox``.
        modules: names of packages and modules that are visible, though they are not installed.
        num_workers: processes; None: one per CPU that this process may use, at most
            ``MAX_WORKERS``.

    Raises:
        ConfigError: isolation is not available, and ``mode`` is ``auto``.
    """

    def __init__(
        self, mode: Mode = "auto", modules: tuple[str, ...] = (), num_workers: int | None = None
    ) -> None:
        count = num_workers or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
        setup = _setup(mode, modules, _package_folders())
        self._pool = Pool("the pool of checkers", [_CallServer(setup) for _ in range(count)])
        self._lock = threading.Lock()
        self.num_failed = 0
        """Calls that raised or gave no numbers."""
        self.num_timed_out = 0
        try:
            self._pool.workers[0].start()
        except (SandboxError, OSError) as error:
            self.close()
            raise refusal(mode, "checker", str(error)) from error

    def call(
        self,
        subject: "Subject",
        arguments: tuple[Any, ...] = (),
        named: Mapping[str, Any] | None = None,
        *,
        read: Callable[[Any], T],
        method: str = "",
        seconds: float = CHECK_SECONDS,
    ) -> T | None:
        """Result of a function; None, and counted, if it raises, gives something else or takes
        too long.

        Args:
            read: takes a number, None, or a list or mapping of these, and raises ValueError where
                the result has another form.
            method: of the subject, which is called; empty: it is called itself.

        Raises:
            CheckerError: it cannot be imported there, or needs files, packages or a network.
        """
        content = base64.b64encode(_pickled((arguments, dict(named or {})))).decode()
        request = {"call": subject.key, "method": method, "arguments": content, "seconds": seconds}
        answer = self._answer(subject, request)
        if answer.get("of_walls"):
            raise CheckerError(
                f"{answer['problem']}; checkers of other packages have no network, no files but "
                "installed packages, and no further processes"
            )
        if "value" in answer:
            try:
                return read(answer["value"])
            except (TypeError, ValueError) as error:
                answer = {"problem": f"it gave {error}"}
        problem = answer.get("problem", f"it took longer than {seconds:g} s")
        # Only the first failure is logged: a policy can fail in one way thousands of times.
        with self._lock:
            is_first = not self.num_timed_out + self.num_failed
            self.num_timed_out += "limit" in answer
            self.num_failed += "problem" in answer
        if is_first:
            log.warning(
                f"a checker failed on what the model wrote ({printable(str(problem)):.200}); this "
                "counts 0, as score/errors and score/timeouts count all such answers"
            )
        return None

    def _answer(self, subject: "Subject", request: dict[str, Any]) -> dict[str, Any]:
        try:
            return self._pool.call(lambda worker: worker.ask(subject, request))
        except SandboxError as error:
            if self._pool.is_closed:
                raise CheckerError("the checkers are closed") from error
        return {"limit": "its worker's end"}

    def close(self) -> None:
        """End the workers and whatever runs in them."""
        self._pool.close()


def finite(value: Any) -> float:
    """A number that is finite; ValueError for anything else."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{str(value)[:60]!r}, which is not a finite number")
    return float(value)


class _Pickler(pickle.Pickler):
    """Writes classes that pydantic made of a generic one, which no module holds, by their parts."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce such a class to its origin and arguments; reduce other values as usual."""
        generic = getattr(value, "__pydantic_generic_metadata__", None)
        if isinstance(value, type) and generic and generic["origin"] is not None:
            return generic["origin"].__class_getitem__, (generic["args"],)
        return NotImplemented


def _pickled(value: Any) -> bytes:
    content = io.BytesIO()
    _Pickler(content).dump(value)
    return content.getvalue()


class Subject:
    """A function or an object whose method is called, as workers load it once each.

    Args:
        value: of installed packages and plain data, so that it can be pickled; a function that a
            factory made, as TRL's ``get_*``, is pickled by its code.
        is_maker: whether it is called without arguments, once, for the object that is meant.
    """

    def __init__(self, value: Any, is_maker: bool = False) -> None:
        try:
            content = _pickled(value)
        except (pickle.PicklingError, AttributeError):  # the latter up to Python 3.12
            content = dill.dumps(value)
        self.key = hashlib.sha256(content).hexdigest() + str(is_maker)
        self.request = {
            "prepare": self.key,
            "subject": base64.b64encode(content).decode(),
            "is_maker": is_maker,
        }


class _CallServer(Launcher):
    """A launcher whose one program is the server of calls."""

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._prepared: set[str] = set()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def ask(self, subject: Subject, request: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request."""
        if self._process is None:
            self.start()
        if subject.key not in self._prepared:
            answer = self.exchange(subject.request, IMPORT_SECONDS)
            if "problem" in answer:
                raise CheckerError(f"it cannot be loaded in the sandbox: {answer['problem']}")
            self._prepared.add(subject.key)
        wait = check_server.PATIENCE * request["seconds"] + 10
        return self.exchange(request, wait)

    def start(self) -> None:
        """Start the server."""
        self._prepared.clear()
        if not self.setup["isolated"]:
            self._folder = self._folder or tempfile.TemporaryDirectory(prefix="reason_llm-")
        super().start()
        orders = {
            "files": {},
            "limits": asdict(_LIMITS),
            "module": "check_server",
            "folder": self._folder and self._folder.name,
        }
        self.exchange({"serve": True, "orders": orders}, 10 + check_server.PATIENCE)


def _setup(mode: Mode, modules: tuple[str, ...], folders: tuple[str, ...]) -> dict[str, Any]:
    """A launcher's setup that shows these folders of installed packages, and these modules."""
    shown = {str(number): Path(folder) for number, folder in enumerate(folders)}
    for name in modules:
        path = _path_of(name.partition(".")[0])
        if path is not None and not any(path.is_relative_to(folder) for folder in folders):
            shown[path.name] = path
    return setup_of(mode, shown, len(folders)) | {"imports": ("jail.check_server",)}


def _package_folders() -> tuple[str, ...]:
    installed = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    shared = (path for path in sys.path if path.endswith(_PACKAGES))
    return tuple(path for path in dict.fromkeys((*installed, *shared)) if Path(path).is_dir())


def _path_of(module: str) -> Path | None:
    """The folder of a package, or the file of a module; None for one of the standard library."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or module in sys.stdlib_module_names:
        return None
    path = Path(spec.origin)
    return path.parent if spec.submodule_search_locations is not None else path


_instances: list[Checkers] = []
os.register_at_fork(after_in_child=_instances.clear)  # they are the parent's


def _make(mode: Mode, modules: tuple[str, ...], folders: tuple[str, ...]) -> Checkers:
    """Checkers for these folders of installed packages, which may change while a process runs."""
    checkers = Checkers(mode, modules)
    _instances.append(checkers)
    return checkers


def checkers_of(mode: Mode, *modules: str) -> Checkers:
    """The process's own checkers, made when first asked for and closed at exit."""
    return shared(_make, mode, modules, _package_folders())


def checker_faults() -> tuple[int, int]:
    """Numbers of calls of checkers that failed and that timed out in this process so far."""
    failed = sum(checkers.num_failed for checkers in _instances)
    return failed, sum(checkers.num_timed_out for checkers in _instances)
