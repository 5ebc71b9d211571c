"""A linear layer and its LoRA adapter as one step of autograd, in few passes over the outputs.

PEFT computes ``base(x) + up(low(x)) * scaling`` one after the other: the product with ``up``, its
scaling and the sum each write another tensor of the outputs' size, and so do their gradients. Here
the scaling is on the small side, and the adapter's product is added to the base's where that lies,
forward and backward. With a scaling that is a power of two these are the same float32 sums.
Source: arXiv:2106.09685, section 4.1.

Measured on one core, float32, 64 tokens of 96 inputs and 128 outputs, rank 16, both passes: 0.55 ms
instead of 0.63; of 1,133 tokens, 640 inputs and 1,792 outputs nearly all is the products.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from peft.tuners.lora import Linear as AdaptedLinear
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from reason_llm.model import products
from reason_llm.model.products import linear, matmul


class Parts(NamedTuple):
    """A layer with one plain adapter that is on."""

    base: nn.Linear
    low_RI: Tensor
    up_OR: Tensor
    scaling: float


def parts(layer: Any) -> Parts | None:
    """The parts of PEFT's layer as it is now; None where it is anything else than a frozen float
    weight with one plain adapter, which drops nothing."""
    if type(layer) is not AdaptedLinear or type(layer.base_layer) is not nn.Linear:
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


@contextmanager
def fused(policy: nn.Module) -> Iterator[None]:
    """Context in which the adapted layers are one step each, and the others take the products of
    ``products``. Adapters may be switched within it; a layer that has no ``parts`` is PEFT's own.
    """
    with replaced(policy, _forward_of):
        yield


@contextmanager
def replaced(
    policy: nn.Module, forward_of: Callable[[nn.Module], Callable[..., Tensor] | None]
) -> Iterator[None]:
    """Context in which modules compute as ``forward_of`` says, where it says anything; not those
    that an outer context has changed."""
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


def _forward_of(module: nn.Module) -> Callable[..., Tensor] | None:
    if type(module) is AdaptedLinear:
        return _of_adapted(module)
    if type(module) is nn.Linear and products.prefers_onednn():  # for passes of the reference
        return lambda input: linear(input, module.weight, module.bias)
    return None


def _of_adapted(layer: AdaptedLinear) -> Callable[..., Tensor]:
    theirs: Callable[..., Tensor] = layer.forward

    def forward(inputs: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        found = parts(layer)
        if found is None or args or kwargs:
            return theirs(inputs, *args, **kwargs)
        weight = found.base.weight
        own: tuple[Tensor, ...] = (inputs, found.low_RI, found.up_OR)
        kind = inputs.device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == weight.dtype:
            own = tuple(tensor.to(weight.dtype) for tensor in own)  # as autocast does
        elif torch.is_autocast_enabled(kind) or any(t.dtype != weight.dtype for t in own):
            return theirs(inputs)
        outputs: Tensor = _AdaptedProduct.apply(*own, weight, found.base.bias, found.scaling)
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
        weight_OI: Tensor,
        bias_O: Tensor | None,
        scaling: float,
    ) -> Tensor:
        outputs = linear(inputs, weight_OI, bias_O)
        between = linear(inputs, low_RI).mul_(scaling)
        outputs.view(-1, len(up_OR)).addmm_(between.view(-1, len(low_RI)), up_OR.t())
        ctx.save_for_backward(inputs, between, low_RI, up_OR)
        ctx.weight_OI, ctx.scaling = weight_OI, scaling  # the base is never moved off the device
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, between, low_RI, up_OR = ctx.saved_tensors
        of_inputs, of_low, of_up, *_ = ctx.needs_input_grad
        gradient_NO = gradient.reshape(-1, len(up_OR))
        between_NR = matmul(gradient_NO, up_OR).mul_(ctx.scaling)
        inputs_gradient = None
        if of_inputs:
            inputs_gradient_NI = matmul(gradient_NO, ctx.weight_OI).addmm_(between_NR, low_RI)
            inputs_gradient = inputs_gradient_NI.view(inputs.shape)
        return (
            inputs_gradient,
            matmul(between_NR.t(), inputs.reshape(-1, low_RI.shape[1])) if of_low else None,
            _of_up(gradient_NO, between.view(-1, len(low_RI))) if of_up else None,
            None,
            None,
            None,
        )


def _of_up(gradient_NO: Tensor, between_NR: Tensor) -> Tensor:
    """The gradient of ``up_OR``; oneDNN is four times as slow with few columns as with few rows."""
    if products.by_onednn(between_NR.t(), gradient_NO.t()):
        return linear(between_NR.t(), gradient_NO.t()).t()
    return gradient_NO.t() @ between_NR
