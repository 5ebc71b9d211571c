"""Functions of the user's own from files, ``path/to/file.py:function``, which may be one of
``examples/`` as it comes with the package. They run in this process."""

import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from reason_llm.config import installation
from reason_llm.errors import ConfigError, one_line

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
        raise ConfigError(f"{option}={where}: {path} does not exist; check the path")
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
