"""Shapes of the models that the shipped configs name, so that their memory is planned without the
Hub. The numbers are those of the models' own config.json."""

from pathlib import Path
from typing import Any, NamedTuple


class ShippedShape(NamedTuple):
    """Numbers of a model's config, by Transformers' names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = False
    family: str = "qwen2"
    head_dim: int = 128

    def described(self) -> dict[str, Any]:
        """The keys of its config.json."""
        sizes = self._asdict()
        return {"model_type": sizes.pop("family"), "dtype": "bfloat16", **sizes}


SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": ShippedShape(1536, 8960, 28, 12, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-3B-Instruct": ShippedShape(2048, 11008, 36, 16, 2, 151936, 32768, True),
    "Qwen/Qwen2.5-7B-Instruct": ShippedShape(3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ShippedShape(3584, 18944, 28, 28, 4, 152064),
    "Qwen/Qwen2.5-14B-Instruct": ShippedShape(5120, 13824, 48, 40, 8, 152064),
    "Qwen/Qwen2.5-32B-Instruct": ShippedShape(5120, 27648, 64, 40, 8, 152064),
    "Qwen/Qwen3-8B": ShippedShape(4096, 12288, 36, 32, 8, 151936, 40960, family="qwen3"),
    "meta-llama/Llama-3.1-8B-Instruct": ShippedShape(
        4096, 14336, 32, 32, 8, 128256, 131072, family="llama"
    ),
}


def write_config(name: str, folder: Path) -> None:
    """Write the config.json of a model in ``SHAPES`` into ``folder``."""
    from transformers import CONFIG_MAPPING

    sizes = SHAPES[name].described()
    family = sizes.pop("model_type")
    kind = f"{family.capitalize()}ForCausalLM"
    made = CONFIG_MAPPING[family](**sizes, architectures=[kind])
    made.save_pretrained(folder)
