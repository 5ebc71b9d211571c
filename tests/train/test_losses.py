"""Each loss against its equation, on numbers worked by hand, and the direction of its gradient.

1. Known vectors; where the clip bites.   2. Sums and KL.   3. Surrogates.   4. Importance weights,
entropies and completions that are too far. How all this adds up is in ``test_stored_gradients``.
"""

import math
from dataclasses import replace

import pytest
import torch

from reason_llm.config.algorithms import ALGORITHMS, Algorithm, resolve
from reason_llm.config.surrogates import SURROGATES, SurrogateColumns, Terms, vespo_weights
from reason_llm.train import PolicyGradient, losses
from reason_llm.train.objectives import Batch, Counts

# Known vectors: 2 and 3 tokens, advantages 1 and -1 (float64 of the papers' formulas).
LOGPROBS = [[-2.04415, -0.85025, -2.69], [-0.41683, -2.34914, -1.57985]]
OLD = [[-1.99529, -0.88674, -6.183], [-0.42273, -2.42634, -1.62856]]
MASK = [[True, True, False], [True, True, True]]
PER_TOKEN = [
    [-0.952314444388473, -1.037163932326568, 0.0],
    [1.005917439280382, 1.0802581064101608, 1.0499158309958108],
]
DAPO_LOSS = 0.22932259999426252
DAPO_GRADIENT = [
    [-0.1904628888776946, -0.2074327864653136, 0.0],
    [0.20118348785607643, 0.21605162128203217, 0.20998316619916216],
]
DR_GRPO_LOSS = 0.08190092856937944  # with 7 tokens at most


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def clipped(
    log_ratio: torch.Tensor, advantages: torch.Tensor, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = SurrogateColumns(clip_low=clip_low, clip_high=clip_high)
    everywhere = torch.ones_like(log_ratio, dtype=torch.bool)
    old = torch.zeros_like(log_ratio)
    return SURROGATES["clip"].loss(columns, Terms(log_ratio, old, advantages, everywhere))


def policy_loss(row: Algorithm, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    return SURROGATES[row.surrogate].loss(row, terms)


def loss_and_gradient(
    aggregation: str, clip_low: float, clip_high: float, max_new_tokens: int = 7
) -> tuple[float, torch.Tensor, torch.Tensor]:
    logprobs = tensor(LOGPROBS).requires_grad_()
    mask = torch.tensor(MASK)
    log_ratio = logprobs - tensor(OLD)
    loss, _ = clipped(log_ratio, tensor([[1.0], [-1.0]]), clip_low, clip_high)
    count = losses.denominator(mask.sum(1).tolist(), aggregation, max_new_tokens)
    total = losses.masked_sum(loss, mask, aggregation) / count
    total.backward()
    assert logprobs.grad is not None
    return total.item(), (loss * mask).detach(), logprobs.grad


@pytest.mark.parametrize(
    ("name", "expected", "factor"),
    [
        ("dapo", DAPO_LOSS, [[1.0], [1.0]]),
        ("dr_grpo", DR_GRPO_LOSS, [[5 / 14], [5 / 14]]),
        ("grpo", (sum(PER_TOKEN[0]) / 2 + sum(PER_TOKEN[1]) / 3) / 2, [[5 / 4], [5 / 6]]),
    ],
)
def test_rows_equal_the_known_vectors(name: str, expected: float, factor: list) -> None:
    row = ALGORITHMS[name]
    loss, per_token, gradient = loss_and_gradient(row.aggregation, row.clip_low, row.clip_high)
    assert loss == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(gradient, tensor(DAPO_GRADIENT) * tensor(factor), atol=1e-12)
    assert name != "dapo" or torch.allclose(per_token, tensor(PER_TOKEN), atol=1e-12)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient_lives"),
    [(1.5, 1.0, False), (1.5, -1.0, True), (0.5, 1.0, True), (0.5, -1.0, False), (1.1, 1.0, True)],
)
def test_clip_takes_the_gradient_only_where_it_would_go_further(
    ratio: float, advantage: float, gradient_lives: bool
) -> None:
    logprobs = tensor([[math.log(ratio)]]).requires_grad_()
    loss, is_clipped = clipped(logprobs, tensor([[advantage]]), 0.2, 0.28)
    loss.sum().backward()
    assert (logprobs.grad.item() != 0) == gradient_lives
    assert is_clipped.item() == (not gradient_lives)
    if gradient_lives:
        assert logprobs.grad.item() == pytest.approx(-advantage * ratio)


def test_clip_high_is_the_upper_bound_and_clip_low_the_lower() -> None:
    log_ratio = tensor([[1.25, 0.75]]).log()
    loss_up, up = clipped(log_ratio, tensor([[1.0]]), 0.2, 0.28)
    loss_down, down = clipped(log_ratio, tensor([[-1.0]]), 0.2, 0.28)
    assert loss_up[0].tolist() == pytest.approx([-1.25, -0.75])
    assert loss_down[0].tolist() == pytest.approx([1.25, 0.8])
    assert up.tolist() == [[False, False]]
    assert down.tolist() == [[False, True]]


def test_masked_tokens_weigh_nothing_and_an_empty_row_is_zero() -> None:
    loss = tensor([[1.0, 100.0], [50.0, 50.0]])
    mask = torch.tensor([[True, False], [False, False]])
    for aggregation in ("sequence_mean", "token_mean", "constant"):
        assert losses.masked_sum(loss, mask, aggregation).item() == 1.0
    by_hand = {"sequence_mean": 2, "token_mean": 5, "sequence_sum": 2, "constant": 20}
    assert {each: losses.denominator([2, 3], each, 10) for each in by_hand} == by_hand
    assert losses.denominator([0], "token_mean", 8) == 1.0  # finite, nothing to divide


def test_kl_estimators_agree_with_an_exact_categorical_kl() -> None:
    policy = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    ref = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    exact = (policy * (policy.log() - ref.log())).sum().item()
    assert exact > 0
    for estimator, tolerance in (("k1", 1e-12), ("k3", 1e-12), ("k2", 2e-3)):
        values = losses.kl_penalty(policy.log()[None], ref.log()[None], estimator)
        assert (policy * values[0]).sum().item() == pytest.approx(exact, abs=tolerance)


def value_and_gradient(
    row: Algorithm, logprobs: object, old: object, advantages: object, lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss per token, and the gradient of the aggregated loss, in the log-probs."""
    logprobs_BT = tensor(logprobs).requires_grad_()
    mask = torch.arange(logprobs_BT.shape[1])[None] < torch.tensor(lengths)[:, None]
    loss, _ = policy_loss(row, Terms(logprobs_BT, tensor(old), tensor(advantages), mask))
    count = losses.denominator(lengths, row.aggregation, 8)
    (losses.masked_sum(loss, mask, row.aggregation) / count).backward()
    assert logprobs_BT.grad is not None
    return loss.detach(), logprobs_BT.grad


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("advantage", [0.7, -0.7])
def test_on_policy_every_row_raises_good_tokens_and_lowers_bad_ones(
    name: str, advantage: float
) -> None:
    logprobs = [[-1.0, -2.0, -0.5]]
    row = replace(ALGORITHMS[name], aggregation="token_mean")
    if row.ratio == "sequence" or row.surrogate == "gmpo":
        row = replace(row, aggregation="sequence_mean")  # their loss is the whole row's
    _, gradient = value_and_gradient(row, logprobs, logprobs, [[advantage]], [3])
    # On policy every surrogate has the gradient of REINFORCE: -A for each token, over the mean.
    assert torch.allclose(gradient, torch.full_like(gradient, -advantage / 3), atol=1e-12)


def test_luspo_weighs_each_completion_by_its_length() -> None:
    """On policy its gradient is -A at each token of each completion, over their number."""
    row, zeros = ALGORITHMS["luspo"], [[0.0] * 3] * 2
    _, gradient = value_and_gradient(row, zeros, zeros, [[1.0], [-1.0]], [1, 3])
    assert gradient.tolist() == [[-0.5, 0.0, 0.0], [0.5, 0.5, 0.5]]


def test_sequence_ratio_is_the_geometric_mean() -> None:
    logprobs, old = tensor([[-1.0, -2.0, -9.0]]), tensor([[-1.2, -1.6, 0.0]])
    mask = torch.tensor([[True, True, False]])
    by_hand = math.exp((0.2 - 0.4) / 2)
    for level in ("sequence", "sequence_token"):
        ratio = Terms(logprobs, old, old, mask).ratio(level)
        assert ratio[0, :2].tolist() == pytest.approx([by_hand, by_hand])


def test_gspo_token_has_each_token_s_own_advantage_and_gradient() -> None:
    """With one advantage a row it is GSPO; with several, GSPO cannot tell tokens apart."""
    row, token = ALGORITHMS["gspo"], ALGORITHMS["gspo_token"]
    logprobs, old = [[-1.0, -2.0]], [[-1.0001, -2.0001]]
    one = [value_and_gradient(r, logprobs, old, [[1.0, 1.0]], [2])[1] for r in (row, token)]
    assert torch.allclose(one[0], one[1], atol=1e-12)
    _, gradient = value_and_gradient(token, logprobs, old, [[1.0, 0.0]], [2])
    assert gradient[0, 0] < 0
    assert gradient[0, 1] == 0


def test_cispo_clips_the_weight_and_never_the_gradient() -> None:
    row = replace(ALGORITHMS["cispo"], clip_low=0.4, clip_high=0.5)
    logprobs = [[math.log(3.0), math.log(0.7), math.log(0.5)]]
    _, gradient = value_and_gradient(row, logprobs, [[0.0] * 3], [[1.0]], [3])
    assert gradient[0].tolist() == pytest.approx([-1.5 / 3, -0.7 / 3, -0.6 / 3])


@pytest.mark.parametrize(
    ("options", "ratio", "advantage", "cost", "slope"),
    [
        ({"delta": 4.0}, 9.0, -1.0, 4.0, 0.0), ({"delta": 4.0}, 3.0, -1.0, 3.0, 3.0),
        ({"delta": 3.0}, 9.0, 0.5, -0.6, 0.0),  # a good token is clipped as always
    ],
)  # fmt: skip
def test_bounds_of_a_negative_advantage(
    options: dict[str, float], ratio: float, advantage: float, cost: float, slope: float
) -> None:
    row, logprobs = replace(ALGORITHMS["bnpo"], **options), [[math.log(ratio)]]
    loss, gradient = value_and_gradient(row, logprobs, [[0.0]], [[advantage]], [1])
    assert (loss.item(), gradient.item()) == pytest.approx((cost, slope))
    terms = Terms(tensor(logprobs), tensor([[0.0]]), tensor([[advantage]]), torch.tensor([[True]]))
    assert policy_loss(row, terms)[1].item() == (slope == 0)


def test_sapo_s_gate_is_soft_and_steeper_below_zero() -> None:
    row = ALGORITHMS["sapo"]
    slopes = {}
    for advantage in (1.0, -1.0):
        logprobs = [[math.log(2.0)]]
        loss, gradient = value_and_gradient(row, logprobs, [[0.0]], [[advantage]], [1])
        tau = 1.0 if advantage > 0 else 1.05
        gate = 1 / (1 + math.exp(-tau))
        assert loss.item() == pytest.approx(-advantage * gate * 4 / tau)
        slopes[advantage] = abs(gradient.item())
        assert gradient.item() == pytest.approx(-advantage * 2.0 * 4 * gate * (1 - gate))
    assert slopes[-1.0] < slopes[1.0] < 2.0


@pytest.mark.parametrize("advantage", [2.0, -2.0])
def test_gmpo_clips_each_token_before_the_geometric_mean(advantage: float) -> None:
    """At 0.5 above for a good answer, at 0.1 below for a bad one."""
    row = replace(ALGORITHMS["gmpo"], clip_low=0.1, clip_high=0.5)
    logs, old, sign = [[1.0, 0.05, -1.0]], [[0.0] * 3], math.copysign(1, advantage)
    loss, gradient = value_and_gradient(row, logs, old, [[advantage]], [3])
    mean = math.exp((0.5 + 0.05 - 1.0 if advantage > 0 else 1.0 + 0.05 - 0.1) / 3)
    clipped = [advantage > 0, False, advantage < 0]
    assert loss[0].tolist() == pytest.approx([-advantage * mean] * 3)
    by_hand = [-sign * 2.0 * mean / 3 * (not each) for each in clipped]
    assert gradient[0].tolist() == pytest.approx(by_hand)
    terms = Terms(tensor(logs), tensor(old), tensor([[advantage]]), torch.tensor([[True] * 3]))
    assert policy_loss(row, terms)[1][0].tolist() == clipped


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token_truncate", [[2.0, 0.5], [1.25, 0.0]]),
        ("token_mask", [[0.0, 0.5], [1.25, 0.0]]),
        ("sequence_truncate", [[2.0, 2.0], [1.25, 0.0]]),
        ("sequence_mask", [[0.0, 0.0], [1.25, 0.0]]),
    ],
)
def test_importance_weights_by_hand(kind: str, expected: list) -> None:
    old = tensor([[math.log(8.0), math.log(0.5)], [math.log(1.25), 9.0]])
    mask = torch.tensor([[True, True], [True, False]])
    found = losses.importance_weights(old, torch.zeros_like(old), mask, kind, cap=2.0)
    assert torch.allclose(found, tensor(expected))


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_mask"])
def test_log_ratios_within_rounding_weigh_exactly_1(kind: str) -> None:
    old = tensor([[5e-4, -9e-4, 1e-3], [2e-3, 5e-4, -5e-3]])
    mask = torch.ones(2, 3, dtype=torch.bool)
    zeros = torch.zeros_like(old)
    found = losses.importance_weights(old, zeros, mask, kind, cap=2.0, rounding=1e-3)
    more, less = math.exp(2e-3), math.exp(-5e-3)
    second = [more, 1.0, less] if kind == "token_truncate" else [more * less] * 3
    assert found[0].tolist() == [1.0, 1.0, 1.0]
    assert found[1].tolist() == pytest.approx(second)
    without = losses.importance_weights(old, zeros, mask, kind, cap=2.0)
    assert 1.0 not in without[0].tolist()


def test_the_top_entropy_threshold_is_a_quantile() -> None:
    """One that falls on a token takes it, though 1 - 0.7 is a little more than 0.3."""
    entropies = tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert losses.top_entropy_threshold(entropies, 0.2) == pytest.approx(0.82)
    assert losses.top_entropy_threshold(tensor([]), 0.2) == math.inf
    entropies = tensor([0.37 * i for i in range(11)])
    for tenths in range(1, 11):
        threshold = losses.top_entropy_threshold(entropies, tenths / 10)
        assert int((entropies >= threshold).sum()) == tenths + 1


def test_off_policy_completions_are_left_out_only_if_they_were_bad() -> None:
    """Where tokens differ in it, what stands at the prompt's place says nothing."""
    logprobs, sampler = tensor([[-3.0, -3.0]] * 3), tensor([[-1.0, -1.0]] * 2 + [[-2.9, -2.9]])
    advantages, mask = tensor([[-1.0], [1.0], [-1.0]]), torch.ones(3, 2, dtype=torch.bool)
    kept = losses.is_near_policy(logprobs, sampler, advantages, mask, threshold=1.0)
    assert kept[:, 0].tolist() == [False, True, True]
    logprobs, sampler = tensor([[0.0, -3.0, -3.0]]), tensor([[0.0, -1.0, -1.0]])
    mask = torch.tensor([[False, True, True]])
    for threshold, bad in ((1.5, False), (2.0, True)):  # the mean of the two is 2
        kept = losses.is_near_policy(logprobs, sampler, tensor([[0.0, -1.0, 2.0]]), mask, threshold)
        assert kept[0, 1:].tolist() == [bad, True]


def test_vespo_s_weight_goes_by_each_token_s_advantage() -> None:
    advantages, mask = tensor([[0.0, -1.0, 2.0]]), torch.tensor([[False, True, True]])
    log_ratio = tensor([[5.0, 0.1, 0.2]])
    weights = vespo_weights(Terms(log_ratio, 0 * log_ratio, advantages, mask))
    w = math.exp(0.3)
    by_hand = [math.exp(2.0 * (1 - w)) * w**3, math.exp(3.0 * (1 - w)) * w**2]
    assert weights[0, 1:].tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize("kind", ["token_truncate", "sequence_truncate"])
def test_vespo_takes_the_sampler_s_correction_into_its_ratio_once(kind: str) -> None:
    """Two tokens of 1.2 each: the completion's weight is their product, of whichever kind."""
    row = resolve("vespo", {"correction": kind, "aggregation": "token_mean"})
    old, mask = tensor([[0.0, 0.0, 0.0]]), torch.tensor([[True, True, False]])
    columns = {
        "old_logprobs": old,
        "sampler_logprobs": torch.full_like(old, -math.log(1.2)),
        "advantages": tensor([[1.0]]),
    }
    logprobs = old.clone().requires_grad_()
    batch = Batch(mask, logprobs, 0 * old, columns, torch.zeros(1))
    PolicyGradient(row, 32).loss(batch, Counts(2.0, 2)).total.backward()
    weight = math.exp(3.0 * (1 - 1.44)) * 1.44**2
    assert logprobs.grad[0].tolist() == pytest.approx([-weight, -weight, 0.0])


def test_vespo_stays_finite_far_from_the_policy() -> None:
    for log_ratio in (-500.0, 500.0):
        far = tensor([[log_ratio, log_ratio]])
        mask = torch.ones(1, 2, dtype=torch.bool)
        weights = vespo_weights(Terms(far, 0 * far, tensor([[1.0]]), mask))
        assert weights.item() == pytest.approx(0, abs=1e-12)
        gone = vespo_weights(Terms(far, far, tensor([[1.0]]), mask, 0 * far))
        assert gone.item() == pytest.approx(0, abs=1e-12)


def test_no_gradient_is_clipped_where_there_is_none() -> None:
    """With a KL in the loss, completions without an advantage are passed, too."""
    ratio = tensor([[9.0, 0.01]])
    for name in ("grpo", "gmpo"):
        mask = torch.ones(1, 2, dtype=torch.bool)
        row = ALGORITHMS[name]
        _, clipped = policy_loss(row, Terms(ratio.log(), 0 * ratio, tensor([[0.0]]), mask))
        assert not clipped.any()
