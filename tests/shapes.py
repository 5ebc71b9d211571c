"""Configs of the models that the shipped configs name, for planning without the Hub."""

from pathlib import Path

from transformers import CONFIG_MAPPING

# family, hidden, intermediate, layers, heads, key-value heads, vocabulary, tied, positions
SHAPES = {
    "Qwen/Qwen2.5-1.5B-Instruct": ("qwen2", 1536, 8960, 28, 12, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-3B-Instruct": ("qwen2", 2048, 11008, 36, 16, 2, 151936, True, 32768),
    "Qwen/Qwen2.5-7B-Instruct": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 32768),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ("qwen2", 3584, 18944, 28, 28, 4, 152064, False, 32768),
    "Qwen/Qwen2.5-14B-Instruct": ("qwen2", 5120, 13824, 48, 40, 8, 152064, False, 32768),
    "Qwen/Qwen2.5-32B-Instruct": ("qwen2", 5120, 27648, 64, 40, 8, 152064, False, 32768),
    "Qwen/Qwen3-8B": ("qwen3", 4096, 12288, 36, 32, 8, 151936, False, 40960),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", 4096, 14336, 32, 32, 8, 128256, False, 131072),
}
PARAMETERS = {
    "Qwen/Qwen2.5-1.5B-Instruct": 1.54e9,
    "Qwen/Qwen2.5-3B-Instruct": 3.09e9,
    "Qwen/Qwen2.5-7B-Instruct": 7.62e9,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7.62e9,
    "Qwen/Qwen2.5-14B-Instruct": 14.8e9,
    "Qwen/Qwen2.5-32B-Instruct": 32.8e9,
    "Qwen/Qwen3-8B": 8.19e9,
    "meta-llama/Llama-3.1-8B-Instruct": 8.03e9,
}
"""As their publishers give them."""


def write_config(name: str, folder: Path) -> str:
    """The model's config.json in ``folder``, without weights."""
    family, hidden, intermediate, layers, heads, key_heads, vocabulary, tied, limit = SHAPES[name]
    CONFIG_MAPPING[family](
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=128,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=limit,
        dtype="bfloat16",
        architectures=[CausalLM[family]],
    ).save_pretrained(folder)
    return str(folder)


CausalLM = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
