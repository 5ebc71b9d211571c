"""Contents of a run's folder for other programs: config, adapter, number of learned steps."""

import hashlib
from pathlib import Path
from typing import Any

from reason_llm.config import Config, file as config_file
from reason_llm.errors import CheckpointError
from reason_llm.files import open_regular, read_object

CONFIG = "resolved_config.yaml"
ADAPTER_CONFIG = "adapter_config.json"


def is_run(path: Path) -> bool:
    """Whether a folder is a run's."""
    return (path / CONFIG).is_file()


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter in PEFT's form."""
    return (path / ADAPTER_CONFIG).is_file()


def read_config(run: Path, overrides: dict[str, Any] | None = None) -> Config:
    """The config of a run, with dotted ``overrides``.

    Raises:
        ConfigError: it is damaged, or an override is wrong.
    """
    return config_file.load(run / CONFIG, overrides)


def find_adapter(run: Path) -> Path:
    """Folder of a run's latest adapter: the final one, or that of the newest checkpoint while the
    run has not ended or continues from its end.

    Raises:
        CheckpointError: the run has neither.
    """
    found = sorted((run / "checkpoints").glob("step-[0-9]*"))
    newest = found[-1] if found and is_adapter(found[-1]) else None
    final = run / "adapter"
    if is_adapter(final) and (newest is None or _step_of(newest) <= (finished_steps(run) or 0)):
        return final
    if newest is None:
        raise CheckpointError(
            f"{run} holds neither adapter/ nor a checkpoint; let the run take a step first"
        )
    return newest


def learned_steps(run: Path, adapter: Path) -> int | None:
    """Number of steps that an adapter from ``find_adapter`` has learned; None if unknown."""
    return finished_steps(run) if adapter == run / "adapter" else int(_step_of(adapter))


def finished_steps(run: Path) -> int | None:
    """Step at which the run last ended; None if it never did."""
    try:
        steps = read_object(run / "summary.json").get("steps")
    except (OSError, ValueError):
        return None
    return steps if type(steps) is int else None


def weights_digest(model: Path, adapter: Path | None) -> str:
    """Digest of the sizes and the beginning of each file; for a Hub id, of its name alone."""
    digest = hashlib.sha256(str(model).encode())
    folders = [folder for folder in (model, adapter) if folder is not None and folder.is_dir()]
    for file in (file for folder in folders for file in sorted(folder.glob("*.safetensors"))):
        with open_regular(file) as opened:
            digest.update(f"{file.name} {file.stat().st_size}".encode() + opened.read(2**22))
    return digest.hexdigest()[:16]


def _step_of(checkpoint: Path) -> float:
    """Number of the checkpoint's step."""
    return float(checkpoint.name.removeprefix("step-"))
