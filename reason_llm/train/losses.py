"""The policy-gradient losses: pure functions of tensors and numbers.

Every loss is a masked sum; the caller divides once by ``denominator`` over the whole optimizer
batch, so that no split into micro-batches changes the gradient. Losses are minimised.

Shapes: B rows, T tokens, N completions of the optimizer batch. ``mask_BT`` is True where a token is
trained; entry t of every (B, T) tensor belongs to token t.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from reason_llm.train.algorithms import Aggregation, KLEstimator


def clipped_surrogate(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B: Tensor,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with ``r = exp(logprobs -
    old_logprobs)``, token by token.

    Returns:
        loss_BT, and clipped_BT: True where the clip took the token's gradient away.

    Source: arXiv:1707.06347 eq. 7; with two bounds, arXiv:2503.14476 eq. 8.
    """
    ratio_BT = torch.exp(logprobs_BT - old_logprobs_BT)
    advantages_B1 = advantages_B[:, None]
    clipped_ratio_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    loss_BT = -torch.minimum(ratio_BT * advantages_B1, clipped_ratio_BT * advantages_B1)
    too_high_BT = (ratio_BT > 1 + clip_high) & (advantages_B1 > 0)
    too_low_BT = (ratio_BT < 1 - clip_low) & (advantages_B1 < 0)
    return loss_BT, too_high_BT | too_low_BT


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


def masked_sum(loss_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation) -> Tensor:
    """The rows' losses added up; with ``sequence_mean`` each row is first divided by its number of
    trained tokens.

    Divide by ``denominator`` of the optimizer batch to get the loss. A row with no trained token
    adds 0.
    """
    row_sums_B = (loss_BT * mask_BT).sum(dim=1)
    if aggregation == "sequence_mean":
        row_sums_B = row_sums_B / mask_BT.sum(dim=1).clamp(min=1)
    return row_sums_B.sum()


def denominator(lengths_N: Sequence[int], aggregation: Aggregation, max_new_tokens: int) -> float:
    """What the masked sums of a whole optimizer batch are divided by.

    Args:
        lengths_N: trained tokens of each completion, those whose advantage is 0 included.

    Source: sequence_mean, arXiv:2402.03300 eq. 3 (mean of sequence means); token_mean,
    arXiv:2503.14476 eq. 8 (all tokens alike); constant, arXiv:2503.20783 section 3.2 (no division
    by the sampled length).
    Differs: constant divides by N * max_new_tokens, as TRL does; the paper leaves the constant
    open.
    """
    if aggregation == "sequence_mean":
        return float(max(1, len(lengths_N)))
    if aggregation == "token_mean":
        return float(max(1, sum(lengths_N)))
    return float(max(1, len(lengths_N) * max_new_tokens))
