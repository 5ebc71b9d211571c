"""Exceptions of families of models, by the ``model_type`` of their text part."""

from typing import Any

PACKED = (
    *("cohere2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm4", "gpt_neox"),
    *("granite", "granitemoehybrid", "llama", "ministral3", "mistral", "mixtral", "olmo2"),
    *("olmo3", "olmo_hybrid"),
    *("olmoe", "phi", "phi3", "qwen2", "qwen2_5_vl_text", "qwen3", "qwen3_5_moe_text"),
    *("qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl_text", "smollm3", "starcoder2"),
)
"""Families whose attention passes segments on and takes nothing but causality and a window from its
mask; others may, and were not tried."""

NOT_PACKED_ON_GPU = {"granitemoehybrid": "packed rows of its Mamba layers were not tried there"}
"""Those of them that a GPU passes padded, with the reason."""

_RENAMED = "vLLM has its weights under other names, or transposed"
_RECURRENT = "the weights of its recurrent layers are not shared with vLLM yet"
WITHOUT_VLLM = {
    **dict.fromkeys(("bloom", "falcon", "gpt2", "gptj", "opt"), _RENAMED),
    "cohere2": "its windows in vLLM 0.32 see a token more than in Transformers",
    "gpt_neox": "vLLM 0.32 runs it by Transformers' modules, whose weights are not shared yet",
    "lfm2": "vLLM 0.32's log-probs of it are up to 1.1 nats off those of Transformers",
    **dict.fromkeys(("falcon_h1", "nemotron_h", "olmo_hybrid"), _RECURRENT),
}
"""Families that vLLM does not sample, with the reason."""

KEYS_ARE_VALUES = (
    "attention_k_eq_v=true in config.json (vLLM 0.32 applies an adapter on k_proj to the keys, and "
    "not to the values, which are the same here; name model.adapter.targets without it)"
)
"""Reason why vLLM does not sample such a model with an adapter on k_proj."""

NO_NF4 = (
    "is a mixture, and the weights of its experts are not linear layers, so they would stay as "
    "they are; set model.quantize to none"
)
"""Reason why NF4 is refused for mixtures."""

UNADAPTED = dict.fromkeys(("falcon_h1", "granitemoehybrid", "nemotron_h"), "out_proj")
"""Last name of the layer whose weight kernels read past the layer, and so without its adapter: that
of Mamba. PEFT 0.21 refuses it for all but Granite's."""


def has_delta_rule(text: Any) -> bool:
    """Whether some layers keep a state in place of keys and values (``recurrent``)."""
    return "linear_attention" in (getattr(text, "layer_types", None) or ())
