"""A linear layer and its LoRA adapter as one step of autograd, in few passes over the outputs: the
scaling is on the small side, and the adapter's product is added to the base's where that lies. With
a scaling that is a power of two these are PEFT's float32 sums. Source: arXiv:2106.09685, 4.1.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from peft.tuners.lora import Linear as AdaptedLinear, Linear4bit as Adapted4bit
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

BASES = {AdaptedLinear: nn.Linear, Adapted4bit: Linear4bit}
"""PEFT's layers that become one step, with the layer that each adapts."""


class Parts(NamedTuple):
    """A layer with one plain adapter that is on."""

    base: nn.Linear
    """The frozen weight, in floats or packed (``nf4``)."""
    low_RI: Tensor
    up_OR: Tensor
    scaling: float


def parts(layer: Any) -> Parts | None:
    """The parts of PEFT's layer; None unless it is a frozen weight, in floats or NF4, with one
    plain adapter without dropout."""
    if BASES.get(type(layer)) is not type(getattr(layer, "base_layer", None)):
        return None
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1 or layer.lora_variant:
        return None
    low, up, dropout = (part[names[0]] for part in (layer.lora_A, layer.lora_B, layer.lora_dropout))
    drops = dropout.training and type(dropout) is not nn.Identity
    learns = any(parameter.requires_grad for parameter in layer.base_layer.parameters())
    if drops or learns or low.bias is not None or up.bias is not None:
        return None
    return Parts(layer.base_layer, low.weight, up.weight, layer.scaling[names[0]])


def fused(policy: nn.Module) -> AbstractContextManager[None]:
    """Context in which the adapted layers are one step each. Adapters may be switched within it; a
    layer that has no ``parts`` is PEFT's own."""
    return _replaced(policy, lambda m: _of_adapted(m) if type(m) in BASES else None)


def lean(policy: nn.Module) -> AbstractContextManager[None]:
    """Context in which adapted layers over weights in floats compute without gradient and without
    looking anything up, for few tokens at once. Adapters must not be switched within it."""
    return _replaced(policy, _without_gradient)


@contextmanager
def without_outputs(layer: nn.Module) -> Iterator[None]:
    """Context in which adapted layers compute gradients but no outputs, for a backward pass that
    reads none. A layer without ``parts`` computes both."""
    before = vars(layer).get("forward")
    vars(layer)["forward"] = _of_adapted(layer, gives_outputs=False)
    try:
        yield
    finally:
        vars(layer).pop("forward")
        if before is not None:
            vars(layer)["forward"] = before


@contextmanager
def _replaced(
    policy: nn.Module, forward_of: Callable[[nn.Module], Callable[..., Tensor] | None]
) -> Iterator[None]:
    """Context in which ``forward_of`` replaces the forward pass of modules, except those that an
    outer context has changed."""
    changed: list[nn.Module] = []
    try:
        for module in policy.modules():
            forward = forward_of(module)
            if forward is not None and "forward" not in vars(module):
                changed.append(module)
                vars(module)["forward"] = forward
        yield
    finally:
        for module in changed:
            vars(module).pop("forward", None)


def _without_gradient(layer: nn.Module) -> Callable[[Tensor], Tensor] | None:
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
        outputs = linear(inputs, weight, bias)
        if outputs.dtype != up_OR.dtype:  # under autocast a weight of another type
            return outputs.add_(linear(between, up_OR))
        outputs.view(-1, size).addmm_(between.view(-1, rank), up_OR.t())
        return outputs

    return forward


def _of_adapted(layer: nn.Module, gives_outputs: bool = True) -> Callable[..., Tensor]:
    theirs: Callable[..., Tensor] = layer.forward

    def forward(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer_parts = parts(layer)
        if layer_parts is None or args or kwargs:
            return theirs(inputs, *args, **kwargs)
        base = layer_parts.base
        dtype = base.compute_dtype if isinstance(base, Linear4bit) else base.weight.dtype
        own: tuple[Tensor, ...] = (inputs, layer_parts.low_RI, layer_parts.up_OR)
        if type(layer_parts.base) is Linear4bit and inputs.dtype != dtype:
            return theirs(inputs)  # it converts there and back
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype:
            own = tuple(tensor.to(dtype) for tensor in own)  # as autocast does
        elif torch.is_autocast_enabled(kind) or any(tensor.dtype != dtype for tensor in own):
            return theirs(inputs)
        outputs: Tensor = _AdaptedProduct.apply(
            *own, layer_parts.base, layer_parts.scaling, gives_outputs
        )
        return outputs

    return forward


class _AdaptedProduct(torch.autograd.Function):
    """``x W^T + b + s (x A^T) B^T``, with gradients in x, A and B."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: Tensor,
        low_RI: Tensor,
        up_OR: Tensor,
        base: nn.Linear,
        scaling: float,
        gives_outputs: bool,
    ) -> Tensor:
        between = linear(inputs, low_RI).mul_(scaling)
        if gives_outputs:
            outputs = _of_base(base, inputs)
            outputs.view(-1, len(up_OR)).addmm_(between.view(-1, len(low_RI)), up_OR.t())
        else:
            outputs = inputs.new_empty(1).expand(*inputs.shape[:-1], len(up_OR))
        ctx.save_for_backward(inputs, between, low_RI, up_OR)
        ctx.base, ctx.scaling = base, scaling
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, between, low_RI, up_OR = ctx.saved_tensors
        of_inputs, of_low, of_up, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, len(up_OR))
        between_NR = (gradient_NO @ up_OR).mul_(ctx.scaling)
        inputs_gradient = None
        if of_inputs:
            inputs_gradient_NI = gradient_NO @ _weight(ctx.base, gradient.dtype)
            inputs_gradient = inputs_gradient_NI.addmm_(between_NR, low_RI).view(inputs.shape)
        return (
            inputs_gradient,
            between_NR.t() @ inputs.reshape(-1, low_RI.shape[1]) if of_low else None,
            gradient_NO.t() @ between.view(-1, len(low_RI)) if of_up else None,
            None,
            None,
            None,
        )


def _of_base(base: nn.Linear, inputs: Tensor) -> Tensor:
    """The base's own outputs, without gradient."""
    if not isinstance(base, Linear4bit):
        return linear(inputs, base.weight, base.bias)
    bias = None if base.bias is None else base.bias.to(inputs.dtype)
    outputs: Tensor = bitsandbytes.matmul_4bit(
        inputs, base.weight, base.weight.quant_state, bias=bias
    )
    return outputs


def _weight(base: nn.Linear, dtype: torch.dtype) -> Tensor:
    """The base's weight (O, I); a packed one is unpacked for the backward pass once more."""
    if not isinstance(base, Linear4bit):
        return base.weight
    packed: Any = base.weight
    unpacked: Tensor = dequantize_4bit(packed.view(-1, 1), packed.quant_state)
    return unpacked.to(dtype)
