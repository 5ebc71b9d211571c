"""The shape of a model by its config.json alone, without PyTorch, Transformers and PEFT, for the
families whose layers are counted here; every other model is built without storage and counted.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reason_llm.config import ModelSection
from reason_llm.files import cached, read_bounded
from reason_llm.model import folder, multimodal
from reason_llm.model.plan.layers import LAYERS
from reason_llm.model.plan.shape import DROPS, SCORES, Shape, kept_by
from reason_llm.model.plan.shipped import FAMILIES, SHAPES, SIZES, TOWERS, WHOLE, known
from reason_llm.model.positions import is_plain

_LLAMA3 = {"factor", "low_freq_factor", "high_freq_factor"}
_ROPE = {"rope_type", "type", "rope_theta", "original_max_position_embeddings", *_LLAMA3}


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_token(value: Any) -> bool:
    ids = value if isinstance(value, list) else [value]
    return value is None or all(type(each) is int and each >= 0 for each in ids)


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_rope(value: Any) -> bool:
    """Whether these are the plain positions, or Llama 3's."""
    if not isinstance(value, dict) or not value.keys() <= _ROPE:
        return value is None
    kind = value.get("rope_type", value.get("type", "default"))
    numbers = [each for name, each in value.items() if name not in ("rope_type", "type")]
    expected = {"default": set[str](), "llama3": _LLAMA3}.get(str(kind))
    return _LLAMA3 & value.keys() == expected and all(map(_is_number, numbers))


KEYS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys((*SIZES, "max_window_layers"), _is_count),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "initializer_range"), _is_number),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_cache", "use_sliding_window"), _is_bool),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), _is_token),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _is_rope),
    **dict.fromkeys(("transformers_version", "_name_or_path"), lambda value: type(value) is str),
    **dict.fromkeys(("torch_dtype", "dtype"), lambda v: v in ("bfloat16", "float16", "float32")),
    "model_type": lambda value: type(value) is str,
    "architectures": lambda value: isinstance(value, list),
    "attention_dropout": lambda value: value == 0,
    "head_dim": _is_count,
    "hidden_act": lambda value: value == "silu",
    "layer_types": lambda value: value is None or isinstance(value, list),
    "pretraining_tp": lambda value: value == 1,
    "sliding_window": lambda value: value is None or _is_count(value),
    "tie_word_embeddings": _is_bool,
}
"""Keys of a config.json whose model is counted here, each with the check of its value."""


def _may_be(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_DELTA = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim",
          "linear_value_head_dim", "linear_conv_kernel_dim")  # fmt: skip
_GEMMA4 = {
    **dict.fromkeys(("head_dim", "global_head_dim"), _is_count),
    **dict.fromkeys(("num_global_key_value_heads", "num_kv_shared_layers"), _may_be(_is_count)),
    "attention_k_eq_v": _may_be(_is_bool),
    "final_logit_softcapping": _may_be(_is_number),
}
MORE: dict[str, dict[str, Callable[[Any], bool]]] = {
    "gemma4": {**_GEMMA4, "hidden_size_per_layer_input": _is_count},
    "gemma4_unified": _GEMMA4,
    "gpt_oss": dict.fromkeys(("head_dim", "num_local_experts", "num_experts_per_tok"), _is_count),
    "qwen3_5": dict.fromkeys(("head_dim", "full_attention_interval", *_DELTA), _is_count),
}
"""Further keys of a family's text part, with the check of their values or of None."""
OF_WHOLE = {"model_type", "architectures", "dtype", "torch_dtype", "tie_word_embeddings",
            "transformers_version", "text_config", "vision_config", "audio_config"}  # fmt: skip
"""Keys of a config.json with a text part."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Facts of a model's config that a plan needs."""

    shape: Shape
    context_tokens: int
    """Longest prompt plus completion: the config's, or the model's limit."""
    positions: int
    """The model's limit."""
    stored_bytes: int | None
    """Size of the weights on the Hub; None where the towers of the model are not known."""
    note: str | None
    """The line that says what is trained of a model that also reads images."""


def outline(section: ModelSection, attention: str = "auto") -> Outline | None:
    """The outline of a model; None where its config, or what is trained of it, is not of the kinds
    that are counted here.

    Args:
        attention: ``model.attention``.

    Raises:
        ModelError: the folder's files are damaged.
    """
    described = None if section.trust_remote_code else _described(section.path)
    text = None if described is None else _text(described)
    if described is None or text is None:
        return None
    adapter, is_full = section.adapter, section.train == "full"
    family, positions = str(described["model_type"]), int(text["max_position_embeddings"])
    is_whole, layers = family in WHOLE, LAYERS[family](text)
    names = {name for name, _, _ in layers.linear}
    targets = names if adapter.targets == "all-linear" else adapter.targets
    if (
        isinstance(targets, str)
        or not targets
        or not set(targets) <= names
        or adapter.target_parameters
        or (is_full and (is_whole or layers.experts))
        or (layers.experts and section.quantize == "nf4")
        or ("k_proj" in targets and text.get("attention_k_eq_v"))  # vLLM cannot sample it
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
        untiled=SCORES if held.has_scores else DROPS if drops else layers.untiled,
        states=layers.states,
        windows=layers.windows,
    )
    size = 4 if (described.get("dtype") or described.get("torch_dtype")) == "float32" else 2
    towers = TOWERS.get(str(known(section.path))) if is_whole else 0
    return Outline(
        shape,
        section.context_tokens or positions,
        positions,
        None if towers is None else (sum(packable) + dense + towers) * size,
        multimodal.note(section.path, family) if is_whole else None,
    )


def _text(described: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The keys of the text part of a config.json; None where one is not of the kinds that are
    counted here."""
    family = str(described.get("model_type"))
    is_whole, more = family in WHOLE, MORE.get(family, {})
    kind = f"{WHOLE.get(family)}ForConditionalGeneration"
    if not is_whole:
        kind = f"{FAMILIES.get(family)}ForCausalLM"
    text = described.get("text_config") if is_whole else described
    checks = KEYS | more
    if (
        family not in LAYERS
        or described.get("architectures", [kind]) != [kind]
        or not isinstance(text, dict)
        or not text.keys() <= checks.keys()
        or not all(checks[name](text.get(name)) for name in {*text, *SIZES, *more})
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
