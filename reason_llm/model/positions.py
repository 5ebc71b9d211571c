"""Contexts beyond a model's positions: YaRN scales its rotary embeddings, in both engines and in
what is exported. Short texts are scaled too. Source: arXiv:2309.00071; the keys are those of
Transformers' ``rope_parameters``."""

from collections.abc import Mapping
from typing import Any

from reason_llm.errors import ModelError

PLAIN = {"rope_type", "type", "rope_theta"}
"""Keys of rotary embeddings that nothing scales."""


def is_plain(rope: Mapping[str, Any] | None) -> bool:
    """Whether nothing scales these rotary embeddings."""
    rope = rope or {}
    return rope.keys() <= PLAIN and rope.get("rope_type", rope.get("type", "default")) == "default"


def yarn(positions: int, rope: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Keys of a text config with ``rope_parameters`` for ``positions``, changed to read ``tokens``
    positions by YaRN."""
    scaled = {"rope_type": "yarn", "factor": tokens / positions}
    scaled |= {"original_max_position_embeddings": positions}
    return {"rope_parameters": {**rope, **scaled}, "max_position_embeddings": tokens}


def keys(config: Any, tokens: int | None) -> dict[str, Any]:
    """``yarn``'s keys for a Transformers config; {} if the model has enough positions. Raises
    ModelError: it has too few, and other position embeddings than plain rotary ones."""
    text = config.get_text_config(decoder=True)
    positions = getattr(text, "max_position_embeddings", None)
    if tokens is None or positions is None or tokens <= positions:
        return {}
    rope = getattr(text, "rope_parameters", None)
    if text is not config or not rope or not is_plain(rope):
        raise ModelError(
            f"model.context_tokens={tokens} exceeds the model's {positions} positions, which are "
            f"not plain rotary embeddings that YaRN could scale; set it to {positions} or less"
        )
    return yarn(positions, rope, tokens)


def extend(config: Any, tokens: int | None) -> Any:
    """The config, changed so that it reads ``tokens`` tokens. Raises ModelError: as ``keys``."""
    for name, value in keys(config, tokens).items():
        setattr(config, name, value)
    return config


def note(path: str, config: Any, tokens: int | None) -> str | None:
    """A line on how the positions are scaled; None if they are not. Raises ModelError: as
    ``keys``."""
    if tokens is None or not (scaling := keys(config, tokens)):
        return None
    positions = scaling["rope_parameters"]["original_max_position_embeddings"]
    return scaling_note(path, positions, tokens)


def scaling_note(path: str, positions: int, tokens: int) -> str:
    """The line for a model with so many positions."""
    return (
        f"model.context_tokens={tokens} exceeds the {positions} positions of {path}: YaRN scales "
        f"them by {tokens / positions:.4g}, in short texts too"
    )
