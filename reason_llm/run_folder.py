"""What a run left behind, for those who come after it: its config, its adapter, its name."""

from pathlib import Path
from typing import Any

from reason_llm import config_file
from reason_llm.config import Config
from reason_llm.errors import CheckpointError

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
    """The folder of a run's adapter: the final one, or that of the newest checkpoint while there is
    none.

    Raises:
        CheckpointError: the run has neither.
    """
    if is_adapter(run / "adapter"):
        return run / "adapter"
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if not checkpoints or not is_adapter(checkpoints[-1]):
        raise CheckpointError(
            f"{run} holds neither adapter/ nor a checkpoint; let the run take a step first"
        )
    return checkpoints[-1]
