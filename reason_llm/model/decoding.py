"""Linear layers while tokens are decoded: the same sums as PEFT's and torch's in fewer calls. An
adapted layer is its three products. On a CPU a large head is multiplied block by block with many
rows, and on AMD's a large weight from the left with few rows, before which MKL would copy it.

Measured on one core of AMD's, a head of 32,000 x 384: 1, 2, 3, 4 rows 7.6, 18.9, 27.3, 13.4 ms
become 4.2, 3.9, 5.9, 7.3; 64 rows 37 become 27. On Intel's 4 rows took 17 % longer from the left.

Shapes: N rows, O outputs, I inputs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from reason_llm.model.adapted_linear import parts, replaced
from reason_llm.model.products import by_onednn, is_amd, linear

LARGE_WEIGHT = 2**16
"""Least elements of a weight that no core's cache holds."""
FEW_ROWS = 4
"""Rows that such a weight is multiplied with from the left on AMD's CPUs."""
FEW_INPUTS = 1536
"""Most inputs for which that is faster with more than 2 rows."""
BLOCK_LINES = 1024
"""Lines of a large head that are multiplied at once: their copy stays in the cache."""


def lean(policy: nn.Module) -> AbstractContextManager[None]:
    """Context in which the linear layers compute without gradient and without looking anything up.
    Adapters must not be switched within it. Layers that are not plain LoRA over float weights stay
    as they are, and so do those without an adapter on a GPU."""
    return replaced(policy, _forward_of)


def _forward_of(module: nn.Module) -> Callable[[Tensor], Tensor] | None:
    if type(module) is nn.Linear and module.weight.device.type == "cpu":
        return lambda input: product(input, module.weight, module.bias)
    return _of_adapted(module)


def _of_adapted(layer: Any) -> Callable[[Tensor], Tensor] | None:
    """The products of PEFT's layer with one active adapter over a float weight; None for others."""
    layer_parts = parts(layer)
    if layer_parts is None or type(layer_parts.base) is not nn.Linear:
        return None
    base, low, up, scaling = layer_parts
    weight, bias = base.weight, base.bias
    # Autocast would convert the adapter to the base's type once a token.
    low_RI = (low.detach() * scaling).to(weight.dtype)
    up_OR = up.detach().to(weight.dtype)
    size, rank = up_OR.shape

    def forward(inputs: Tensor) -> Tensor:
        between = linear(inputs, low_RI)
        if _is_from_left(inputs, weight):
            added = linear(between, up_OR)
            added.view(-1, size).add_(_from_left(inputs, weight, bias))
            return added
        outputs = product(inputs, weight, bias)
        if outputs.dtype != up_OR.dtype:  # under autocast a weight of another type
            return outputs.add_(linear(between, up_OR))
        outputs.view(-1, size).addmm_(between.view(-1, rank), up_OR.t())
        return outputs

    return forward


def product(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """``linear`` without gradient: inputs (..., I) to outputs (..., O). With more than ``FEW_ROWS``
    rows the bits are those of ``products.linear``."""
    outputs = weight_OI.shape[0]
    if _is_from_left(inputs, weight_OI):
        result_NO = _from_left(inputs, weight_OI, bias_O)
        return result_NO.contiguous().view(*inputs.shape[:-1], outputs)
    is_head = _is_large(inputs, weight_OI) and outputs >= 4 * BLOCK_LINES
    if not is_head or bias_O is not None or by_onednn(inputs, weight_OI):
        return linear(inputs, weight_OI, bias_O)
    return torch.cat([linear(inputs, lines) for lines in weight_OI.split(BLOCK_LINES)], dim=-1)


def _is_large(inputs: Tensor, weight_OI: Tensor) -> bool:
    """Whether this is a large float32 weight on a CPU."""
    is_float32 = weight_OI.dtype == inputs.dtype == torch.float32
    return is_float32 and weight_OI.numel() >= LARGE_WEIGHT and weight_OI.device.type == "cpu"


def _is_from_left(inputs: Tensor, weight_OI: Tensor) -> bool:
    """Whether the rows are so few that they are multiplied from the left."""
    size = weight_OI.shape[1]
    most = FEW_ROWS if size <= FEW_INPUTS else 2
    return inputs.numel() <= most * size and _is_large(inputs, weight_OI) and is_amd()


def _from_left(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """The product (N, O), whose rows do not lie one after the other."""
    inputs_NI = inputs.reshape(-1, weight_OI.shape[1])
    rows = inputs_NI.shape[0]
    if rows == 1:  # a product with two columns is faster than one with a vector
        inputs_NI = torch.cat([inputs_NI, inputs_NI])
    result_NO = (weight_OI @ inputs_NI.t())[:, :rows].t()
    return result_NO if bias_O is None else result_NO + bias_O
