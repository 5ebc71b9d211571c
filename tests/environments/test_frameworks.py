"""Agents over others' frameworks, as docs/environments.md lists them. They are played in another
process, since the frameworks leave connections open until it ends."""

import subprocess
import sys
from ast import literal_eval
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_sessions import FIXTURES, TOKENIZER, Told, a_prompt, call, play, qwen, sessions

from conftest import ROOT

pytestmark = pytest.mark.long
CODE = "Thought: easy.\n<code>\nfinal_answer(6 * 7)\n</code> and more"
CHECKS = {
    "langgraph_asks_in_parallel": "langgraph",
    "langchain_calls_a_tool_and_streams": "langchain_openai",
    "smolagents_is_cut_at_its_stop_strings": "smolagents",
    "instructor_reads_a_model_from_a_text": "instructor",
    "dspy_predicts": "dspy",
    "litellm_asks_and_streams": "litellm",
}
"""Functions of this file, and the packages that they need."""
TOOL_AGENTS = {
    "openai_parts": "openai",
    "openai_responses": "openai",
    "agents_sdk": "agents",
    "pydantic_ai_tool": "pydantic_ai",
    "llama_index_tool": "llama_index",
    "autogen_tool": "autogen_agentchat",
    "ag2_tool": "ag2",
    "haystack_tool": "haystack",
    "agno_tool": "agno",
    "strands_tool": "strands",
    "crewai_agent": "crewai",
}
"""Agents that call a tool and answer, and the packages that they need."""


def test_each_row_of_the_table_is_run_or_says_why_not() -> None:
    """Rows that ``make long`` runs have the version of the lock."""
    page = (ROOT / "docs" / "environments.md").read_text()
    lock = (ROOT / "requirements" / "lock-cpu.txt").read_text()
    table = page[page.index("| framework | version |") :].partition("\n\n")[0]
    rows = [line.strip("|").split(" | ") for line in table.splitlines()[2:]]
    assert len(rows) >= 25
    for name, version, _, run_by in rows:
        if run_by.strip() == "`make long`":
            assert f"{name.split()[0].strip(',')}=={version}" in lock, name
        else:
            assert run_by.startswith("by hand: "), name


PLAY = """
import sys, traceback
sys.path[:0] = {path}
import test_frameworks
for name in {names}:
    try:
        test_frameworks.check(name)
        problem = ""
    except BaseException:
        problem = traceback.format_exc()
    print("played:", {{name: problem}})
"""


@pytest.fixture(scope="module")
def problems() -> dict[str, str]:
    """Tracebacks of the installed frameworks, by agent; empty where all is well."""
    names = [name for name, package in (CHECKS | TOOL_AGENTS).items() if find_spec(package)]
    path = [str(each) for each in (Path(__file__).parent, FIXTURES, *FIXTURES.parents[:2])]
    done = subprocess.run(
        [sys.executable, "-c", PLAY.format(path=path, names=names)],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("played: "):
            found |= literal_eval(line.removeprefix("played: "))
    return found | {name: done.stderr[-3000:] for name in names if name not in found}


@pytest.mark.parametrize("name", [*CHECKS, *TOOL_AGENTS])
def test_a_framework(name: str, problems: dict[str, str]) -> None:
    """What is not installed is skipped. To run one by hand, install it into a folder (``pip install
    --target``) and put that into ``PYTHONPATH``."""
    if name not in problems:
        pytest.skip(f"{(CHECKS | TOOL_AGENTS)[name]} is not installed")
    assert not problems[name], problems[name]


def check(name: str) -> None:
    globals()[name]() if name in CHECKS else calls_a_tool(name)


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


def dspy_predicts() -> None:
    said = "[[ ## answer ## ]]\n42\n\n[[ ## completed ## ]]"
    for each in played("dspy_predict", said, context=6000)[0]:
        assert each.environment == {"turns": 1, "reward": 1.0}


def litellm_asks_and_streams() -> None:
    completions, sampler = played("litellm_asked", "it is 42", context=3000)
    for each in completions:
        assert (each.environment["reward"], len(each.others)) == (1.0, 1)
    assert len(sampler.seeds) == 2 + 1  # each rollout's own, and that of the batch


def calls_a_tool(name: str) -> None:
    """Each chat is one conversation: the call, its result and the answer."""
    said = call("times", '{"first": 6, "second": 7}'), "it is 42"
    for each in played(name, *said, context=12_000)[0]:
        assert each.environment.get("reward") == 1.0, each.environment
        assert each.environment["turns"] == 2 * (1 + len(each.others))
        for text in (each.text, *(other.text for other in each.others)):
            assert "<tool_response>\n42\n</tool_response>" in text
