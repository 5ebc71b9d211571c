"""The state of a run on disk: adapter, optimizer, step, identity. Written beside and renamed; the
last n are kept.

    <run>/checkpoints/step-00000012/{adapter_model.safetensors, adapter_config.json,
    optimizer.safetensors, state.json}

All randomness of a run is a function of its seed and the step, so there is no generator state to
keep.
"""

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
from reason_llm.errors import CheckpointError, WriteError
from reason_llm.files import sync, write_atomically
from reason_llm.model import adapters
from reason_llm.train import optim

FORMAT = 1


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
    folders = sorted(_folder(run_folder).glob("step-*"))
    if not folders:
        return RunState(RunIdentity(uuid.uuid4().hex[:12], name, config), step=0, folder=None)
    newest = folders[-1]
    try:
        value = orjson.loads((newest / "state.json").read_bytes())
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}, this version reads {FORMAT}")
        run, step = RunIdentity(**value["run"]), int(value["step"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{newest} is damaged ({error!r}); remove it to go on from the one before"
        ) from error
    changed = config_file.differences(run.config, config)
    if changed:
        raise CheckpointError(
            f"{run_folder} holds a run with another config ({'; '.join(changed)}); set that back, "
            f"give this run a "
            "--run.name of its own, or start with --run.resume never, which moves the old run aside"
        )
    return RunState(RunIdentity(run.id, name, config), step, newest)


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
    target = _folder(run_folder) / f"step-{state.step:08d}"
    beside = target.with_name(f".writing-{target.name}")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        adapters.save(policy, beside)
        save_file(optim.state_tensors(optimizer), str(beside / "optimizer.safetensors"))
        value = {"format": FORMAT, "step": state.step, "run": asdict(state.run)}
        write_atomically(beside / "state.json", orjson.dumps(value, option=orjson.OPT_INDENT_2))
        for file in beside.iterdir():
            sync(file)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync(target.parent)
        for old in sorted(_folder(run_folder).glob("step-*"))[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        raise WriteError(
            f"{target} cannot be written ({error.strerror or error}); free or choose another place"
        ) from error
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


def _folder(run_folder: Path) -> Path:
    return run_folder / "checkpoints"
