"""Tasks of reasoning-gym: their rows, and their own checkers as the reward."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import reasoning_gym

from reason_llm.app.console import Console
from reason_llm.app.training import run_training
from reason_llm.config import Config
from reason_llm.data import Data
from reason_llm.data.rows import read_rows
from reason_llm.errors import DataError
from reason_llm.rollout import Completion, Prompt
from reason_llm.run.store import metrics
from reason_llm.score import Scorer

SOURCE = "gym:chain_sum?size=20&seed=4&min_terms=2&max_terms=3"


def rows(source: str) -> list[tuple[str, dict[str, Any]]]:
    return list(read_rows(source, "train", _raise, {}))


def _raise(error: DataError) -> None:
    raise error


def test_rows_are_the_generator_s() -> None:
    made = rows(SOURCE)
    options = {"size": 20, "seed": 4, "min_terms": 2, "max_terms": 3}
    tasks = reasoning_gym.create_dataset("chain_sum", **options)
    assert [row for _, row in made] == [
        {"question": task["question"], "answer": task["answer"]} for task in tasks
    ]
    assert made[0][0] == f"{SOURCE}:row 1"
    assert len(rows("gym:chain_sum")) == 2000
    assert rows("gym:chain_sum?seed=1&size=3") != rows("gym:chain_sum?seed=2&size=3")


@pytest.mark.parametrize(
    "source", ["gym:no_such", "gym:chain_sum?size=x", "gym:chain_sum?no=1", "gym:chain_sum?size"]
)
def test_what_it_does_not_make_is_one_line(source: str) -> None:
    with pytest.raises(DataError, match=r"reasoning-gym makes no such tasks .*; write gym:NAME"):
        rows(source)


def test_without_the_package_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(DataError, match=r"pip install -e '\.\[gym\]'"):
        rows("gym:chain_sum?size=9")


@pytest.mark.parametrize("seed", [200, 201])
def test_a_held_out_set_of_the_training_tasks_is_told(seed: int, load: Callable[..., Data]) -> None:
    training, held_out = (f"gym:chain_sum?size=200&seed={each}&min_terms=3" for each in (1, seed))
    data = load(training, data__eval=held_out, score__rewards="gym")
    shared = f"{training}:row 200, which asks the same as {held_out}:row 1; set data.contamination"
    assert (shared in (data.contamination_warning() or "")) is (seed == 200)


def test_its_checker_is_the_reward(small_run: Callable[..., Config]) -> None:
    config = small_run(data__train=SOURCE, score__rewards=["gym"])
    where, row = rows(SOURCE)[7]
    prompt = Prompt(where, "x", (1,), row["answer"])
    with Scorer(config.score, 32) as scorer:
        of_one = scorer.rewards[0].reward.of_one
        assert of_one is not None

        def paid(text: str) -> float:
            return of_one(prompt, Completion((1,), text, (0.0,), "stop"))

        assert paid(f"<answer>{row['answer']}</answer>") == 1.0
        assert paid(f"so \\boxed{{{row['answer']}}}") == 1.0
        assert paid("<answer>12345678</answer>") == paid("nothing") == 0.0
        bare = Prompt("x.jsonl:1", "x", (1,), "1")
        with pytest.raises(ValueError, match=r"data\.train=gym:NAME alone"):
            of_one(bare, Completion((1,), "<answer>1</answer>", (0.0,), "stop"))


def test_a_run(small_run: Callable[..., Config]) -> None:
    config = small_run(
        run__steps=1, data__train=SOURCE, data__eval=SOURCE.replace("seed=4", "seed=5"),
        score__rewards=["gym"],
    )  # fmt: skip
    run_training(config, Console("quiet"))
    records = metrics.read(config.run.directory / "small")
    assert all("score/gym" in record for record in records[1:])
    assert 0 <= records[-1]["eval/accuracy"] <= 1
