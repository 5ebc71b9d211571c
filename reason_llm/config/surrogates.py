"""Table of surrogates, the losses of a token's ratio and advantage. A new one is a record and a
test.

This module does not import torch: surrogates use tensor methods. Their columns are options of
``algorithm``.

Shapes: B rows, T tokens; entry t of every (B, T) tensor belongs to token t. Losses are minimised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from reason_llm.config.rows import row_of_table
from reason_llm.config.types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor

Ratio = Literal["token", "sequence", "sequence_token"]

SAPO_TEMPERATURES = 1.0, 1.05
"""Temperatures of SAPO's gate: for positive advantages, and for others."""
VESPO_POSITIVE, VESPO_NEGATIVE = (2.0, 3.0), (3.0, 2.0)
"""(k, lambda) of VESPO's weight for advantages from 0 up, and below."""
VESPO_LOG_RATIO = (-18.420680743952367, 20.0)
"""Bounds of VESPO's sequence log-ratio: log 1e-8 and 20, as its authors have them."""


@row_of_table
class SurrogateColumns:
    """Columns that only some surrogates read."""

    ratio: Ratio = "token"
    """Level of the probability ratio. token: per token; sequence: geometric mean over the
    completion; sequence_token: that mean, with the gradient of each token."""
    clip_low: NonNegative = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_low (gmpo: its log at -clip_low)."""
    clip_high: NonNegative = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high (gmpo: its log at clip_high)."""
    delta: NonNegative = 0.0
    """Upper bound of the unclipped ratio for negative advantages (two-sided clipping, c of
    dual-clip PPO). 0: none."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Inputs of a surrogate: tensors (B, T)."""

    logprobs_BT: Tensor
    """Log-probs of the current policy, with gradient."""
    old_BT: Tensor
    """Log-probs of the policy before the step."""
    advantages_BT: Tensor
    """Advantages; (B, 1) where each row has one value."""
    mask_BT: Tensor
    """True where a token is trained."""
    weights_BT: Tensor | None = None
    """``losses.importance_weights``; None: all 1."""
    weight_is_shared: bool = False
    """Whether the weight is per completion, the same for all its tokens."""

    def ratio(self, level: Ratio) -> Tensor:
        """Return ``pi / pi_old`` per token, or its geometric mean over the completion.

        ``sequence_token`` has the value of the completion and the gradient of the token.

        Source: arXiv:1707.06347 eq. 6 (token); arXiv:2507.18071 eq. 7 (sequence) and 14
        (sequence_token).
        """
        log_ratio_BT = self.logprobs_BT - self.old_BT
        if level == "token":
            return log_ratio_BT.exp()
        mean_B1 = self.mean(log_ratio_BT)
        if level == "sequence":
            return mean_B1.exp().expand_as(log_ratio_BT)
        return (mean_B1.detach() + self.logprobs_BT - self.logprobs_BT.detach()).exp()

    def mean(self, values_BT: Tensor) -> Tensor:
        """Return the mean over each row's trained tokens, (B, 1); 0 for a row without any."""
        return masked_mean(values_BT, self.mask_BT)


@dataclass(frozen=True, slots=True)
class Surrogate:
    """Surrogate. docs/algorithms.md has its equation."""

    idea: str
    """Short description."""
    source: str
    """Paper and equation."""
    function: Callable[[SurrogateColumns, Terms], tuple[Tensor, Tensor | None]]
    """Returns the loss of each token, and a mask of tokens without gradient due to clipping or
    None."""
    columns: tuple[str, ...] = ()
    """Columns of ``SurrogateColumns`` that it reads."""
    weights_inside: bool = False
    """Whether the importance weights are part of its ratio instead of a factor of the loss."""

    def loss(self, row: SurrogateColumns, terms: Terms) -> tuple[Tensor, Tensor]:
        """Return the loss of each token, including importance weights.

        Returns:
            loss_BT, and clipped_BT: True where clipping removed the token's gradient.
        """
        loss_BT, clipped_BT = self.function(row, terms)
        if terms.weights_BT is not None and not self.weights_inside:
            loss_BT = loss_BT * terms.weights_BT
        mask_BT = terms.mask_BT
        return loss_BT, mask_BT.new_zeros(mask_BT.shape) if clipped_BT is None else clipped_BT


def _reinforce(row: SurrogateColumns, terms: Terms) -> tuple[Tensor, None]:
    return -terms.advantages_BT * terms.logprobs_BT, None


def _clip(row: SurrogateColumns, terms: Terms) -> tuple[Tensor, Tensor]:
    ratio_BT = terms.ratio(row.ratio)
    return clipped_surrogate(ratio_BT, terms.advantages_BT, row.clip_low, row.clip_high, row.delta)


def _cispo(row: SurrogateColumns, terms: Terms) -> tuple[Tensor, None]:
    """``-clamp(r) A log pi``, without a gradient in the clamped ratio."""
    weight_BT = terms.ratio(row.ratio).clamp(1 - row.clip_low, 1 + row.clip_high).detach()
    return -weight_BT * terms.advantages_BT * terms.logprobs_BT, None


def _sapo(row: SurrogateColumns, terms: Terms) -> tuple[Tensor, None]:
    """``-4 / tau * sigmoid(tau (r - 1)) A``: slope 1 at r = 1, flatter away from it."""
    advantages_BT = terms.advantages_BT
    tau_BT = _by_sign(advantages_BT > 0, *SAPO_TEMPERATURES)
    gate_BT = (tau_BT * (terms.ratio(row.ratio) - 1)).sigmoid() * 4 / tau_BT
    return -gate_BT * advantages_BT, None


def _gmpo(row: SurrogateColumns, terms: Terms) -> tuple[Tensor, Tensor]:
    """``-A exp(mean_t clipped log r_t)``, the same at every token of a row; clips are of log r.
    Each token is clipped on the side to which its advantage pushes."""
    log_ratio_BT, positive_BT = terms.logprobs_BT - terms.old_BT, terms.advantages_BT > 0
    bounded_BT = log_ratio_BT.clamp(-row.clip_low, row.clip_high)
    clipped_BT = ((log_ratio_BT > row.clip_high) & positive_BT) | (
        (log_ratio_BT < -row.clip_low) & (terms.advantages_BT < 0)
    )
    log_BT = log_ratio_BT.minimum(bounded_BT).where(positive_BT, log_ratio_BT.maximum(bounded_BT))
    loss_B1 = -terms.advantages_BT * terms.mean(log_BT).exp()
    return loss_B1.expand_as(log_ratio_BT), clipped_BT


def _vespo(row: SurrogateColumns, terms: Terms) -> tuple[Tensor, None]:
    return -vespo_weights(terms) * terms.advantages_BT * terms.logprobs_BT, None


SURROGATES: dict[str, Surrogate] = {
    "clip": Surrogate(
        idea="the clipped ratio of PPO and GRPO",
        source="arXiv:1707.06347 eq. 7; with two bounds, arXiv:2503.14476 eq. 8",
        function=_clip,
        columns=("ratio", "clip_low", "clip_high", "delta"),
    ),
    "reinforce": Surrogate(
        idea="the log-prob, without a ratio",
        source="Williams 1992, doi:10.1007/BF00992696",
        function=_reinforce,
    ),
    "cispo": Surrogate(
        idea="the log-prob weighted by the clipped ratio, so that no token loses its gradient",
        source="arXiv:2506.13585 eq. 4 and 5",
        function=_cispo,
        columns=("ratio", "clip_low", "clip_high"),
    ),
    "sapo": Surrogate(
        idea="a smooth gate of the ratio",
        source="arXiv:2511.20347",
        function=_sapo,
        columns=("ratio",),
    ),
    "gmpo": Surrogate(
        idea="the geometric mean of clipped token ratios",
        source="arXiv:2507.20673",
        function=_gmpo,
        columns=("clip_low", "clip_high"),
    ),
    "vespo": Surrogate(
        idea="the log-prob with a gamma-shaped weight of the whole completion's ratio",
        source="arXiv:2602.10693",
        function=_vespo,
        weights_inside=True,
    ),
}


def clipped_surrogate(
    ratio_BT: Tensor,
    advantages_BT: Tensor,
    clip_low: float,
    clip_high: float,
    delta: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``, token by token.

    Args:
        delta: the unclipped ratio is at most this, a bound for negative advantages; 0: none.

    Returns:
        loss_BT, and clipped_BT: True where clipping removed the token's gradient.

    Source: arXiv:1707.06347 eq. 7; with two bounds, arXiv:2503.14476 eq. 8; delta, INTELLECT-2,
    arXiv:2505.07291, and the c of arXiv:1912.09729.
    """  # fmt: skip
    clipped_ratio_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    bounded_BT = ratio_BT.clamp(max=delta) if delta else ratio_BT
    loss_BT = -(bounded_BT * advantages_BT).minimum(clipped_ratio_BT * advantages_BT)
    negative_BT = advantages_BT < 0
    clipped_BT = ((ratio_BT > 1 + clip_high) & (advantages_BT > 0)) | (
        (ratio_BT < 1 - clip_low) & negative_BT
    )
    if delta:
        clipped_BT = clipped_BT | ((ratio_BT > delta) & negative_BT)
    return loss_BT, clipped_BT


def vespo_weights(terms: Terms) -> Tensor:
    """``w^k e^{lambda (1 - w)}`` with the whole completion's ratio w, without a gradient: 1 on
    policy; k and lambda depend on the advantage's sign. The importance weights belong to w.

    Returns:
        (B, 1), or (B, T) where a row's advantages differ.

    Source: arXiv:2602.10693, with the constants of TRL 1.14's vespo_k_* and vespo_lambda_*.
    """
    low, high = VESPO_LOG_RATIO
    log_ratio_BT = (terms.logprobs_BT - terms.old_BT).detach()
    log_w_B1 = (log_ratio_BT.clamp(-20.0, 20.0) * terms.mask_BT).sum(dim=1, keepdim=True)
    if terms.weights_BT is not None:
        log_weights_BT = terms.weights_BT.log().clamp(low, high) * terms.mask_BT
        log_w_B1 += (
            terms.mean(log_weights_BT)
            if terms.weight_is_shared
            else log_weights_BT.sum(dim=1, keepdim=True)
        )
    log_w_B1 = log_w_B1.clamp(low, high)
    positive_BT = terms.advantages_BT >= 0
    k_BT = _by_sign(positive_BT, VESPO_POSITIVE[0], VESPO_NEGATIVE[0])
    lambda_BT = _by_sign(positive_BT, VESPO_POSITIVE[1], VESPO_NEGATIVE[1])
    return (lambda_BT + k_BT * log_w_B1 - lambda_BT * log_w_B1.exp()).exp()


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Return the mean over each row's trained tokens, (B, 1); 0 for a row without any."""
    counts_B1 = mask_BT.sum(dim=1, keepdim=True).clamp(min=1)
    return (values_BT * mask_BT).sum(dim=1, keepdim=True) / counts_B1


def _by_sign(is_positive_BT: Tensor, positive: float, negative: float) -> Tensor:
    """Return ``positive`` where True and ``negative`` elsewhere, float32."""
    return is_positive_BT.float().fill_(positive).where(is_positive_BT, negative)
