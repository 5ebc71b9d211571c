"""What is special in a preference loss, and numbers at their edges. Each loss and its gradient are
compared with TRL's in ``equivalence/test_trl.py`` and worked by hand in
``test_stage_objectives.py``.

1. DPO far from the reference; cDPO's target; rDPO over flipped labels; IPO's target.
2. KTO: the mismatched pairs, the weights.
3. ORPO's odds, and completions that are certain.
"""

import math

import pytest
import torch

from reason_llm.errors import DataError
from reason_llm.train import preferences

SOFTPLUS = math.log1p(math.exp(-1.5))  # -log sigmoid(1.5)


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value_and_gradient(name: str, h: float, *arguments: float) -> list[float]:
    """The loss of a pair, and its gradient in h."""
    h_P = tensor([h]).requires_grad_()
    loss_P = getattr(preferences, name)(h_P, *arguments)
    loss_P.backward()
    return [loss_P.item(), h_P.grad.item()]


def test_dpo_of_huge_log_ratios_is_finite() -> None:
    assert value_and_gradient("cdpo", -3998.0, 1.0, 0.0) == [3998.0, -1.0]
    assert value_and_gradient("cdpo", 3998.0, 1.0, 0.0)[0] == 0.0


def test_cdpo_turns_back_beyond_its_target() -> None:
    """At sigmoid(beta h) = 0.9 nothing is pushed; beyond, the chosen completion is pushed down."""
    target = math.log(9.0)
    near = (target - 1, target, target + 1)
    gradients = [value_and_gradient("cdpo", h, 1.0, 0.1)[1] for h in near]
    assert gradients[0] < 0 < gradients[2]
    assert gradients[1] == pytest.approx(0.0, abs=1e-12)


def test_rdpo_averages_to_dpo_over_flipped_labels() -> None:
    right, wrong = (value_and_gradient("rdpo", h, 0.5, 0.2)[0] for h in (3.0, -3.0))
    assert right == pytest.approx((0.8 * SOFTPLUS - 0.2 * (SOFTPLUS + 1.5)) / 0.6)
    assert 0.8 * right + 0.2 * wrong == pytest.approx(SOFTPLUS)


def test_ipo_has_a_target_on_either_side_of_which_it_pushes_back() -> None:
    assert value_and_gradient("ipo", 3.0, 0.1) == pytest.approx([4.0, -4.0])
    assert value_and_gradient("ipo", 3.0, 0.25) == pytest.approx([1.0, 2.0])


def test_kto_needs_two_completions() -> None:
    with pytest.raises(DataError, match=r"2 or more completions.* has 1; choose a batch size"):
        preferences.mismatched(1)


def test_kto_weights_balance_the_labels() -> None:
    low, high = preferences.kto_desirable_weights(200, 50, undesirable_weight=2.0)
    assert (low, high) == pytest.approx((0.5, 2 / 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mean", [0.0, 1e-9, -1e-12, -1e-4, -0.69, -0.7, -100.0, -1e4])
def test_orpo_is_finite_everywhere(mean: float, dtype: torch.dtype) -> None:
    for other in (0.0, -1.0, mean):
        logprobs = torch.tensor([mean, other], dtype=dtype, requires_grad=True)
        preferences.orpo(logprobs[:1], logprobs[1:], 0.1).sum().backward()
        assert logprobs.grad.isfinite().all()
        assert preferences.log_odds(logprobs.detach()).isfinite().all()


def test_log1mexp_loses_no_digits_on_either_side() -> None:
    x = torch.tensor([-1e-6, -30.0])  # float32: 1 - exp(x) alone would give 0 or few digits
    assert preferences.log1mexp(x).tolist() == pytest.approx(
        [math.log(-math.expm1(-1e-6)), -math.exp(-30)], rel=1e-6, abs=0.0
    )


def test_only_what_is_certain_has_constant_odds() -> None:
    means = tensor([-1e-6, -1e-8, 0.0]).requires_grad_()
    odds = preferences.log_odds(means)
    odds.sum().backward()
    assert odds.tolist() == pytest.approx([-math.log(1e-6), -math.log(1e-7), -math.log(1e-7)])
    assert means.grad.tolist() == pytest.approx([1e6, 0.0, 0.0], rel=1e-5)


def test_log1mexp_has_a_gradient_next_to_0() -> None:
    """-exp(x) / (1 - exp(x)), though exp(-1e-9) is 1 in float32."""
    x = torch.tensor([-1e-9, -1.0, -50.0], requires_grad=True)
    preferences.log1mexp(x).sum().backward()
    by_hand = [-1e9, -1 / math.expm1(1.0), -math.exp(-50)]
    assert x.grad.tolist() == pytest.approx(by_hand, rel=1e-5, abs=0.0)
