"""What makes a class an environment, what its ``reset`` asks for, and messages of OpenAI's form."""

import re
from pathlib import Path

import pytest

from reason_llm.data.tools import calls_of, said_before
from reason_llm.environments.data_side import (
    environment_class,
    environment_name,
    environments_by_name,
    reset_columns,
    tool_methods,
    tool_schemas,
)
from reason_llm.errors import ConfigError, DataError

SOURCE = """
class Game:
    def reset(self, level, seed=0, *rest, color, **row): ...
    def step(self, text): ...
    def shown(self): ...
class Tools:
    reset = type
    def add(self): ...
    def close(self): ...
    def _hidden(self): ...
class Mute:
    def reset(self): ...
class Still:
    reset = None
    def step(self, text): ...
def function(): ...
"""


def test_a_class_is_an_environment_by_its_methods(tmp_path: Path) -> None:
    (path := tmp_path / "its.py").write_text(SOURCE)
    for name, told in (
        ("function", "is no class; name one"),
        ("Mute", "has neither a method step(text), which answers what the model writes, nor"),
        ("Still", "has no method reset; add it: reset(**row) gives a text or None"),
    ):
        with pytest.raises(
            ConfigError, match=re.escape(f"sample.environment={path}:{name} {told}")
        ):
            environment_class(f"{path}:{name}")
    for name, methods, columns in (("Game", [], ["level", "color"]), ("Tools", ["add"], [])):
        assert list(tool_methods(environment_class(f"{path}:{name}"))) == methods
        assert reset_columns(f"{path}:{name}") == columns
    for where in ("agent:a.py:f", "mcp:server", "verifiers", "verifiers?a=1"):
        assert (reset_columns(where), tool_schemas(where)) == ([], ())


def test_a_call_may_begin_with_llama_s_tag() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'
    assert calls_of(text) == [("f", {"a": 1})] and said_before(text) == ""
    assert calls_of("<|python_tag|>print(1)") == []


def test_a_row_names_its_environment() -> None:
    given = {"sums": "a.py:A", "words": "b.py:B"}
    assert environments_by_name(given) == given
    assert (environments_by_name("a.py:A"), environments_by_name(None)) == ({"": "a.py:A"}, {})
    assert environment_name("a.py:A", "x:1", {"environment": "sums"}) == ""
    assert environment_name(given, "x:1", {"environment": "sums"}) == "sums"
    for row in ({}, {"environment": "sum"}):
        with pytest.raises(DataError, match=r"x:1: column environment=.* has sums, words; write"):
            environment_name(given, "x:1", row)
