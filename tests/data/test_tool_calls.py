"""What makes a class an environment, what its ``reset`` asks for, and messages of OpenAI's form."""

import re
from pathlib import Path
from typing import Any

import pytest

from reason_llm.data.tools import (
    calls_of,
    environment_class,
    environment_name,
    environments_by_name,
    own_session,
    plain_messages,
    reset_columns,
    said_before,
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


def test_programs_that_ask_the_model_themselves() -> None:
    for where, expected in {
        "a.py:A": ("", ""), "agent:a.py:f": ("agent", "a.py:f"), "mcp:run it": ("mcp", "run it"),
        "agent": ("", ""), "verifiers": ("verifiers", ""), "verifiers?a=1?": ("verifiers", "a=1?"),
    }.items():  # fmt: skip
        assert own_session(where) == expected
    assert own_session({"agent": "a.py:A"}) == ("", "")


def test_messages_are_made_plain() -> None:
    called = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    plain = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    given: list[dict[str, Any]] = [
        {"role": "user", "content": [{"text": "a"}, {"text": "b"}], "name": "me", "other": 1},
        {"role": "assistant", "content": None, "tool_calls": [called, plain]},
        {"role": "tool", "content": "1", "tool_call_id": "c", "name": ""},
    ]
    assert plain_messages(given) == [
        {"role": "user", "content": "ab", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [plain, plain]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    for message, told in (
        ({"content": "a"}, "give its role and a text"),
        ({"role": "user", "content": [{"image": 1}]}, "give its role and a text"),
        ({"role": "user", "content": ["a"]}, "give its role and a text"),
        ({"role": "assistant", "tool_calls": [{}]}, "give OpenAI's form"),
        ({"role": "assistant", "tool_calls": 1}, "give OpenAI's form"),
    ):
        with pytest.raises(ValueError, match=told):
            plain_messages([message])
    assert said_before(" Well. <tool_call>{}</tool_call> so") == "Well."
    assert said_before('{"name": "a"}') == ""
