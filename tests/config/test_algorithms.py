"""The table: rows, overrides, refusals."""

import re
from dataclasses import fields
from typing import get_args

import pytest
from pydantic import ValidationError

from conftest import ROOT
from reason_llm.config.algorithms import (
    ALGORITHMS,
    FIXED,
    Aggregation,
    Algorithm,
    AlgorithmSection,
    Baseline,
    Credit,
    KLEstimator,
    KLPlace,
    Normalization,
    Scale,
    resolve,
)
from reason_llm.config.preferences import PREFERENCES
from reason_llm.config.surrogates import SURROGATES, Ratio, SurrogateColumns


def test_grpo_with_equal_clips_is_the_dapo_row_with_sequence_mean() -> None:
    dapo = resolve(
        "dapo", {"clip_high": 0.2, "aggregation": "sequence_mean", "dynamic_sampling": 1}
    )
    grpo = resolve("grpo", {"kl": "none"})
    columns = AlgorithmSection.model_fields.keys() - {"name"}
    assert [getattr(dapo, c) for c in columns] == [getattr(grpo, c) for c in columns]


def test_the_config_has_every_column_and_documents_every_row() -> None:
    options = AlgorithmSection.model_fields
    assert set(options) == {"name"} | {each.name for each in fields(Algorithm)} - FIXED
    assert all(option.description for option in options.values())
    named = (options["name"].description or "").replace(".", "").replace(" or ", ", ")
    assert {name.strip() for name in named.partition(":")[2].split(",")} == set(ALGORITHMS)


def test_overrides_replace_their_column_only() -> None:
    row = resolve("grpo", {"clip_high": 0.3})
    assert row.clip_high == 0.3
    assert row.clip_low == ALGORITHMS["grpo"].clip_low


def test_kl_none_takes_its_coefficient_along() -> None:
    assert resolve("grpo", {"kl": "none"}).kl_coefficient == 0


@pytest.mark.parametrize(
    ("name", "overrides", "named"),
    [
        ("dapo", {"kl_coefficient": 0.1}, "kl_coefficient=0.1"),
        ("grpo", {"kl": "none", "kl_coefficient": 0.1}, "kl_coefficient=0.1"),
        ("dapo", {"kl": "k3"}, "kl=k3"),
        ("grpo", {"kl_coefficient": 0.0}, "kl=k3"),
        ("pg", {"clip_low": 0.1}, "clip_low=0.1"),
        ("sapo", {"clip_high": 0.1}, "clip_high=0.1"),
        ("grpo", {"temperature_negative": 2.0}, "temperature_negative=2.0"),
        ("cispo", {"dual_clip": 3.0}, "dual_clip=3.0"),
        ("gmpo", {"ratio": "sequence"}, "ratio=sequence"),
        ("grpo", {"top_k": 2}, "top_k=2"),
        ("grpo", {"success_range": (0.2, 0.8)}, "success_range"),
        ("dapo", {"correction": "none", "correction_cap": 3.0}, "correction_cap=3.0"),
        ("dapo", {"correction": "none", "correction_floor": 0.5}, "correction_floor=0.5"),
        ("dapo", {"kl_place": "reward"}, "kl_place=reward"),
        ("opd", {"credit": "turn"}, "credit=turn"),
        ("grpo", {"min_reward_std": 0.1, "kl_place": "reward"}, "min_reward_std=0.1"),
        ("pg", {"min_reward_std": 0.1}, "min_reward_std=0.1"),
        ("ppo", {"min_reward_std": 0.1, "dynamic_sampling": 3}, "min_reward_std=0.1"),
        ("opd", {"min_reward_std": 0.1, "dynamic_sampling": 3}, "min_reward_std=0.1"),
        ("rloo", {"kl_horizon": 9}, "kl_horizon=9"),
        ("rloo", {"kl_target": 6.0, "kl_place": "loss"}, "kl_target=6.0"),
        ("dapo", {"kl_reference": "start"}, "kl_reference=start"),
    ],
)
def test_an_ignored_override_is_an_error(name: str, overrides: dict, named: str) -> None:
    with pytest.raises(ValueError, match="would be ignored") as caught:
        resolve(name, overrides)
    assert named in str(caught.value)


@pytest.mark.parametrize(
    ("name", "overrides", "first", "second"),
    [
        ("grpo", {"keep": "top_k"}, "keep=top_k", "top_k"),
        ("gdpo", {"kl": "k1", "kl_coefficient": 0.1, "kl_place": "reward"}, "kl_place=reward",
         "normalization=per_reward"),
        ("gdpo", {"baseline": "leave_one_out"}, "baseline=leave_one_out", "normalization=per_rew"),
        ("gdpo", {"scale": "batch"}, "scale=batch", "normalization=per_reward"),
        ("dr_grpo", {"normalization": "per_reward"}, "scale=none", "normalization=per_reward"),
        ("gdpo", {"credit": "turn"}, "credit=turn", "normalization=per_reward"),
        ("gspo", {"credit": "turn"}, "credit=turn", "ratio to sequence_token"),
        ("gmpo", {"credit": "turn"}, "credit=turn", "surrogate=gmpo"),
        ("grpo", {"max_ratio": 0.99}, "max_ratio=0.99", "above 1"),
        ("rloo", {"kl_place": "token_reward"}, "kl_place=token_reward", "baseline=leave_one_out"),
        ("grpo", {"dual_clip": 1.0}, "dual_clip=1.0", "above 1"),
        ("grpo", {"correction_floor": 2.0}, "correction_floor=2.0", "correction_cap=2.0"),
        ("dapo", {"delta": 1.28}, "delta=1.28", "clip_high=0.28"),
        ("grpo", {"clip_low": 1.01}, "clip_low=1.01", "1 or less"),
        ("cispo", {"clip_low": 1.01}, "clip_low=1.01", "1 or less"),
        ("dapo", {"success_range": (0.51, 0.5)}, "success_range=[0.51, 0.5]", "empty"),
        ("ppo", {"baseline": "group_mean"}, "algorithm.name=ppo has a critic", "baseline to none"),
        ("ppo", {"scale": "batch"}, "scale=batch", "algorithm.name=ppo"),
        ("ppo", {"kl_place": "reward"}, "kl_place=reward", "algorithm.name=ppo"),
        ("opd", {"baseline": "group_mean"}, "algorithm.name=opd", "baseline, scale and kl"),
        ("opd", {"scale": "batch"}, "algorithm.name=opd", "baseline, scale and kl"),
        ("opd", {"kl": "k3", "kl_coefficient": 0.1}, "algorithm.name=opd", "kl to none"),
        ("reinforce_pp", {"scale": "batch"}, "kl_place=token_reward", "scale=batch"),
    ],
)  # fmt: skip
def test_a_contradiction_names_both(name: str, overrides: dict, first: str, second: str) -> None:
    with pytest.raises(ValueError, match=re.escape(first)) as caught:
        resolve(name, overrides)
    assert second in str(caught.value)


def test_every_row_names_its_paper() -> None:
    assert all("arXiv:" in row.source or "doi:" in row.source for row in ALGORITHMS.values())


def test_every_column_of_the_surrogates_is_read_by_one_of_them() -> None:
    read = {column for each in SURROGATES.values() for column in each.columns}
    assert read == {each.name for each in fields(SurrogateColumns)}


def test_the_option_names_every_surrogate_with_its_idea() -> None:
    option = AlgorithmSection.model_fields["surrogate"]
    for name, each in SURROGATES.items():
        assert f"{name}: {each.idea}" in str(option.description)
        assert "arXiv:" in each.source or "doi:" in each.source
        assert AlgorithmSection(surrogate=name).row().surrogate == name
    with pytest.raises(ValidationError, match="'clip'"):
        AlgorithmSection(surrogate="clipp")


def test_the_docs_have_an_equation_for_each_choice() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    section = text.partition("\n### Equations\n")[2].partition("\n### ")[0]
    named = set(re.findall(r"`(?:[a-z_.]+: )?([a-z0-9_]+)`", section))
    of_columns = (
        Baseline,
        Scale,
        Normalization,
        Ratio,
        Aggregation,
        KLEstimator,
        KLPlace,
        Credit,
    )
    choices = {choice for column in of_columns for choice in get_args(column)} - {
        "none",
        "total",
        "rollout",
    }
    choices |= set(SURROGATES)
    assert len(choices) > 20
    assert (choices | {*PREFERENCES, "ppo", "opd"}) - named == set()
