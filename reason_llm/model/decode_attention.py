"""Attention of one new token per row without copies of keys and values.

Where several query heads share a key head, Transformers' SDPA first copies the whole cache once for
each query head if there is an attention mask. With a single query per row the query heads of a key
head can stand in the place of queries instead, which is the same sum and reads the cache once:
(B, H, 1, D) becomes (B, K, H / K, D). Rows that lie end to end go to ``attention``, rows whose
prompts are kept once to whoever keeps them, and everything else to Transformers' own SDPA.

Measured on a CPU, 256 rows, 40 tokens, 4 query and 2 key heads: 0.6 ms instead of 5.1 ms.

Shapes: B rows, H query heads, K key heads, T tokens in the cache, D head size.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reason_llm.model import attention as packed_attention
from reason_llm.model.attention import Segments

NAME = "reason_llm_sdpa"


class SharedPrompts(Protocol):
    """Prompts whose keys and values are kept once for all the rows that continue them."""

    def attend(
        self, layer: int, query_BKGD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scale: float
    ) -> Tensor:
        """Attention (B, K, H / K, D) of one new token a row to its prompt and to its own T tokens,
        whose keys and values are given, in a layer of the model."""
        ...


def register() -> str:
    """Register it with Transformers and return its name for ``attn_implementation``."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _attention(
    module: Any,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    shared: SharedPrompts | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if segments is not None:
        return packed_attention.attend(
            query_BHTD, key_BKTD, value_BKTD, segments, scaling, sliding_window, dropout
        ), None
    rows, heads, tokens, size = query_BHTD.shape
    key_heads = key_BKTD.shape[1]
    if shared is not None:
        assert sliding_window is None
        attended = shared.attend(
            module.layer_idx,
            query_BHTD.reshape(rows, key_heads, heads // key_heads, size).to(value_BKTD.dtype),
            key_BKTD.to(value_BKTD.dtype),
            value_BKTD,
            size**-0.5 if scaling is None else scaling,
        )
        return attended.reshape(rows, 1, heads, attended.shape[-1]), None
    if tokens > 1 or heads == key_heads or "position_bias" in kwargs:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module,
            query_BHTD,
            key_BKTD,
            value_BKTD,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            **kwargs,
        )
        return result
    grouped = torch.nn.functional.scaled_dot_product_attention(
        query_BHTD.reshape(rows, key_heads, heads // key_heads, size),
        key_BKTD,
        value_BKTD,
        attn_mask=attention_mask,  # (B, 1, 1, T): the same for every head
        dropout_p=dropout,
        scale=scaling,
    )
    return grouped.reshape(rows, 1, heads, grouped.shape[-1]), None
