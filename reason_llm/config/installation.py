"""Files of the package: example configs with data and model, lists of packages. A checkout has them
in the repository, a wheel in a folder that ``setup.py`` makes."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from reason_llm import __version__
from reason_llm.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = _PACKAGE.parent
"""Folder of the repository, unless the package was installed from a wheel."""
_BUNDLED = _PACKAGE / "quickstart"
HOME = _BUNDLED if _BUNDLED.is_dir() else CHECKOUT
"""Folder with ``configs/``, ``data/`` and so on, in the repository's layout."""


def install(extra: str) -> str:
    """Return the command that installs an extra; the package is on no index."""
    if HOME == CHECKOUT:
        return f"pip install -e '.[{extra}]'"
    return f"pip install './reason_llm-{__version__}-py3-none-any.whl[{extra}]'"


CONSOLE_SCRIPT = "reason-llm"


def command(name: str) -> str:
    """Return ``python scripts/train.py`` in a checkout's folder, elsewhere ``reason-llm train``."""
    script = Path("scripts", f"{name}.py")
    is_here = Path.cwd() == CHECKOUT and script.is_file()
    if Path(sys.argv[0]).name == CONSOLE_SCRIPT or not is_here:
        return f"{CONSOLE_SCRIPT} {name}"
    return f"python {script}"


def slice_for(name: str, asked: str) -> Any:
    """Import a folder of the package, or a module in it, that is not needed until a config asks for
    it, such as ``environments.data_side``; raises a ConfigError with what ``asked`` if it is not
    there."""
    if (found := slice_if_there(name)) is None:
        raise ConfigError(
            f"{asked} needs the folder reason_llm/{name.partition('.')[0]}, which this "
            "installation lacks; install the package again, or leave it out"
        )
    return found


def slice_if_there(name: str) -> Any:
    """Import such a folder or module; None where the folder is not there."""
    try:
        return import_module(f"reason_llm.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"reason_llm.{name.partition('.')[0]}":
            raise
        return None


def file(name: str) -> Path:
    """Return the path in the working folder or, if there is no such file, in ``HOME``."""
    path = Path(name)
    return HOME / path if not path.exists() and (HOME / path).is_file() else path


def in_home(value: Any) -> Any:
    """Return a config's sections with paths that exist in ``HOME`` made relative to it."""
    if isinstance(value, dict):
        return {key: in_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(in_home, value))
    # the file of path/to/file.py:Class
    is_ours = isinstance(value, str) and "/" in value and (HOME / value.partition(":")[0]).exists()
    return str(HOME / value) if is_ours else value
