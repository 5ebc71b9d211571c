"""KV cache whose storage is reserved once: a token is written into it, and nothing is copied.

Layers that attend to the whole text get storage for the longest row when the prompts have been
read; a row that leaves is replaced by the last one. Layers with a sliding window stay as
Transformers has them.

Shapes: P prompts, B rows, K key heads, T tokens so far, C tokens there is room for, H head size.
"""

import torch
from torch import Tensor
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import CacheLayerMixin, DynamicLayer


class ReservedCache(DynamicCache):
    """The cache of a batch of rows that all grow by a token at a time."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config=config)
        layers: list[CacheLayerMixin] = self.layers
        self.layers: list[CacheLayerMixin] = [
            _ReservedLayer() if type(layer) is DynamicLayer else layer for layer in layers
        ]
        self.is_reserved = all(isinstance(layer, _ReservedLayer) for layer in self.layers)
        """Whether no layer copies what it keeps when rows leave."""

    def reserve(self, index_B: Tensor, new_tokens: int) -> None:
        """Make row b a copy of row ``index_B[b]``, with room for ``new_tokens`` more."""
        for layer in self.layers:
            if isinstance(layer, _ReservedLayer):
                layer.reserve(index_B, new_tokens)
            else:
                layer.reorder_cache(index_B)

    def keep(self, index_B: Tensor) -> None:
        """Row b becomes row ``index_B[b]``, which is b itself or no row that is kept before it."""
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
