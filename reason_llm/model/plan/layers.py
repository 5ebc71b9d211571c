"""The layers of the families that ``outline`` counts, by the numbers of their config.json, as
Transformers 5.19 builds them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from reason_llm.model.plan.states import NO_STATES, States

Linear = tuple[str, int, int]
"""Last name, inputs and outputs of a linear layer."""
Text = Mapping[str, Any]
"""Keys of the text part of a config.json, of the kinds that ``outline`` has checked."""


@dataclass(frozen=True, slots=True)
class Layers:
    """A decoder without its embeddings, its last norm and its head."""

    linear: list[Linear]
    """In the model's order."""
    other: int
    """Elements of all other weights."""
    query: int
    """Query heads times their size, in the layer with the largest heads."""
    keys: list[int]
    """Elements of a token's keys, of each layer that keeps them."""
    states: States = NO_STATES
    """Of layers that keep a state in place of keys."""
    experts: int = 0
    """In a layer."""
    of_expert: int = 0
    """Elements of the weights of one."""
    active: int = 0
    """Experts of one token."""
    expert_inputs: int = 0
    """Inputs of the down projections of all experts of one token."""
    windows: tuple[tuple[int, int], ...] = ()
    """Elements of a token's keys and the window of each layer that has one."""
    untiled: bool = False
    """Whether the feed-forwards do not pass backward in tiles."""


def _attention(hidden: int, query: int, keys: int, gated: int = 1) -> list[Linear]:
    return [
        ("q_proj", hidden, gated * query),
        ("k_proj", hidden, keys),
        ("v_proj", hidden, keys),
        ("o_proj", query, hidden),
    ]


def _feed_forward(hidden: int, wide: int) -> list[Linear]:
    return [
        ("gate_proj", hidden, wide),
        ("up_proj", hidden, wide),
        ("down_proj", wide, hidden),
    ]


def _sizes(text: Text) -> tuple[int, int, int, int, int, int]:
    """Width, width of the feed-forward, layers, query heads, key heads and their size."""
    hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
    size = text.get("head_dim") or hidden // heads
    names = ("intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    wide, layers, heads, key_heads = (int(text[name]) for name in names)
    return hidden, wide, layers, heads, key_heads, int(size)


def _plain(text: Text) -> Layers:
    """Llama, Mistral, Qwen2 and Qwen3."""
    hidden, wide, layers, heads, key_heads, size = _sizes(text)
    family, query, keys = text["model_type"], heads * size, key_heads * size
    attention, feed_forward = _attention(hidden, query, keys), _feed_forward(hidden, wide)
    biased = attention[:3] if family == "qwen2" else []
    if text.get("attention_bias"):
        biased = attention
    if text.get("mlp_bias"):
        biased = [*biased, *feed_forward]
    norms = 2 * hidden + (2 * size if family == "qwen3" else 0)
    other = layers * (norms + sum(outputs for _, _, outputs in biased))
    windows = ((keys, _window(text)),) * layers if family == "mistral" and _window(text) else ()
    linear = [*attention, *feed_forward] * layers
    return Layers(linear, other, query, [keys] * layers, windows=windows)


def _window(text: Text) -> int:
    """Tokens that a layer with a window sees; 0: all."""
    return int(text.get("sliding_window", WINDOWS[text["model_type"]]) or 0)


WINDOWS = {"mistral": 4096, "gpt_oss": 128, "gemma4_text": 512, "gemma4_unified_text": 1024}
"""Windows by the ``model_type`` of the text part, where its config.json has none."""


def _qwen3_5(text: Text) -> Layers:
    hidden, wide, layers, heads, key_heads, size = _sizes(text)
    inner_keys = text["linear_num_key_heads"] * text["linear_key_head_dim"]
    inner_heads, inner_size = text["linear_num_value_heads"], text["linear_value_head_dim"]
    values = inner_heads * inner_size
    mixed = 2 * inner_keys + values
    delta = [
        ("out_proj", values, hidden),
        ("in_proj_qkv", hidden, mixed),
        ("in_proj_z", hidden, values),
        ("in_proj_b", hidden, inner_heads),
        ("in_proj_a", hidden, inner_heads),
    ]
    attention = _attention(hidden, heads * size, key_heads * size, gated=2)
    are_full = [(place + 1) % text["full_attention_interval"] == 0 for place in range(layers)]
    parts = (
        [*(attention if is_full else delta), *_feed_forward(hidden, wide)] for is_full in are_full
    )
    full, recurrent = sum(are_full), layers - sum(are_full)
    kernel = text["linear_conv_kernel_dim"]
    return Layers(
        [each for part in parts for each in part],
        layers * 2 * hidden
        + full * 2 * size
        + recurrent * (mixed * kernel + 2 * inner_heads + inner_size),
        heads * size,
        [key_heads * size] * full,
        States(
            recurrent,
            recurrent * inner_heads * text["linear_key_head_dim"] * inner_size,
            recurrent * mixed * kernel,
        ),
        untiled=recurrent > 0,
    )


def _gemma4(text: Text) -> Layers:
    """Every sixth layer and the last one see everything, with larger heads; the last layers take
    the keys and values of earlier ones; with inputs of their own in E2B and E4B."""
    hidden, wide, layers, heads, key_heads, size = _sizes(text)
    inputs = text.get("hidden_size_per_layer_input", 0)
    own, window = layers - text.get("num_kv_shared_layers", 0), _window(text)
    linear, kept, windows, other = list[Linear](), list[int](), list[tuple[int, int]](), 0
    for place in range(layers):
        is_full = (place + 1) % 6 == 0 or place == layers - 1
        is_one = is_full and text.get("attention_k_eq_v", False)
        head = text["global_head_dim"] if is_full else size
        keys = head * ((is_one and text.get("num_global_key_value_heads")) or key_heads)
        query, *projections, out = _attention(hidden, heads * head, keys)
        projections = projections[: (1 if is_one else 2) if place < own else 0]
        linear += [query, *projections, out, *_feed_forward(hidden, wide)]
        other += 4 * hidden + head * (2 if place < own else 1)
        kept += [keys] if place < own else []
        windows += [(keys, window)] if place < own and not is_full else []
        if inputs:
            linear += [
                ("per_layer_input_gate", hidden, inputs),
                ("per_layer_projection", inputs, hidden),
            ]
            other += hidden
    if inputs:
        linear.append(("per_layer_model_projection", hidden, layers * inputs))
        other += inputs + text.get("vocab_size_per_layer_input", 262144) * layers * inputs
    return Layers(
        linear,
        other,
        heads * text["global_head_dim"],
        kept,
        windows=tuple(windows),
        untiled=inputs > 0,
    )


def _gpt_oss(text: Text) -> Layers:
    hidden, wide, layers, heads, key_heads, size = _sizes(text)
    attention = _attention(hidden, heads * size, key_heads * size)
    experts, asked = text["num_local_experts"], text["num_experts_per_tok"]
    biases = sum(outputs for _, _, outputs in attention)
    of_expert, of_biases = 3 * hidden * wide, 2 * wide + hidden
    other = layers * (2 * hidden + biases + heads + experts * (of_expert + of_biases + hidden + 1))
    return Layers(
        attention * layers,
        other,
        heads * size,
        [key_heads * size] * layers,
        experts=experts,
        of_expert=of_expert,
        active=asked,
        expert_inputs=asked * wide,
        windows=((key_heads * size, _window(text)),) * (-(-layers // 2)),
    )


LAYERS: dict[str, Callable[[Text], Layers]] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _plain),
    **dict.fromkeys(("gemma4", "gemma4_unified"), _gemma4),
    "gpt_oss": _gpt_oss,
    "qwen3_5": _qwen3_5,
}
"""By the ``model_type`` of the whole."""
