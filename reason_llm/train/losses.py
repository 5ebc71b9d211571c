"""The parts of a policy-gradient loss other than its surrogate: KL, weights, masks, sums.
Pure functions of tensors and numbers. Every loss is a masked sum; the caller divides once by
``denominator`` over the whole optimizer batch. Losses are minimised.

Shapes: B rows, T tokens, N completions of the optimizer batch. ``mask_BT`` is True where a token is
trained; entry t of every (B, T) tensor belongs to token t; advantages are (B, T), or (B, 1).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from reason_llm.config import Aggregation, Correction, KLEstimator, masked_mean


def kl_penalty(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, estimator: KLEstimator) -> Tensor:
    """An estimate of KL(policy || reference) at each token, from tokens that the policy drew.

    With ``log_ratio = ref - policy``: k1 = -log_ratio, k2 = log_ratio^2 / 2, k3 = expm1(log_ratio)
    - log_ratio.

    Source: k3 is arXiv:2402.03300 eq. 4; all three, J. Schulman, "Approximating KL Divergence"
    (2020).
    """
    log_ratio_BT = ref_logprobs_BT - logprobs_BT
    if estimator == "k1":
        return -log_ratio_BT
    if estimator == "k2":
        return log_ratio_BT.square() / 2
    if estimator == "k3":
        return torch.expm1(log_ratio_BT) - log_ratio_BT
    return torch.zeros_like(log_ratio_BT)


def importance_weights(
    old_BT: Tensor,
    sampler_BT: Tensor,
    mask_BT: Tensor,
    kind: Correction,
    cap: float,
    rounding: float = 0.0,
) -> Tensor:
    """Importance weights ``w = pi_old / pi_sampler`` (B, T), 0 outside the mask: each token's, or
    the whole completion's product. Above ``cap`` w is cut down to it (truncate) or is 0 (mask).
    A log-ratio of at most ``rounding`` nats counts as 0.

    Source: truncated importance sampling, F. Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025); the four kinds are TRL's.
    Differs: the default is token_truncate with a cap of 2, as there; TRL 1.14.2's is sequence_mask
    with a cap of 3.
    """
    log_ratio_BT = (old_BT - sampler_BT) * mask_BT
    if rounding:  # smaller differences are noise of the two implementations, not of the policy
        log_ratio_BT = log_ratio_BT.masked_fill(log_ratio_BT.abs() <= rounding, 0.0)
    if kind.startswith("sequence"):
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True)
    ratio_BT = torch.exp(log_ratio_BT)
    if kind.endswith("truncate"):
        ratio_BT = ratio_BT.clamp(max=cap)
    else:
        ratio_BT = torch.where(ratio_BT > cap, 0.0, ratio_BT)
    return ratio_BT * mask_BT


def is_near_policy(
    logprobs_BT: Tensor,
    sampler_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    threshold: float,
) -> Tensor:
    """Mask of tokens to train: those with a non-negative advantage, or in a completion whose mean
    of ``log pi_sampler - log pi`` is at most ``threshold``. (B, 1), or (B, T) where advantages are.

    Source: DeepSeek-V3.2, arXiv:2512.02556 eq. 9.
    """
    drift_B1 = masked_mean(sampler_BT - logprobs_BT.detach(), mask_BT)
    return (advantages_BT >= 0) | (drift_B1 <= threshold)


def top_entropy_threshold(entropies_N: Tensor, fraction: float) -> float:
    """Smallest entropy among the ``fraction`` of tokens with the highest entropy; infinite if there
    are none.

    Source: arXiv:2506.01939; the quantile is interpolated linearly, as TRL does.
    """
    if not len(entropies_N):
        return math.inf
    ordered_N = entropies_N.double().sort().values
    # Rounded, as 1 - 0.7 is more than 0.3: where the place is a token's, that token belongs to it.
    place = round((1 - fraction) * (len(ordered_N) - 1), 6)
    below = int(place)
    above = min(below + 1, len(ordered_N) - 1)
    return float(torch.lerp(ordered_N[below], ordered_N[above], place - below))


def masked_sum(loss_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """Sum of the masked losses; with ``sequence_mean`` each row is first divided by its trained
    tokens."""
    row_sums_B = (loss_BT * mask_BT).sum(dim=1)
    if aggregation == "sequence_mean":
        row_sums_B = row_sums_B / mask_BT.sum(dim=1).clamp(min=1)
    return row_sums_B.sum()


def denominator(lengths_N: Sequence[int], aggregation: Aggregation, max_new_tokens: int) -> float:
    """Denominator of the masked sums of a whole optimizer batch, from the trained tokens of each
    completion, those whose advantage is 0 included.

    Source: sequence_mean, arXiv:2402.03300 eq. 3 (mean of sequence means); token_mean,
    arXiv:2503.14476 eq. 8 (all tokens alike); sequence_sum, arXiv:2402.14740 (mean of
    sequence sums); constant, arXiv:2503.20783 section 3.2 (no division by the sampled length).
    Differs: constant divides by N * max_new_tokens, as TRL does; the paper leaves it open.
    """
    if aggregation in ("sequence_mean", "sequence_sum"):
        return float(max(1, len(lengths_N)))
    if aggregation == "token_mean":
        return float(max(1, sum(lengths_N)))
    return float(max(1, len(lengths_N) * max_new_tokens))
