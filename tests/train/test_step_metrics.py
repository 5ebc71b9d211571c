"""The metrics of a step, on numbers worked by hand."""

import math

import pytest
import torch

from reason_llm.train.step_metrics import Tally


def tally(loss: float, values: list[float], log_ratios: list[float], padding: int) -> Tally:
    """One micro-batch of a row, whose first token is the prompt's."""
    made = Tally()
    mask = torch.tensor([[False] + [True] * len(values)])
    passed = 1 + len(values) + padding
    made.add_micro_batch(
        torch.tensor(loss),
        mask,
        passed,
        padding,
        {"entropy": torch.tensor([[99.0, *values]])},
        torch.tensor([[99.0, *log_ratios]]),
        torch.tensor([[99.0, *log_ratios]]),
    )
    return made


def test_tokens_are_averaged_over_tokens_and_losses_over_optimizer_steps() -> None:
    whole = Tally()
    whole.merge(tally(1.0, [1.0, 2.0, 3.0], [0.0, 0.1, -0.2], padding=2))
    whole.add_update(norm=4.0, rate=0.1)
    other = tally(2.0, [6.0], [0.5], padding=0)
    other.left_out = 3
    whole.merge(other)
    whole.add_update(norm=2.0, rate=0.2)
    whole.merge(Tally())  # of a shard without rows
    found = whole.metrics()
    assert found["train/loss"] == 1.5
    assert found["train/grad_norm"] == 3.0
    assert found["train/learning_rate"] == 0.2
    assert found["train/entropy"] == 3.0
    assert found["train/tokens"] == 4
    assert found["train/padding_fraction"] == pytest.approx(2 / 8)  # prompts count
    assert found["train/masked_out"] == 3
    assert found["train/sampler_mismatch_max"] == pytest.approx(0.5)
    assert found["train/ratio_max"] == pytest.approx(math.exp(0.5))
    assert found["train/ratio_p01"] == pytest.approx(math.exp(-0.2))
    assert found["train/ratio_p99"] == pytest.approx(math.exp(0.5))
    k3 = [math.expm1(x) - x for x in (0.0, 0.1, -0.2, 0.5)]
    assert found["train/sampler_kl"] == pytest.approx(sum(k3) / 4, rel=1e-5)


def test_means_over_rows_weigh_each_row_alike_whatever_micro_batch_it_was_in() -> None:
    whole = Tally()
    for margins, tokens in (([1.0, 2.0, 6.0], 3), ([11.0], 1), ([], 1)):
        part, mask = Tally(), torch.tensor([[False, *[True] * tokens]])
        part.add_micro_batch(
            torch.tensor(0.5), mask, 9, 4, {"entropy": 2.0 * tokens * mask}, None, None,
            {"margin": torch.tensor(margins)},
        )  # fmt: skip
        whole.merge(part)
    assert whole.of_rows() == {"loss": 1.5, "entropy": (18 + 2 + 2) / 5, "margin": 5.0}
    whole.add_update(norm=1.0, rate=0.1)
    found = whole.metrics()
    assert (found["train/margin"], found["train/entropy"]) == (5.0, 22 / 5)
    assert found["train/padding_fraction"] == pytest.approx(12 / 27)


def test_quantiles_of_a_hundred_tokens() -> None:
    ratios = [float(i) for i in range(1, 102)]
    made = tally(0.0, [0.0] * 101, [math.log(r) for r in ratios], 0)
    made.merge(tally(0.0, [0.0], [-9.0], 0))
    assert made.largest_log_ratio == made.metrics()["train/sampler_mismatch_max"] == 9.0
    found = tally(0.0, [0.0] * 101, [math.log(r) for r in ratios], 0).metrics()
    assert found["train/ratio_p01"] == pytest.approx(2.0, rel=1e-5)
    assert found["train/ratio_p99"] == pytest.approx(100.0, rel=1e-5)


def test_the_sampler_s_divergence_is_over_the_tokens_that_were_compared() -> None:
    whole = tally(0.0, [0.0], [0.5], 0)
    mask = torch.tensor([[True, True]])
    whole.add_micro_batch(torch.tensor(0.0), mask, 2, 0, {}, torch.zeros(1, 2), None)
    assert whole.metrics()["train/sampler_kl"] == pytest.approx(math.expm1(0.5) - 0.5, rel=1e-5)


def test_a_step_without_tokens_has_finite_metrics() -> None:
    empty = Tally()
    empty.add_update(0.0, 0.1)
    assert all(math.isfinite(value) for value in empty.metrics().values())


def test_what_was_measured_of_no_token_is_not_told() -> None:
    """An entropy of 0 would look like a policy that explores no more."""
    empty = Tally()
    empty.add_update(0.0, 0.1)
    found = empty.metrics()
    assert found["train/grad_norm"] == 0
    assert found["train/tokens"] == 0
    assert not {"train/entropy", "train/kl", "train/sampler_kl", "train/ratio_max"} & set(found)
    no_pair = {"margin": torch.empty(0)}
    empty.add_micro_batch(torch.tensor(0.0), torch.zeros(1, 1), 1, 0, {}, None, None, no_pair)
    assert "train/margin" not in empty.metrics()
    later = Tally()  # its first optimizer step had no token
    mask = torch.tensor([[True, True]])
    later.add_micro_batch(torch.tensor(0.0), mask, 2, 0, {}, torch.zeros(1, 2), None)
    assert "train/ratio_max" in later.metrics()
    assert "train/sampler_kl" not in later.metrics()
