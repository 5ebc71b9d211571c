"""The shape of a model by its config.json alone, without PyTorch, Transformers and PEFT, for the
families whose layers are counted here; every other model is built without storage and counted.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reason_llm.config import ModelSection
from reason_llm.errors import ModelError
from reason_llm.files import cached, read_bounded
from reason_llm.model import folder, multimodal
from reason_llm.model.families import KEYS_ARE_VALUES, NO_NF4
from reason_llm.model.plan.layers import LAYERS
from reason_llm.model.plan.shape import Shape, kept_by
from reason_llm.model.plan.shipped import FAMILIES, SHAPES, SIZES, TOWERS, WHOLE, known
from reason_llm.model.positions import is_plain, scaling_note

KEYS = {
    *SIZES, "model_type", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias",
    *("sliding_window", "use_sliding_window", "layer_types", "attention_k_eq_v"),
    *("final_logit_softcapping", "num_global_key_value_heads", "num_kv_shared_layers"),
    # These change no size.
    *("architectures", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act"),
    *("initializer_range", "max_window_layers", "_name_or_path", "pad_token_id", "pretraining_tp"),
    *("rms_norm_eps", "rope_parameters", "rope_scaling", "rope_theta", "torch_dtype"),
    *("transformers_version", "use_cache"),
}  # fmt: skip
"""Keys of a config.json whose model is counted here."""
_GEMMA4 = {"head_dim", "global_head_dim"}
MORE = {
    "gemma4": {*_GEMMA4, "hidden_size_per_layer_input"},
    "gemma4_unified": _GEMMA4,
    "gpt_oss": {"head_dim", "num_local_experts", "num_experts_per_tok"},
    "qwen3_5": {"head_dim", "full_attention_interval", "linear_num_key_heads",
                "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
                "linear_conv_kernel_dim"},
}  # fmt: skip
"""Keys that a family's text part must have besides ``SIZES``."""
OF_WHOLE = {"model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings",
            "transformers_version", "text_config", "vision_config", "audio_config"}  # fmt: skip
"""Keys of a config.json with a text part."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Facts of a model's config that a plan needs."""

    shape: Shape
    context_tokens: int
    """Longest prompt plus completion: the config's, or the model's limit."""
    stored_bytes: int | None
    """Size of the weights on the Hub; None where the towers of the model are not known."""
    notes: tuple[str, ...]
    """Lines on what is trained of a model that also reads images, and on scaled positions."""
    without_vllm: str | None
    """Reason why vLLM cannot sample it."""


def outline(section: ModelSection, attention: str = "auto") -> Outline | None:
    """The outline of a model; None where its config, or what is trained of it, is not of the kinds
    that are counted here.

    Args:
        attention: ``model.attention``.

    Raises:
        ModelError: the folder's files are damaged, or it is a mixture in NF4.
    """
    described = None if section.trust_remote_code else _described(section.path)
    try:
        if described is None or (text := _text(described)) is None:
            return None
        family, positions = str(described["model_type"]), int(text["max_position_embeddings"])
        is_whole, layers = family in WHOLE, LAYERS[family](text)
    except (KeyError, TypeError, ValueError, ArithmeticError):
        return None  # Transformers says what is wrong
    adapter, is_full = section.adapter, section.train == "full"
    if layers.experts and section.quantize == "nf4":
        raise ModelError(f"model.quantize=nf4: {section.path} ({family}) {NO_NF4}")
    names = {name for name, _, _ in layers.linear}
    targets = names if adapter.targets == "all-linear" else adapter.targets
    if (
        isinstance(targets, str)
        or not targets
        or not set(targets) <= names
        or adapter.target_parameters
        or (is_full and (is_whole or layers.experts))
        or ((section.context_tokens or 0) > positions and not _can_extend(family, described))
    ):
        return None
    hidden, vocabulary = int(text["hidden_size"]), int(text["vocab_size"])
    count, rank = int(text["num_hidden_layers"]), adapter.rank
    adapted = [] if is_full else [each for each in layers.linear if each[0] in targets]
    packable = tuple(inputs * outputs for _, inputs, outputs in layers.linear)
    tables = 1 if text.get("tie_word_embeddings", False) else 2
    dense = layers.other + tables * vocabulary * hidden + hidden
    lines = sum(inputs + outputs for _, inputs, outputs in adapted)
    widest = max(max(each[1:]) for each in adapted) if adapted else 0
    held = kept_by(family, attention == "eager")
    drops = bool(adapted) and adapter.dropout > 0
    widths = [inputs for _, inputs, _ in layers.linear] + [rank] * bool(adapted)
    shape = Shape(
        layers=count,
        hidden=hidden,
        intermediate=max(*widths, layers.expert_inputs),
        query=layers.query,
        key_value=max(layers.keys, default=0),
        cached=sum(layers.keys),
        attention_layers=count - layers.states.layers,
        heads=int(text["num_attention_heads"]),
        vocabulary=vocabulary,
        packable=packable,
        dense=dense,
        adapter=rank * lines,
        trained=sum(packable) + dense if is_full else rank * lines,
        largest=max(vocabulary * hidden, *packable) if is_full else rank * widest,
        adapter_lines=lines,
        adapted=tuple(sorted({name for name, _, _ in adapted})),
        adapter_outputs=rank * len(adapted) // count,
        adapted_experts=0,
        kept=held,
        has_softcap=text.get("final_logit_softcapping") is not None,
        experts=count * layers.experts * layers.of_expert,
        active_experts=count * layers.active * layers.of_expert,
        routed=layers.experts * count,
        untiled=held.has_scores or drops or layers.untiled,
        states=layers.states,
        windows=layers.windows,
    )
    size = 4 if (described.get("dtype") or described.get("torch_dtype")) == "float32" else 2
    towers = TOWERS.get(str(known(section.path))) if is_whole else 0
    context, notes = section.context_tokens or positions, list[str]()
    if is_whole:
        notes.append(multimodal.note(section.path, family))
    if context > positions:
        notes.append(scaling_note(section.path, positions, context))
    keys_are_values = bool(text.get("attention_k_eq_v")) and "k_proj" in targets and not is_full
    return Outline(
        shape,
        context,
        None if towers is None else (sum(packable) + dense + towers) * size,
        tuple(notes),
        KEYS_ARE_VALUES if keys_are_values else None,
    )


def _text(described: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The keys of the text part of a config.json; None where one is not of the kinds that are
    counted here."""
    family = str(described.get("model_type"))
    is_whole, more = family in WHOLE, MORE.get(family, set[str]())
    kind = f"{WHOLE.get(family)}ForConditionalGeneration"
    if not is_whole:
        kind = f"{FAMILIES.get(family)}ForCausalLM"
    text = described.get("text_config") if is_whole else described
    if (
        family not in LAYERS
        or described.get("architectures", [kind]) != [kind]
        or not isinstance(text, dict)
        or not more <= text.keys() <= KEYS | more
        or not all(type(text.get(name)) is int and text[name] > 0 for name in SIZES)
    ):
        return None
    if is_whole and (
        not described.keys() <= OF_WHOLE
        or text.get("model_type") != f"{family}_text"
        or text.get("tie_word_embeddings") != described.get("tie_word_embeddings")
    ):
        return None
    heads = text["num_attention_heads"]
    key_heads = text["num_key_value_heads"], text.get("num_global_key_value_heads") or 1
    if any(heads % each for each in key_heads):
        return None
    shared = text.get("num_kv_shared_layers") or 0
    if shared and text["num_hidden_layers"] - shared < 6:
        return None  # no earlier layer of each kind
    if "head_dim" not in text and (family == "qwen3" or text["hidden_size"] % heads):
        return None  # Qwen3's are 128, whatever the width
    if text.get("layer_types") not in (None, ["full_attention"] * text["num_hidden_layers"]):
        return None
    if text.get("use_sliding_window"):
        return None
    if more and text.keys() & {"layer_types", "rope_scaling", "rope_parameters"}:
        return None
    biases = {"llama": {"attention_bias", "mlp_bias"}, "qwen3": {"attention_bias"}}
    others = {"attention_bias", "mlp_bias"} - biases.get(family, set[str]())
    return None if text.keys() & others else text


def _can_extend(family: str, described: Mapping[str, Any]) -> bool:
    return family not in MORE and all(
        is_plain(described.get(name)) for name in ("rope_scaling", "rope_parameters")
    )


def _described(path: str) -> Mapping[str, Any] | None:
    """The config.json of a folder, of the Hub's cache or of a shipped shape; None without one."""
    file = Path(path) / "config.json"
    if not Path(path).is_dir():
        found = cached(path, "config.json")
        if found is None:
            name = known(path)
            return None if name is None else SHAPES[name]
        file = found
    else:
        folder.check(path, "config.json")
    try:
        value = json.loads(read_bounded(file, folder.MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # Transformers says what is wrong
    return value if isinstance(value, dict) else None
