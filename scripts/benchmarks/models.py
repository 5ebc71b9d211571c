"""Models of given shapes with random weights, and the data that the quick start trains on: nothing
comes from the Hub.

Memory and speed do not depend on the values. The tokenizer is one of bytes whose other tokens never
occur in a text, so a text of letters has as many tokens as letters; its last token ends an answer.

Transformers is imported late, because Unsloth wants to come before it.
"""

from pathlib import Path
from typing import NamedTuple

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


def make(shape: str, folder: Path) -> str:
    """The folder with a random model in it; one that is there already is left as it is."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    done = folder / "made_for_benchmark"
    if done.exists():
        return str(folder)
    sizes = SHAPES[shape]
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
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, sizes.dtype))
    model.save_pretrained(folder)
    save_tokenizer(folder, sizes.vocabulary)
    done.touch()
    return str(folder)


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
