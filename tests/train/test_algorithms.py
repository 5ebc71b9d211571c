"""The table: rows, overrides, refusals."""

import pytest

from reason_llm.train.algorithms import ALGORITHMS, resolve


def test_grpo_with_equal_clips_is_the_dapo_row_with_sequence_mean() -> None:
    dapo = resolve("dapo", {"clip_high": 0.2, "aggregation": "sequence_mean"})
    grpo = resolve("grpo", {"kl": "none"})
    columns = ("scale", "clip_low", "clip_high", "aggregation", "kl", "kl_coefficient")
    assert [getattr(dapo, c) for c in columns] == [getattr(grpo, c) for c in columns]


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
    ],
)
def test_an_ignored_override_is_an_error(name: str, overrides: dict, named: str) -> None:
    with pytest.raises(ValueError, match="would be ignored") as caught:
        resolve(name, overrides)
    assert named in str(caught.value)


def test_every_row_names_its_paper() -> None:
    assert all("arXiv:" in row.source for row in ALGORITHMS.values())
