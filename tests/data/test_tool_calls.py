"""Calls of tools in an answer."""

from reason_llm.data.tools import calls_of, said_before


def test_a_call_may_begin_with_llama_s_tag() -> None:
    text = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}'
    assert calls_of(text) == [("f", {"a": 1})] and said_before(text) == ""
    assert calls_of("<|python_tag|>print(1)") == []
