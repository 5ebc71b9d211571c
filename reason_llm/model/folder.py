"""Checks of a model's folder, somebody else's download, before loading.

Weights are safetensors; pickled ones are not read. Python in the folder runs only with
``model.trust_remote_code``, which is logged as a warning.
"""

import json
import logging
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from safetensors import SafetensorError, safe_open

from reason_llm.config import ModelSection
from reason_llm.errors import ModelError, one_line
from reason_llm.files import (
    MANIFEST,
    MIB,
    cached,
    cached_repositories,
    check_digests,
    check_nesting,
    hub_refusal,
    read_bounded,
    regular,
    sha256,
    similar,
)

MAX_JSON_BYTES = 64 * MIB
MAX_LAYERS = 1024
COUNT = re.compile(r"(layers?|experts|labels)\Z")
"""Ending of a count's name: num_hidden_layers, GPT-2's n_layer, num_local_experts, num_labels."""
SIZE = re.compile(
    r"(?<!feature_)(layers?|experts|heads?|dim|embd|positions|(embed|hidden|intermediate|vocab|head)"
    r"_size)\Z"
)
"""Ending of the name of a number that is never negative: num_attention_heads, n_embd, head_dim."""

logger = logging.getLogger(__name__)


def check(path: str, *names: str, runs: bool = False) -> bool:
    """Check that ``path`` is a folder with the files ``names``, none of them harmful and all as
    they were written, or the id of a model on the Hub or in its cache. Weights are left to
    ``check_weights``, which every reader of weights calls.

    Args:
        runs: ``model.trust_remote_code``, which is returned, if true with a warning.

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
        problem = "is not a folder" if folder.exists() else f"does not exist{_near(path)}"
        raise ModelError(
            f"model.path={path} {problem}; give a folder with a model, or a Hub id such as org/name"
        )
    if folder.is_dir():
        for name in names:
            if not (folder / name).is_file():
                raise ModelError(
                    f"model.path={path} is not a folder with a model: {name} is missing; save it "
                    "there, or name another folder"
                )
        check_written(folder, lambda name: not _is_weights(name))
        _check_files(folder)
    elif constants.HF_HUB_OFFLINE and not cached(path, "config.json"):
        raise ModelError(
            f"model.path={path:.200} is not a folder here, and HF_HUB_OFFLINE is set but the Hub's "
            f"cache does not hold it{_near(path)}; unset HF_HUB_OFFLINE, or give a folder"
        )
    elif not cached(path, "config.json") and (refusal := hub_refusal(path, "config.json")):
        problem, fix = refusal
        raise ModelError(f"model.path={path:.200} {problem}{_near(path)}; {fix}")
    if runs:
        say(
            f"model.trust_remote_code is true: Python code that comes with {path} runs with all "
            "your rights"
        )
    return runs


def _near(path: str) -> str:
    """`` (did you mean X?)`` with a model that is known, in the Hub's cache or in a folder."""
    from reason_llm.model.plan.shipped import SHAPES

    return similar(path, [*SHAPES, *cached_repositories()])


@cache
def _check_files(folder: Path) -> None:
    """No FIFO, no device and no JSON that is damaged, huge or absurd."""
    for file in sorted(folder.iterdir()):
        if file.exists() and not file.is_file() and not file.is_dir():
            raise ModelError(f"model.path={folder}: {file.name} is not a regular file; remove it")
        if file.suffix == ".json":
            check_json(file)


def check_weights(path: str) -> None:
    """Compare a model's weights with the SHA-256 that its folder carries, if it does: once in each
    process, as long as the files stay as they are. Raises ModelError: as ``check_written``."""
    folder = Path(path)
    if folder.is_dir():
        # A checkpoint of a whole model has an optimizer and other adapters, too.
        first = "model" if any(folder.glob("model*.safetensors")) else ""
        check_written(folder, lambda name: _is_weights(name) and name.startswith(first))


def check_written(folder: Path, is_read: Callable[[str], bool] = lambda name: True) -> None:
    """Compare the files of a model or an adapter with the folder's own SHA-256, if it has any;
    ``is_read`` as in ``check_digests``. Raises ModelError: a file was changed."""
    try:
        check_digests(folder, is_read)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder}: {one_line(error)[:300]}; restore it, or call the command of its run again, "
            f"which writes it from a checkpoint, or remove {MANIFEST} if it was edited on purpose"
        ) from error


TOKENIZER = ("tokenizer*", "special_tokens*", "added_tokens*", "vocab*", "merges*", "*.model")
"""Files of a tokenizer in a model's folder, without the chat template."""


def digests_of_small_files(path: str, runs_code: bool) -> dict[str, str]:
    """Digests of the tokenizer's files in a folder, by name, and of its Python files if those are
    run; none of a Hub id, of which the commit counts. Raises ModelError: one cannot be read."""
    patterns = (*TOKENIZER, "*.py") if runs_code else TOKENIZER
    files = sorted({file for pattern in patterns for file in Path(path).glob(pattern)})
    try:
        return {file.name: sha256(file)[:16] for file in files if Path(path).is_dir()}
    except OSError as error:
        raise ModelError(
            f"{path} has a file that cannot be read ({one_line(error)[:200]}); restore it"
        ) from error


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def refuse_adapter(path: str) -> None:
    """Refuse an adapter next to the model, or instead of it: Transformers would follow it."""
    from transformers.utils import find_adapter_config_file

    if find_adapter_config_file(path) is not None:
        raise ModelError(
            f"model.path={path} holds an adapter (adapter_config.json), which would be loaded over "
            "whatever base it names; merge it into its base, or remove the file"
        )


def stored_shapes(config: ModelSection) -> Iterator[tuple[Path, dict[str, list[int]]]]:
    """Shapes of the tensors by name, for each file of weights in the folder. Raises ModelError:
    there are none, or one is damaged or not what was written."""
    folder = Path(config.path)
    check_weights(config.path)
    files = sorted(folder.glob("*.safetensors"))
    for file in files:
        try:
            yield file, header_shapes(file)
        except (SafetensorError, OSError) as error:
            raise ModelError(
                f"{file} is damaged ({one_line(error)[:300]}); copy or download it again"
            ) from error
    if files:
        return
    raise ModelError(
        f"model.path={folder} holds no weights: no .safetensors file; save the model as safetensors"
    )


def header_shapes(file: Path) -> dict[str, list[int]]:
    """Shapes by name, from the header of a safetensors file."""
    with safe_open(regular(file), framework="pt") as opened:
        return {name: opened.get_slice(name).get_shape() for name in list(opened.keys())}


def names_of(model: Any) -> Callable[[str], str]:
    """The model's name of a tensor, by the name in a checkpoint, which may be of an earlier version
    of Transformers."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings = [entry for entry in table if isinstance(entry, WeightRenaming)]
    return lambda name: rename_source_key(name, renamings, [])[0]


def check_json(file: Path) -> None:
    """Check that the JSON is whole, of bounded size and depth, and that an index of weights names
    only files of this folder. Raises ModelError: one line with the file."""
    try:
        # Not orjson: there are configs with Infinity.
        content = read_bounded(file, MAX_JSON_BYTES)
        value = json.loads(content)
        check_nesting(value)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{file} cannot be read ({one_line(error)[:200]}); copy or download it again"
        ) from error
    if isinstance(value, dict) and file.name.endswith(".index.json"):
        weights = value.get("weight_map")
        named = set(map(str, weights.values())) if isinstance(weights, dict) else {"?"}
        for other in sorted(named):
            if Path(other).name != other or not (file.parent / other).is_file():
                raise ModelError(
                    f"{file} names the weights {other[:100]!r}, which are not in that folder; copy "
                    "or download the model again"
                )
    if isinstance(value, dict) and file.name == "config.json":
        _check_counts(file, value)


def _check_counts(file: Path, value: dict[str, Any]) -> None:
    """Check that a config has no more layers, experts or labels than any model (Transformers makes
    an object for each, even without storage), and no negative size, as -1 in a shape fits
    anything."""
    for name, number in value.items():
        if isinstance(number, dict):
            _check_counts(file, number)
        elif not isinstance(number, int):
            continue
        elif COUNT.search(name) and number > MAX_LAYERS:
            raise ModelError(
                f"{file} has {name[:60]}={str(number)[:30]}, more than any model's {MAX_LAYERS}; "
                "fix it"
            )
        elif SIZE.search(name) and number < 0:
            raise ModelError(f"{file} has {name[:60]}={str(number)[:30]}, which is below 0; fix it")


@cache
def say(warning: str) -> None:
    """Log a warning, once in each process."""
    logger.warning("%s", warning)
