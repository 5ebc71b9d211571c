"""Preference losses: pure functions of the log-probs of whole completions, in nats, one loss a pair
(or a labelled completion); the caller sums them and divides once by their number over the whole
optimizer batch. Losses are minimised.

Shapes: P pairs, N labelled completions. ``h = (policy_chosen - ref_chosen) - (policy_rejected -
ref_rejected)``. Log-probs of ``cdpo``, ``rdpo`` and ``kto`` are sums over a completion's trained
tokens, its end token included; those of ``orpo`` and ``simpo`` are means; ``ipo`` takes either.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from reason_llm.errors import DataError

KTO_BALANCE = (1.0, 4 / 3)
"""Range of ``w_D n_D / (w_U n_U)``, the desirable completions' weight to that of the others."""
LARGEST_MEAN = -1e-7
"""Mean log-prob from which on, as above it are rounding errors, a completion counts as certain."""


def cdpo(h_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """``-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)``, e the fraction of labels that are
    wrong, from 0 (DPO) to 0.5; above 0 it is lowest where ``sigmoid(beta h) = 1 - e``.

    Source: DPO, arXiv:2305.18290 eq. 7; conservative DPO, E. Mitchell, "A note on DPO with noisy
    preferences & relationship to IPO" (2023) eq. 3.
    """
    right_P, wrong_P = -logsigmoid(beta * h_P), -logsigmoid(-beta * h_P)
    return (1 - label_smoothing) * right_P + label_smoothing * wrong_P


def rdpo(h_P: Tensor, beta: float, label_smoothing: float) -> Tensor:
    """``(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e)``: its mean over labels
    of which a fraction e, below 0.5, is wrong is DPO's loss on the right ones.

    Source: robust DPO, arXiv:2403.00409; TRL 1.14.2's ``loss_type="robust"``.
    """
    right_P, wrong_P = -logsigmoid(beta * h_P), -logsigmoid(-beta * h_P)
    clean = 1 - label_smoothing
    return (clean * right_P - label_smoothing * wrong_P) / (clean - label_smoothing)


def ipo(h_P: Tensor, tau: float) -> Tensor:
    """``(h - 1 / (2 tau))^2``, whose target for h is finite. The paper sums over tokens; its
    authors confirmed to TRL that they had used means.

    Source: IPO, arXiv:2310.12036 eq. 17; TRL 1.14.2's ``loss_type="ipo"`` (means).
    """
    return (h_P - 1 / (2 * tau)).square()


def kto(
    policy_N: Tensor,
    ref_N: Tensor,
    desirable_N: Tensor,
    baseline: Tensor,
    beta: float,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """With the log-ratio r and z0 of ``kto_baseline``: ``w_D (1 - sigmoid(beta (r - z0)))`` for a
    desirable completion, ``w_U (1 - sigmoid(beta (z0 - r)))`` for another.

    Source: KTO, arXiv:2402.01306 (v1) eq. 7.
    """
    distance_N = beta * (policy_N - ref_N - baseline)
    return torch.where(
        desirable_N,
        desirable_weight * torch.sigmoid(-distance_N),
        undesirable_weight * torch.sigmoid(distance_N),
    )


def kto_baseline(policy_N: Tensor, ref_N: Tensor) -> Tensor:
    """z0, an estimate of KL(policy || reference): the mean log-ratio of completions under prompts
    that are not theirs (``mismatched``), and at least 0. A scalar without gradient.

    Source: arXiv:2402.01306 section 4.1.
    """
    return (policy_N - ref_N).detach().mean().clamp(min=0)


def mismatched(count: int) -> list[int]:
    """The completion that each prompt of an optimizer batch gets for the baseline: the one before
    its own; a DataError for fewer than 2.

    Source: arXiv:2402.01306 section 4.1; TRL 1.14.2's KTOTrainer.
    """
    if count < 2:
        raise DataError(
            f"KTO needs 2 or more completions in each optimizer batch for its baseline and one "
            f"has {count}; choose a batch size that leaves no remainder of 1"
        )
    return [(i - 1) % count for i in range(count)]


def kto_desirable_weights(
    num_desirable: float, num_undesirable: float, undesirable_weight: float
) -> tuple[float, float]:
    """Lowest and highest recommended weight of desirable completions, for which
    ``w_D n_D / (w_U n_U)`` lies within ``KTO_BALANCE``; numbers of rows, or shares, above 0.

    Source: arXiv:2402.01306 (v1) section 4.2; TRL 1.14.2 warns outside of 1 to 1.33.
    """
    low, high = KTO_BALANCE
    balance = undesirable_weight * num_undesirable / num_desirable
    return low * balance, high * balance


def orpo(chosen_P: Tensor, rejected_P: Tensor, coefficient: float) -> Tensor:
    """``-coefficient log sigmoid(log odds_chosen - log odds_rejected)``, of means over the trained
    tokens; the caller adds the NLL of the chosen completions' tokens.

    Source: ORPO, arXiv:2403.07691 eq. 4, 6 and 7.
    Differs: TRL's NLL covers the prompt too.
    """
    return -coefficient * logsigmoid(log_odds(chosen_P) - log_odds(rejected_P))


def log_odds(mean_logprobs_P: Tensor) -> Tensor:
    """``log(p / (1 - p))`` with p = exp(mean log-prob), finite for p = 1, too: there, from
    ``LARGEST_MEAN`` on, it is constant and its gradient 0.

    Source: arXiv:2403.07691 eq. 4.
    """
    mean_P = mean_logprobs_P.clamp(max=LARGEST_MEAN)
    return mean_P - log1mexp(mean_P)


def log1mexp(x: Tensor) -> Tensor:
    """``log(1 - exp(x))`` for x < 0, without cancellation near 0 and far from it.

    Source: M. Mächler, "Accurately Computing log(1 - exp(-|a|))" (2012).
    """
    is_near = x > -math.log(2)
    far = torch.where(is_near, -1.0, x)
    return torch.where(is_near, torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(far)))


def simpo(chosen_P: Tensor, rejected_P: Tensor, beta: float, gamma: float) -> Tensor:
    """``-log sigmoid(beta (chosen - rejected) - gamma)``, of means over tokens; gamma is the margin
    itself, as in TRL, and not gamma / beta.

    Source: SimPO, arXiv:2405.14734 eq. 6.
    """
    return -logsigmoid(beta * (chosen_P - rejected_P) - gamma)
