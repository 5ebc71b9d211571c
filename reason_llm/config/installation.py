"""Files that come with the package: example configs, their data and model, lists of packages. In a
checkout they are where they are; a wheel has them in a folder that ``setup.py`` makes."""

from pathlib import Path
from typing import Any

from reason_llm import __version__

_PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = _PACKAGE.parent
"""The repository's folder, unless the package was installed from a wheel."""
_BUNDLED = _PACKAGE / "quickstart"
HOME = _BUNDLED if _BUNDLED.is_dir() else CHECKOUT
"""The folder with ``configs/``, ``data/`` and so on, laid out as in the repository."""


def install(extra: str) -> str:
    """The command that installs an extra. It names no package index, which does not have us."""
    if HOME == CHECKOUT:
        return f"pip install -e '.[{extra}]'"
    return f"pip install './reason_llm-{__version__}-py3-none-any.whl[{extra}]'"


def file(name: str) -> Path:
    """The file of this name in the working folder or, if it has none, in ``HOME``."""
    path = Path(name)
    return HOME / path if not path.exists() and (HOME / path).is_file() else path


def in_home(value: Any) -> Any:
    """A config's sections with the paths that exist in ``HOME`` as paths in it."""
    if isinstance(value, dict):
        return {key: in_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return list(map(in_home, value))
    # of path/to/file.py:Class, the file
    is_ours = isinstance(value, str) and "/" in value and (HOME / value.partition(":")[0]).exists()
    return str(HOME / value) if is_ours else value
