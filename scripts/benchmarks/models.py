"""Models of given shapes with random weights: nothing comes from the Hub.

Memory and speed do not depend on the values. The tokenizer is one of bytes whose other tokens never
occur in a text, so a text of letters has as many tokens as letters; its last token ends an answer.

Transformers is imported late, because Unsloth wants to come before it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.device import has_gpu


class Shape(NamedTuple):
    """Sizes of a Qwen2."""

    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    is_tied: bool = True
    dtype: str = "float32"
    positions: int = 4096
    """Longest context; Qwen2.5 reaches 131,072 with YaRN, which costs no memory."""


SHAPES = {
    "tiny": Shape(512, 64, 96, 2, 2, 1, dtype="bfloat16", positions=131072),
    "25m": Shape(32_000, 384, 1024, 8, 6, 3),
    "58m": Shape(32_000, 640, 1792, 8, 10, 5),
    "42m": Shape(150_000, 256, 768, 4, 4, 2),
    "qwen2.5-0.5b": Shape(151936, 896, 4864, 24, 14, 2, dtype="bfloat16", positions=131072),
    "qwen2.5-7b": Shape(152064, 3584, 18944, 28, 28, 4, False, "bfloat16", 131072),
}
GEMMA4_E4B: dict[str, Any] = {
    "vocab_size": 262144, "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
    "global_head_dim": 512, "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144, "num_kv_shared_layers": 18,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
}  # fmt: skip
QWEN35_4B: dict[str, Any] = {
    "vocab_size": 248320, "hidden_size": 2560, "intermediate_size": 9216,
    "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "tie_word_embeddings": True,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e7, "mrope_interleaved": True,
        "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
    },
}  # fmt: skip
SMALL = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma4-e4b": GEMMA4_E4B,
    "gemma4-tiny": GEMMA4_E4B | SMALL | {
        "num_hidden_layers": 4, "head_dim": 32, "global_head_dim": 64,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 512,
        "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "qwen3.5-4b": QWEN35_4B,
    "qwen3.5-tiny": QWEN35_4B | SMALL | {
        "num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
        "rope_parameters": QWEN35_4B["rope_parameters"] | {"mrope_section": [3, 3, 2]},
    },
}  # fmt: skip
"""Text parts of models that also read images, by the numbers that were published of them. The
tower is a small one, because it is not loaded."""
TOWERS: dict[str, dict[str, Any]] = {
    "gemma4": {
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
            "num_attention_heads": 2, "num_key_value_heads": 2,
        },
        "audio_config": None, "image_token_id": 300, "boi_token_id": 301, "eoi_token_id": 302,
    },
    "qwen3_5": {
        "vision_config": {
            "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
            "patch_size": 16, "out_hidden_size": 64,
        },
        "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302,
        "vision_end_token_id": 303, "tie_word_embeddings": True,
    },
}  # fmt: skip


def make(shape: str, folder: Path) -> str:
    """The folder with a random model in it; one that is there already is left as it is."""
    done = folder / "made_for_benchmark"
    if done.exists():
        return str(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu() else "cpu"):
        model, vocabulary = _multimodal(shape) if shape in MULTIMODAL else _qwen2(SHAPES[shape])
    model.save_pretrained(folder)
    save_tokenizer(folder, vocabulary)
    done.touch()
    return str(folder)


def _qwen2(sizes: Shape) -> tuple[Any, int]:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.intermediate,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        tie_word_embeddings=sizes.is_tied,
        max_position_embeddings=sizes.positions,
        bos_token_id=None,
        eos_token_id=sizes.vocabulary - 1,
        pad_token_id=sizes.vocabulary - 2,
    )
    dtype = getattr(torch, sizes.dtype)
    return AutoModelForCausalLM.from_config(config, dtype=dtype), sizes.vocabulary


def _multimodal(shape: str) -> tuple[Any, int]:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    text, family = MULTIMODAL[shape], "gemma4" if shape.startswith("gemma4") else "qwen3_5"
    size = text["vocab_size"]
    ends = {"bos_token_id": None, "eos_token_id": size - 1, "pad_token_id": size - 2}
    config = CONFIG_MAPPING[family](text_config=text | ends, **TOWERS[family])
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model, size


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """The tokenizer of bytes, with so many tokens."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fillers = [f"<{i}>" for i in range(vocabulary - len(alphabet) - 2)]
    tokens = [*alphabet, *fillers, "<|endoftext|>", "<|end|>"]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    wrapped.save_pretrained(folder)
