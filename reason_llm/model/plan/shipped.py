"""Published sizes of models, so that their memory is planned without the Hub. The numbers are those
of the models' own config.json; ``tests/fixtures/shapes.py`` has the parameters they add up to."""

from typing import Any

FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3",
            "gpt_oss": "GptOss"}  # fmt: skip
"""Families that ``outline`` counts, and the beginning of their classes' names."""
WHOLE = {"qwen3_5": "Qwen3_5", "gemma4": "Gemma4", "gemma4_unified": "Gemma4Unified"}
"""The same of families that also read images."""
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "max_position_embeddings")  # fmt: skip


def _plain(family: str, *sizes: int, tied: bool = False) -> dict[str, Any]:
    """The keys of the config.json of one of ``FAMILIES``, with heads of 128."""
    return {
        "model_type": family, "architectures": [f"{FAMILIES[family]}ForCausalLM"],
        "dtype": "bfloat16", **dict(zip(SIZES, sizes, strict=True)), "head_dim": 128,
        "tie_word_embeddings": tied,
    }  # fmt: skip


def _whole(family: str, tied: bool, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The keys of the config.json of a model that also reads images."""
    text = {
        "model_type": f"{family}_text",
        "dtype": "bfloat16",
        "tie_word_embeddings": tied,
        **text,
    }
    return {
        "model_type": family, "architectures": [f"{WHOLE[family]}ForConditionalGeneration"],
        "dtype": "bfloat16", "tie_word_embeddings": tied, "text_config": text, **more,
    }  # fmt: skip


def _qwen3_5(hidden: int, wide: int, tower: dict[str, Any], tied: bool) -> dict[str, Any]:
    """Qwen3.5 of 32 layers, of which every fourth has keys and values."""
    sizes = dict(zip(SIZES, (hidden, wide, 32, 16, 4, 248320, 262144), strict=True))
    delta = {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
             "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4}  # fmt: skip
    tower = {"patch_size": 16, "num_position_embeddings": 2304, "out_hidden_size": hidden} | tower
    text = {**sizes, "head_dim": 256, "full_attention_interval": 4, **delta}
    return _whole("qwen3_5", tied, text, vision_config=tower)


_GEMMA4 = {"head_dim": 256, "global_head_dim": 512, "final_logit_softcapping": 30.0}
_GPT_OSS = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "dtype": "bfloat16",
    **dict(zip(SIZES, (2880, 2880, 24, 64, 8, 201088, 131072), strict=True)), "head_dim": 64,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128,
}  # fmt: skip

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen/Qwen2.5-1.5B-Instruct": _plain(
        "qwen2", 1536, 8960, 28, 12, 2, 151936, 32768, tied=True
    ),
    "Qwen/Qwen2.5-3B-Instruct": _plain("qwen2", 2048, 11008, 36, 16, 2, 151936, 32768, tied=True),
    "Qwen/Qwen2.5-7B-Instruct": _plain("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen/Qwen2.5-Coder-7B-Instruct": _plain("qwen2", 3584, 18944, 28, 28, 4, 152064, 32768),
    "Qwen/Qwen2.5-14B-Instruct": _plain("qwen2", 5120, 13824, 48, 40, 8, 152064, 32768),
    "Qwen/Qwen2.5-32B-Instruct": _plain("qwen2", 5120, 27648, 64, 40, 8, 152064, 32768),
    "Qwen/Qwen3-8B": _plain("qwen3", 4096, 12288, 36, 32, 8, 151936, 40960),
    "meta-llama/Llama-3.1-8B-Instruct": _plain("llama", 4096, 14336, 32, 32, 8, 128256, 131072),
    "Qwen/Qwen3-4B-Instruct-2507": _plain(
        "qwen3", 2560, 9728, 36, 32, 8, 151936, 262144, tied=True
    ),
    "Qwen/Qwen3.5-4B": _qwen3_5(
        2560, 9216, {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096}, tied=True
    ),
    "Qwen/Qwen3.5-9B": _qwen3_5(
        4096, 12288, {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304}, tied=False
    ),
    "google/gemma-4-E4B-it": _whole(
        "gemma4", True,
        {**dict(zip(SIZES, (2560, 10240, 42, 8, 2, 262144, 131072), strict=True)), **_GEMMA4,
         "sliding_window": 512, "num_kv_shared_layers": 18, "hidden_size_per_layer_input": 256},
        vision_config={}, audio_config={},
    ),
    "google/gemma-4-12B-it": _whole(
        "gemma4_unified", True,
        {**dict(zip(SIZES, (3840, 15360, 48, 16, 8, 262144, 262144), strict=True)), **_GEMMA4,
         "sliding_window": 1024, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        vision_config={}, audio_config={},
    ),
    "model/gpt-oss-20b": _GPT_OSS,
}  # fmt: skip
"""The keys of each model's config.json that memory depends on, by its Hub id; ``model/gpt-oss-20b``
is the copy in bfloat16 that ``scripts/export.py`` makes."""

TOWERS = {
    "Qwen/Qwen3.5-4B": 333514240,
    "Qwen/Qwen3.5-9B": 456010480,
    "google/gemma-4-E4B-it": 478087456,
    "google/gemma-4-12B-it": 52379904,
}
"""Weights of the parts of a model that read images and sound, as Transformers 5.19 builds them."""


def known(path: str) -> str | None:
    """The name in ``SHAPES`` of a model that is not on disk: the same, or of the same last part on
    the Hub."""
    if path in SHAPES:
        return path
    last = path.rpartition("/")[2].casefold()
    on_hub = (name for name in SHAPES if not name.startswith("model/"))
    return next((name for name in on_hub if name.rpartition("/")[2].casefold() == last), None)
