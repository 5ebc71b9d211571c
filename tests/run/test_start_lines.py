"""What a start says of the rows and the steps, before a weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
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


def test_the_optimizer_steps_and_the_warm_up_are_said(said: Callable[..., list[str]]) -> None:
    for options, told in (
        ({}, []),
        ({"train__optimizer_steps": 2}, ["2 optimizer steps each, 12 in all"]),
        (
            {"train__optimizer_steps": 2, "train__epochs": 2, "train__warmup_steps": 3},
            ["4 optimizer steps each, 24 in all; warm-up 3"],
        ),
        ({"train__warmup_steps": 2}, ["1 optimizer step each, 6 in all; warm-up 2"]),
    ):
        lines = said(run__steps=6, **options)
        assert [line for line in lines if "optimizer step" in line] == told


def test_the_size_and_the_strength_of_a_step_are_said(said: Callable[..., list[str]]) -> None:
    options = {
        "sample__prompts_per_step": 2, "sample__completions_per_prompt": 4,
        "train__schedule": "linear",
        "train__learning_rate": 5e-6, "model__adapter__rank": 8, "model__adapter__alpha": 16,
        "algorithm": {"name": "grpo", "kl": "k3", "kl_coefficient": 0.04},
    }  # fmt: skip
    trained = "LoRA of rank 8, alpha 16, on all-linear; learning rate 5e-06 (linear)"
    objective = "objective: aggregation sequence_mean; KL k3 x 0.04; ratio clipped to 0.8 ... 1.2"
    lines = said(**options)
    first = lines.index("grpo: steps of 2 prompts x 4 completions")
    assert lines[first + 1 : first + 3] == [objective, trained]
    for row, told in (
        ({"name": "grpo", "kl": "none"}, "sequence_mean; no KL; ratio clipped to 0.8 ... 1.2"),
        ({"name": "dapo"}, "token_mean; no KL; ratio clipped to 0.8 ... 1.28"),
        ({"name": "gmpo"}, "sequence_mean; no KL; log-ratio clipped to -0.4 ... 0.4"),
        ({"name": "pg"}, "token_mean; no KL"),
        ({"name": "gspo"}, "sequence_mean; no KL; sequence ratio clipped to 0.9997 ... 1.0004"),
    ):
        options["algorithm"] = row
        (line,) = [each for each in said(**options) if each.startswith("objective:")]
        assert line == f"objective: aggregation {told}"
    del options["algorithm"]
    options |= {"model__adapter__targets": ["q_proj", "v_proj"], "model__adapter__rslora": True}
    trained = "LoRA of rank 8, alpha 16 (rsLoRA), on q/v_proj; learning rate 5e-06 (linear)"
    assert trained in said(**options)
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    options["model__adapter__targets"] = every
    (line,) = [each for each in said(**options) if each.startswith("LoRA of")]
    assert ", on q/k/v/o/gate/up/down_proj; " in line and len(line) <= 100
    options["model__adapter__targets"] = r"model\.layers\.([0-9]|1[0-9])\.(self_attn|mlp)\..*_proj"
    (line,) = [each for each in said(**options) if each.startswith("LoRA of")]
    assert r", on model\.layers" in line and "…; learning" in line and len(line) <= 100


def test_the_weights_of_a_preference_loss_are_said(
    said: Callable[..., list[str]], tmp_path: Path
) -> None:
    pair = {"prompt": "What is 1 + 1?", "chosen": "2", "rejected": "3"}
    (rows := tmp_path / "pairs.jsonl").write_text(f"{json.dumps(pair)}\n" * 4)
    for row, told in (
        ({"name": "dpo"}, "beta 0.1"),
        ({"name": "irpo", "nll_coefficient": 0.5}, "beta 0.1; NLL of the chosen side x 0.5"),
    ):
        lines = said(
            stage="preference", preference=row, algorithm={}, sample={}, score={},
            data={"train": str(rows)}, train__rows_per_step=2,
        )  # fmt: skip
        assert [each for each in lines if each.startswith("objective:")] == [f"objective: {told}"]


def test_a_rate_for_all_weights_is_warned_of_with_an_adapter(
    small_run: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    for rate, train, is_warned in (
        (1e-6, "adapter", True), (2.9e-6, "adapter", True), (3e-6, "adapter", False),
        (0.0, "adapter", False), (1e-6, "full", False),
    ):  # fmt: skip
        caplog.clear()
        section = {"model__adapter": {}} if train == "full" else {}
        prepare(small_run(train__learning_rate=rate, **section, model__train=train), Lines())
        lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
        rows = [line for line in lines if "train.learning_rate" in line]
        assert rows == is_warned * [
            f"train.learning_rate={rate:g} teaches a LoRA adapter next to nothing; set it to 1e-5 "
            "to 2e-5, or set model.train to full, which trains all weights"
        ]
