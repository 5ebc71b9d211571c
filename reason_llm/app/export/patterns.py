"""Adapters with other ranks or scales in some layers, written with one rank and scale for all.

PEFT reads ``rank_pattern`` and ``alpha_pattern``; vLLM before 0.32 (``lora/peft_helper.py``)
silently scales every layer by ``lora_alpha / r``. So B is multiplied by its layer's scale, the
factors are padded with zeros to the largest rank r, ``lora_alpha`` is r, and W + B A is the same.
"""

from pathlib import Path
from typing import Any

import orjson
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from reason_llm.config import matching
from reason_llm.errors import ModelError, one_line
from reason_llm.files import MIB, read_object, regular
from reason_llm.model import adapters

PATTERNS = ("rank_pattern", "alpha_pattern")


def are_in(folder: Path) -> bool:
    """Whether an adapter's config has patterns."""
    try:
        value = read_object(folder / adapters.CONFIG, MIB)
    except (OSError, ValueError):
        return False  # whoever reads the adapter says why
    return any(isinstance(value.get(name), dict) and value[name] for name in PATTERNS)


def write_plain(folder: Path, out: Path) -> int:
    """Write the adapter without patterns into ``out``, in float32, and return its rank."""
    config = read_object(folder / adapters.CONFIG, MIB)
    (out / adapters.CONFIG).write_bytes(orjson.dumps(config | {name: {} for name in PATTERNS}))
    adapters.check_written(folder)
    try:
        tensors = load_file(regular(folder / adapters.WEIGHTS))
        save_file(tensors, out / adapters.WEIGHTS)
        plain = adapters.read_config(out)  # refuses all else that is not plain
        matches = {name: m[1] for name in tensors if (m := adapters.ADAPTED.fullmatch(name))}
        if other := [name for name in tensors if ".lora_" in name and name not in matches]:
            raise ValueError(f"{other[0]} is not a factor of a linear layer")
        layers = sorted({*matches.values()})
        ranks = _by_layer(layers, config.get(PATTERNS[0]), plain.r)
        alphas = _by_layer(layers, config.get(PATTERNS[1]), plain.lora_alpha)
        rank: int = max(ranks.values(), default=plain.r)
        for name, layer in matches.items():
            layer_rank, is_a = ranks[layer], ".lora_A." in name
            factor = tensors[name].float()
            if plain.target_parameters or factor.shape[0 if is_a else 1] != layer_rank:
                raise ValueError(f"{name} is not of rank {layer_rank}")
            scale = alphas[layer] / (layer_rank**0.5 if plain.use_rslora else layer_rank)
            zeros = (0, 0, 0, rank - layer_rank) if is_a else (0, rank - layer_rank)
            tensors[name] = pad(factor if is_a else factor * scale, zeros).contiguous()
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(
            f"{folder}: its {' and '.join(PATTERNS)} do not fit its weights "
            f"({one_line(error)[:200]}); save the adapter again"
        ) from error
    uniform = {
        "r": rank,
        "lora_alpha": rank,
        "use_rslora": False,
        **{name: {} for name in PATTERNS},
    }
    (out / adapters.CONFIG).write_bytes(orjson.dumps(config | uniform, option=orjson.OPT_INDENT_2))
    save_file(tensors, out / adapters.WEIGHTS, metadata={"format": "pt"})
    return rank


def _by_layer(layers: list[str], pattern: Any, usual: float) -> dict[str, Any]:
    """The value of each layer: of the first key (a name's end, or a regular expression) that
    matches, as in PEFT's ``get_pattern_key``."""
    values = dict.fromkeys(layers, usual)
    for key, value in reversed((pattern or {}).items()):
        if type(value) not in (int, float) or not 0 < value <= 1e6:
            raise ValueError(f"{key!r:.60} is {value!r:.60}")
        values |= dict.fromkeys(matching(rf"(?:.*\.)?(?:{key})", layers), value)
    return values
