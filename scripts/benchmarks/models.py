"""Models of given shapes with random weights, and the data that the quick start trains on: nothing
comes from the Hub.

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

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "model" / "tiny"
"""The quick start's model."""


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
    "vocab_size": 262144,
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 42,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 18,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 7,
}
SMALL_GEMMA4 = GEMMA4_E4B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "global_head_dim": 64,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 512,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
MULTIMODAL: dict[str, dict[str, Any]] = {"gemma4-e4b": GEMMA4_E4B, "gemma4-tiny": SMALL_GEMMA4}
"""Text parts of Gemma 4's shapes; the tower is a small one, because it is not loaded."""
TOWER = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16,
         "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip


def make(shape: str, folder: Path) -> str:
    """The folder with a random model in it; one that is there already is left as it is."""
    done = folder / "made_for_benchmark"
    if done.exists():
        return str(folder)
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu() else "cpu"):
        model, vocabulary = _gemma4(shape) if shape in MULTIMODAL else _qwen2(SHAPES[shape])
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


def _gemma4(shape: str) -> tuple[Any, int]:
    from transformers import AutoModelForImageTextToText, Gemma4Config

    text = MULTIMODAL[shape]
    ends = {"bos_token_id": None, "eos_token_id": text["vocab_size"] - 1,
            "pad_token_id": text["vocab_size"] - 2}  # fmt: skip
    config = Gemma4Config(text_config=text | ends, vision_config=TOWER, audio_config=None,
                          image_token_id=300, boi_token_id=301, eoi_token_id=302)  # fmt: skip
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    return model, text["vocab_size"]


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
