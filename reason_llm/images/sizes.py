"""Sizes of a run's images, as the memory plan counts them and vLLM is given them."""

from dataclasses import dataclass
from typing import Any

from reason_llm.model import Line

MAX_FEATURE_BYTES = 2 << 30
"""Features of images that stay in host memory; the image that was passed longest ago is dropped
first."""


@dataclass(frozen=True, slots=True)
class ImageSizes:
    """Sizes of a run's images, and of the part of the model that reads them."""

    weights: int
    """Parameters of that part."""
    max_tokens: int
    """Tokens of the largest image."""
    max_images: int
    """Images of one prompt at most."""
    all_tokens: int
    """Tokens of all different images together."""
    token_pixels: int
    """Pixels of one token."""
    features: int
    """Elements of the features of one token."""
    passing: int
    """Elements per token while an image passes, its pixels among them."""

    def resident(self, element_bytes: int) -> dict[str, int]:
        """See ``AttachmentSizes``."""
        return {"weights that read images": self.weights * element_bytes}

    def lines(
        self, element_bytes: int, context: int, vllm_tokens: int | None, is_gpu: bool
    ) -> list[Line]:
        """An image on its way through the part that reads it, and features that are kept: vLLM's
        for as many tokens as one of its passes has, ours of all images, in host memory."""
        tokens = min(self.max_tokens, context)
        passing, features = self.passing * element_bytes, self.features * element_bytes
        lines = [Line("an image in flight", tokens * (passing + features), tokens * passing)]
        if vllm_tokens is not None:
            batch = max(tokens, vllm_tokens)
            lines = [
                Line("images in flight", batch * passing, tokens * passing),
                Line("vLLM's cache of image features", batch * features),
            ]
        if not is_gpu:
            cached = self.kept_bytes(element_bytes)
            lines.append(Line("features of images", cached, cached))
        return lines

    def kept_bytes(self, element_bytes: int) -> int:
        """Bytes of the features that the learner keeps in host memory."""
        return min(self.all_tokens * self.features * element_bytes, MAX_FEATURE_BYTES)

    def engine_options(self, is_packed: bool) -> dict[str, Any]:
        """vLLM's options for images. It prepares none itself, and the size of its cache of features
        follows from the largest image that its processor would make."""
        if is_packed:
            _keep_tower_unpacked()
        pixels = self.max_tokens * self.token_pixels
        size = {"shortest_edge": self.token_pixels, "longest_edge": pixels}
        return {
            "limit_mm_per_prompt": {"image": self.max_images, "video": 0},
            "mm_processor_kwargs": {"images_kwargs": {"size": size}},
            "mm_processor_cache_gb": 0,
            "mm_device_do_normalize": False,  # or vLLM 0.32 normalises our pixels once more
            "skip_mm_profiling": True,  # the plan counts it
        }


def _keep_tower_unpacked() -> None:
    """Keep the part that reads images in its dtype: vllm-bnb-plugin 0.0.3 packs all linear layers
    of a model and takes modules to skip from a checkpoint alone. Ends when a caller can name
    some."""
    from vllm_bnb_plugin.quantization import config, utils

    def is_skipped(prefix: str, skipped: list[str]) -> bool:
        return bool(utils.is_layer_skipped_bnb(prefix, [*skipped, "visual"]))

    config.is_layer_skipped_bnb = is_skipped
