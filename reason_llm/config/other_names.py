"""Our names of the options of TRL, Unsloth and verl (``other_names.yaml``), for error messages."""

from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reason_llm.files import read_text


@cache
def equivalents() -> dict[str, dict[str, Any]]:
    """The table: ``whose`` option it is, our ``options`` (none where there is nothing to set) and
    perhaps a ``note``, by the option's name or by the last parts of it."""
    table: dict[str, dict[str, Any]]
    table = yaml.safe_load(read_text(Path(__file__).with_suffix(".yaml")))
    return table


def told(key: str, dashes: str, known: Collection[str]) -> str | None:
    """``lr of verl is --train.learning_rate here``, of a key that ends in another trainer's name;
    None for no such name.

    Args:
        known: our options that there are.
    """
    parts = key.replace("-", "_").split(".")
    names = [".".join(parts[i:]) for i in range(len(parts))]
    name = next((name for name in names if name in equivalents()), None)
    if name is None:
        return None
    same = equivalents()[name]
    note = same.get("note", "")
    options = " and ".join(f"{dashes}{each}" for each in same["options"] if each in known)
    if not options:
        return f"{name} of {same['whose']} has no option here: {note}"
    return f"{name} of {same['whose']} is {options} here{note and f' ({note})'}"
