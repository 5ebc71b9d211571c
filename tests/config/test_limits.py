"""Defaults and limits of all options, and what follows from several of them."""

from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from reason_llm.config import Config
from reason_llm.config.algorithms import Algorithm
from reason_llm.config.file import build, leaves
from reason_llm.config.preferences import PreferenceRow

SIGNS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<", "min_length": "#>=", "max_length": "#<="}


def limits_of(kind: Any, metadata: Any = ()) -> str:
    """``>=0<1`` of a type with its members."""
    parts = (*metadata, *getattr(kind, "__metadata__", ()))
    flat = [each for part in parts for each in getattr(part, "metadata", [part])]
    own = [(sign, getattr(each, name, None)) for each in flat for name, sign in SIGNS.items()]
    told = [f"{sign}{limit:g}" for sign, limit in own if limit is not None]
    return "".join([*told, *map(limits_of, get_args(kind))])


def test_numbers_and_limits_are_those_that_users_know() -> None:
    """``numbers.txt`` has a line for each option that is a number or has a limit: its default, of
    the two tables that of a row which names no other, and its limits. One that is changed on
    purpose is changed there, too."""
    rows: Any = {"algorithm": Algorithm, "preference": PreferenceRow}
    columns = {f"{s}.{c.name}": c.default for s, row in rows.items() for c in fields(row)}
    found = []
    for key, option in leaves(Config):
        default = columns.get(key, option.default)
        value = f"{default:g}" if type(default) in (int, float) else str(default)
        limits = limits_of(option.annotation, option.metadata)
        if limits or type(default) in (int, float):
            found.append(f"{key}={value} {limits}".strip())
    snapshot = Path(__file__).with_name("numbers.txt").read_text()
    assert "".join(f"{each}\n" for each in found) == snapshot


def made(options: dict[str, Any]) -> Config:
    return build({"data": {"train": "x"}}, Path("my.yaml"), options)


RL, SFT, KTO = {"stage": "rl"}, {"stage": "sft"}, {"stage": "preference", "preference.name": "kto"}


def test_rows_that_are_given_come_beside_those_that_were_given() -> None:
    data = made({}).data.with_rows({"a": [1], "b": [2]})
    assert data.with_rows({"b": [3], "c": [4]}).given == {"a": [1], "b": [3], "c": [4]}
    assert data.given == {"a": [1], "b": [2]}


def test_several_options_of_a_section_are_set_at_once() -> None:
    config = made({"run.steps": 5, "model.adapter.alpha": 7})
    found = config.with_options({
        "run.seed": 3, "run.name": "b", "model.adapter.rank": 4, "model.path": "p",
        "model.adapter.dropout": 0.5, "data": "all",
    })  # fmt: skip
    assert (found.run.seed, found.run.name, found.run.steps, found.data) == (3, "b", 5, "all")
    adapter = found.model.adapter
    assert (found.model.path, adapter.rank, adapter.dropout, adapter.alpha) == ("p", 4, 0.5, 7)
    assert (config.run.seed, config.model.adapter.rank) == (0, 32)
