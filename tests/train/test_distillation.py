"""Distillation against its equations, on numbers worked by hand, and its gradients.

1. Advantages of sampled tokens.        2. The divergence's two ends and its middle.
3. What the gradient leads to.      4. Tokens that cannot occur.        5. The likeliest tokens.
"""

import math

import pytest
import torch
from torch.nn.functional import one_hot

from reason_llm.train import distillation
from reason_llm.train.distillation import generalized_jsd, topk_forward_kl

STUDENT, TEACHER = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]


def logits(probabilities: list[float]) -> torch.Tensor:
    """One token's; a constant is added, which a softmax takes out."""
    return torch.tensor([probabilities], dtype=torch.float64).log() + 3.0


def tensor(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_advantages_are_the_teachers_logprobs_minus_the_students() -> None:
    student = tensor([[-1.0, -2.0, math.nan, -0.5], [-1.0, 9.0, 9.0, 9.0]])
    teacher = tensor([[-3.0, -1.0, math.nan, -0.5], [-2.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False, True], [True, False, False, False]])
    got = distillation.distillation_advantages(student, teacher, mask, 0.5)
    assert got.tolist() == [[-1.0, 0.5, 0.0, 0.0], [-0.5, 0.0, 0.0, 0.0]]


def test_a_discount_adds_what_follows_over_gaps() -> None:
    student, teacher = tensor([[0.0, 0.0, 0.0]]), tensor([[1.0, 50.0, -4.0]])
    mask = torch.tensor([[True, False, True]])
    got = distillation.distillation_advantages(student, teacher, mask, 1.0, 0.5)
    assert got.tolist() == [[1.0 - 2.0, 0.0, -4.0]]


def test_the_policy_gradient_of_the_advantages_is_that_of_the_reverse_kl() -> None:
    student, teacher = logits(STUDENT).requires_grad_(), logits(TEACHER)
    logprobs = torch.log_softmax(student, dim=-1)
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages = distillation.distillation_advantages(
        logprobs.detach(), torch.log_softmax(teacher, dim=-1), mask
    )
    loss = -(logprobs.detach().exp() * advantages * logprobs).sum()  # over what is sampled
    (sampled,) = torch.autograd.grad(loss, student)
    (exact,) = torch.autograd.grad(generalized_jsd(student, teacher, 1.0).sum(), student)
    assert torch.allclose(sampled, exact, atol=1e-12)
    assert exact[0, 0] > 0 > exact[0, 2]  # the teacher likes the last token better


def test_the_ends_are_the_two_kls() -> None:
    student, teacher = logits([0.5, 0.5]), logits([0.75, 0.25])
    forward = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    reverse = 0.5 * math.log(2 / 3) + 0.5 * math.log(2)
    assert generalized_jsd(student, teacher, 0.0).item() == pytest.approx(forward)
    assert generalized_jsd(student, teacher, 1.0).item() == pytest.approx(reverse)


def test_the_middle_is_a_mixture_of_kls_to_the_mixture() -> None:
    """beta 0.25: M = 0.25 (0.75, 0.25) + 0.75 (0.5, 0.5) = (0.5625, 0.4375)."""
    of_teacher = 0.75 * math.log(0.75 / 0.5625) + 0.25 * math.log(0.25 / 0.4375)
    of_student = 0.5 * math.log(0.5 / 0.5625) + 0.5 * math.log(0.5 / 0.4375)
    got = generalized_jsd(logits([0.5, 0.5]), logits([0.75, 0.25]), 0.25)
    assert got.item() == pytest.approx(0.25 * of_teacher + 0.75 * of_student)


def test_the_temperature_divides_both() -> None:
    student, teacher = logits([0.2, 0.8]), logits([0.5, 0.5])
    warm = generalized_jsd(student, teacher, 0.0, temperature=2.0)
    assert warm.item() == pytest.approx(0.5 * math.log(0.75) + 0.5 * math.log(1.5))  # 1/3 and 2/3


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_gradient_leads_to_the_teacher_and_not_the_teacher(beta: float) -> None:
    student, teacher = logits(STUDENT).requires_grad_(), logits(TEACHER).requires_grad_()
    generalized_jsd(student, teacher, beta).sum().backward()
    assert student.grad[0, 0] > 0 > student.grad[0, 2]
    assert teacher.grad is None
    same = logits(TEACHER).requires_grad_()
    loss = generalized_jsd(same, teacher, beta).sum()
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-12)
    assert torch.allclose(same.grad, torch.zeros(1, 3, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_a_token_that_neither_can_draw_changes_nothing(beta: float) -> None:
    ends = tensor([[-math.inf]])
    student, teacher = logits([0.5, 0.5]).requires_grad_(), logits([0.75, 0.25])
    longer = torch.cat([student, ends], dim=1)
    loss = generalized_jsd(longer, torch.cat([teacher, ends], dim=1), beta).sum()
    assert loss.item() == pytest.approx(generalized_jsd(student, teacher, beta).item())
    loss.backward()
    assert student.grad.isfinite().all()
    assert student.grad.abs().sum() > 0


def test_tokens_are_independent_so_that_chunks_add_up() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 7, 11, dtype=torch.float64, generator=generator)
    whole = generalized_jsd(student, teacher, 0.4, 1.5)
    parts = [generalized_jsd(student[i : i + 3], teacher[i : i + 3], 0.4, 1.5) for i in (0, 3, 6)]
    assert torch.allclose(whole, torch.cat(parts), atol=1e-14)
    assert whole.shape == (7,)
    assert (whole > 0).all()


def test_half_precision_is_computed_in_float32() -> None:
    student = torch.tensor([[0.0, 9.0]], dtype=torch.bfloat16)
    assert generalized_jsd(student, student, 0.5).dtype == torch.float32


def test_the_likeliest_tokens_by_hand() -> None:
    student = logits(STUDENT).requires_grad_()
    loss, mass = topk_forward_kl(student, torch.tensor([[2, 0]]), tensor([[0.5, 0.25]]).log())
    loss.sum().backward()
    assert loss.item() == pytest.approx(0.5 * math.log(2) + 0.25 * math.log(0.5))
    assert mass.item() == 0.75
    # d/dz of -sum p log q = mass q - p
    assert student.grad[0].tolist() == pytest.approx([0.375 - 0.25, 0.1875, 0.1875 - 0.5])


def test_all_tokens_give_the_whole_kl() -> None:
    student, teacher = logits(STUDENT), logits(TEACHER)
    ids = torch.tensor([[1, 2, 0]])
    logprobs = torch.log_softmax(teacher, dim=-1).gather(1, ids)
    loss, mass = topk_forward_kl(student, ids, logprobs)
    assert loss.item() == pytest.approx(generalized_jsd(student, teacher, 0.0).item())
    assert mass.item() == pytest.approx(1.0)


def test_one_sure_token_is_its_nll() -> None:
    sure = one_hot(torch.tensor([1]), 3).double().log()  # 0 and -inf
    got = generalized_jsd(logits(STUDENT), sure, 0.0)
    assert got.item() == pytest.approx(-math.log(0.25))
