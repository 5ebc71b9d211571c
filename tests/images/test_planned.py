"""The memory plan with images."""

from pathlib import Path

from conftest import config_of
from reason_llm.config import ModelSection
from reason_llm.images.sizes import ImageSizes
from reason_llm.model.base import meta_model
from reason_llm.model.plan import memory
from reason_llm.model.plan.machine import GIB, Machine
from reason_llm.model.plan.shape import Shape
from shapes import write_config


def test_images_take_the_tower_and_their_features(tmp_path: Path) -> None:
    """One of 3,000 tokens, more than the 2,048 of a pass of vLLM, in bfloat16."""
    images = ImageSizes(
        weights=400_000_000, max_tokens=3000, max_images=2, all_tokens=10**6, token_pixels=1024,
        features=10_000, passing=80_000,
    )  # fmt: skip
    path = write_config("Qwen/Qwen2.5-7B-Instruct", tmp_path)
    config = config_of(
        {
            "model": {"path": path, "dtype": "bfloat16"},
            "data": {"train": "some.jsonl"},
            "sample": {"engine": "vllm", "max_new_tokens": 1024},
        }
    )
    shape = Shape.of(meta_model(ModelSection(path=path)))
    machine = Machine("cuda", 48 * GIB, 64 * GIB)
    made = memory.plan(config, shape, machine, 32768, 3200, attachments=images)
    bare = memory.plan(config, shape, machine, 32768, 3200)
    lines = {line.name: (line.sampling, line.learning) for line in made.lines}
    assert lines["weights that read images"] == (800_000_000, 800_000_000)
    assert lines["images in flight"] == (2 * 80_000 * 3000, 2 * 80_000 * 3000)
    assert lines["vLLM's cache of image features"] == (2 * 10_000 * 3000, 0)
    assert made.host_bytes - bare.host_bytes == 2 << 30  # of 20 GB
    assert made.engine is not None and made.engine.attachments == images
    with_transformers = config.with_options({"sample.engine": "transformers"})
    made = memory.plan(with_transformers, shape, machine, 32768, 3200, attachments=images)
    lines = {line.name: (line.sampling, line.learning) for line in made.lines}
    assert lines["an image in flight"] == (2 * 90_000 * 3000, 2 * 80_000 * 3000)
