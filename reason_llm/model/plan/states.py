"""Recurrent states: what some layers keep of a sequence in place of keys and values."""

from dataclasses import dataclass
from typing import Any

LINE = "recurrent states"
"""Name in the ledger."""


@dataclass(frozen=True, slots=True)
class States:
    """Sizes of the states of one sequence in all layers."""

    layers: int = 0
    """Layers that keep a state of a fixed size."""
    elements: int = 0
    """Elements of these states, in float32."""
    conv_inputs: int = 0
    """Elements of the inputs that their convolutions keep."""

    def num_bytes(self, element_bytes: int) -> int:
        """Bytes of the states of one sequence."""
        return 4 * self.elements + element_bytes * self.conv_inputs

    def block_tokens(self, key_value: int, element_bytes: int) -> int:
        """Tokens whose keys and values take as much of one layer as a recurrent state does: the
        least block of vLLM's cache, which has pages of one size; 0 without such layers, or without
        keys. ``key_value`` is the number of elements of the keys of one token in a layer."""
        if not self.layers or not key_value:
            return 0
        page = self.num_bytes(element_bytes) // self.layers
        return page // (2 * key_value * element_bytes)


NO_STATES = States()


def cache_of(base: Any) -> list[tuple[int, int, int, int]]:
    """Elements of the keys, states and convolution inputs that each layer keeps of one token, and
    its window in tokens (0 without one), by a pass on the meta device; empty where that needs
    values."""
    import torch
    from transformers import DynamicCache

    cache = DynamicCache(config=base.config)
    ids_11 = torch.ones(1, 1, dtype=torch.long, device="meta")
    try:
        with torch.no_grad(), torch.device("meta"):
            base.get_decoder()(input_ids=ids_11, past_key_values=cache, use_cache=True)
    except (RuntimeError, NotImplementedError, AttributeError, TypeError):
        return []
    return [
        (
            _elements([getattr(layer, "keys", None)]),
            _elements(getattr(layer, "recurrent_states", {}).values()),
            _elements(getattr(layer, "conv_states", {}).values()),
            getattr(layer, "sliding_window", None) or 0,
        )
        for layer in cache.layers
    ]


def _elements(tensors: Any) -> int:
    return sum(each.numel() for each in tensors if each is not None)
