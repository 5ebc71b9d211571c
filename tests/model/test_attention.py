"""What is added up for shared keys; one new token a row."""

from typing import Any

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from reason_llm.model import attention
from reason_llm.model.attention import NAME
from reason_llm.model.base import Model


@pytest.mark.parametrize("index", [[0, 1, 2, *([0, 1] * 40), 3, 1], [3, 0, 1, 2, 0, 1], [1, 0]])
def test_shared_keys_add_up_in_float32(index: list[int]) -> None:
    """torch's own backward pass adds in 16 bits."""
    tokens = max(index) + 1
    torch.manual_seed(0)
    key = torch.randn(1, 2, tokens, 3).bfloat16().requires_grad_()
    gathered = attention._gathered(key, torch.tensor(index))
    assert torch.equal(gathered, key[:, :, index])
    gradient = torch.rand(gathered.shape).bfloat16()
    gathered.backward(gradient)
    exact = torch.zeros(1, 2, tokens, 3, dtype=torch.float64)
    exact.index_add_(2, torch.tensor(index), gradient.double())
    assert key.grad is not None
    assert torch.equal(key.grad, exact.bfloat16())
    plain = torch.zeros(1, 2, tokens, 3, dtype=torch.bfloat16)
    plain.index_add_(2, torch.tensor(index), gradient)
    assert len(index) < 80 or not torch.equal(plain, key.grad)


class Layer(torch.nn.Module):
    """What Transformers reads of a layer."""

    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_one_token_a_row_is_as_in_transformers(tokens: int, masked: bool, model: Model) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 6, tokens, 8, generator=generator)
    key, value = torch.randn(2, 4, 2, 7, 8, generator=generator)
    mask: Any = torch.rand(4, 1, tokens, 7, generator=generator) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    ours, _ = attention._attention(Layer(), query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)
    assert model.text_config._attn_implementation == NAME
