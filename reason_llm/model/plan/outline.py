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
from reason_llm.model import folder
from reason_llm.model.plan.shape import DROPS, EAGER, KEPT, SCORES, Kept, Shape
from reason_llm.model.plan.shipped import FAMILIES, SHAPES, SIZES, known
from reason_llm.model.positions import is_plain

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
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
    "model_type": lambda value: str(value) in FAMILIES,
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


@dataclass(frozen=True, slots=True)
class Outline:
    """What a plan takes from a model's config."""

    shape: Shape
    context_tokens: int
    """Longest prompt plus completion: the config's, or the model's limit."""
    stored_bytes: int
    """Size of the weights on the Hub."""


def outline(section: ModelSection, attention: str = "auto") -> Outline | None:
    """The outline of a model; None where its config, or what is trained of it, is not of the kinds
    that are counted here.

    Args:
        attention: ``model.attention``.

    Raises:
        ModelError: the folder's files are damaged.
    """
    adapter, is_full = section.adapter, section.train == "full"
    described = None if section.trust_remote_code else _described(section.path)
    if described is None or not set(described) <= set(KEYS):
        return None
    if not all(KEYS[name](value) for name, value in described.items()):
        return None
    family, counts = str(described.get("model_type")), [described.get(name) for name in SIZES]
    kind = f"{FAMILIES.get(family)}ForCausalLM"
    if not all(counts) or described.get("architectures", [kind]) != [kind]:
        return None
    hidden, wide, layers, heads, key_heads, vocabulary, positions = map(int, filter(None, counts))
    if family == "qwen3" and "head_dim" not in described:
        return None  # 128, whatever the width
    size = described.get("head_dim") or hidden // heads
    if heads % key_heads or ("head_dim" not in described and hidden % heads):
        return None
    if described.get("layer_types") not in (None, ["full_attention"] * layers):
        return None
    ends = {
        "q_proj": (hidden, heads * size),
        "k_proj": (hidden, key_heads * size),
        "v_proj": (hidden, key_heads * size),
        "o_proj": (heads * size, hidden),
        "gate_proj": (hidden, wide),
        "up_proj": (hidden, wide),
        "down_proj": (wide, hidden),
    }
    targets = ends.keys() if adapter.targets == "all-linear" else adapter.targets
    if (
        isinstance(targets, str)
        or not set(targets) <= ends.keys()
        or adapter.target_parameters
        or not targets
        or ((section.context_tokens or 0) > positions and not _can_extend(described))
    ):
        return None
    biased: tuple[str, ...] = ATTENTION[:3] if family == "qwen2" else ()
    if family in ("llama", "qwen3") and described.get("attention_bias"):
        biased = ATTENTION
    if family == "llama" and described.get("mlp_bias"):
        biased += MLP
    if (family not in ("llama", "qwen3") and "attention_bias" in described) or (
        family != "llama" and "mlp_bias" in described
    ):
        return None
    norms = 2 * hidden + (2 * size if family == "qwen3" else 0)
    linear = tuple(inputs * outputs for inputs, outputs in ends.values())
    tied = described.get("tie_word_embeddings", False)
    other = (1 if tied else 2) * vocabulary * hidden + hidden
    other += layers * (norms + sum(ends[name][1] for name in biased))
    adapted = {} if is_full else {name: ends[name] for name in ends if name in set(targets)}
    lines, rank = sum(map(sum, adapted.values())), adapter.rank
    widths = [ends[name][0] for name in ends] + [rank] * bool(adapted)
    total = layers * sum(linear) + other
    drops = not is_full and adapter.dropout > 0
    shape = Shape(
        layers=layers,
        hidden=hidden,
        intermediate=max(widths),
        query=heads * size,
        key_value=key_heads * size,
        cached=layers * key_heads * size,
        attention_layers=layers,
        heads=heads,
        vocabulary=vocabulary,
        packable=linear * layers,
        dense=other,
        adapter=layers * rank * lines,
        trained=total if is_full else layers * rank * lines,
        largest=max(vocabulary * hidden, *linear)
        if is_full
        else rank * max(map(max, adapted.values())),
        adapter_lines=layers * lines,
        adapted=tuple(sorted(adapted)),
        adapter_outputs=rank * len(adapted),
        adapted_experts=0,
        kept=EAGER if attention == "eager" else KEPT.get(family, Kept()),
        has_softcap=False,
        untiled=SCORES if attention == "eager" else DROPS if drops else None,
    )
    dtype = described.get("dtype") or described.get("torch_dtype")
    stored = total * (4 if dtype == "float32" else 2)
    return Outline(shape, section.context_tokens or positions, stored)


def _can_extend(described: Mapping[str, Any]) -> bool:
    return all(is_plain(described.get(name)) for name in ("rope_scaling", "rope_parameters"))


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
        value = json.loads(read_bounded(file, folder.MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return None  # Transformers says what is wrong
    return value if isinstance(value, dict) else None
