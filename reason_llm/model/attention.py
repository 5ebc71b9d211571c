"""Attention over rows that lie end to end in one ("varlen"): each row sees only itself and the
prompt that it shares with others.

A prompt that several completions begin with stands once: its keys and values are gathered for each
of them, so that each completion is a segment whose keys are the prompt's and its own. Its queries
are aligned to the end of its keys, as FlashAttention 2 does. Nothing is masked, so no score of two
rows is ever computed.

On a GPU this is FlashAttention as torch ships it (``varlen_attn``, 16 bits only); elsewhere each
segment by itself through SDPA.

Shapes: S segments, N tokens of the row, M gathered keys, H query heads, K key heads, D head size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig

FAMILIES = ("gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3")
"""Whose attention hands segments on and takes nothing but causality and a window from its mask;
others may, and were not tried."""

MOST_KEYS_PER_TOKEN = 4
"""Gathered keys, of the tokens that a micro-batch may have: every layer copies them."""


def unfit(text: PretrainedConfig, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why the rows of this model cannot lie end to end here; None if they can."""
    if text.model_type not in FAMILIES:
        return f"it is known to hold for {', '.join(FAMILIES)}, and this is {text.model_type}"
    if device.type != "cuda":
        return None
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    if dtype == torch.float32:
        return "on a GPU it is FlashAttention, which knows no float32"
    if torch.cuda.get_device_capability(device)[0] < 8:
        return "FlashAttention needs a GPU of compute capability 8.0 or more"
    if size % 8 or size > 256:
        return f"FlashAttention knows no heads of {size} numbers"
    if getattr(text, "attention_dropout", 0.0):
        return f"attention_dropout={text.attention_dropout} is not in torch's FlashAttention"
    return None


LONG_QUERIES = 512
"""Completions of that many tokens, whose prompt is at most a quarter as long, get queries in the
prompt's place on a CPU. Measured, forward and backward, 1,500 tokens after 64: 209 -> 127 ms; 384
after 300 would take longer, 34 instead of 27 ms."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Query and key ranges of the segments: the queries and the keys of segment s end together."""

    query_lengths: tuple[int, ...]
    key_lengths: tuple[int, ...]
    """At least as long as the segment's queries."""
    key_index_M: Tensor | None
    """Where in the row each gathered key stands; None: every segment sees its own tokens alone."""
    query_ends: Tensor
    """(S + 1,) int32, from 0: the sums of the lengths, on the model's device."""
    key_ends: Tensor
    """(S + 1,) int32."""

    @classmethod
    def of(
        cls,
        query_lengths: list[int],
        key_lengths: list[int],
        key_index: list[int] | None,
        device: torch.device,
    ) -> "Segments":
        """Segments from lengths in tokens, with their cumulative sums."""

        def ends(lengths: list[int]) -> Tensor:
            summed = torch.tensor([0, *lengths]).cumsum(0)
            return summed.to(device, torch.int32)

        index = None if key_index is None else torch.tensor(key_index, device=device)
        return cls(
            tuple(query_lengths), tuple(key_lengths), index, ends(query_lengths), ends(key_lengths)
        )


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
    if segments.key_index_M is not None:
        key_1KND, value_1KND = (
            x.index_select(2, segments.key_index_M) for x in (key_1KND, value_1KND)
        )
    if query_1HND.device.type == "cuda":
        return _flash(query_1HND, key_1KND, value_1KND, segments, scaling, sliding_window)
    parts = zip(
        query_1HND.split(segments.query_lengths, dim=2),
        key_1KND.split(segments.key_lengths, dim=2),
        value_1KND.split(segments.key_lengths, dim=2),
        strict=True,
    )
    found = [
        _one_segment(*part, scaling=scaling, sliding_window=sliding_window, dropout=dropout)
        for part in parts
    ]
    return torch.cat(found, dim=2).transpose(1, 2).contiguous()


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
    if not is_windowed and LONG_QUERIES <= queries < keys <= 5 * queries / 4:
        # Without a mask torch skips the half of the scores that no query sees; queries in the
        # prompt's place, whose results are dropped, cost less than that half.
        before_1HTD = query_1HTD.new_zeros(
            *query_1HTD.shape[:2], keys - queries, query_1HTD.shape[3]
        )
        padded_1HTD = torch.cat([before_1HTD, query_1HTD], dim=2)
        attended = _one_segment(padded_1HTD, key_1KTD, value_1KTD, scaling, None, dropout)
        return attended[:, :, keys - queries :]
    is_causal = queries == keys and queries > 1 and not is_windowed
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
        # SDPA takes autocast's dtype by itself; this operator takes what it is given.
        x[0].transpose(0, 1).to(value_1KND.dtype)
        for x in (query_1HND, key_1KND, value_1KND)
    )
    options: dict[str, Any] = {"scale": scaling}
    if _asks_for_grouped_heads(varlen_attn):
        options["enable_gqa"] = query_NHD.shape[1] != key_MKD.shape[1]
    found: Any = varlen_attn(
        query_NHD,
        key_MKD,
        value_MKD,
        segments.query_ends,
        segments.key_ends,
        max(segments.query_lengths),
        max(segments.key_lengths),
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        **options,
    )
    attended_NHD: Tensor = found
    return attended_NHD[None]


@cache
def _asks_for_grouped_heads(operator: Callable[..., Any]) -> bool:
    """Whether torch needs ``enable_gqa`` when there are fewer key heads than query heads.

    torch 2.13 wants that; torch 2.11 has no such parameter and calls the same kernel without it.
    """
    return "enable_gqa" in inspect.signature(operator).parameters
