"""Policy-gradient losses: pure functions of tensors and numbers.

Every loss is a masked sum; the caller divides once by ``denominator`` over the whole optimizer
batch, so that no split into micro-batches changes the gradient. Losses are minimised.

Shapes: B rows, T tokens, N completions of the optimizer batch. ``mask_BT`` is True where a token is
trained; entry t of every (B, T) tensor belongs to token t; advantages are (B, T), or (B, 1) where
a row has one.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reason_llm.config import (
    SURROGATES,
    Aggregation,
    Algorithm,
    Correction,
    KLEstimator,
    Ratio,
    Surrogate,
)

VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""(k, lambda) of VESPO's weight for advantages from 0 up, and below."""
VESPO_LOG_RATIO = (-18.420680743952367, 20.0)
"""Where VESPO's sequence log-ratio is cut off: log 1e-8 and 20, as its authors do."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs of a surrogate: tensors (B, T), entry t of token t."""

    logprobs_BT: Tensor
    """Of the policy as it is now, with gradient."""
    old_BT: Tensor
    """Of the policy before the step."""
    advantages_BT: Tensor
    """Or (B, 1) where a row has one."""
    mask_BT: Tensor
    """True where a token is trained."""
    weights_BT: Tensor | None = None
    """``importance_weights`` for a sampler that is not quite the policy; None: all 1."""


def policy_loss(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    """Loss of each token by the row's surrogate, importance weights included.

    Returns:
        loss_BT, and clipped_BT: True where a clip took the token's gradient away.
    """
    loss_BT, clipped_BT = FUNCTIONS[row.surrogate](row, terms)
    if terms.weights_BT is not None and not SURROGATES[row.surrogate].weights_inside:
        loss_BT = loss_BT * terms.weights_BT
    return loss_BT, clipped_BT


def _reinforce(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    return -terms.advantages_BT * terms.logprobs_BT, torch.zeros_like(terms.mask_BT)


def _clip(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    ratio_BT = importance_ratio(terms, row.ratio)
    return clipped_surrogate(
        ratio_BT, terms.advantages_BT, row.clip_low, row.clip_high, row.delta, row.dual_clip
    )


def _cispo(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    """``-clamp(r) A log pi``, without a gradient in the clamped ratio: no token loses its own.

    Source: arXiv:2506.13585 eq. 4 and 5.
    """
    weight_BT = (
        importance_ratio(terms, row.ratio).clamp(1 - row.clip_low, 1 + row.clip_high).detach()
    )
    loss_BT = -weight_BT * terms.advantages_BT * terms.logprobs_BT
    return loss_BT, torch.zeros_like(terms.mask_BT)


def _sapo(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    """``-4 / tau * sigmoid(tau (r - 1)) A``: slope 1 at r = 1, flatter away from it.

    Source: arXiv:2511.20347; tau by the advantage's sign.
    """
    tau_BT = torch.where(
        terms.advantages_BT > 0, row.temperature_positive, row.temperature_negative
    )
    gate_BT = torch.sigmoid(tau_BT * (importance_ratio(terms, row.ratio) - 1)) * 4 / tau_BT
    return -gate_BT * terms.advantages_BT, torch.zeros_like(terms.mask_BT)


def _gmpo(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    """``-A exp(mean_t clipped log r_t)``, the same at every token of a row; clips are of log r.

    Source: arXiv:2507.20673: each token is clipped on the side where its advantage asks for more.
    """
    log_ratio_BT, positive_BT = terms.logprobs_BT - terms.old_BT, terms.advantages_BT > 0
    bounded_BT = log_ratio_BT.clamp(-row.clip_low, row.clip_high)
    clipped_BT = ((log_ratio_BT > row.clip_high) & positive_BT) | (
        (log_ratio_BT < -row.clip_low) & (terms.advantages_BT < 0)
    )
    log_BT = torch.where(
        positive_BT,
        torch.minimum(log_ratio_BT, bounded_BT),
        torch.maximum(log_ratio_BT, bounded_BT),
    )
    loss_B1 = -terms.advantages_BT * torch.exp(_mean(log_BT, terms.mask_BT))
    return loss_B1.expand_as(log_ratio_BT), clipped_BT


def _vespo(row: Algorithm, terms: Terms) -> tuple[Tensor, Tensor]:
    weights_BT = vespo_weights(
        terms.logprobs_BT - terms.old_BT,
        terms.advantages_BT,
        terms.mask_BT,
        terms.weights_BT,
        is_whole=row.correction.startswith("sequence"),
    )
    loss_BT = -weights_BT * terms.advantages_BT * terms.logprobs_BT
    return loss_BT, torch.zeros_like(terms.mask_BT)


FUNCTIONS: dict[Surrogate, Callable[[Algorithm, Terms], tuple[Tensor, Tensor]]] = {
    "reinforce": _reinforce,
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "vespo": _vespo,
}
"""By the names of ``config.SURROGATES``, which says what each reads."""


def importance_ratio(terms: Terms, level: Ratio) -> Tensor:
    """``pi / pi_old``: each token's own, or the completion's, the geometric mean of its tokens'.

    ``sequence_token`` has the completion's value and the token's own gradient.

    Source: arXiv:1707.06347 eq. 6 (token); arXiv:2507.18071 eq. 7 (sequence) and 14
    (sequence_token).
    """
    logprobs_BT = terms.logprobs_BT
    log_ratio_BT = logprobs_BT - terms.old_BT
    if level == "token":
        return torch.exp(log_ratio_BT)
    mean_B1 = _mean(log_ratio_BT, terms.mask_BT)
    if level == "sequence":
        return torch.exp(mean_B1).expand_as(log_ratio_BT)
    return torch.exp(mean_B1.detach() + logprobs_BT - logprobs_BT.detach())


def clipped_surrogate(
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
    delta: float = 0.0,
    dual_clip: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, token by token.

    Args:
        delta: the unclipped ratio is at most this, a bound for negative advantages; 0: none.
        dual_clip: for negative advantages the loss is at most ``-dual_clip * A``; 0: none.

    Returns:
        loss_BT, and clipped_BT: True where the clip took the token's gradient away.

    Source: arXiv:1707.06347 eq. 7; with two bounds, arXiv:2503.14476 eq. 8; delta, INTELLECT-2,
    arXiv:2505.07291; dual_clip, arXiv:1912.09729.
    """  # fmt: skip
    clipped_ratio_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    bounded_BT = ratio_BT.clamp(max=delta) if delta else ratio_BT
    loss_BT = -torch.minimum(bounded_BT * advantages_BT, clipped_ratio_BT * advantages_BT)
    negative_BT = advantages_BT < 0
    clipped_BT = ((ratio_BT > 1 + clip_high) & (advantages_BT > 0)) | (
        (ratio_BT < 1 - clip_low) & negative_BT
    )
    if delta:
        clipped_BT = clipped_BT | ((ratio_BT > delta) & negative_BT)
    if dual_clip:
        clipped_BT = clipped_BT | ((ratio_BT > dual_clip) & negative_BT)
        loss_BT = torch.where(
            negative_BT, torch.minimum(loss_BT, -dual_clip * advantages_BT), loss_BT
        )
    return loss_BT, clipped_BT


@torch.no_grad()
def vespo_weights(
    log_ratio_BT: Tensor,
    advantages_BT: Tensor,
    mask_BT: Tensor,
    correction_BT: Tensor | None,
    is_whole: bool = False,
) -> Tensor:
    """``w^k e^{lambda (1 - w)}`` with the whole completion's ratio w: 1 on policy; k and lambda
    depend on the advantage's sign.

    Args:
        correction_BT: weights of the sampler's tokens, which belong to w; None: all 1.
        is_whole: they are the whole completion's already, the same at each of its tokens.

    Returns:
        (B, 1), or (B, T) where a row's advantages differ.

    Source: arXiv:2602.10693, with the constants of TRL 1.14's vespo_k_* and vespo_lambda_*.
    """
    low, high = VESPO_LOG_RATIO
    log_w_B1 = (log_ratio_BT.clamp(-20.0, 20.0) * mask_BT).sum(dim=1, keepdim=True)
    if correction_BT is not None:
        log_correction_BT = correction_BT.log().clamp(low, high) * mask_BT
        log_w_B1 += (
            _mean(log_correction_BT, mask_BT)
            if is_whole
            else log_correction_BT.sum(dim=1, keepdim=True)
        )
    log_w_B1 = log_w_B1.clamp(low, high)
    positive_BT = advantages_BT >= 0
    k_BT = torch.where(positive_BT, VESPO_POSITIVE[0], VESPO_NEGATIVE[0])
    lambda_BT = torch.where(positive_BT, VESPO_POSITIVE[1], VESPO_NEGATIVE[1])
    return torch.exp(lambda_BT + k_BT * log_w_B1 - lambda_BT * log_w_B1.exp())


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
    floor: float = 0.0,
    rounding: float = 0.0,
) -> Tensor:
    """Importance weights for tokens drawn by another policy, or by a sampler that differs slightly
    from the old policy.

    ``w = pi_old / pi_sampler``, each token's, or the whole completion's product; above ``cap`` it
    is cut down to it (truncate) or the weight is 0 (mask); below ``floor`` it is raised to it, or 0
    likewise. 0 outside the mask.

    Args:
        rounding: a token's log-ratio of up to this many nats counts as 0, its weight as 1.

    Source: truncated importance sampling, F. Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training" (2025); the four kinds and the floor are TRL's.
    Differs: the default is token_truncate with a cap of 2, as there; TRL 1.14.2's is sequence_mask
    with a cap of 3.
    """
    log_ratio_BT = (old_BT - sampler_BT) * mask_BT
    if rounding:
        log_ratio_BT = log_ratio_BT.masked_fill(log_ratio_BT.abs() <= rounding, 0.0)
    if kind.startswith("sequence"):
        log_ratio_BT = log_ratio_BT.sum(dim=1, keepdim=True)
    ratio_BT = torch.exp(log_ratio_BT)
    if kind.endswith("truncate"):
        ratio_BT = ratio_BT.clamp(floor, cap)
    else:
        ratio_BT = torch.where((ratio_BT > cap) | (ratio_BT < floor), 0.0, ratio_BT)
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
    """  # fmt: skip
    drift_B1 = _mean(sampler_BT - logprobs_BT.detach(), mask_BT)
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
    """Sum of the masked losses; with ``sequence_mean`` each row is first divided by its number of
    trained tokens.

    Divide by ``denominator`` of the optimizer batch to get the loss. A row with no trained token
    adds 0.
    """
    row_sums_B = (loss_BT * mask_BT).sum(dim=1)
    if aggregation == "sequence_mean":
        row_sums_B = row_sums_B / mask_BT.sum(dim=1).clamp(min=1)
    return row_sums_B.sum()


def denominator(lengths_N: Sequence[int], aggregation: Aggregation, max_new_tokens: int) -> float:
    """Denominator of the masked sums of a whole optimizer batch.

    Args:
        lengths_N: trained tokens of each completion, those whose advantage is 0 included.

    Source: sequence_mean, arXiv:2402.03300 eq. 3 (mean of sequence means); token_mean,
    arXiv:2503.14476 eq. 8 (all tokens alike); sequence_sum, arXiv:2402.14740 (mean of
    sequence sums); constant, arXiv:2503.20783 section 3.2 (no division by the sampled length).
    Differs: constant divides by N * max_new_tokens, as TRL does; the paper leaves the constant
    open.
    """
    if aggregation in ("sequence_mean", "sequence_sum"):
        return float(max(1, len(lengths_N)))
    if aggregation == "token_mean":
        return float(max(1, sum(lengths_N)))
    return float(max(1, len(lengths_N) * max_new_tokens))


def _mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(B, 1): mean over each row's trained tokens; 0 for a row without any."""
    counts_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (values_BT * mask_BT).sum(dim=1, keepdim=True) / counts_B1
