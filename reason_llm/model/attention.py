"""Attention, as Transformers calls it: over rows that lie end to end in one ("varlen"), and of one
new token a row without copies of keys and values.

A packed row sees only itself and the prompt that it shares with others, whose keys and values are
gathered for each of them; its queries are aligned to the end of its keys, as FlashAttention 2 does.
On a GPU this is FlashAttention as torch ships it (``varlen_attn``, 16 bits only); elsewhere each
segment goes through SDPA alone.

Shapes: N tokens of the row, M gathered keys, B rows, T tokens of a row, H query heads,
K key heads, D head size.
"""

import importlib.util
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from reason_llm.config import installation
from reason_llm.model.families import NOT_PACKED_ON_GPU, PACKED, has_delta_rule

NAME = "reason_llm_sdpa"

INSTALL_FLA = installation.install("gpu")


def layer_configs(text: PretrainedConfig) -> list[PretrainedConfig]:
    """Configs of the layers, in their order; the global layers of Gemma 4 have larger heads."""
    count = text.num_hidden_layers
    return [text.per_layer_config[i] if text.is_heterogeneous else text for i in range(count)]


def head_size(layer: PretrainedConfig) -> int:
    """Size of the attention heads, of the whole model or of one of ``layer_configs``."""
    return int(getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads)


def unfit(text: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why the rows of this model cannot lie end to end here; None if they can."""
    if text.model_type not in PACKED:
        return f"packed rows are tested for {', '.join(PACKED)}, and this is {text.model_type}"
    if device.type != "cuda":
        return None
    if (reason := NOT_PACKED_ON_GPU.get(text.model_type)) is not None:
        return f"on a GPU {reason}, and this is {text.model_type}"
    if has_delta_rule(text) and importlib.util.find_spec("fla") is None:
        return f"on a GPU the recurrent layers of packed rows need fla ({INSTALL_FLA})"
    size = max(map(head_size, layer_configs(text)))
    if dtype == torch.float32:
        return "on a GPU packed rows need FlashAttention, which has no float32"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "FlashAttention needs a GPU of compute capability 8.0 or more"
    if size % 8 or size > 256:
        return f"FlashAttention has no heads of {size} numbers"
    if getattr(text, "attention_dropout", 0.0):
        return f"attention_dropout={text.attention_dropout} is not in torch's FlashAttention"
    return None


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """Query and key ranges of the segments: the queries and the keys of segment s end together."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    """At least as long as the segment's queries."""
    prompt_starts: tuple[int | None, ...]
    """Place at which the prompt of each segment begins, of which it has the keys but not the
    queries; None for a whole row."""
    index_M: Tensor | None
    """Place in the row of each gathered key; None: every segment sees only its own tokens."""
    query_ends: Tensor
    """(S + 1,) int32, from 0: the sums of the lengths, on the model's device."""
    key_ends: Tensor
    """(S + 1,) int32."""

    @classmethod
    def of(
        cls,
        query_lengths: list[int],
        key_lengths: list[int],
        index_M: NDArray[np.int64] | None,
    ) -> "Segments":
        """Segments from lengths in tokens, in host memory; ``index_M`` is the token of each key,
        None where each segment sees only its own."""
        query_ends, key_ends = (
            torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
            for lengths in (query_lengths, key_lengths)
        )
        starts: list[int | None] = [None] * len(query_lengths)
        key_starts = accumulate(key_lengths, initial=0)
        rows = zip(query_lengths, key_lengths, key_starts, strict=False)
        for i, (own, keys, at) in enumerate(rows):  # more keys than queries continue a prompt
            if index_M is not None and own < keys:
                starts[i] = int(index_M[at])
        return cls(
            tuple(query_lengths),
            tuple(key_lengths),
            tuple(starts),
            None if index_M is None else torch.from_numpy(index_M),
            query_ends,
            key_ends,
        )


def _gathered(x_1KND: Tensor, index_M: Tensor) -> Tensor:
    """The keys, or values, (1, K, M, D) that the segments see."""
    if x_1KND.device.type == "cpu" and x_1KND.dtype.itemsize > 2:
        return x_1KND.index_select(2, index_M)
    gathered: Tensor = _Gather.apply(x_1KND, index_M)
    return gathered


class _Gather(torch.autograd.Function):
    """``index_select`` whose backward pass adds in float32; torch's adds in 16 bits."""

    @staticmethod
    def forward(ctx: Any, x_1KND: Tensor, index_M: Tensor) -> Tensor:
        ctx.index_M, ctx.shape = index_M, x_1KND.shape
        return x_1KND.index_select(2, index_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient_1KMD: Tensor) -> tuple[Tensor, None]:
        total_1KND = gradient_1KMD.new_zeros(ctx.shape, dtype=torch.float32)
        total_1KND.index_add_(2, ctx.index_M, gradient_1KMD.float())
        return total_1KND.to(gradient_1KMD.dtype), None


def attend(
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    segments: Segments,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of each segment, (1, N, H, D).

    Args:
        sliding_window: how many keys a query sees, its own among them; None for all before it.
    """
    if (index_M := segments.index_M) is not None:
        key_1KND, value_1KND = (_gathered(x, index_M) for x in (key_1KND, value_1KND))
    if query_1HND.device.type == "cuda":
        return _flash(query_1HND, key_1KND, value_1KND, segments, scaling, sliding_window)
    # SDPA has no segments of different lengths, as FlashAttention has on a GPU: a call for each.
    parts = zip(
        query_1HND.split(segments.query_lengths, dim=2),
        key_1KND.split(segments.key_lengths, dim=2),
        value_1KND.split(segments.key_lengths, dim=2),
        strict=True,
    )
    outputs = [
        _one_segment(*part, scaling=scaling, sliding_window=sliding_window, dropout=dropout)
        for part in parts
    ]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous()


def _one_segment(
    query_1HTD: Tensor,
    key_1KTD: Tensor,
    value_1KTD: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
) -> Tensor:
    queries, keys = query_1HTD.shape[2], key_1KTD.shape[2]
    is_windowed = sliding_window is not None and keys > sliding_window
    is_causal = queries == keys and queries > 1 and not is_windowed
    # SDPA's is_causal has queries start at the first key, and here they end at the last one.
    mask_TT = None
    if not is_causal and (queries > 1 or is_windowed):
        mask_TT = torch.ones(queries, keys, dtype=torch.bool, device=query_1HTD.device)
        mask_TT = mask_TT.tril(keys - queries)
        if sliding_window is not None and is_windowed:
            mask_TT = mask_TT.triu(keys - queries - sliding_window + 1)
    return scaled_dot_product_attention(
        query_1HTD,
        key_1KTD,
        value_1KTD,
        attn_mask=mask_TT,
        dropout_p=dropout,
        scale=scaling,
        is_causal=is_causal,
        enable_gqa=query_1HTD.shape[1] != key_1KTD.shape[1],
    )


def _flash(
    query_1HND: Tensor,
    key_1KND: Tensor,
    value_1KND: Tensor,
    segments: Segments,
    scaling: float | None,
    sliding_window: int | None,
) -> Tensor:
    """torch's FlashAttention; its window counts the keys before a query's own."""
    from torch.nn.attention.varlen import varlen_attn

    query_NHD, key_MKD, value_MKD = (
        # SDPA converts to autocast's dtype; this operator takes what it is given.
        x[0].transpose(0, 1).to(value_1KND.dtype)
        for x in (query_1HND, key_1KND, value_1KND)
    )
    output: Any = varlen_attn(
        query_NHD,
        key_MKD,
        value_MKD,
        segments.query_ends,
        segments.key_ends,
        max(segments.query_lengths),
        max(segments.key_lengths),
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query_NHD.shape[1] != key_MKD.shape[1],
    )
    attended_NHD: Tensor = output
    return attended_NHD[None]


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Rows end to end, one new token a row; and everything else by Transformers' own SDPA.

    With one query a row the query heads that share a key head take the place of queries, (B, H,
    1, D) becomes (B, K, H / K, D): the same sum, without a copy of the cache for each query head.
    """
    if segments is not None:
        return attend(
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
