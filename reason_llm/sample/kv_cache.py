"""KV cache whose storage is reserved once: a token is written into it, and nothing is copied.

Layers that attend to the whole text get storage for the longest row when the prompts have been
read; a row that leaves is replaced by the last one. Layers with a sliding window stay as
Transformers has them. On a CPU, long prompts of many rows are kept once (``SharedPrompts``).

Shapes: P prompts, B rows, K key heads, T tokens so far, C tokens there is room for, H head size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from reason_llm.model import SharedPrompts

SHARED_TOKENS = 128
"""Prompts are kept once if they have at least this many tokens on average,"""
SHARED_ROWS = 4
"""and at least this many rows each."""


class ReservedCache(DynamicCache):
    """The cache of a batch of rows that all grow by a token at a time."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        made: list[CacheLayerMixin] = self.layers
        self.layers: list[CacheLayerMixin] = [
            _ReservedLayer() if type(layer) is DynamicLayer else layer for layer in made
        ]
        self.is_reserved = all(isinstance(layer, _ReservedLayer) for layer in self.layers)
        """Whether no layer copies what it keeps when rows leave."""
        self.prompts: SharedPrompts | None = None
        """Prompts that are kept once; None: every row has its own copy."""

    def reserve(self, index_B: Tensor, new_tokens: int) -> None:
        """Make row b a copy of row ``index_B[b]``, with room for ``new_tokens`` more."""
        for layer in self.layers:
            if isinstance(layer, _ReservedLayer):
                layer.reserve(index_B, new_tokens)
            else:
                layer.reorder_cache(index_B)

    def share(self, index_B: Tensor, lengths: Sequence[int], new_tokens: int) -> None:
        """Keep the rows so far, padded on the left, as prompts of these lengths, and make row b a
        continuation of prompt ``index_B[b]`` with room for ``new_tokens``; ``is_reserved`` must
        hold."""
        layers = [layer for layer in self.layers if isinstance(layer, _ReservedLayer)]
        keys_values = [layer.share(len(index_B), new_tokens) for layer in layers]
        self.prompts = SharedPrompts(keys_values, lengths, index_B)

    def keep(self, index_B: Tensor) -> None:
        """Row b becomes row ``index_B[b]``, which is b itself or no row that is kept before it."""
        if self.prompts is not None:
            self.prompts.follow(self.prompts.index_B[index_B])
        moved_B = (index_B != torch.arange(len(index_B), device=index_B.device)).nonzero()[:, 0]
        for layer in self.layers:
            if isinstance(layer, _ReservedLayer):
                layer.keep(moved_B, index_B[moved_B], len(index_B))
            else:
                layer.reorder_cache(index_B)


def filling(keep_B: Tensor) -> Tensor:
    """Indices of the rows to keep, (N,): each in its own place where that is below N, the others in
    the places of rows that leave."""
    kept_N = keep_B.nonzero()[:, 0]
    index_N = torch.arange(len(kept_N), device=keep_B.device)
    index_N[~keep_B[: len(kept_N)]] = kept_N[kept_N >= len(kept_N)]
    return index_N


class _ReservedLayer(DynamicLayer):
    """Keys and values (B, K, T, H), views of a storage (B, K, C, H) once it is reserved."""

    _storage: tuple[Tensor, Tensor] | None = None

    def reserve(self, index_B: Tensor, new_tokens: int) -> None:
        def room(tensor_PKTH: Tensor) -> Tensor:
            _, heads, tokens, size = tensor_PKTH.shape
            storage = tensor_PKTH.new_empty(len(index_B), heads, tokens + new_tokens, size)
            torch.index_select(tensor_PKTH, 0, index_B, out=storage[:, :, :tokens])
            return storage

        length = self.get_seq_length()
        self._storage = room(self.keys), room(self.values)
        self._view(len(index_B), length)

    def share(self, rows: int, new_tokens: int) -> tuple[Tensor, Tensor]:
        """The keys and values so far, which are left to the caller; then ``rows`` empty ones."""
        prompts = self.keys, self.values
        _, heads, _, size = self.keys.shape
        room = (rows, heads, new_tokens, size)
        self._storage = self.keys.new_empty(room), self.values.new_empty(room)
        self._view(rows, 0)
        return prompts

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        if self._storage is None:
            keys, values = super().update(key_states, value_states)
            return keys, values
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        rows = len(key_states)
        for storage, states in zip(self._storage, (key_states, value_states), strict=True):
            storage[:rows, :, start:end] = states
        return self._view(rows, end)

    def keep(self, places: Tensor, sources: Tensor, rows: int) -> None:
        """Copy the rows ``sources`` to ``places`` and keep the first ``rows``."""
        assert self._storage is not None
        length = self.get_seq_length()
        for storage in self._storage:
            storage[places, :, :length] = storage[sources, :, :length]
        self._view(rows, length)

    def _view(self, rows: int, length: int) -> tuple[Tensor, Tensor]:
        assert self._storage is not None
        keys, values = self._storage
        self.keys, self.values = keys[:rows, :, :length], values[:rows, :, :length]
        return self.keys, self.values
