"""Checks of a model's folder before loading: which files may be read, and the headers of its
weights.

A model is somebody else's download. Weights are safetensors; pickled ones are read only with
``model.allow_pickle``, by torch's loader that makes tensors and no other objects. Python in the
folder runs only with ``model.trust_remote_code``. Both are said loudly, once. An adapter in the
folder is refused, because Transformers would follow it to whatever base it names.
"""

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import find_adapter_config_file

from reason_llm.config import ModelSection
from reason_llm.errors import ModelError, one_line
from reason_llm.files import (
    MIB,
    cached,
    check_nesting,
    check_tokenizer,
    reach_hub,
    read_bounded,
    regular,
)

MOST_JSON_BYTES = 64 * MIB
MOST_LAYERS = 1024
COUNT = re.compile(r"(layers?|experts|labels)\Z")
"""In the name of a count: num_hidden_layers, GPT-2's n_layer, num_local_experts, num_labels."""

SIZE = re.compile(
    r"(layers?|experts|heads?|dim|embd|positions|(embed|hidden|intermediate|vocab|head)_size)\Z"
)
"""In the name of a number that is never negative: num_attention_heads, GPT-2's n_embd, head_dim."""

logger = logging.getLogger(__name__)


def check(path: str, name: str, what: str) -> None:
    """Check that ``path``, if it looks like a folder, has the file ``name``.

    Raises:
        ModelError: one line with what to give in its place.
    """
    folder = Path(path)
    looks_local = (
        folder.exists()
        or path.startswith((".", "/", "~", "model/"))
        or path.count("/") != 1
        or any(folder.parent.glob("*/resolved_config.yaml"))  # a run's name that is misspelt
    )
    if looks_local and not folder.is_dir():
        problem = "is no folder" if folder.exists() else "does not exist"
        raise ModelError(
            f"model.path={path} {problem}; give a folder with {what}, or a Hub id such as org/name"
        )
    if folder.is_dir() and not (folder / name).is_file():
        raise ModelError(
            f"model.path={path} is no folder with {what}: {name} is missing; save it there, or "
            "name another folder"
        )


@cache
def check_files(path: str) -> None:
    """Check that a folder holds no FIFO, no device and no JSON that is damaged, huge or absurd.

    Raises:
        ModelError: one line with the file.
    """
    if not Path(path).is_dir():
        return
    for file in sorted(Path(path).iterdir()):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ModelError(f"model.path={path}: {file.name} is no regular file; remove it")
        if file.suffix == ".json":
            check_json(file)


def check_hub(path: str) -> None:
    """Check that a model that is no folder is on the Hub's side of a connection, or in the cache.

    Raises:
        ModelError: it is neither.
    """
    is_local = Path(path).is_dir()
    if not is_local and not reach_hub() and not cached(path, "config.json"):
        raise ModelError(
            f"model.path={path:.200} is no folder here, and the Hub cannot be reached (no network, "
            "or HF_HUB_OFFLINE is set) and did not leave it in the cache; connect, or give a folder"
        )


def refuse_adapter(path: str) -> None:
    """Raises:
    ModelError: there is an adapter beside, or in place of, the model.
    """
    if find_adapter_config_file(path) is not None:
        raise ModelError(
            f"model.path={path} holds an adapter (adapter_config.json), which would be loaded over "
            "whatever base it names; merge it into its base, or remove the file"
        )


def code_allowed(path: str, asked: bool) -> bool:
    """``asked`` unchanged; if true, with a warning."""
    if asked:
        _say(
            f"model.trust_remote_code is true: Python code that comes with {path} runs with all "
            "your rights"
        )
    return asked


def is_pickled(config: ModelSection) -> bool:
    """Whether a folder has pickled weights and no others. False for a Hub id."""
    folder = Path(config.path)
    return not any(folder.glob("*.safetensors")) and any(folder.glob("pytorch_model*.bin"))


def use_safetensors(config: ModelSection) -> bool | None:
    """Transformers' argument: True for safetensors, False for pickled weights, None for either
    (Hub)."""
    if not config.allow_pickle:
        return True
    if Path(config.path).is_dir():
        return not is_pickled(config)
    _say(f"model.allow_pickle is true: {config.path} may be read from pickled weights")
    return None


def stored_shapes(config: ModelSection) -> Iterator[tuple[Path, dict[str, list[int]]]]:
    """Shapes of the tensors by name, for each file of weights in the folder.

    Raises:
        ModelError: there are none, pickled ones that are not allowed, or one is damaged.
    """
    folder = Path(config.path)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            with safe_open(regular(file), framework="pt") as opened:
                names = list(opened.keys())
                yield file, {name: opened.get_slice(name).get_shape() for name in names}
        except (SafetensorError, OSError) as error:
            raise _damaged(file, error) from error
    if files:
        return
    if not is_pickled(config):
        raise ModelError(
            f"model.path={folder} holds no weights: no .safetensors file; save the model with them"
        )
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if not config.allow_pickle:
        raise ModelError(
            f"model.path={folder} holds pickled weights only ({pickled[0].name}), which may run "
            "code; save it as safetensors, or set model.allow_pickle to true if you trust it"
        )
    _say(f"model.allow_pickle is true: reading pickled weights, {pickled[0]}")
    for file in pickled:
        yield file, _pickled_shapes(file)


def _pickled_shapes(file: Path) -> dict[str, list[int]]:
    try:
        tensors = torch.load(regular(file), map_location="meta", weights_only=True)
    except (UnpicklingError, RuntimeError, OSError, EOFError, ValueError, LookupError) as error:
        raise _damaged(file, error) from error
    if not isinstance(tensors, dict):
        raise ModelError(f"{file} holds {type(tensors).__name__}, no weights; save it again")
    return {
        str(name): list(tensor.shape)
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }


def check_json(file: Path) -> None:
    """Check that the JSON is whole, of bounded size and depth, that no text grows without bound in
    a tokenizer, and that an index of weights names only files of this folder.

    Raises:
        ModelError: one line with the file.
    """
    try:
        # Not orjson: there are configs with Infinity.
        content = read_bounded(file, MOST_JSON_BYTES)
        value = json.loads(content)
        check_nesting(value)
        if file.name == "tokenizer.json":
            check_tokenizer(content)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} cannot be read ({one_line(error)[:200]}); copy or download it again"
        ) from error
    if not isinstance(value, dict):
        return
    if file.name.endswith(".index.json"):
        weights = value.get("weight_map")
        named = set(map(str, weights.values())) if isinstance(weights, dict) else {"?"}
        for each in sorted(named):
            if Path(each).name != each or not (file.parent / each).is_file():
                raise ModelError(
                    f"{file} names the weights {each[:100]!r}, which are not in that folder; copy "
                    "or download the model again"
                )
    if file.name == "config.json":
        if value.get("vision_config") and not str(value.get("model_type")).endswith("_text"):
            raise ModelError(
                f"{file}: {value.get('model_type')!s:.40} reads images, too, which is not "
                "supported; take a model of text alone, or save its text part as a model"
            )
        _check_counts(file, value)


def _check_counts(file: Path, value: dict[str, Any]) -> None:
    """No more layers, experts or labels than any model has, by whatever name and in whatever
    section: Transformers makes an object for each, even without storage. And no size below 0: where
    a shape is made of it, -1 stands for whatever fits."""
    for name, each in value.items():
        if isinstance(each, dict):
            _check_counts(file, each)
        elif not isinstance(each, int):
            continue
        elif COUNT.search(name) and each > MOST_LAYERS:
            raise ModelError(
                f"{file} has {name[:60]}={str(each)[:30]}, more than any model's {MOST_LAYERS}; "
                "fix it"
            )
        elif SIZE.search(name) and each < 0:
            raise ModelError(f"{file} has {name[:60]}={str(each)[:30]}, which is below 0; fix it")


def _damaged(file: Path, error: Exception) -> ModelError:
    return ModelError(f"{file} is damaged ({one_line(error)[:300]}); copy or download it again")


@cache
def _say(warning: str) -> None:
    logger.warning("%s", warning)
