"""Files that come with the package: example configs, their data and model, lists of packages. In a
checkout they are where they are; a wheel has them in a folder that ``setup.py`` makes."""

from pathlib import Path
from typing import Any

from reason_llm import __version__
from reason_llm.config.file import CHECKOUT, Mistakes, build, read_yaml
from reason_llm.config.sections import Config

_BUNDLED = Path(__file__).resolve().parents[1] / "quickstart"
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


def read(path: Path) -> dict[str, Any]:
    """The sections of a config file. In one that the package brings, paths are those in ``HOME``.

    Raises:
        ConfigError: as ``read_yaml``.
    """
    place = file(str(path))
    tree = read_yaml(place)
    return tree if place == path else _in_home(tree)


def load(path: Path, overrides: dict[str, Any], mistakes: Mistakes | None = None) -> Config:
    """The config in a file of the working folder or of the package, with dotted ``overrides``;
    arguments and errors as of ``config.file.load``."""
    return build(read(path), path, overrides, mistakes)


def _in_home(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _in_home(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_in_home(inner) for inner in value]
    is_ours = isinstance(value, str) and "/" in value and (HOME / value.partition(":")[0]).exists()
    return str(HOME / value) if is_ours else value
