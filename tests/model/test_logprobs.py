"""Chunked log-probs equal the plain ones, forward and backward, and never hold all logits."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reason_llm.model.logprobs import target_logprobs


def case(dtype: torch.dtype, bias: bool) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(19, 16, generator=generator).to(dtype).requires_grad_()
    head = torch.randn(37, 16, generator=generator).to(dtype)
    bias_V = torch.randn(37, generator=generator).to(dtype) if bias else None
    ids = torch.randint(37, (19,), generator=generator)
    return hidden, head, bias_V, ids


def plain(hidden, head, bias, ids, temperature, softcap=None):
    """Over full logits."""
    logits = torch.nn.functional.linear(hidden, head, bias).to(torch.float64)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits / temperature
    full = logits.log_softmax(-1)
    return full.gather(-1, ids[:, None])[:, 0], -(full.exp() * full).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_equal_to_full_logits(
    chunk: int, temperature: float, bias: bool, softcap: float | None
) -> None:
    hidden, head, bias_V, ids = case(torch.float32, bias)
    logprobs, entropy = target_logprobs(hidden, ids, head, bias_V, temperature, chunk, softcap)
    weights = torch.linspace(-1, 1, len(ids))
    (logprobs * weights).sum().backward()
    found = hidden.grad.clone()
    hidden.grad = None
    expected, expected_entropy = plain(hidden, head, bias_V, ids, temperature, softcap)
    (expected * weights).sum().backward()
    assert torch.allclose(logprobs.double(), expected, atol=1e-5)
    assert torch.allclose(entropy.double(), expected_entropy, atol=1e-5)
    assert torch.allclose(found, hidden.grad, atol=1e-5)
    assert hidden.grad.abs().max() > 0.1


def test_double_precision_gradient_is_exact() -> None:
    hidden, head, _, ids = case(torch.float64, bias=False)

    def total(h: torch.Tensor) -> torch.Tensor:
        return target_logprobs(h, ids, head, None, 0.9, 5)[0].square().sum()

    assert torch.autograd.gradcheck(total, (hidden,))


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_entropy_has_an_exact_gradient_when_asked(softcap: float | None) -> None:
    hidden, head, _, ids = case(torch.float64, bias=False)

    def total(h: torch.Tensor) -> torch.Tensor:
        logprobs, entropy = target_logprobs(
            h, ids, head, None, 0.9, 5, softcap, entropy_gradient=True
        )
        return logprobs.square().sum() + entropy.pow(3).sum()

    assert torch.autograd.gradcheck(total, (hidden,))
    _, entropy = target_logprobs(hidden, ids, head, None, 0.9, 5, softcap)
    assert not entropy.requires_grad


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_an_adapter_on_the_head_learns_exactly(chunk: int, softcap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    hidden, low, up = drawn(9, 16), drawn(9, 3), drawn(37, 3)
    head, bias = drawn(37, 16).detach(), drawn(37).detach()
    ids = torch.randint(37, (9,), generator=generator)
    logits = torch.nn.functional.linear(hidden, head, bias) + low @ up.T
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    full = (logits / 0.9).log_softmax(-1)
    expected = full.gather(-1, ids[:, None])[:, 0], -(full.exp() * full).sum(-1)
    wanted = torch.autograd.grad(
        expected[0].square().sum() + expected[1].pow(3).sum(), (hidden, low, up)
    )
    found = target_logprobs(hidden, ids, head, bias, 0.9, chunk, softcap, True, (low, up))
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12)
    gradients = torch.autograd.grad(
        found[0].square().sum() + found[1].pow(3).sum(), (hidden, low, up)
    )
    for gradient, exact in zip(gradients, wanted, strict=True):
        assert torch.allclose(gradient, exact, atol=1e-12)
    _, entropy = target_logprobs(hidden, ids, head, bias, 0.9, chunk, softcap, False, (low, up))
    assert not entropy.requires_grad


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements of any tensor that an operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, torch.Tensor):
                self.elements = max(self.elements, item.numel())
        return result


def test_logits_never_exist_as_a_whole() -> None:
    tokens, vocabulary, width, chunk = 512, 4096, 8, 16
    hidden = torch.randn(tokens, width, requires_grad=True)
    head = torch.randn(vocabulary, width)
    ids = torch.randint(vocabulary, (tokens,))
    with LargestTensor() as watch:
        target_logprobs(hidden, ids, head, None, 1.0, chunk)[0].sum().backward()
    assert watch.elements == chunk * vocabulary


def test_no_gradient_is_made_where_none_is_wanted() -> None:
    hidden, head, _, ids = case(torch.float32, bias=False)
    with torch.no_grad():
        logprobs, _ = target_logprobs(hidden, ids, head, None, 1.0)
    assert not logprobs.requires_grad
