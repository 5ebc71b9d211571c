"""Whom an evaluation asks, in what waves, and what the sampler is asked for a wave."""

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from reason_llm.config import Config
from reason_llm.data import Conditioning, DataSet
from reason_llm.errors import ConfigError
from reason_llm.evaluate.evaluation import _by_base, _config_for, _Stage, _wave_outcomes
from reason_llm.evaluate.outcomes import Wave
from reason_llm.evaluate.request import Request, Target, _target
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


@pytest.mark.parametrize(
    ("sample", "engine", "sizes"),
    [({}, None, [3, 2, 1]), ({}, "vllm", [5, 1]), ({"prompts_per_wave": 2}, None, [2, 2, 1, 1]),
     ({"completions_per_prompt": 99}, None, [1] * 6)],
)  # fmt: skip
def test_waves_hold_what_fits_at_once(sample: Any, engine: Any, sizes: list[int]) -> None:
    """Ten completions fit; of each problem three are sampled."""
    config = Config.model_validate(
        {"data": {"train": "x"}, "sample": {"completions_per_prompt": 3} | sample}
    )
    prompts = [Prompt(str(n), "q", (1,), "4") for n in range(6)]
    sets = [DataSet("a", "a", "problems", prompts=prompts[:5])]
    sets.append(DataSet("b", "b", "problems", prompts=prompts[5:]))
    targets = [Target("adapter", "m", Path("x")), Target("base", "m", None)]
    plan: Any = SimpleNamespace(cache_tokens=1099, context_tokens=100, engine=engine)
    waves = list(_Stage(config, targets, None, sets, plan, None).waves())
    assert [(of.label, wave.model) for of, wave in waves] == [
        (label, label) for label in ("adapter", "base") for _ in sizes
    ]
    first = [wave for _, wave in waves[: len(sizes)]]
    assert [len(wave.prompts) for wave in first] == sizes
    assert [prompt for wave in first for prompt in wave.prompts] == prompts
    assert [wave.start for wave in first] == [*accumulate(sizes[:-2], initial=0), 0]
    assert [wave.set for wave in first] == ["a"] * (len(sizes) - 1) + ["b"]


def test_models_share_a_base_copy_that_serves_them_all(tmp_path: Path) -> None:
    """With adapters of one shape, asked alike."""
    made = {name: tmp_path / name for name in ("a", "b", "wide", "scored")}
    for name, folder in made.items():
        folder.mkdir()
        rank = 9 if name == "wide" else 8
        settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 16, "target_modules": ["q_proj"]}
        (folder / "adapter_config.json").write_text(json.dumps(settings))
    Conditioning("{input} {reward}", 0.0, 1.0, None).write(made["scored"])
    of = {name: Target(name, "m", folder) for name, folder in made.items()}
    base, other = Target("base", "m", None), Target("other", "n", None)
    for first, second, is_shared in (
        (of["a"], of["b"], True), (of["a"], base, True), (base, of["a"], True),
        (of["a"], of["wide"], False), (of["a"], of["scored"], False), (base, other, False),
    ):  # fmt: skip
        request: Any = SimpleNamespace(targets=(first, second))
        assert _by_base(request) == ([[first, second]] if is_shared else [[first], [second]])
    tree = {"data": {"train": "x", "eval": "y"}, "eval": {"max_new_tokens": 5}}
    config = Config.model_validate(tree | {"model": {"train": "full"}})
    asked = Request(config, (), 0, False, Path("o"), False, False)
    for targets, rank, train in (([base, of["wide"]], 9, "adapter"), ([base], 32, "full")):
        found = _config_for(asked, targets)
        assert (found.model.path, found.model.adapter.rank, found.model.train) == ("m", rank, train)
        sample = found.sample
        assert (sample.prompts_per_step, sample.completions_per_prompt) == (64, 1)
        assert sample.max_new_tokens == 5
    several = replace(asked, num_samples=4)
    assert _config_for(several, [base]).sample.completions_per_prompt == 4


def test_a_model_is_named_by_its_run_its_adapter_or_itself(tmp_path: Path) -> None:
    run, whole, adapter = (tmp_path / name for name in ("run", "whole", "mine"))
    config = Config.model_validate({"data": {"train": "x"}, "model": {"path": "m"}})
    for folder in (run / "adapter", run / "adapter_best", adapter, whole / "model"):
        folder.mkdir(parents=True)
        name = "model.safetensors" if folder.name == "model" else "adapter_config.json"
        (folder / name).write_text("{}")
    for folder in (run, whole):
        tree = {"data": {"train": "x"}, "model": {"train": "full"} if folder == whole else {}}
        (folder / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    own = Target("adapter", "m", run / "adapter")
    for name, of_run, expected in (
        ("adapter", None, own),
        ("base", run, Target("base", "m", None)),
        ("best", run, Target("best", "m", run / "adapter_best")),
        (str(run), None, Target(str(run), "m", run / "adapter")),
        (str(whole), run, Target(str(whole), str(whole / "model"), None)),
        (str(adapter), run, Target(str(adapter), "m", adapter)),
        ("org/model", run, Target("org/model", "org/model", None)),
    ):
        assert _target(name, config, own, of_run) == expected
    tree = {"stage": "reward", "data": {"train": "x"}}
    (run / "resolved_config.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"is a reward model \(stage=reward\)"):
        _target(str(run), config, own, None)
    with pytest.raises(ConfigError, match="there is no adapter: name a run's folder"):
        _target("best", config, own, None)
