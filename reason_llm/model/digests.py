"""Digests of what a run reads: weights, adapters, and their configs."""

import hashlib
from contextlib import suppress
from pathlib import Path

import orjson

from reason_llm.errors import ModelError, one_line
from reason_llm.files import MIB, cached, check_digests, large_digest, read_object

ADAPTER_CONFIG = "adapter_config.json"
NOT_OF_THE_VALUES = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    "task_type",
}
"""Members of an adapter's config that do not change what it computes."""


def weights_digest(model: str, adapter: Path | None = None) -> str:
    """Digest of all weights and of the config of a model, and of an adapter over it; of a Hub id
    that of the commit in the cache; raises ModelError."""
    lines = []
    if not Path(model).is_dir():
        config = cached(model, "config.json")
        lines = [model, config.parent.name if config else ""]
    folders = [folder for folder in (Path(model), adapter) if folder is not None]
    lines += [folder_digest(folder, "*.safetensors", "*.bin", "config.json") for folder in folders]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def folder_digest(folder: Path, *patterns: str) -> str:
    """Digest of the files that match, and of an adapter's config without options that do not affect
    its values, such as the order of layer names. Raises ModelError."""
    files = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    config = folder / ADAPTER_CONFIG
    read, known = {file.name for file in (*files, config)}, dict[str, str]()
    try:
        with suppress(ValueError):  # not as written: another digest; whoever loads it refuses it
            known = check_digests(folder, read.__contains__)
        digest = large_digest(files, known)
        if config.is_file():
            value = read_object(config, MIB)
            options = {
                name: sorted(option, key=repr) if isinstance(option, list) else option
                for name, option in value.items()
                if name not in NOT_OF_THE_VALUES
            }
            content = orjson.dumps([digest, options], option=orjson.OPT_SORT_KEYS)
            digest = hashlib.sha256(content).hexdigest()
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} has a file that cannot be read ({one_line(error)[:200]}); restore it"
        ) from error
    return digest
