"""The model's image processor: a prompt's image tokens, and the pixels that the tower reads.

A template writes one token for an image. The record has as many of it as the image has places,
``time x height x width / merge_size^2`` of its grid of patches.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from reason_llm.config import READERS, Config, ModelSection
from reason_llm.data import Example, Row, player_of
from reason_llm.errors import ConfigError, DataError, ModelError
from reason_llm.images.files import Image, Picture, pictures_of, placed
from reason_llm.images.sizes import ImageSizes
from reason_llm.rollout import ATTACHMENTS, Attachment, Prompt, TokenRow

if TYPE_CHECKING:
    from reason_llm.images.tower import Tower

FAMILIES = ("qwen2_5_vl", "qwen3_5", "qwen3_vl")
"""Families whose images are read, by ``model_type``."""
BOTH_WAYS = ("gemma3", "gemma4")
"""Families whose image tokens attend to each other in both directions."""


class Images:
    """The images of a run's data, and the processor that prepares them.

    Args:
        path: folder or Hub id of the model.
        described: its config.
    """

    modules = ("model.visual",)

    def __init__(self, path: str, described: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        from reason_llm.model import reading

        self.path = path
        self.token_id = int(described.image_token_id)
        self._tower_config = described.vision_config
        with reading(path, "image processor"):
            # Pillow's form needs no torchvision, and has the same pixels wherever it runs.
            self._processor = Qwen2VLImageProcessorPil.from_pretrained(path)
        self._pictures: dict[str, Picture] = {}
        self._lengths: dict[str, int] = {}
        self._max_images = 0

    @property
    def line(self) -> str:
        """Line for the start of a run."""
        return (
            f"images: {len(self._pictures):,} in the data; the {self._weights / 1e6:,.1f} million "
            "weights that read them are frozen"
        )

    @property
    def sizes(self) -> ImageSizes:
        """Sizes for the memory plan, of the images that prompts and rows have so far."""
        tower, lengths = self._tower_config, self._lengths.values()
        patches = tower.spatial_merge_size**2
        # In flight: a few vectors of a layer of the tower, and the pixels.
        vectors = 8 * tower.hidden_size + 2 * tower.intermediate_size
        values = 3 * tower.temporal_patch_size * tower.patch_size**2
        layers = len(getattr(tower, "deepstack_visual_indexes", None) or ())
        return ImageSizes(
            weights=self._weights,
            max_tokens=max(lengths, default=1),
            max_images=self._max_images,
            all_tokens=sum(lengths),
            token_pixels=patches * tower.patch_size**2,
            features=(1 + layers) * tower.out_hidden_size,
            passing=patches * (vectors + 2 * values),
        )

    @cached_property
    def _weights(self) -> int:
        """Number of weights of the part that reads images."""
        from transformers import AutoModel

        with torch.device("meta"):
            tower = AutoModel.from_config(self._tower_config, trust_remote_code=False)
        return sum(parameter.numel() for parameter in tower.parameters())

    def embedder(self, base: Any) -> "Tower":
        """The part of the whole model that reads images."""
        from reason_llm.images.tower import Tower

        return Tower(self.pixels, base)

    def detach(
        self, where: str, row: Row, source: str, ignored: Sequence[str]
    ) -> tuple[Row, list[Picture]]:
        """See ``pictures_of``; the images are known from now on."""
        rest, pictures = pictures_of(where, row, source, ignored)
        for picture in pictures:
            self._pictures.setdefault(picture.sha256, picture)
        return rest, pictures

    def placed(self, example: Example, pictures: Sequence[Picture]) -> Example:
        """See ``files.placed``."""
        return placed(example, pictures)

    def check(self, config: Config, is_alone: bool = True) -> None:
        """Raise ConfigError where an option contradicts rows with images. ``is_alone``: one process
        does all work of the run."""
        for option, fix in _contradictions(config, is_alone):
            raise ConfigError(f"{option} contradicts rows with images; {fix}")

    def prompt(self, prompt: Prompt, pictures: Sequence[Picture]) -> Prompt:
        """The prompt with all places of its images, and with their records."""
        ids, images = self._expanded(prompt.id, prompt.token_ids, len(prompt.token_ids), pictures)
        records = [asdict(image) for image in images]
        return replace(prompt, token_ids=ids, extra={**prompt.extra, ATTACHMENTS: records})

    def row(self, row: TokenRow, pictures: Sequence[Picture]) -> TokenRow:
        """The row with all places of the images in its prompt, and with their records."""
        prompt = row.trained.index(True)
        ids, images = self._expanded(row.name, row.ids, prompt, pictures)
        more = (False,) * (len(ids) - len(row.ids))
        return replace(row, ids=ids, trained=more + row.trained, attachments=images)

    def pixels(self, image: Image) -> tuple[torch.Tensor, torch.Tensor]:
        """The patches (N, values of a patch) of an image and its grid (1, 3). Raises DataError: it
        is not in the data of the run, or was changed."""
        picture = self._pictures.get(image.sha256)
        if picture is None:
            picture = Picture(image.sha256, image.path, (0, 0))
            if not image.path:
                raise DataError(
                    f"the image {image.sha256} of a rollout is not in the data; name the data that "
                    "it was sampled from as data.train"
                )
        inputs = self._processor(picture.pixels(), return_tensors="pt")
        if tuple(inputs["image_grid_thw"][0].tolist()) != image.grid:
            raise DataError(
                f"the image {image.path or image.sha256} has the grid "
                f"{inputs['image_grid_thw'][0].tolist()}, and its record {[*image.grid]}; restore "
                "preprocessor_config.json of the model"
            )
        return inputs["pixel_values"], inputs["image_grid_thw"]

    def _expanded(
        self, where: str, ids: Sequence[int], end: int, pictures: Sequence[Picture]
    ) -> tuple[tuple[int, ...], tuple[Attachment, ...]]:
        """The ids with all tokens of the images whose single token is before ``end``."""
        count = ids[:end].count(self.token_id)
        if count != len(pictures):
            raise DataError(
                f"{where}: the chat template writes {count} image tokens for {len(pictures)} "
                "images; take the template that the model was published with"
            )
        # An image's place is that in the expanded ids: every image moves those after it.
        expanded: list[int] = []
        records, waiting = list[Attachment](), iter(pictures)
        for place, token in enumerate(ids):
            if token != self.token_id or place >= end:
                expanded.append(token)
                continue
            picture = next(waiting)
            grid = self._grid(picture)
            length = grid[0] * grid[1] * grid[2] // self._processor.merge_size**2
            image = Image(picture.sha256, picture.path, grid, len(expanded), length)
            records.append(image.record)
            expanded += [token] * length
            self._lengths[picture.sha256] = length
        self._max_images = max(self._max_images, count)
        return tuple(expanded), tuple(records)

    def _grid(self, picture: Picture) -> tuple[int, int, int]:
        """Patches of an image over time, height and width, without decoding it."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        own = self._processor
        (width, height), factor = picture.size, own.patch_size * own.merge_size
        if own.do_resize:
            bounds = own.size["shortest_edge"], own.size["longest_edge"]
            height, width = smart_resize(height, width, factor, *bounds)
        return 1, height // own.patch_size, width // own.patch_size


def _contradictions(config: Config, is_alone: bool) -> Iterator[tuple[str, str]]:
    """Options that do not go with images, and what to set them to."""
    if (player := player_of(config)) is not None:
        yield player.option, "leave it out"
    if config.stage == "preference" and not config.learns_pairs:
        yield f"preference.name={config.preference.name}", "take one that learns from pairs"
    if not is_alone:
        yield "run.replicas, run.samplers, run.shards or run.max_staleness", "leave it out"
    for reader in READERS.values():
        for use in reader.text_only(config):
            yield f"{use}, which reads text alone,", "leave it out"


def open_attachments(section: ModelSection) -> Images | None:
    """The images of a model's data; None for a model of text. Raises ConfigError: images of its
    family are not supported, or not with these options."""
    from reason_llm.model import is_multimodal, read_config

    described = read_config(section.path, section.trust_remote_code)
    if not is_multimodal(described):
        return None
    family, path = described.model_type, section.path
    if family not in FAMILIES:
        why = "images of it were not tried"
        if family in BOTH_WAYS:
            why = "its image tokens attend to each other in both directions, rows here to the left"
        raise ConfigError(
            f"model.path={path}: model_type={family}, and {why}; images can be trained with "
            f"{', '.join(FAMILIES)}: take one of them, or name the column in data.columns.ignore"
        )
    if section.trust_remote_code:
        raise ModelError(
            f"model.path={path}: model.trust_remote_code contradicts rows with images; leave it out"
        )
    return Images(path, described)
