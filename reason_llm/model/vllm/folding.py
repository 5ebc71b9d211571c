"""Folding of the policy's adapter into the base weights while vLLM samples, and back to the same
bits. With D = s B A in float32, computed again each time, and W in bfloat16 or float32:

    folded    F  = round(W + D)
    unfolded  W' = round(F - D)

Elements with W' != W, bit by bit, are kept in host memory: their places and their values in W.
Checksums of the bits are compared after each unfolding. Nothing here writes to disk.

Letters: R rows and C columns of a tile of a weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from reason_llm.errors import ModelError
from reason_llm.model.adapters import POLICY, reference
from reason_llm.model.vllm.engine import on_default_stream

TILE_ELEMENTS = 2**22
"""Elements of a weight that are folded at once, with about 20 bytes of temporaries each."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Rows of a base weight, and the adapter's factors for them."""

    name: str
    rows_RC: Tensor
    """View of vLLM's storage."""
    a: nn.Parameter
    b: nn.Parameter
    start: int
    scaling: float

    def product(self) -> Tensor:
        """The adapter's D (R, C) in float32; the same bits for the same adapter."""
        b = self.b[self.start : self.start + len(self.rows_RC)]
        return (b * self.scaling) @ self.a


class Folding:
    """The policy's adapter, in place of vLLM's adapter slot. Raises ModelError: an adapted layer
    whose weight is no plain matrix."""

    def __init__(self, policy: PeftModel) -> None:
        self._policy = policy
        self._tiles = [
            tile
            for name, module in policy.named_modules()
            if isinstance(module, LoraLayer) and POLICY in module.lora_A
            for tile in _tiles_of(name, module)
        ]
        self._kept: list[tuple[Tensor, Tensor]] = []
        """Places and values of each tile that is folded."""
        self._sums = self._checksums()
        self._is_read = False
        self.is_on = False
        self.changed_fraction = 0.0
        """Elements of the adapted weights that the last folding changed."""

    @contextmanager
    def on(self) -> Iterator[None]:
        """Context in which the base weights are the folded ones. Raises ModelError: after it their
        bits are not what they were."""
        self._fold()
        try:
            yield
        finally:
            self._unfold()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Context in which the base weights are as before, also within ``on``."""
        was_on = self.is_on
        self._unfold()
        try:
            yield
        finally:
            if was_on:
                self._fold()

    @contextmanager
    def read(self) -> Iterator[None]:
        """Context in which the learner may read: within ``on`` the folded weights alone."""
        if not self.is_on:
            yield
            return
        self._is_read = True
        try:
            with reference(self._policy):
                yield
        finally:
            self._is_read = False

    def check(self) -> None:
        """Refuse to read the base or to change the adapter while the base is folded: the adapter
        would count twice. Raises ModelError: it is."""
        if self.is_on and not self._is_read:
            raise ModelError(
                "the adapter is folded into the base weights: read and learn outside of the "
                "sampling phase"
            )

    @property
    def kept_bytes(self) -> int:
        """Memory of the kept elements."""
        return sum(tensor.nbytes for pair in self._kept for tensor in pair)

    @torch.no_grad()
    def _fold(self) -> None:
        self.check()
        self.is_on = True
        changed = list[Tensor]()
        try:
            with on_default_stream():
                for tile in self._tiles:
                    old_RC, delta_RC = tile.rows_RC, tile.product()
                    new_RC = (old_RC + delta_RC).to(old_RC.dtype)
                    changed.append((new_RC != old_RC).sum())
                    back_RC = (new_RC - delta_RC).to(old_RC.dtype)
                    (places,) = (_bits(back_RC) != _bits(old_RC)).view(-1).nonzero(as_tuple=True)
                    lost = places.to("cpu", torch.int32), old_RC.view(-1)[places].cpu()
                    self._kept.append(lost)  # allocates nothing between this and the next line
                    old_RC.copy_(new_RC)
        except BaseException:
            self._unfold()
            raise
        total = sum(tile.rows_RC.numel() for tile in self._tiles)
        self.changed_fraction = int(torch.stack(changed).sum()) / total

    @torch.no_grad()
    def _unfold(self) -> None:
        with on_default_stream():
            while self._kept:
                tile, (places, values) = self._tiles[len(self._kept) - 1], self._kept[-1]
                rows_RC = tile.rows_RC
                rows_RC.copy_(rows_RC - tile.product())
                rows_RC.view(-1)[places.to(rows_RC.device, torch.long)] = values.to(rows_RC.device)
                self._kept.pop()
            (wrong,) = (self._checksums() != self._sums).nonzero(as_tuple=True)
        if len(wrong):
            raise ModelError(
                f"{self._tiles[int(wrong[0])].name}: unfolding the adapter did not restore the "
                "base weights in memory; give the command again, which resumes the run, with "
                "--sample.fold false, and report this"
            )
        self.is_on = False

    def _checksums(self) -> Tensor:
        return torch.stack([checksum(tile.rows_RC) for tile in self._tiles])


def checksum(values: Tensor) -> Tensor:
    """Sum of the elements' bits, each times an odd number by its place, modulo 2**64."""
    bits = _bits(values).view(-1)
    return torch.arange(1, 2 * len(bits), 2, device=bits.device).mul_(bits).sum()


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.int16 if values.element_size() == 2 else torch.int32)


def _tiles_of(name: str, layer: LoraLayer) -> Iterator[Tile]:
    base: Any = layer.get_base_layer()
    weight: Tensor = base.weight.data
    is_plain = isinstance(base, nn.Linear) and weight.is_contiguous()
    if not is_plain or weight.dtype not in (torch.bfloat16, torch.float32):
        raise ModelError(
            f"sample.fold=true: {name} is a {type(base).__name__} in {weight.dtype}, into which no "
            "adapter can be folded; set sample.fold to false"
        )
    a, b = layer.lora_A[POLICY].weight, layer.lora_B[POLICY].weight
    scaling, count = float(layer.scaling[POLICY]), max(1, TILE_ELEMENTS // weight.shape[1])
    for start in range(0, len(weight), count):
        yield Tile(name, weight[start : start + count], a, b, start, scaling)
