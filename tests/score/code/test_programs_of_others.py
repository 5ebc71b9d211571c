"""Wrong programs that look for pay and right ones in odd dress, made by others than wrote the
reward: 108 and 41, then 229 and 82, then 75 and 30 by others again. Each is judged as in a run.
``docs/answers.md`` says what a hidden test cannot see."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from reason_llm.config.score import ScoreSection
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score import Scorer
from reason_llm.score.code.cases import answer_of_row

ROWS = [
    json.loads(line)
    for line in Path(__file__).with_name("programs_of_others.jsonl").read_text().splitlines()
]
UNSEEN = {"wrong-006", "wrong-014", "wrong-091", "second-wrong-060", "eighth-W60"}
"""Paid: a loop that the program ends after its first assertion; a bound that the result moves; an
``async`` function, which is waited for; an error of an own class named ``ValueError``."""
ASSERT_NOTHING = {"wrong-099", "wrong-100"}
"""Their tests are refused when the data is read."""


@pytest.fixture(scope="module")
def scorer() -> Iterator[Scorer]:
    section = ScoreSection.model_validate({"rewards": [{"name": "code_tests"}]})
    with Scorer(section, max_new_tokens=4096) as scorer:
        yield scorer


@pytest.mark.long
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['id']}: {row['class']}")
def test_only_right_programs_are_paid(scorer: Scorer, row: dict) -> None:
    def reward() -> float:
        prompt = Prompt(row["id"], row["task"], (), answer_of_row(row["tests"]))
        completion = Completion((1,), row["completion"], (0.0,), "stop")
        (scored,) = scorer.score([Group(prompt, (completion,))])
        return scored.completions[0].rewards["code_tests"]

    if row["id"] in ASSERT_NOTHING:
        with pytest.raises(ValueError, match="asserts nothing"):
            reward()
        return
    assert reward() == float(row["right"] or row["id"] in UNSEEN)
