"""The part of the model that reads images: frozen, without an adapter, run once for an image.

Shapes: B rows, T tokens, N image tokens, D hidden.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reason_llm.images.files import Image, image_of
from reason_llm.images.sizes import MAX_FEATURE_BYTES
from reason_llm.model import PlacedRow
from reason_llm.rollout import Attachment, Prompt


class Tower:
    """Features of images, and the embeddings of rows with them.

    Args:
        pixels: an image's patches and its grid.
        base: the whole model.
    """

    def __init__(self, pixels: Callable[[Image], tuple[Tensor, Tensor]], base: Any) -> None:
        self.pixels = pixels
        self._model = base.model
        self._embed = base.get_input_embeddings()
        self.merge = int(base.config.vision_config.spatial_merge_size)
        base.model.visual.requires_grad_(False)
        self._known: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()
        self._bytes = 0

    @torch.no_grad()
    def features(self, image: Image) -> tuple[Tensor, ...]:
        """Embeddings (N, D) of an image's tokens, then what is added to them after each of the
        first layers of the decoder (Qwen3-VL's DeepStack, arXiv:2406.04334)."""
        if (known := self._known.get(image.sha256)) is not None:
            self._known.move_to_end(image.sha256)
            return known
        pixels, grid = (tensor.to(self._embed.weight.device) for tensor in self.pixels(image))
        output = self._model.get_image_features(pixels, grid, return_dict=True)
        layers = getattr(output, "deepstack_features", None) or []
        pieces = (piece for layer in (output.pooler_output, *layers) for piece in layer)
        embeddings = tuple(piece.cpu() for piece in pieces)
        self._known[image.sha256] = embeddings
        self._bytes += sum(map(_bytes_of, embeddings))
        while self._bytes > MAX_FEATURE_BYTES and len(self._known) > 1:
            self._bytes -= sum(map(_bytes_of, self._known.popitem(last=False)[1]))
        return embeddings

    def embed(self, rows: Sequence[PlacedRow], width: int) -> "Sight":
        """Image features for one pass over rows, in a batch of ``width`` columns."""
        images = [[*map(image_of, row.attachments)] for row in rows]
        return Sight(self, rows, images, width)

    def shift(self, attachments: Sequence[Attachment]) -> int:
        """Position of a token after these images, less its place in the row."""
        images = map(image_of, attachments)
        return sum(max(image.grid) // self.merge - image.length for image in images)

    def request(self, prompt: Prompt) -> Any:
        """vLLM's input: the ids unchanged, with the pixels, digests and places of the prompt's
        images. vLLM then prepares no image, expands no token again, treats image tokens elsewhere
        as text, and distinguishes prompts with equal ids."""
        from vllm.inputs import mm_input
        from vllm.multimodal.inputs import (
            MultiModalFieldConfig,
            MultiModalKwargsItems,
            PlaceholderRange,
        )

        images = [*map(image_of, prompt.attachments)]
        pixels, grids = map(torch.cat, zip(*map(self.pixels, images), strict=True))
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes("image", grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched("image", keep_on_cpu=True),
        }
        items = MultiModalKwargsItems.from_hf_inputs(
            {"pixel_values": pixels, "image_grid_thw": grids}, fields
        )
        places = [PlaceholderRange(offset=image.start, length=image.length) for image in images]
        digests = [image.sha256 for image in images]
        return mm_input(list(prompt.token_ids), items, {"image": digests}, {"image": places})


@dataclass(frozen=True, slots=True)
class Sight:
    """Images and positions of the rows of a batch."""

    tower: Tower
    rows: Sequence[PlacedRow]
    images: Sequence[Sequence[Image]]
    """Images of each row."""
    width: int

    def inputs(self, ids_BT: Tensor, start: int) -> dict[str, Any]:
        """Arguments of the decoder that replace ids, for the columns from ``start`` on."""
        tower, device = self.tower, ids_BT.device
        end = start + ids_BT.shape[1]
        positions = torch.arange(self.width).repeat(3, ids_BT.shape[0], 1)
        is_image_BT = torch.zeros(ids_BT.shape, dtype=torch.bool)
        parts: list[tuple[Tensor, ...]] = []
        # Row by row, and in a row from left to right, as a mask is filled.
        for row, images in zip(self.rows, self.images, strict=True):
            own = positions_of(images, row.tokens, tower.merge)[:, row.skipped :]
            positions[:, row.row, row.column : row.column + own.shape[1]] = own
            for image in images:
                first = row.column - row.skipped + image.start
                low, high = max(first, start), min(first + image.length, end)
                if image.start >= row.skipped and low < high:
                    is_image_BT[row.row, low - start : high - start] = True
                    features = tower.features(image)
                    parts.append(tuple(layer[low - first : high - first] for layer in features))
        embeds_BTD = tower._embed(ids_BT)
        inputs: dict[str, Any] = {"position_ids": positions[:, :, start:end].to(device)}
        if parts:
            first_ND, *layers = (
                torch.cat(pieces).to(device) for pieces in zip(*parts, strict=True)
            )
            mask_BT = is_image_BT.to(device)
            first_ND = first_ND.to(embeds_BTD.dtype)
            embeds_BTD = embeds_BTD.masked_scatter(mask_BT[..., None], first_ND)
            if layers:
                inputs |= {"visual_pos_masks": mask_BT, "deepstack_visual_embeds": layers}
        return {"inputs_embeds": embeds_BTD, **inputs}


def positions_of(images: Sequence[Image], tokens: int, merge: int) -> Tensor:
    """Positions (3, T) over time, height and width of a row's tokens. Text has one number in all
    three; an image's tokens count its rows and columns, and what follows begins after the longer
    side. Source: arXiv:2409.12191 section 2.1."""
    parts, done, position = list[Tensor](), 0, 0
    for image in images:
        text = torch.arange(position, position + image.start - done)
        position += len(text)
        sizes = (image.grid[0], image.grid[1] // merge, image.grid[2] // merge)
        axes = torch.meshgrid(*map(torch.arange, sizes), indexing="ij")
        parts += [text.expand(3, -1), torch.stack(axes).reshape(3, -1) + position]
        position += max(sizes[1:])
        done = image.start + image.length
    rest = torch.arange(position, position + tokens - done)
    return torch.cat([*parts, rest.expand(3, -1)], dim=1)


def _bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
