"""Tiny random models of families that name their sizes and layers in their own ways."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from conftest import TINY

OLDER: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "opt": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 256,
        "word_embed_proj_dim": 32, "max_position_embeddings": 512,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "falcon": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    "falcon_new": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_kv_heads": 2,
        "new_decoder_architecture": True,
    },
    "falcon_alibi": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True,
        "multi_query": False, "parallel_attn": False, "bias": True,
    },
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
}  # fmt: skip
"""Without ``intermediate_size`` in their configs."""
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def make(
    folder: Path, name: str, dtype: torch.dtype = torch.float32, vocab_size: int = 512, **more: Any
) -> str:
    """The folder of a random model with the tiny model's tokenizer."""
    sizes = OLDER[name] | ENDS | {"vocab_size": vocab_size} | more
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name.partition("_")[0]](**sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # larger than at the start, so that all of it counts
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / file).write_bytes((TINY / file).read_bytes())
    return str(folder)
