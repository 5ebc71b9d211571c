"""The config that commands take when none is named: that of the working folder, or the quick start
that an installation brings along.

A wheel holds the quick start's config, data and model in ``reason_llm/quickstart/``, laid out as in
the repository (``setup.py`` copies them); elsewhere the repository's own files serve.
"""

from pathlib import Path
from typing import Any

from reason_llm.config.file import COMMAND_LINE, build, load
from reason_llm.config.sections import Config

OWN_NAME = "my_run"
"""Name of a run without a config file that is not the quick start."""
QUICK_START = Path("configs/quickstart.yaml")
_PACKAGE = Path(__file__).resolve().parents[1]
CHECKOUT = _PACKAGE.parent
"""The repository's folder, unless the package was installed from a wheel."""
_PATHS = ("model.path", "data.train", "data.eval")


def load_quick_start(overrides: dict[str, Any]) -> Config:
    """The quick start with dotted ``overrides``; with a model or a training set among them a run of
    their own, in which every other option has its default.

    Outside of a folder that has a ``configs/quickstart.yaml`` its model and data are those of the
    installation, and what it writes goes into the working folder as ever.

    Raises:
        ConfigError: as ``load``.
    """
    if overrides.keys() & {"model.path", "data.train"}:
        return build({"run": {"name": OWN_NAME}}, Path(COMMAND_LINE), overrides)
    bundled = _PACKAGE / "quickstart"
    home = bundled if bundled.is_dir() else CHECKOUT
    if QUICK_START.exists() or not (home / QUICK_START).is_file():
        return load(QUICK_START, overrides)
    sections = load(home / QUICK_START).model_dump(mode="json")
    paths = {}
    for key in _PATHS:
        section, name = key.split(".")
        paths[key] = str(home / sections[section][name])
    return load(home / QUICK_START, paths | overrides)
