"""Our names of the options of TRL, Unsloth and verl (``other_names.yaml``), for error messages."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from reason_llm.files import read_text


@dataclass(frozen=True, slots=True)
class Equivalent:
    """An option of another trainer, and what it is here."""

    whose: str
    options: tuple[str, ...]
    """Our option; empty where there is nothing to set."""
    note: str = ""
    """How the values differ, or why there is nothing to set."""


@cache
def equivalents() -> dict[str, Equivalent]:
    """The table, by the option's name or by the last parts of it."""
    table = yaml.safe_load(read_text(Path(__file__).with_suffix(".yaml")))
    return {
        name: Equivalent(row["whose"], tuple(row["options"]), row.get("note", ""))
        for name, row in table.items()
    }


def told(key: str, dashes: str, known: Iterable[str]) -> str | None:
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
    options = " and ".join(f"{dashes}{each}" for each in same.options if each in set(known))
    if not options:
        return f"{name} of {same.whose} is not needed here: {same.note}"
    note = f" ({same.note})" if same.note else ""
    return f"{name} of {same.whose} is {options} here{note}"
