"""Decoding with grouped heads equals Transformers' own attention, with and without a mask."""

import pytest
import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from reason_llm.model.attention import NAME, _attention
from reason_llm.model.base import Model


class Layer(torch.nn.Module):
    """What Transformers reads of a layer."""

    num_key_value_groups = 3
    is_causal = True


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("masked", [True, False])
def test_equal_to_transformers(tokens: int, masked: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 6, tokens, 8, generator=generator)
    key, value = torch.randn(2, 4, 2, 7, 8, generator=generator)
    mask = torch.rand(4, 1, tokens, 7, generator=generator) < 0.6 if masked else None
    if mask is not None:
        mask[..., 0] = True
    ours, _ = _attention(Layer(), query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(Layer(), query, key, value, mask, scaling=0.3)
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours, theirs)


def test_the_base_uses_it(model: Model) -> None:
    assert model.text_config._attn_implementation == NAME
