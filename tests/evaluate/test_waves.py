"""Whom an evaluation asks, in what waves, and what the sampler is asked for a wave."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import TINY
from reason_llm.config import Config
from reason_llm.config.command_line import CommandLine
from reason_llm.errors import ConfigError
from reason_llm.evaluate.evaluation import (
    _wave_outcomes,
)
from reason_llm.evaluate.outcomes import EvaluationWave
from reason_llm.evaluate.request import (
    HELD_OUT,
    Request,
    Target,
    _sets,
    _target,
    make_request,
)
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.store import folder as run_folder

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
    request = Request(config, (), 4, None, False)  # type: ignore[arg-type]
    wave = EvaluationWave(model, "held_out", start, PROMPTS)
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


def named(sets: list[str] | None) -> CommandLine:
    return CommandLine(None, {}, set(), {} if sets is None else {"sets": sets})


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, {HELD_OUT: "y", "hard": "z"}),
        (["gsm8k", "hard"], {"gsm8k": "openai/gsm8k:main", "hard": "z"}),
        (["math500"], {"math500": "HuggingFaceH4/MATH-500"}),
        (["aime2024", "aime2025"], {"aime2024": "math-ai/aime24", "aime2025": "math-ai/aime25"}),
        (["mine=a/b"], {"mine": "a/b"}),
        (["org/my set:x"], {"my_set_x": "org/my set:x"}),
        (["rows.JSONL"], {"rows": "rows.JSONL"}),
        (["verifiers:a-b?size=2"], {"verifiers_a-b_size_2": "verifiers:a-b?size=2"}),
    ],
)
def test_sets_are_named_by_the_run_a_preset_or_a_file(names: Any, expected: dict[str, str]) -> None:
    tree = {"data": {"train": "x", "eval": "y"}, "eval": {"sets": {"hard": "z"}}}
    assert _sets(named(names), Config.model_validate(tree)) == expected


def test_a_set_of_the_run_goes_before_a_preset_of_its_name() -> None:
    tree = {"data": {"train": "x"}, "eval": {"sets": {"gsm8k": "mine"}}}
    assert _sets(named(["gsm8k"]), Config.model_validate(tree)) == {"gsm8k": "mine"}
    with pytest.raises(ConfigError, match=r"names rows twice; .* as in other=b/rows.csv"):
        _sets(named(["a/rows.csv", "b/rows.csv"]), Config.model_validate(tree))
    with pytest.raises(ConfigError, match="is not one of gsm8k, math500, aime2024, aime2025"):
        _sets(named(["nothing"]), Config.model_validate(tree))


@pytest.mark.parametrize(
    ("k", "number"),
    [(None, 0), ("0", 0), ("4096", 4096), ("4097", None), ("-1", None), ("00001", None)],
)
def test_a_request_says_what_is_asked_and_where_it_is_kept(
    k: str | None, number: int | None, tmp_path: Path
) -> None:
    tree = {"run": {"name": "r", "directory": "runs"}, "data": {"train": "x", "eval": "y"}}
    (path := tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    values = {} if k is None else {"k": [k]}
    if number is None:
        with pytest.raises(ConfigError, match="is not a number of samples; give one from 0"):
            make_request(CommandLine(str(path), {}, set(), values))
        return
    found = make_request(CommandLine(str(path), {"eval.limit": 3}, set(), values))
    assert found.num_samples == number
    assert (found.out, found.afresh) == (Path("runs/r/evaluation"), False)
    assert found.targets == (Target("base", found.config.model.path, None),)
    assert (found.config.data.eval, dict(found.config.eval.sets)) == (None, {HELD_OUT: "y"})
    assert found.config.eval.limit == 3
    again = CommandLine(str(path), {"run.resume": "never"}, set(), values)
    assert make_request(again).afresh
    named = replace(again, values=values | {"out": ["o"], "compare": ["org/m"], "model": ["org/n"]})
    found = make_request(named)
    assert found.out == Path("o")
    assert [each.label for each in found.targets] == ["org/n", "org/m"]


def test_an_evaluation_of_a_copied_run_is_kept_in_the_copy(tmp_path: Path) -> None:
    tree = {
        "run": {"name": "r", "directory": str(tmp_path / "runs")},
        "model": {"path": str(TINY)},
        "data": {"train": "x", "eval": "y"},
    }
    copied = tmp_path / "elsewhere" / "copied"
    (copied / "adapter").mkdir(parents=True)
    (copied / "adapter" / "adapter_config.json").write_text("{}")
    config = Config.model_validate(tree)
    (copied / "resolved_config.yaml").write_bytes(run_folder.config_to_bytes(config))
    line = CommandLine(str(copied), {}, set(), {})
    assert make_request(line).out == copied / "evaluation"
    moved = replace(line, overrides={"run.name": "other"})
    assert make_request(moved).out == tmp_path / "runs" / "other" / "evaluation"
