"""Functions of the user's own from files, ``path/to/file.py:function``, which may be one of
``examples/`` as it comes with the package. They run in this process."""

import ast
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from reason_llm.config import RewardSpec, installation
from reason_llm.data.played import Player
from reason_llm.errors import ConfigError, one_line
from reason_llm.files import MIB, read_bounded, sha256

_PACKAGE = Path(__file__).resolve().parents[1]
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
_INSTALLED = {"site-packages", "dist-packages"}


def load_function(where: str, option: str) -> Callable[..., Any]:
    """The function that ``where``, a value of ``option``, names.

    Raises:
        ConfigError: there is no such file or function, or the file cannot be imported.
    """
    name, colon, function = where.rpartition(":")
    path = installation.file(name)
    if not colon or path.suffix != ".py" or not function.isidentifier():
        raise ConfigError(f"{option}={where!r} must be path/to/file.py:function; write it so")
    if not path.is_file():
        raise ConfigError(f"{option}={where}: {path} does not exist; name one file and function")
    installed = _installed_name(path)
    spec = importlib.util.spec_from_file_location(f"reason_llm_custom_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if (home := str(installation.HOME)) not in sys.path:
        sys.path.append(home)  # own classes are made of those in examples/tools.py
    try:
        if installed is not None:
            module = importlib.import_module(installed)
        else:
            spec.loader.exec_module(module)
    except (Exception, SystemExit, GeneratorExit) as error:
        place = None if isinstance(error, SyntaxError) else place_of(error)  # it tells its own
        raise ConfigError(
            f"{option}={where}: {path} cannot be imported ({type(error).__name__}: "
            f"{one_line(error)}{f' at {place}' if place else ''}); fix it"
        ) from error
    loaded: Callable[..., Any] | None = vars(module).get(function)
    if not callable(loaded):
        of = module.__name__
        known = [n for n, v in vars(module).items() if getattr(v, "__module__", "") == of]
        raise ConfigError(
            f"{option}={where}: {path} has no function {function!r}; it has "
            f"{', '.join(known) or 'none'}"
        )
    return loaded


def _installed_name(path: Path) -> str | None:
    """The name of a module in a file of an installed package; None for other files."""
    for folder in map(Path, sys.path):
        if folder.name in _INSTALLED and path.is_relative_to(folder):
            return ".".join(path.relative_to(folder).with_suffix("").parts)
    return None


def is_published(function: Any) -> bool:
    """Whether a function, or an object that is called, is one of an installed package."""
    while isinstance(function, partial):
        function = function.func
    name = str(getattr(function, "__module__", None))
    module = (
        None if name == "__main__" else sys.modules.get(name)
    )  # of a notebook it is ipykernel's
    file = getattr(module, "__file__", None)
    return (
        file is not None
        and not Path(file).is_relative_to(_PACKAGE)
        and bool(_INSTALLED.intersection(Path(file).parts))
    )


def place_of(error: BaseException) -> str | None:
    """``my_rewards.py:12``: the deepest line of the user's code in a traceback; None without
    one."""
    frames = [
        (path, frame.lineno)
        for frame in traceback.extract_tb(error.__traceback__)
        if not (path := Path(frame.filename)).is_relative_to(_PACKAGE)
        and not path.is_relative_to(_STANDARD_LIBRARY)
        and not _INSTALLED.intersection(path.parts)
        and not frame.filename.startswith("<frozen")
    ]
    if not frames:
        return None
    path, line = frames[-1]
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}"


MOST_SOURCE_BYTES = 64 * MIB
"""Largest file of a user's program whose digest is taken."""


def own_sources(
    rewards: Sequence[RewardSpec],
    player: Player | None = None,
    sources: Iterable[str] = (),
) -> dict[str, str]:
    """Digests of the user's own code that a run calls, by what names it: files of rewards
    and of the player, the local modules that they import, and functions that were given in Python.

    Args:
        sources: names of data sets, some of which the player makes.

    Raises:
        ConfigError: a file cannot be read.
    """
    digests, files = dict[str, str](), dict[str, Path]()
    for reward in rewards:
        if reward.source_sha256 is not None:
            digests[reward.key] = reward.source_sha256
        files[reward.key] = file_of(str(reward.custom))
    for key, file in files.items():
        digests |= with_imports(key, file, sys.path)
    if player is not None:
        digests |= player.sources(sources)
    return digests


def file_of(where: str) -> Path:
    """The file of ``path/to/file.py:function``."""
    return installation.file(where.rpartition(":")[0])


def with_imports(key: str, file: Path, places: Sequence[str], name: str = "") -> dict[str, str]:
    """Digests of a file and of what it imports; none of a file that is not there or no Python."""
    if not file.is_file():
        return {}
    modules = local_modules(file, places, name) if file.suffix == ".py" else {}
    named = {key: file} | {f"{key} imports {name}": place for name, place in modules.items()}
    try:
        return {name: sha256(place, MOST_SOURCE_BYTES)[:16] for name, place in named.items()}
    except OSError as error:
        raise ConfigError(
            f"{key}: {file}, or a module that it imports, cannot be read ({one_line(error)}); "
            "restore it"
        ) from error


def local_modules(file: Path, places: Sequence[str], name: str = "") -> dict[str, Path]:
    """Files of the modules that a Python file imports, and of those that they import, by name. The
    standard library, installed packages and this package do not count. Import statements are read
    and nothing is imported; what ``importlib`` imports by a name made up at run time is not found.

    Args:
        places: folders in which a module is searched for.
        name: the file's own as a module; empty for a file alone.
    """
    found: dict[str, Path] = {}
    todo = [(file, name)]
    while todo:
        path, name = todo.pop()
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for each in _imported(path, package):
            place = None if each in found else module_file(each, places)
            if place is not None:
                found[each] = place
                todo.append((place, each))
    return dict(sorted(found.items()))


def _imported(file: Path, package: str) -> Iterator[str]:
    """Names that the import statements of a file may mean, packages before their modules."""
    try:
        tree = ast.parse(read_bounded(file, MIB)) if file.suffix == ".py" else ast.Module([], [])
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return  # its own digest counts all the same
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and (package or not node.level):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            start = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            names = [start, *(f"{start}.{each.name}" for each in node.names)] if start else []
        for name in names:
            parts = name.split(".")
            yield from (".".join(parts[: end + 1]) for end in range(len(parts)))


def module_file(name: str, places: Sequence[str]) -> Path | None:
    """File of a local module; None for any other."""
    parts, search = name.split("."), list(places)
    if parts[0] in sys.stdlib_module_names:
        return None
    origin = getattr(sys.modules.get(name), "__file__", None)
    if origin is None:
        for end in range(len(parts)):
            spec = PathFinder.find_spec(".".join(parts[: end + 1]), search)
            if spec is None:
                return None
            origin, search = spec.origin, list(spec.submodule_search_locations or [])
    path = Path(origin).resolve() if origin is not None else None
    if path is None or not path.is_file() or path.is_relative_to(_PACKAGE):
        return None
    is_installed = path.is_relative_to(_STANDARD_LIBRARY) or _INSTALLED.intersection(path.parts)
    return None if is_installed else path
