"""Linear layers while tokens are decoded: the same sums as PEFT's and torch's in fewer calls.

A decoded token costs one product of a few rows with every weight. Two things take longer than those
sums: the Python around each adapted layer, which looks up an adapter that does not change within a
phase; and, on a CPU, what MKL does before a product of few rows, which is to copy the weight into a
layout of its own. So within ``lean`` an adapted layer is its three products and nothing else, and
on a CPU a large weight meets few rows from the left, and many rows a block of its lines at a time.

Measured on one core (AVX512), float32, a head of 32,000 x 384: 1, 2, 3, 4 rows 7.6, 18.9, 27.3,
13.4 ms become 4.2, 3.9, 5.9, 7.3; 64 rows 37 become 27; and for 32,000 x 640 64 rows 59 become 44.

Shapes: N rows, O outputs, I inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.lora import Linear as AdaptedLinear
from torch import Tensor, nn
from torch.nn.functional import linear

LARGE_WEIGHT = 2**17
"""Elements from which a weight is read from memory for each token: no core's cache holds them
all."""
FEW_ROWS = 4
"""Rows that such a weight is multiplied with from the left."""
FEW_INPUTS = 1000
"""Inputs up to which that is faster for more than 2 rows."""
BLOCK_LINES = 1024
"""Lines of a large head that are multiplied at once: their copy stays in the cache."""


@contextmanager
def lean(policy: nn.Module, head: nn.Module) -> Iterator[None]:
    """Context in which the adapted layers and the head compute without gradient and without looking
    anything up. Adapters must not be switched within it.

    Args:
        policy: its layers that are not plain LoRA over float weights, or that drop out, stay as
            they are.
    """
    changed: list[nn.Module] = []
    try:
        for module in policy.modules():
            forward = _of_adapted(module)
            if forward is None and module is head and type(module) is nn.Linear:
                forward = _of_linear(module)
            if forward is not None and "forward" not in vars(module):
                vars(module)["forward"] = forward
                changed.append(module)
        yield
    finally:
        for module in changed:
            del vars(module)["forward"]


def _of_linear(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    weight, bias = layer.weight, layer.bias
    return lambda inputs: product(inputs, weight, bias)


def _of_adapted(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """The sums of PEFT's layer with one adapter that is on; None for any other layer."""
    if type(layer) is not AdaptedLinear or type(layer.base_layer) is not nn.Linear:
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1 or layer.lora_variant:
        return None
    low, up, dropout = (part[names[0]] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    drops = dropout.training and type(dropout) is not nn.Identity
    if drops or low.bias is not None or up.bias is not None:
        return None
    base, scaling = layer.base_layer, layer.scaling[names[0]]
    weight, bias = base.weight, base.bias
    # Autocast would convert the adapter to the base's type once a token.
    low_RI, up_OR = (part.weight.detach().to(weight.dtype) for part in (low, up))

    def forward(inputs: Tensor) -> Tensor:
        added = linear(linear(inputs, low_RI), up_OR).mul_(scaling)
        return product(inputs, weight, bias).add_(added)

    return forward


def product(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``linear`` without gradient: inputs (..., I) to outputs (..., O).

    A large float32 weight on a CPU is read in the order that suits the number of rows; with more
    than ``FEW_ROWS`` rows the bits are those of ``linear``.
    """
    outputs, size = weight_OI.shape
    plain = weight_OI.numel() < LARGE_WEIGHT or weight_OI.device.type != "cpu"
    if plain or weight_OI.dtype != torch.float32 or inputs.dtype != torch.float32:
        return linear(inputs, weight_OI, bias_O)
    rows = inputs.numel() // size
    if rows <= 2 or (rows <= FEW_ROWS and size <= FEW_INPUTS):
        inputs_NI = inputs.reshape(rows, size)
        if rows == 1:  # a product with two columns is faster than one with a vector
            inputs_NI = torch.cat([inputs_NI, inputs_NI])
        result_NO = (weight_OI @ inputs_NI.t())[:, :rows].t()
        if bias_O is not None:
            result_NO = result_NO + bias_O
        return result_NO.contiguous().view(*inputs.shape[:-1], outputs)
    if outputs < 4 * BLOCK_LINES or bias_O is not None:
        return linear(inputs, weight_OI, bias_O)
    return torch.cat([linear(inputs, lines) for lines in weight_OI.split(BLOCK_LINES)], dim=-1)
