"""Text that a model may write to stop the run: no reward and no finder takes long over it.

Each unit is repeated to 100,000 characters, in each of several frames, and given to all that reads
a model's text in this process. CPU time, so that a busy machine does not matter.
"""

import gc
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from marks import most_are_long
from reason_llm.config.score import RewardSpec, ScoreSection
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score.math.answer_text import (
    MAX_CHARACTERS,
    decide,
    normalise,
    reading_of,
    tokens_of,
    trees_as_asked,
)
from reason_llm.score.math.boxed_math import is_copied, is_worked_out, majority
from reason_llm.score.math.constraints import asked_units
from reason_llm.score.math.extraction import (
    candidates,
    extract_answer,
    final_boxed,
    last_answer_tags,
    last_boxed,
)
from reason_llm.score.math.prose import prose_of, readings
from reason_llm.score.math.question import last_question, read_question, words_of
from reason_llm.score.math.units import unit_words
from reason_llm.score.rewards import REWARDS, Context, make_reward

CHARACTERS = 100_000
MAX_CPU_SECONDS = 0.3
CACHES = (
    tokens_of, reading_of, trees_as_asked, prose_of, read_question, words_of, last_question,
    asked_units,
)  # fmt: skip
"""Emptied before each measurement: a hit is no work."""

UNITS = [
    " ", "\n", "\t", " \n", "a", "1", "1 ", "1,", "1,000", "1{,}", "1\\!,", "ab ", "word ", "A",
    "é", "一", "\u00a0", "\x00",
    "{", "}", "{}", "(", "()", "[", "|", "$", "\\", "\\(", "^", "_{", "=", "-", "*", "**", "`", "/",
    "1/", "0.", "..",
    ",", ";", ":", "#", "####", "#### 1", "%", "!", "'", "</", "~", "\\,", "\\left", "\\right.",
    "½", "²", "°", "√(",
    "\\boxed", "\\boxed{", "\\boxed {", "\\boxed{1}", "\\text{", "\\text{1", "\\text{ cm} ",
    "\\mathrm{m}/",
    "\\frac", "\\frac{", "\\frac12", "\\sqrt[", "\\sin ", "\\begin{pmatrix}", "&", "\\{",
    "\\overline{", "\\color{",
    "\\phantom{", "\\pm ", "\\cup ", "\\ldots", "<answer>", "</answer>", "<think>",
    "<answer>1</answer>", "<|im_end|>",
    "<|a", "answer is ", "answer: ", "the answer is 5. ", "step 1 ", "1. ", "- ", "\nfirst ",
    "not ", "or ", "A) ", "(A)",
    "so x = 1 ", "Wait, 6. ", "Q:\n", "in ", "how many in ", "all real ", "where C ", "\\text{or} ",
    "\\begin{cases}", "\\$", "x=1, ", "1e9", "9**", "9^{9", "is ", "12 cm ", "square ",
]  # fmt: skip
FRAMES = [("5 ", "x"), ("<answer>\\boxed{", "}</answer>"), ("\\boxed{5}. ", "")]
LONGEST_ANSWER = MAX_CHARACTERS - 60
"""Shorter answers are read as mathematics; longer ones are not."""


def texts(unit: str, length: int) -> list[str]:
    """The unit repeated, in each frame; and nested, with as many closing braces behind it."""
    body = (unit * (length // len(unit) + 1))[:length]
    half = (unit * (length // len(unit) // 2 + 1))[: length // 2]
    return [*(start + body + end for start, end in FRAMES), half + "}" * (length // 2)]


def cpu_seconds(call: Callable[[str], Any], text: str) -> float:
    """CPU time of this thread, of the quickest of up to six runs while they are over the bar: a
    core that others use is slower by half, and what backtracks is slower by thousands."""
    seconds = _once(call, text)
    for _ in range(5):
        if seconds < MAX_CPU_SECONDS:
            break
        seconds = min(seconds, _once(call, text))
    return seconds


def _once(call: Callable[[str], Any], text: str) -> float:
    for cached in CACHES:
        cached.cache_clear()
    gc.disable()  # a collection of the whole test session is not the call's
    start = time.thread_time()
    call(text)
    seconds = time.thread_time() - start
    gc.enable()
    return seconds


GOLDS = ("Evelyn", "C", "2x+y")
FINDERS: dict[str, Callable[[str], Any]] = {
    "last_boxed": last_boxed, "final_boxed": final_boxed, "last_answer_tags": last_answer_tags,
    "extract_answer": extract_answer,
    "candidates": candidates, "normalise": normalise, "unit_words": unit_words,
    "decide": lambda text: [decide(gold, text) for gold in GOLDS],
    "decide (gold)": lambda text: decide(text, "5"),
    "is_worked_out": lambda text: [is_worked_out(gold, text) for gold in GOLDS],
    "prose": lambda text: [[*readings(gold, text, "How many cm?")] for gold in GOLDS],
    "last_question": last_question, "asked_units": asked_units,
    "majority": lambda text: majority([text, None, text]),
}  # fmt: skip


@pytest.mark.parametrize("name", most_are_long(FINDERS, ["majority", "prose"]))
def test_no_finder_takes_long(name: str) -> None:
    for unit in UNITS:
        for length in (CHARACTERS, LONGEST_ANSWER):
            for text in texts(unit, length):
                assert cpu_seconds(FINDERS[name], text) < MAX_CPU_SECONDS, (unit, text[:12], length)


@pytest.mark.parametrize("unit", UNITS)
def test_no_question_takes_long(unit: str) -> None:
    for text in texts(unit, CHARACTERS)[-2:]:
        assert cpu_seconds(lambda of: is_copied("2x", "y = 2x", of), text) < MAX_CPU_SECONDS


OPTIONS: dict[str, dict[str, Any]] = {
    "soft_overlong": {"cache_tokens": 10},
    "regex": {"pattern": r"<answer>\s*\d+\s*</answer>"},
}
MODELS = ("reward_model", "judge")
"""Which pass the text on to a model, and search nothing in it."""
OF_TEXT = [
    name for name in REWARDS if not name.startswith("code_tests") and name not in (*MODELS, "gym")
]
"""The code rewards run programs, in a sandbox with limits of its own."""


@pytest.mark.parametrize("name", OF_TEXT)
def test_no_reward_takes_long(name: str) -> None:
    spec = RewardSpec(name=name, options=OPTIONS.get(name, {}))
    with ExitStack() as resources:
        reward = make_reward(spec, Context(ScoreSection(), 100_000, resources))
        for unit in UNITS:
            for text in texts(unit, CHARACTERS):
                seconds = cpu_seconds(lambda text: score(reward, text), text)
                assert seconds < MAX_CPU_SECONDS, (unit, text[:12])


def score(reward: Any, text: str) -> None:
    prompt = Prompt("p", "What is $2+3$?", (), "5")
    completion = Completion((1, 2, 3), text, (0.0, 0.0, 0.0), "stop")
    if reward.of_one is not None:
        reward.of_one(prompt, completion)
    else:
        reward.of_group(Group(prompt, (completion, completion)), [1.0, 0.0])


@pytest.mark.parametrize("pattern", [r"(a+)+$", r"(a|aa)+$", r"(.*a){30}b"])
def test_a_pattern_that_backtracks_is_ended_and_finds_nothing(
    pattern: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as resources:
        spec = RewardSpec(name="regex", options={"pattern": pattern})
        section = ScoreSection(timeout_seconds=0.3)
        reward = make_reward(spec, Context(section, 100, resources))
        assert reward.of_one is not None
        text = "a" * 30_000 + "c"
        assert reward.of_one(Prompt("p", "", (), ""), Completion((1,), text, (0.0,), "stop")) == 0
    assert "took more than 0.3 seconds" in caplog.text


@pytest.mark.parametrize(
    "answer",
    ["9**9**9", "9^{9^{9}}", "1e999999999", "10^{10^{10}}", "(10^9)!", "1" * 3999,
    "0." + "0" * 3000 + "1",
     "5 " + "\\text{ cm} " * 15 + "x", "0.\\overline{" + "9" * 3900 + "}", "1e-400",
     "(" * 1990 + "5" + ")" * 1990],
)  # fmt: skip
def test_numbers_beyond_reason_cost_nothing_here(answer: str) -> None:
    seconds = cpu_seconds(lambda text: (decide("5", text), is_worked_out("5", text)), answer)
    assert seconds < MAX_CPU_SECONDS
