"""What the sampler is asked for a wave of an evaluation."""

from dataclasses import replace
from typing import Any

from reason_llm.config import Config
from reason_llm.evaluate.evaluation import _wave_outcomes
from reason_llm.evaluate.outcomes import Wave
from reason_llm.evaluate.request import Request
from reason_llm.rollout import Completion, Group, Prompt

PROMPTS = [Prompt(f"rows.jsonl:{n}", "q", (1, 2), "4") for n in range(3)]
SAMPLE = {"stop": ["</answer>"], "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}


class Noted:
    """A sampler that keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, int]] = []

    def sample(self, prompts: Any, params: Any, seed: int, progress: Any) -> list[Group]:
        self.asked.append((params, seed))
        said = Completion((5,), "x", (-1.0,), "stop")
        return [Group(prompt, (said,) * params.num_completions) for prompt in prompts]


def asked(model: str, start: int = 0, **run: Any) -> list[tuple[Any, int]]:
    given = {"data": {"train": "x"}, "sample": {**SAMPLE, "max_new_tokens": 7}, "run": run}
    config, sampler = Config.model_validate(given), Noted()
    scorer: Any = type("Scorer", (), {"score": lambda self, groups, only_first: groups,
                                      "rewards": [Scored()]})()  # fmt: skip
    request = Request(config, (), 4, False, None, False, False)  # type: ignore[arg-type]
    wave = Wave(model, "held_out", start, PROMPTS)
    found = _wave_outcomes(request, config, wave, sampler, scorer, lambda *told: None)  # type: ignore[arg-type]
    assert [len(each["samples"]) for each in found] == [4, 4, 4]
    return sampler.asked


class Scored:
    def __init__(self) -> None:
        self.reward = type("Reward", (), {"answer": None})()


def test_greedy_and_drawn_end_where_a_run_s_completions_end() -> None:
    (greedy, _), (drawn, _) = asked("adapter")
    assert (greedy.temperature, greedy.num_completions, greedy.max_new_tokens) == (0.0, 1, 7)
    assert greedy.stop == drawn.stop == ("</answer>",)
    assert drawn == replace(
        greedy, num_completions=4, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1
    )


def test_models_that_are_compared_have_the_same_random_numbers() -> None:
    seeds = [seed for _, seed in asked("adapter")]
    assert seeds == [seed for _, seed in asked("base")]
    assert seeds != [seed for _, seed in asked("base", 3)]
    assert seeds != [seed for _, seed in asked("base", seed=1)]
