"""Recomputation of activations in the backward pass (``train.gradient_checkpointing``).

A layer keeps its input alone. Where memory asks for it, one of two or three layers keeps nothing:
its input is computed again from that of the layer before. Within a layer, the parts that treat each
token alone, norms and feed-forward, keep their input and pass backward in tiles of tokens, so that
the wide vectors of a feed-forward exist for one tile at a time.

Shapes: N tokens of a pass, D hidden.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_layers import GradientCheckpointingLayer

from reason_llm.model import adapted_linear, adapters
from reason_llm.model.sizes import TILE_TOKENS

Run = Callable[[Tensor], Tensor]


def has_tiles(decoder: nn.Module) -> bool:
    """Whether the feed-forwards of a model pass backward in tiles. Other wide parts of a layer,
    such as experts and recurrent ones, keep as much as a feed-forward."""
    parts = [part for layer in _layers(decoder) for part in layer.children()]
    return any(map(_is_feed_forward, parts)) and all(
        _is_feed_forward(part) or _is_norm(part) or type(part).__name__.endswith("Attention")
        for part in parts
        if any(True for _ in part.parameters())
    )


def _layers(decoder: nn.Module) -> list[nn.Module]:
    return [m for m in decoder.modules() if isinstance(m, GradientCheckpointingLayer)]


def _tokenwise(decoder: nn.Module) -> list[nn.Module]:
    parts = [part for layer in _layers(decoder) for part in layer.children()]
    return [*filter(_is_feed_forward, parts), *filter(_is_norm, decoder.modules())]


def _takes_one_tensor(part: nn.Module) -> bool:
    """Attention takes positions and masks, too; some feed-forwards the residual."""
    takes = [*inspect.signature(type(part).forward).parameters.values()][1:]
    return [parameter.kind for parameter in takes] == [inspect.Parameter.POSITIONAL_OR_KEYWORD]


def _is_norm(part: nn.Module) -> bool:
    return type(part).__name__.endswith(("RMSNorm", "LayerNorm")) and _takes_one_tensor(part)


def _is_feed_forward(part: nn.Module) -> bool:
    """Whether a part of a layer has linear layers and no other weights, such as experts'."""
    holders = [m for m in part.modules() if any(True for _ in m.parameters(recurse=False))]
    are_linear = len(holders) > 1 and all(isinstance(m, adapters.LINEAR) for m in holders)
    return are_linear and _takes_one_tensor(part)


@contextmanager
def tiled(decoder: nn.Module) -> Iterator[None]:
    """Context in which norms and feed-forwards keep their input alone, in passes of more tokens
    than a tile. Models without tiles and parts that drop values at random stay as they are."""
    tokenwise = _tokenwise(decoder) if has_tiles(decoder) else []
    parts = [part for part in tokenwise if "forward" not in vars(part)]
    try:
        for part in parts:
            vars(part)["forward"] = _in_tiles(part)
        yield
    finally:
        for part in parts:
            vars(part).pop("forward", None)


def _in_tiles(part: nn.Module) -> Run:
    theirs: Run = part.forward
    adapted = [m for m in part.modules() if type(m) in adapted_linear.BASES]
    drops = [m for m in part.modules() if isinstance(m, nn.Dropout)]

    def forward(inputs: Tensor) -> Tensor:
        """Run the part on (B, T, D), in tiles of its tokens unless its dropout would draw other
        numbers for them."""
        tokens = inputs.shape[:2].numel()
        tiles = -(-tokens // TILE_TOKENS.get(inputs.device.type, tokens))
        if tiles == 1 or any(m.training and m.p > 0 for m in drops):
            return theirs(inputs)
        learned = [p for p in part.parameters() if p.requires_grad]
        if not torch.is_grad_enabled() or not (inputs.requires_grad or learned):
            return _in_turn(theirs, inputs, tiles)
        # Kept before the outputs are computed: here a layer that is computed again may stop.
        keeper = _Keep.apply(inputs, torch.empty(0, requires_grad=True)).grad_fn
        last = adapted[-1] if adapted else None
        outputs: Tensor = _Tiled.apply(theirs, tiles, last, keeper, inputs, *learned)
        return outputs

    return forward


def _split(x: Tensor, tiles: int) -> tuple[Tensor, ...]:
    """Tiles (1, N, D) of about the same size."""
    return x.reshape(1, -1, x.shape[-1]).tensor_split(tiles, dim=1)


def _in_turn(run: Run, inputs: Tensor, tiles: int) -> Tensor:
    first, *others = _split(inputs, tiles)
    output = run(first)
    outputs = torch.empty_like(inputs, dtype=output.dtype)
    into, *rest = _split(outputs, tiles)
    into.copy_(output)
    del output
    for tile, place in zip(others, rest, strict=True):
        place.copy_(run(tile))
    return outputs


class _Keep(torch.autograd.Function):
    """A tensor that is kept in the node of an output that nobody uses."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, anchor: Tensor) -> Tensor:
        ctx.save_for_backward(inputs)
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None]:
        return None, None


class _Tiled(torch.autograd.Function):
    """A function of each token alone, which is computed again in the backward pass, tile by tile.
    Gradients in parameters are summed in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Run,
        tiles: int,
        last: nn.Module | None,
        keeper: Any,
        inputs: Tensor,
        *learned: nn.Parameter,
    ) -> Tensor:
        ctx.run, ctx.tiles, ctx.last, ctx.keeper, ctx.learned = run, tiles, last, keeper, learned
        ctx.autocast = _autocast(inputs.device.type)
        if last is None:
            return _in_turn(run, inputs, tiles)
        places: list[int] = []

        def run_watched(tile: Tensor) -> Tensor:
            outputs = run(tile)
            if places[-1] != outputs.data_ptr():  # something comes after it
                ctx.last = None
            return outputs

        hook = last.register_forward_hook(lambda m, args, out: places.append(out.data_ptr()))
        try:
            return _in_turn(run_watched, inputs, tiles)
        finally:
            hook.remove()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (inputs,) = ctx.keeper.saved_tensors
        ctx.keeper = None  # frees it
        wants_inputs = ctx.needs_input_grad[4]
        of_inputs = torch.empty_like(inputs) if wants_inputs else inputs
        sums = [torch.zeros_like(p, dtype=torch.float32) for p in ctx.learned]
        without = nullcontext if ctx.last is None else adapted_linear.without_outputs
        parts = (_split(whole, ctx.tiles) for whole in (inputs, gradient, of_inputs))
        for tile, of_tile, into in zip(*parts, strict=True):
            tile = tile.detach().requires_grad_(wants_inputs)
            with torch.enable_grad(), ctx.autocast(), without(ctx.last):
                outputs = ctx.run(tile)
            wanted = [*([tile] if wants_inputs else []), *ctx.learned]
            gradients = list(torch.autograd.grad(outputs, wanted, of_tile))
            if wants_inputs:
                into.copy_(gradients.pop(0))
            for total, of_parameter in zip(sums, gradients, strict=True):
                total += of_parameter
        learned = (total.to(p.dtype) for total, p in zip(sums, ctx.learned, strict=True))
        return *(None,) * 4, of_inputs if wants_inputs else None, *learned


def _autocast(kind: str) -> Callable[[], AbstractContextManager[Any]]:
    """The autocast of now, for later."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
    return lambda: torch.autocast(kind, dtype, enabled=enabled, cache_enabled=False)


def keep_inputs(decoder: nn.Module, skip_every: int) -> None:
    """Have layers with gradient checkpointing keep their inputs.

    Args:
        skip_every: one of so many layers keeps none, which is computed again; 0: all keep theirs.
    """
    before = WeakTensorKeyDictionary()
    for place, layer in enumerate(_layers(decoder)):
        is_before = skip_every > 0 and place % skip_every == skip_every - 2
        layer._gradient_checkpointing_func = _Checkpoint(before, is_before)  # type: ignore[assignment]


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """Checkpointing of a layer, as Transformers' layers call it."""

    before: WeakTensorKeyDictionary
    """The layer before one that keeps no input, by its outputs."""
    is_before: bool

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        inputs = args[0]
        before: _Before | None = self.before.pop(inputs, None)
        if before is None:
            remembered = _Before(function, args) if self.is_before else None
            outputs = checkpoint(function, *args, use_reentrant=False)
            if remembered is not None and isinstance(outputs, Tensor):
                self.before[outputs] = remembered
            return outputs

        replaced = ref(inputs)  # as the hooks live as long as what they return

        def pack(tensor: Tensor) -> Tensor | _Before:
            return before if tensor is replaced() else tensor

        def unpack(held: Tensor | _Before) -> Tensor:
            return held.outputs() if isinstance(held, _Before) else held

        with saved_tensors_hooks(pack, unpack):
            return checkpoint(function, *args, use_reentrant=False)


class _Before:
    """A layer whose outputs can be computed again."""

    def __init__(self, function: Callable[..., Tensor], args: Sequence[Any]) -> None:
        self._function = function
        self._args = [arg.detach() if isinstance(arg, Tensor) else arg for arg in args]
        self._autocast = _autocast(self._args[0].device.type)
        self._devices = [torch.cuda.current_device()] if self._args[0].is_cuda else []
        self._random = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self._devices)]

    def outputs(self) -> Tensor:
        with torch.no_grad(), self._autocast(), torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._random[0])
            for device, state in zip(self._devices, self._random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            return self._function(*self._args)
