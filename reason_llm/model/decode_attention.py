"""Attention of one new token per row without copies of keys and values.

Where several query heads share a key head, Transformers' SDPA first copies the whole cache once for
each query head if there is an attention mask. With a single query per row the query heads of a key
head can stand in the place of queries instead, which is the same sum and reads the cache once:
(B, H, 1, D) becomes (B, K, H / K, D). Rows that lie end to end go to ``attention``, and
everything else to Transformers' own SDPA.

Measured on a CPU, 256 rows, 40 tokens, 4 query and 2 key heads: 0.6 ms instead of 5.1 ms.

Shapes: B rows, H query heads, K key heads, T tokens in the cache, D head size.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reason_llm.model import attention as packed_attention
from reason_llm.model.attention import Segments

NAME = "reason_llm_sdpa"


def register() -> str:
    """Register it with Transformers and return its name for ``attn_implementation``."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    return NAME


def _attention(
    module: torch.nn.Module,
    query_BHTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    segments: Segments | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if segments is not None:
        return packed_attention.attend(
            query_BHTD, key_BKTD, value_BKTD, segments, scaling, sliding_window, dropout
        ), None
    rows, heads, tokens, size = query_BHTD.shape
    key_heads = key_BKTD.shape[1]
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
