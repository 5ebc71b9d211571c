"""Agents over others' frameworks, as docs/environments.md lists them."""

from typing import Any

import pytest
from test_sessions import FIXTURES, TOKENIZER, Told, a_prompt, call, play, qwen, sessions

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("default")]
CODE = "Thought: easy.\n<code>\nfinal_answer(6 * 7)\n</code> and more"


def played(name: str, *said: str, **options: Any) -> tuple[Any, Told]:
    own = sessions(f"agent:{FIXTURES / 'framework_agents.py'}:{name}", qwen(), **options)
    sampler = Told(*said, numbered=False)
    (group,) = play(own, sampler, [a_prompt()], each=2, most=options.get("context", 3000) // 4)
    return group.completions, sampler


def test_langgraph_asks_in_parallel() -> None:
    pytest.importorskip("langgraph")
    pytest.importorskip("langchain_openai")
    completions, sampler = played("langgraph_fan_out", "one", context=3000)
    assert [len(asked) for asked in sampler.asked] == [6, 2]
    for each in completions:
        assert (each.environment["reward"], len(each.others)) == (4.0, 3)


def test_langchain_calls_a_tool_and_streams() -> None:
    pytest.importorskip("langchain_openai")
    said = call("times", '{"first": 6, "second": 7}'), "it is 42"
    for each in played("langchain_tool", *said, context=3000)[0]:
        assert (each.environment["reward"], each.others) == (1.0, ())
        assert "<tool_response>\n42\n</tool_response>" in each.text


def test_smolagents_is_cut_at_its_stop_strings() -> None:
    pytest.importorskip("smolagents")
    for each in played("smolagents_code", CODE, context=40_000)[0]:
        assert each.environment == {"turns": 1, "stops": 1, "reward": 1.0}
        assert TOKENIZER.decode(each.token_ids) == CODE.partition("</code>")[0]


def test_instructor_reads_a_model_from_a_text() -> None:
    pytest.importorskip("instructor")
    said = '```json\n{"value": 42}\n```'
    for each in played("instructor_json", said, context=3000)[0]:
        assert each.environment["reward"] == 1.0
