"""Agents over others' frameworks, as docs/environments.md lists them. Each is played in a process
of its own, since the frameworks leave connections open until it ends."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_sessions import FIXTURES, TOKENIZER, Told, a_prompt, call, play, qwen, sessions

pytestmark = pytest.mark.long
CODE = "Thought: easy.\n<code>\nfinal_answer(6 * 7)\n</code> and more"
CHECKS = {
    "langgraph_asks_in_parallel": "langgraph",
    "langchain_calls_a_tool_and_streams": "langchain_openai",
    "smolagents_is_cut_at_its_stop_strings": "smolagents",
    "instructor_reads_a_model_from_a_text": "instructor",
}
"""Functions of this file, and the packages that they need."""


@pytest.mark.parametrize("name", CHECKS)
def test_a_framework(name: str) -> None:
    if find_spec(CHECKS[name]) is None:
        pytest.skip(f"{CHECKS[name]} is not installed")
    folders = [Path(__file__).parent, FIXTURES, *FIXTURES.parents[:2]]
    path = f"import sys; sys.path[:0] = {[*map(str, folders)]}"
    code = f"{path}; import test_frameworks; test_frameworks.{name}()"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


def played(name: str, *said: str, **options: Any) -> tuple[Any, Told]:
    own = sessions(f"agent:{FIXTURES / 'framework_agents.py'}:{name}", qwen(), **options)
    sampler = Told(*said, numbered=False)
    (group,) = play(own, sampler, [a_prompt()], each=2, most=options.get("context", 3000) // 4)
    return group.completions, sampler


def langgraph_asks_in_parallel() -> None:
    completions, sampler = played("langgraph_fan_out", "one", context=3000)
    assert [len(asked) for asked in sampler.asked] == [6, 2]
    for each in completions:
        assert (each.environment["reward"], len(each.others)) == (4.0, 3)


def langchain_calls_a_tool_and_streams() -> None:
    said = call("times", '{"first": 6, "second": 7}'), "it is 42"
    for each in played("langchain_tool", *said, context=3000)[0]:
        assert (each.environment["reward"], each.others) == (1.0, ())
        assert "<tool_response>\n42\n</tool_response>" in each.text


def smolagents_is_cut_at_its_stop_strings() -> None:
    for each in played("smolagents_code", CODE, context=40_000)[0]:
        assert each.environment == {"turns": 1, "stops": 1, "reward": 1.0}
        assert TOKENIZER.decode(each.token_ids) == CODE.partition("</code>")[0]


def instructor_reads_a_model_from_a_text() -> None:
    said = '```json\n{"value": 42}\n```'
    for each in played("instructor_json", said, context=3000)[0]:
        assert each.environment["reward"] == 1.0
