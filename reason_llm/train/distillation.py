"""Distillation from a teacher: advantages of sampled tokens, and divergences of whole vocabularies.
Pure functions of tensors.

A divergence needs the logits of both models, so it is computed for a chunk of tokens at a time:
each function treats its tokens independently and returns one loss a token, whose sum over chunks
the caller divides once by the trained tokens of the whole optimizer batch.

Shapes: B rows, T tokens, N tokens of a chunk, V vocabulary, K likeliest tokens. Entry t of a (B, T)
tensor belongs to token t; entry n of logits is the distribution from which token n was drawn.
"""

import math

import torch
from torch import Tensor

from reason_llm.train.advantages import returns_to_go


@torch.no_grad()
def distillation_advantages(
    student_BT: Tensor,
    teacher_BT: Tensor,
    mask_BT: Tensor,
    coefficient: float = 1.0,
    discount: float = 0.0,
) -> Tensor:
    """``-coefficient (log pi_student - log pi_teacher)`` of each token that the student sampled, 0
    outside the mask: what the policy gradient needs to minimise KL(student || teacher).

    Args:
        student_BT, teacher_BT: log-probs of the sampled tokens in nats.
        discount: of what follows a token, which is added; 0: each token stands for itself.

    Source: Thinking Machines, "On-Policy Distillation" (2025), discount 0; the KL of each token,
    arXiv:2306.13649 and MiniLLM, arXiv:2306.08543.
    """
    rewards_BT = torch.where(mask_BT, coefficient * (teacher_BT - student_BT), 0.0)
    return returns_to_go(rewards_BT, mask_BT, discount) if discount else rewards_BT


def generalized_jsd(
    student_NV: Tensor, teacher_NV: Tensor, beta: float, temperature: float = 1.0
) -> Tensor:
    """Generalised Jensen-Shannon divergence of each token, (N,), with gradient in the student.

    ``beta KL(teacher || M) + (1 - beta) KL(student || M)`` with ``M = beta teacher + (1 - beta)
    student``; at beta 0 it is KL(teacher || student), at 1 KL(student || teacher).

    Args:
        student_NV, teacher_NV: logits, of one vocabulary; -inf where a token cannot occur.
        temperature: both logits are divided by it.

    Source: GKD, arXiv:2306.13649 eq. 1; both ends as TRL 1.14.2's ``generalized_jsd_loss`` has
    them.
    Differs: the loss is not multiplied by temperature^2; neither is TRL's.
    """
    dtype = torch.promote_types(student_NV.dtype, torch.float32)
    student_NV = torch.log_softmax(student_NV.to(dtype) / temperature, dim=-1)
    teacher_NV = torch.log_softmax(teacher_NV.detach().to(dtype) / temperature, dim=-1)
    if beta == 0:
        return _kl(teacher_NV, student_NV)
    if beta == 1:
        return _kl(student_NV, teacher_NV)
    mixture_NV = _log_sum(teacher_NV + math.log(beta), student_NV + math.log1p(-beta))
    return beta * _kl(teacher_NV, mixture_NV) + (1 - beta) * _kl(student_NV, mixture_NV)


def topk_forward_kl(
    student_NV: Tensor, teacher_ids_NK: Tensor, teacher_logprobs_NK: Tensor
) -> tuple[Tensor, Tensor]:
    """``sum_k p_k (log p_k - log q_k)`` over the teacher's K likeliest tokens, (N,), with gradient
    in the student's logits; and the teacher's mass on them, (N,).

    It is a part of KL(teacher || student): the probabilities are not normalised again, so that it
    may be negative, and the tokens beyond K are left to the student.

    Source: ``forward_kl_topk`` of verl's distillation.
    """
    dtype = torch.promote_types(student_NV.dtype, torch.float32)
    student_NK = student_NV.to(dtype).gather(-1, teacher_ids_NK)
    student_NK = student_NK - torch.logsumexp(student_NV.to(dtype), dim=-1, keepdim=True)
    teacher_NK = teacher_logprobs_NK.detach().to(dtype)
    return _kl(teacher_NK, student_NK), teacher_NK.exp().sum(dim=-1)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p || q) over the last dimension; what p cannot draw adds 0 to it and to its gradient."""
    log_ratio = (log_p - log_q).masked_fill(log_p == -math.inf, 0.0)
    return (log_p.exp() * log_ratio).sum(dim=-1)


def _log_sum(a: Tensor, b: Tensor) -> Tensor:
    """``log(exp(a) + exp(b))``; where both are -inf a number that ``_kl`` does not look at, as the
    gradient would be NaN there."""
    impossible = (a == -math.inf) & (b == -math.inf)
    return torch.logaddexp(a.masked_fill(impossible, 0.0), b.masked_fill(impossible, 0.0))
