"""What a run left behind, for those who come after it: its config, its adapter, what tells
its weights."""

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
    """The folder of a run's adapter as far as it has come: the final one, or that of the newest
    checkpoint while the run has not ended, or goes on from its end.

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
    """How many steps an adapter that ``find_adapter`` gave has learned; None if nothing tells."""
    return finished_steps(run) if adapter == run / "adapter" else int(_step_of(adapter))


def finished_steps(run: Path) -> int | None:
    """At which step the run ended, the last time that it did; None if it never did."""
    try:
        steps = read_object(run / "summary.json").get("steps")
    except (OSError, ValueError):
        return None
    return steps if type(steps) is int else None


def weights_digest(model: Path, adapter: Path | None) -> str:
    """Of sizes, and of the beginning of each file; of a Hub id, of its name alone."""
    digest = hashlib.sha256(str(model).encode())
    folders = [folder for folder in (model, adapter) if folder is not None and folder.is_dir()]
    for file in (file for folder in folders for file in sorted(folder.glob("*.safetensors"))):
        with open_regular(file) as opened:
            digest.update(f"{file.name} {file.stat().st_size}".encode() + opened.read(2**22))
    return digest.hexdigest()[:16]


def _step_of(checkpoint: Path) -> float:
    """Between two optimizer steps of a step it is no whole number."""
    return float(checkpoint.name.removeprefix("step-"))
