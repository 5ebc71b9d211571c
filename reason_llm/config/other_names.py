"""Equivalents of the options of TRL, Unsloth and verl (``other_names.yaml``), and of values of
their options (``other_values.yaml``), for error messages."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

import yaml

from reason_llm.files import read_text


@cache
def equivalents() -> dict[str, dict[str, Any]]:
    """Return the table, by the option's name or its last parts: ``whose`` option it is, our
    ``options`` (empty if there is nothing to set), an optional ``note``, and the options that mean
    the same as its ``values``, where ``number`` stands for any number."""
    table: dict[str, dict[str, Any]]
    table = yaml.safe_load(read_text(Path(__file__).with_suffix(".yaml")))
    return table


@cache
def equivalent_values() -> dict[str, dict[str, str]]:
    """Return our values by our option and another trainer's value in lower case."""
    table: dict[str, dict[str, str]]
    table = yaml.safe_load(read_text(Path(__file__).with_name("other_values.yaml")))
    return table


def equivalent_value(option: str, value: Any) -> str | None:
    """Return our name of another trainer's value, such as adamw for ``adamw_torch``."""
    return equivalent_values().get(option, {}).get(str(value)[:100].lower())


def note(key: str) -> str:
    """Return the note on another trainer's option with the name of ours, in parentheses; empty if
    there is none."""
    name = key.rpartition(".")[2]
    row = equivalents().get(name, {})
    text = row.get("note") if key in row.get("options", ()) else None
    return f" ({text})" if text else ""


def equivalent(key: str, dashes: str, known: Collection[str], value: Any = None) -> str | None:
    """Return ``lr of verl is --train.learning_rate here`` for a key that ends in another trainer's
    option, with what to write for its ``value``; None for any other key, and for options that are
    not ``known``."""
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
    ours = _options_of(same.get("values", {}), str(value)[:100])
    parts = [f"{dashes}{k} {v}" if dashes else f"{k}: {v}" for k, v in ours.items() if k in known]
    write = f"; write {(' ' if dashes else ', ').join(parts)}" if parts else ""
    return f"{name} of {same['whose']} is {options} here{note and f' ({note})'}{write}"


def _options_of(values: Mapping[str, Mapping[str, str]], value: str) -> dict[str, str]:
    """Return the options that mean the same as a value; empty where it is not in the table."""
    row = values.get(value.lower())
    with suppress(ValueError):
        if row is None and isfinite(number := float(value)):
            row = values.get(f"{number:g}") or values.get("number")
    return {k: value if v == "number" else v for k, v in (row or {}).items()}
