"""The state of a run on disk: adapter, optimizer, step, identity. Written beside and renamed; the
last n are kept.

    <run>/checkpoints/step-00000012/{adapter_model.safetensors, adapter_config.json,
    optimizer.safetensors, state.json}

All randomness of a run is a function of its seed and the step, so there is no generator state to
keep.
"""

import logging
import shutil
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import torch
from peft import PeftModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from reason_llm import config_file
from reason_llm.buffer import RunIdentity
from reason_llm.errors import CheckpointError
from reason_llm.files import replacing_folder
from reason_llm.model import adapters
from reason_llm.train import optim

FORMAT = 1

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands: ``step`` steps are learned."""

    run: RunIdentity
    step: int
    folder: Path | None
    """The checkpoint it was read from; None for a run that has not begun."""


def find(run_folder: Path, name: str, config: dict[str, Any]) -> RunState:
    """The newest state of the run in ``run_folder``, or the beginning of a new one. Writes nothing.

    Raises:
        CheckpointError: the run there has another config, or its state cannot be read.
    """
    folders = sorted(_checkpoints(run_folder).glob("step-*"))
    if not folders and (run_folder / "summary.json").exists():
        raise CheckpointError(
            f"{run_folder} holds a finished run without its checkpoints; give this run "
            "a --run.name of its own, or start with --run.resume never, which moves the old run "
            "aside"
        )
    if not folders:
        return fresh(name, config)
    newest = folders[-1]
    try:
        value = orjson.loads((newest / "state.json").read_bytes())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}, this version reads {FORMAT}")
        run, step = RunIdentity(**value["run"]), int(value["step"])
        changed = config_file.differences(run.config, config)
    except (OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{newest} is damaged ({error!r}); remove it to go on from the one before"
        ) from error
    if changed:
        raise CheckpointError(
            f"{run_folder} holds a run with another config ({'; '.join(changed)}); set that back, "
            "give this run a --run.name of its own, or start with --run.resume never, which moves "
            "the old run aside"
        )
    old_steps, new_steps = run.config["run"]["steps"], config["run"]["steps"]
    if old_steps != new_steps and config["train"]["schedule"] != "constant":
        logger.warning(
            "run.steps %s -> %s stretches the %s schedule: the learning rate goes on from there",
            *(old_steps, new_steps, config["train"]["schedule"]),
        )
    return RunState(RunIdentity(run.id, name, config), step, newest)


def fresh(name: str, config: dict[str, Any]) -> RunState:
    """The beginning of a new run."""
    return RunState(RunIdentity(uuid.uuid4().hex[:12], name, config), step=0, folder=None)


def save(
    run_folder: Path,
    state: RunState,
    policy: PeftModel,
    optimizer: torch.optim.Optimizer,
    keep: int,
) -> RunState:
    """Write ``state`` with the adapter and the optimizer; whole or not at all. The state, with its
    folder.

    Raises:
        WriteError: the disk is full or read-only; older checkpoints are as they were.
    """
    target = _checkpoints(run_folder) / f"step-{state.step:08d}"
    with replacing_folder(target) as folder:
        adapters.save(policy, folder)
        save_file(optim.state_tensors(optimizer), str(folder / "optimizer.safetensors"))
        value = {"format": FORMAT, "step": state.step, "run": asdict(state.run)}
        (folder / "state.json").write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
    for old in sorted(_checkpoints(run_folder).glob("step-*"))[:-keep]:
        shutil.rmtree(old)
    return RunState(state.run, state.step, target)


def restore(state: RunState, policy: PeftModel, optimizer: torch.optim.Optimizer) -> None:
    """Put the checkpoint's values into the adapter and the optimizer; nothing for a run that has
    not begun.

    Raises:
        CheckpointError: its files are damaged or of another adapter.
    """
    if state.folder is None:
        return
    try:
        adapters.load(policy, state.folder)
        optim.load_state_tensors(optimizer, load_file(str(state.folder / "optimizer.safetensors")))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{state.folder} is damaged ({error}); remove it to go on from the one before"
        ) from error


def _checkpoints(run_folder: Path) -> Path:
    return run_folder / "checkpoints"
