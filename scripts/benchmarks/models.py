"""Models of real shapes with random weights, and prompts for them: nothing comes from the Hub.

Memory and speed do not depend on the values. The tokenizer is the tiny model's, filled up with
tokens that no text contains, so that every id that is sampled has a text.

Transformers is imported late, because Unsloth wants to come before it.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch

from benchmarks.device import has_gpu
from reason_llm.files import MIB, read_bounded, read_object

TINY = Path(__file__).resolve().parents[2] / "model" / "tiny"
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": {
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
POSITIONS = 131072
"""Longest context; Qwen2.5 reaches it with YaRN, which costs no memory."""


def make(shape: str, folder: Path) -> None:
    """A random bfloat16 model in ``folder``; one that is there already is left as it is."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    done = folder / "made_for_benchmark"
    if done.exists():
        return
    sizes = SHAPES[shape]
    config = Qwen2Config(
        **sizes, max_position_embeddings=POSITIONS, bos_token_id=0, eos_token_id=2, pad_token_id=0
    )
    torch.manual_seed(0)
    with torch.device("cuda" if has_gpu() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    _write_tokenizer(folder, sizes["vocab_size"])
    done.touch()


def _write_tokenizer(folder: Path, vocabulary: int) -> None:
    tokenizer = read_object(TINY / "tokenizer.json")
    known = set(tokenizer["model"]["vocab"].values())
    known |= {token["id"] for token in tokenizer["added_tokens"]}
    more = {f"<{number}>": number for number in range(vocabulary) if number not in known}
    tokenizer["model"]["vocab"] |= more
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes(read_bounded(TINY / name, MIB))


def prompt_texts(model: str, count: int, tokens: int, seed: int) -> list[str]:
    """Texts of so many tokens each, no two with the same beginning."""
    tokenizer = _tokenizer(model)
    generator = random.Random(seed)
    made: list[str] = []
    while len(made) < count:
        text = " ".join(str(generator.randrange(10**6)) for _ in range(tokens))
        while len(tokenizer(text)["input_ids"]) > tokens:
            text = text[: len(text) - max(1, (len(tokenizer(text)["input_ids"]) - tokens) // 4)]
        made.append(text)
    return made


def prompt_ids(model: str, texts: list[str]) -> list[list[int]]:
    """The texts' token ids, as every system reads them."""
    found: list[list[int]] = _tokenizer(model)(texts)["input_ids"]
    return found


def _tokenizer(model: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
