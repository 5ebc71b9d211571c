"""What a start says of the rows and the steps, before a weight is read."""

from collections.abc import Callable
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.run.start.prepare import prepare
from reason_llm.run.watch import Watch


class Lines(Watch):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def said(small_run: Callable[..., Config]) -> Callable[..., list[str]]:
    def said(**options: Any) -> list[str]:
        watch = Lines()
        prepare(small_run(**options), watch)
        return watch.lines

    return said


def test_the_system_prompt_is_said_with_where_it_comes_from(
    said: Callable[..., list[str]],
) -> None:
    def line(name: str) -> list[str]:
        return [each for each in said(data__system_prompt=name) if each.startswith("system prompt")]

    (auto,) = line("auto")
    assert auto.endswith(" (data.system_prompt: auto)")
    assert line("Be\nbrief.") == ["system prompt of rows without one: Be brief."]
    assert line("none") == []


def test_the_size_and_the_strength_of_a_step_are_said(said: Callable[..., list[str]]) -> None:
    options = {
        "sample__prompts_per_step": 2, "sample__completions_per_prompt": 4,
        "train__schedule": "linear",
        "train__learning_rate": 5e-6, "model__adapter__rank": 8, "model__adapter__alpha": 16,
        "algorithm": {"name": "grpo", "kl": "k3", "kl_coefficient": 0.04},
    }  # fmt: skip
    told = "grpo: steps of 2 prompts x 4 completions, KL k3 x 0.04; learning rate 5e-06 (linear); "
    assert told + "LoRA of rank 8, alpha 16" in said(**options)
    options["algorithm"] = {"name": "grpo", "kl": "none"}
    assert any(", no KL; " in each for each in said(**options))
