"""Options of the stages that contradict each other, or would be ignored, are refused."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from reason_llm.config import Config
from stages import OF_FORM

PREFERENCE = OF_FORM["preferences"]
FULL = {"train": "full"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model": {"quantize": "nf4"}}, "model.quantize=nf4"),
        ({"model": {"backend": "unsloth"}}, "model.backend=unsloth"),
        ({"model": {"allow_pickle": True}}, "model.trust_remote_code or model.allow_pickle"),
        ({"model": {"adapter": {"rank": 4}}}, "the model.adapter section"),
        ({"model": {"start": "x"}}, "model.start=x"),
        ({"run": {"shards": 2}}, "run.replicas, run.shards, run.samplers or run.max_staleness"),
        ({"run": {"max_staleness": 1}}, "run.samplers or run.max_staleness"),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name=ppo"),
        ({"algorithm": {"name": "opd"}, "teacher": {"adapter": "x"}}, "teacher.adapter=x"),
        ({"stage": "reward"}, "stage=reward"),
        ({"stage": "sample"}, "stage=sample"),
        ({"stage": "sft", "sft": {"condition": "reward"}}, "sft.condition=reward"),
        ({"train": {"ema": 0.9}}, "train.ema=0.9"),
    ],
)
def test_what_needs_a_base_that_stays_is_refused(options: dict[str, Any], problem: str) -> None:
    options = options | {"model": options.get("model", {}) | FULL, "data": {"train": "x"}}
    with pytest.raises(ValidationError) as caught:
        Config.model_validate(options)
    assert f"{problem} contradicts model.train=full: " in str(caught.value)
    assert "or set model.train to adapter" in str(caught.value)


def test_a_reward_model_that_is_an_adapter_needs_a_base_that_stays(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").touch()
    rewards = ["boxed_math", {"name": "reward_model", "options": {"path": str(tmp_path)}}]
    with pytest.raises(ValidationError, match=r"is an adapter contradicts model\.train=full: "):
        Config.model_validate(
            {"model": FULL, "data": {"train": "x"}, "score": {"rewards": rewards}}
        )


def test_a_part_of_the_weights_is_of_all_weights() -> None:
    with pytest.raises(ValidationError, match=r"model\.trainable=x contradicts model\.train="):
        Config.model_validate({"model": {"trainable": "x"}, "data": {"train": "x"}})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sft": {"aggregation": "sequence_mean"}}, "the sft section contradicts stage=rl"),
        ({"reward": {"centering": 0.1}}, "the reward section contradicts stage=rl"),
        ({"stage": "sft", "algorithm": {"name": "dapo"}}, "algorithm section contradicts"),
        ({"stage": "sft", "data": {"train": "x", "form": "texts"}}, "data.form=texts contradicts"),
        ({"eval": {"rows": "x"}}, "eval.rows=x contradicts stage=rl"),
        ({"stage": "reward", "data": {"train": "x", "eval": "y"}}, "contradicts stage=reward"),
        ({"critic": {"lam": 0.5}}, "the critic section contradicts algorithm.name=grpo"),
        ({"teacher": {"adapter": "x"}}, "the teacher section contradicts algorithm.name=grpo"),
        (
            {"algorithm": {"name": "ppo"}, "critic": {"start": "rm", "warmup_steps": 0}},
            "critic.warmup_steps=0 contradicts critic.start=rm",
        ),
        ({"algorithm": {"missing_eos_penalty": 1.0}}, "because algorithm.name is not ppo"),
        (
            {"algorithm": {"name": "ppo", "missing_eos_penalty": 1.0, "truncated": "leave_out"}},
            "missing_eos_penalty=1.0 would be ignored because algorithm.truncated is leave_out",
        ),
        ({"algorithm": {"name": "ppo", "kl_reference": "start"}}, "kl_reference=start contradicts"),
        (PREFERENCE | {"preference": {"reference": "start"}}, "reference=start contradicts"),
        (
            PREFERENCE | {"preference": {"name": "orpo", "reference": "base"}},
            "preference.reference=base would be ignored",
        ),
        (
            PREFERENCE | {"preference": {"name": "rdpo", "label_smoothing": 0.5}},
            "Input should be less than 0.5",
        ),
        (
            PREFERENCE | {"preference": {"name": "cdpo", "label_smoothing": 0.5}},
            "Input should be less than 0.5",
        ),
        ({"train": {"rows_per_step": 63}}, "train.rows_per_step=63 contradicts stage=rl"),
        ({"stage": "sft", "sft": {"condition_bins": 3}}, "sft.condition_bins=3 would be ignored"),
        (
            {"stage": "sft", "sft": {"condition": "reward", "condition_bins": 3}},
            "sft.condition_bins=3 would be ignored",
        ),
        (
            {"stage": "sft", "sft": {"condition_text": "{reward} {input}"}},
            "would be ignored because sft.condition is none",
        ),
    ],
)  # fmt: skip
def test_contradictions_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Config.model_validate({"data": {"train": "x"}, **options})
    assert problem in str(caught.value)


def test_only_what_is_judged_is_asked_for_a_reward_s_form() -> None:
    def asked(**options: Any) -> str:
        return Config.model_validate({"data": {"train": "x"}, **options}).prompting_reward

    judged = {"data": {"train": "x", "eval": "y"}}
    assert asked() == asked(stage="sample") == "boxed"
    assert asked(stage="sft") == asked(stage="reward") == asked(stage="pretrain") == ""
    assert asked(stage="sft", **judged) == "boxed"
    assert asked(score={"rewards": [{"name": "think_answer_tags"}]}) == "think_answer_tags"


def test_the_form_follows_from_the_stage_and_the_reference_from_the_start() -> None:
    forms = {
        "sft": "demonstrations",
        "pretrain": "texts",
        "reward": "preferences",
        "rl": "problems",
    }
    for stage, form in forms.items():
        config = Config.model_validate({"data": {"train": "x"}, "stage": stage})
        assert config.data.form == form
    kto = Config.model_validate(
        {"data": {"train": "x"}, "stage": "preference", "preference": {"name": "kto"}}
    )
    assert (kto.data.form, kto.learns_pairs) == ("labels", False)
    ppo: dict[str, Any] = {"data": {"train": "x"}, "algorithm": {"name": "ppo"}}
    assert not Config.model_validate(ppo).compares_with_start
    assert Config.model_validate(ppo | {"model": {"start": "runs/sft"}}).compares_with_start


def test_long_answers_have_whole_returns_by_default() -> None:
    config = Config.model_validate({"data": {"train": "x"}, "algorithm": {"name": "ppo"}})
    assert (config.critic.lam, config.critic.value_lam, config.critic.gamma) == (1.0, 1.0, 1.0)
