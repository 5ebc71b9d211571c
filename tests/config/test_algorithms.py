"""The table: rows, overrides, refusals."""

import re
from contextlib import suppress
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
from reason_llm.config.preferences import PREFERENCES, PreferenceSection
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
    columns = (Baseline, Scale, Normalization, Ratio, Aggregation, KLEstimator, KLPlace, Credit)
    choices = {choice for column in columns for choice in get_args(column)} | set(SURROGATES)
    choices -= {"none", "total", "rollout"}
    assert len(choices) > 20
    assert (choices | {*PREFERENCES, "ppo", "opd"}) - named == set()
    rows = re.findall(r"^\| (.*) \| (.*) \|$", section, re.MULTILINE)
    smoothed = {name for names, loss in rows for name in re.findall(r"`(\w+)`", names)
                if name in PREFERENCES and "(1 - s)" in loss}  # fmt: skip
    takes = set[str]()
    for name in PREFERENCES:
        with suppress(ValidationError):
            PreferenceSection(name=name, label_smoothing=0.2)
            takes.add(name)
    assert smoothed == takes
