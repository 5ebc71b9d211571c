"""Shapes of the models that the shipped configs name, so that their memory is planned without the
Hub. The numbers are those of the models' own config.json."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class ShippedShape:
    """Numbers of a model's config."""

    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    is_tied: bool
    """Whether the output head is the embedding."""
    positions: int
    head_size: int = 128


SHAPES: dict[str, ShippedShape] = {
    "Qwen/Qwen2.5-1.5B-Instruct": ShippedShape("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-3B-Instruct": ShippedShape("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B-Instruct": ShippedShape("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 32768),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ShippedShape(
        "qwen2", 3584, 18944, 28, 28, 4, 152064, False, 32768
    ),
    "Qwen/Qwen2.5-14B-Instruct": ShippedShape(
        "qwen2", 5120, 13824, 48, 40, 8, 152064, False, 32768
    ),
    "Qwen/Qwen2.5-32B-Instruct": ShippedShape(
        "qwen2", 5120, 27648, 64, 40, 8, 152064, False, 32768
    ),
    "Qwen/Qwen3-8B": ShippedShape("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 40960),
    "meta-llama/Llama-3.1-8B-Instruct": ShippedShape(
        "llama", 4096, 14336, 32, 32, 8, 128256, False, 131072
    ),
}


def write_config(name: str, folder: Path) -> None:
    """Write the config.json of a model in ``SHAPES`` into ``folder``."""
    from transformers import CONFIG_MAPPING

    shape = SHAPES[name]
    made = CONFIG_MAPPING[shape.family](
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_size,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.is_tied,
        max_position_embeddings=shape.positions,
        dtype="bfloat16",
        architectures=[f"{shape.family.capitalize()}ForCausalLM"],
    )
    made.save_pretrained(folder)
