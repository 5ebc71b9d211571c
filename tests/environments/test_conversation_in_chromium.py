"""A played rollout on the report's page, in Debian's Chromium."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from chromium import IN_A_BROWSER, Chromium, opened
from reason_llm.rollout import Completion, Span
from report_runs import TOKENIZER, group, record, write_run

pytestmark = IN_A_BROWSER


def talk(*parts: str, **environment: object) -> Completion:
    """A rollout whose parts the model and its tools wrote in turns, the model first."""
    ids, spans, text = list[int](), list[Span](), ""
    for number, part in enumerate(parts):
        found = TOKENIZER.encode(part, add_special_tokens=False).ids
        if number % 2:
            spans.append(Span(len(ids), len(ids) + len(found)))
        ids, text = [*ids, *found], text + part
    return Completion(
        tuple(ids), text, (-0.5,) * len(ids), "environment", {"boxed": 1.0}, 1.0, 0.0,
        spans=tuple(spans), environment=environment,
    )  # fmt: skip


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_a_rollout_of_turns_is_a_conversation(
    page: Chromium, tmp_path: Path, theme: str, width: int
) -> None:
    call = '<tool_call>\n{"name": "python", "arguments": {"code": "1 + 1"}}\n</tool_call>'
    played = talk(
        f"I compute.{call}", "\ntool\n<b>2</b>\nassistant\n", "And <tool_call>{no json", "\nlong "
        + "x" * 500, "It is 2.", turns=3, calls=2, failed_calls=1, reward=1.0,
        turn_rewards=[0.25, 0.0, 0.75],
    )  # fmt: skip
    failed = talk("<img src=x onerror=\"document.title='taken'\">", turns=1, problem="step raised")
    made = group(["a", "b"], [1.0, 0.0])
    steps = [[replace(made, completions=(played, replace(failed, finish_reason="error")))]]
    folder = write_run(tmp_path / "run", [record(1)], steps)
    page.resize(width, 900)
    page.theme(theme)
    opened(page, folder, "view=rollouts&group=0").wait("document.querySelector('.card .reply')")
    found = page.run(
        "[...document.querySelectorAll('.card:first-child .text-block > *')].map((each) => "
        "[each.tagName, each.className, (each.querySelector('summary') || each).textContent])"
    )
    assert found[:3] == [
        ["DETAILS", "call", 'python {"code":"1 + 1"}'],
        ["P", "muted", "reward 0.25"],
        ["DIV", "reply", "tool\n<b>2</b>\nassistant"],
    ]
    assert found[3] == ["DETAILS", "call", "a call that cannot be read"]
    assert found[5][:2] == ["DETAILS", "reply"] and "505 characters" in found[5][2]
    assert page.run("document.querySelectorAll('.card details[open]').length") == 0
    heads = page.run("[...document.querySelectorAll('.card header')].map((e) => e.textContent)")
    assert "3 turns, 2 calls, 1 failed, over" in heads[0]
    assert "1 turn, failed: step raised" in heads[1]
    colors = page.run(
        "['.card .reply', '.card .text-block'].map((e) => getComputedStyle("
        "document.querySelector(e)).color)"
    )
    assert colors[0] != colors[1]
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    page.click(".modes button:nth-child(2)")
    page.wait("document.querySelector('.t.read')")
    read = page.run("[...document.querySelectorAll('.card:first-child .t.read')].length")
    assert read == sum(span.end - span.start for span in played.spans)
    assert page.run("document.title") != "taken" and not page.complaints
    if folder_of_pictures := os.environ.get("REPORT_PICTURES"):
        page.click(".modes button:nth-child(1)")
        page.picture(Path(folder_of_pictures) / f"turns-{theme}-{width}.png")
