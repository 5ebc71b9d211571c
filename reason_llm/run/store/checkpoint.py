"""Checkpoints of a run: adapter, optimizer, step, identity. A thread writes each one next to its
place and renames it; the last n are kept.

    <run>/checkpoints/step-00000012/{adapter_model.safetensors, adapter_config.json,
    optimizer.safetensors, state.json, digests.json}

With ``model.train: full`` there is a whole model in the adapter's place, and the run waits until it
is written, so as not to copy it. With ``run.max_staleness`` the adapters of earlier steps that
steps to come are sampled by are there, too, as ``version-00000011.safetensors``.

All randomness of a run is a function of its seed and the step, so there is no generator state to
keep, and nothing is saved inside a step: it is learned again from its rollouts, to the same bits.
"""

import hashlib
import logging
import os
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from reason_llm.config import file as config_file
from reason_llm.errors import CheckpointError, ConfigError, one_line
from reason_llm.files import (
    MIB,
    check_digests,
    read_object,
    recorded_digest,
    regular,
    replacing_folder,
)
from reason_llm.model import Model, Role, adapters, score_head, weights
from reason_llm.rollout import Count, Text, record_from_json
from reason_llm.run.store.best import Best, ends_early
from reason_llm.run.store.document import RunIdentity
from reason_llm.run.store.folder import CONFIG, listing, step_of
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.train import optim

FORMAT = 2
MAX_STATE_BYTES = 64 * MIB
STATE = "state.json"
OPTIMIZER = "optimizer.safetensors"
MAX_SHARE = 1 / 20
"""Part of a run's time in which checkpoints are written, with ``run.save_every: auto``."""
FREE_SECONDS = 0.5
"""Checkpoints that take less time are written after each step."""
WRITTEN = (
    *("step", "drawn", "micro_batch_tokens", "best", "metrics_sha256"),
    "run",
)
"""Members of a state after the format, in their order in the file."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunState:
    """State of a run in which ``step`` steps are learned."""

    run: RunIdentity
    step: Count
    folder: Path | None
    """The checkpoint it was read from; None for a run that has not begun."""
    drawn: Count = 0
    """Prompts taken from the order so far, those of dropped groups included."""
    micro_batch_tokens: Count | None = None
    """The micro-batch size after out of memory; None while the planned size holds."""
    best: Best | None = None
    """The best evaluation so far; None before any."""
    metrics_sha256: Text | None = None
    """SHA-256 of metrics.jsonl; None for a run that has not begun."""
    changed: tuple[str, ...] = ()
    """Differences of the run's config from the one in its checkpoint, as it starts."""


def find(run_folder: Path, name: str, config: dict[str, Any]) -> RunState:
    """Newest whole state of the run in ``run_folder``, or the beginning of a new run. Writes
    nothing; a damaged checkpoint is skipped with a warning.

    Raises:
        CheckpointError: the run there has another config, or none of its states is whole.
    """
    folders = listing(run_folder)
    if not folders and (run_folder / "summary.json").exists():
        raise CheckpointError(
            f"{run_folder} holds a finished run without its checkpoints; give this run "
            "another --run.name, or start with --run.resume never, which moves the old run "
            "aside"
        )
    if not folders:
        return fresh(name, config)
    state = _newest_whole(folders)
    found = config_file.changes(state.run.config, config)
    if found.refused:
        raise CheckpointError(
            f"{run_folder} holds a run with another config ({'; '.join(found.refused)}); set that "
            "back, give this run another --run.name, or start with --run.resume never, which moves "
            "the old run aside"
        )
    is_early = ends_early(state.best, config["eval"]["patience"])
    if state.step < config["run"]["steps"] and not is_early:
        warn_of_changes(state.run.config, config)
    changed = tuple(sorted(found.warned + found.free))
    return replace(state, run=RunIdentity(state.run.id, name, config), changed=changed)


def warn_of_changes(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Warn of changes of the config that make a run another experiment, if none is refused."""
    changes = config_file.changes(old, new)
    for line in [] if changes.refused else changes.warned:
        logger.warning("the run resumes with %s: from here on it is another experiment", line)


def begin_from(path: Path, name: str, config: dict[str, Any]) -> RunState:
    """Beginning of a new run with the adapter and the optimizer of a checkpoint.

    Its id follows from the checkpoint's run and step and from ``name``, so that the run can be told
    from others when it resumes.

    Args:
        path: a checkpoint's folder, or a run's, whose newest whole checkpoint is meant.

    Raises:
        CheckpointError: there is none, or its adapter or optimizer is of another kind.
    """
    folders = listing(path) if os.path.lexists(path) else []
    if os.path.lexists(path / STATE):
        folders = [path.resolve()]
    if not folders:
        raise CheckpointError(
            f"run.resume={path} is neither auto nor never, and no checkpoint's folder; name one, "
            "such as runs/quickstart/checkpoints/step-00000060"
        )
    source = _newest_whole(folders)
    # The adapter and the moments mean something under these options alone; others may change.
    same = (
        "stage",
        "model.path",
        "model.weights_sha256",
        "model.train",
        "model.adapter.",
        "train.optimizer",
    )
    changed = [
        line
        for line in config_file.changes(source.run.config, config).refused
        if line.startswith(same) and not line.startswith("train.optimizer_steps")
    ]
    if changed:
        raise CheckpointError(
            f"run.resume={path} is of another kind ({'; '.join(changed)}); set that back, or name "
            "its adapter as model.start, from which a run of any kind can begin"
        )
    if source.step >= config["run"]["steps"]:
        raise CheckpointError(
            f"run.resume={path} has learned {source.step} steps and run.steps="
            f"{config['run']['steps']}: none is left; raise run.steps"
        )
    origin = f"{source.run.id}/{source.step}/{name}".encode()
    run = RunIdentity(hashlib.sha256(origin).hexdigest()[:12], name, config)
    return replace(source, run=run, micro_batch_tokens=None, best=None, metrics_sha256=None)


def needed_from(run_folder: Path) -> int:
    """First step whose rollouts may be needed again: that of the checkpoint before the newest,
    which a run continues from if the newest is damaged."""
    return min(map(step_of, listing(run_folder)[-2:]), default=0)


def date_of(run_folder: Path) -> str | None:
    """``data.date`` of a run by its config, or else by its newest readable checkpoint, which may be
    named itself; None where its templates read no date, or without a readable record of the run,
    whose reader reports that."""
    with suppress(ConfigError, OSError):
        if (run_folder / CONFIG).is_file():
            return date_in(config_file.read_yaml(run_folder / CONFIG))
    with suppress(OSError):  # a name that is too long
        for folder in (*reversed(listing(run_folder)), run_folder):
            with suppress(OSError, ValueError, LookupError, TypeError):
                return date_in(read_object(folder / STATE, MAX_STATE_BYTES)["run"]["config"])
    return None


def date_in(config: Mapping[str, Any]) -> str | None:
    """``data.date`` in a dumped config."""
    section = config.get("data")
    date = section.get("date") if isinstance(section, Mapping) else None
    return date if isinstance(date, str) else None


def read(folder: Path) -> RunState:
    """State in one checkpoint; raises CheckpointError where a file is missing or is not what was
    written."""
    try:
        if folder.is_symlink():
            raise ValueError("it is a link")
        names = check_digests(folder).keys()
        if STATE not in names:
            raise ValueError(f"{STATE} is missing")
        value = read_object(folder / STATE, MAX_STATE_BYTES)
        if value["format"] != FORMAT:
            raise ValueError(f"format {value['format']!r}, this version reads {FORMAT}")
        state = record_from_json(RunState, value | {"folder": folder, "changed": ()})
        if missing := {weights.FILES[state.run.config["model"]["train"]], OPTIMIZER} - names:
            raise ValueError(f"{min(missing)} is missing")
        return state
    except (OSError, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} is damaged ({error!s:.300}); remove it") from error


def _newest_whole(folders: list[Path]) -> RunState:
    for folder in reversed(folders):
        try:
            return read(folder)
        except CheckpointError as error:
            logger.warning("%s; it is skipped", error)
    raise CheckpointError(
        f"{folders[-1].parent} holds no checkpoint that is whole; restore one, or start with "
        "--run.resume never, which moves the old run aside"
    )


def fresh(name: str, config: dict[str, Any]) -> RunState:
    """Beginning of a new run."""
    return RunState(RunIdentity(uuid.uuid4().hex[:12], name, config), step=0, folder=None)


def save(
    run_folder: Path,
    state: RunState,
    model: Model,
    optimizers: Mapping[Role, torch.optim.Optimizer],
    keep: int,
    writer: BackgroundWriter,
    extra_files: Mapping[str, Mapping[str, Tensor] | Path] = {},
) -> RunState:
    """Save ``state`` with the current adapters, heads and optimizers, whole or not at all, and
    return the state with its folder. ``writer.wait()`` raises WriteError where it could not be.

    Args:
        optimizers: by the role whose adapter each moves; the policy's among them.
        keep: how many checkpoints are kept.
        extra_files: further files by name: tensors, or an earlier checkpoint's file, which is then
            a file of both.
    """
    target = run_folder / "checkpoints" / f"step-{state.step:08d}"
    policy = model.snapshot()
    files: dict[str, Mapping[str, Tensor] | Path] = {}
    for role, optimizer in optimizers.items():
        state_of = optim.state_tensors(optimizer)
        if not model.is_full:  # a copy in host memory, which later optimizer steps do not change
            state_of = {
                key: value.detach().to("cpu", copy=True).contiguous()
                for key, value in state_of.items()
            }
        files[_file(role, OPTIMIZER)] = state_of
        if role != "policy":
            files[_file(role, adapters.WEIGHTS)] = model.adapter_of(role)
        if role in model.heads:
            files[_file(role, score_head.FILE)] = score_head.state(model.heads[role])
    files |= extra_files

    def write() -> None:
        """Write the folder as a whole, then delete the checkpoints beyond ``keep``; on the writer's
        thread."""
        for half in target.parent.glob(".step-*.writing"):  # of a run that was killed
            shutil.rmtree(half, ignore_errors=True)
        known: dict[str, str] = {}
        with replacing_folder(target, known=known) as folder:
            policy.write(folder)
            for name, content in files.items():
                if isinstance(content, Path):
                    _link(content, folder / name)
                    with suppress(OSError, LookupError):  # else it is read
                        known[name] = recorded_digest(content)
                else:
                    save_file(dict(content), str(folder / name), metadata={"format": "pt"})
            value = {"format": FORMAT} | {name: getattr(state, name) for name in WRITTEN}
            (folder / STATE).write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2))
        for old in listing(run_folder)[:-keep]:
            if old != target and not old.is_symlink():
                shutil.rmtree(old, ignore_errors=True)

    writer.submit(write)
    if model.is_full:
        writer.wait()
    return replace(state, folder=target)


def _link(file: Path, name: Path) -> None:
    """Give a file a second name, or a copy where the file system has no hard links."""
    try:
        os.link(regular(file), name)
    except OSError:
        shutil.copyfile(regular(file), name)


class Pace:
    """Time between checkpoints with ``run.save_every: auto``. The writer's thread calls ``begin``
    before it writes one, and ``end`` after."""

    def __init__(self) -> None:
        self._began = self._seconds = 0.0
        self._shortest: float | None = None

    def begin(self) -> None:
        """Note that a checkpoint is written from now on."""
        self._began = time.perf_counter()

    def end(self) -> None:
        """Note that it is written."""
        self._seconds = time.perf_counter() - self._began
        self._shortest = min(self._seconds, self._shortest or self._seconds)

    @property
    def is_due(self) -> bool:
        """Whether another one leaves their share of the time within ``MAX_SHARE``, or costs less
        than ``FREE_SECONDS``, a single slow one aside."""
        if self._shortest is None or self._shortest < FREE_SECONDS:
            return True
        return self._seconds <= MAX_SHARE * (time.perf_counter() - self._began)


def restore(
    state: RunState, model: Model, optimizers: Mapping[Role, torch.optim.Optimizer]
) -> None:
    """Load the checkpoint's values into the adapters, the heads and the optimizers; nothing for a
    run that has not begun.

    Raises:
        CheckpointError: its files are damaged or of another adapter.
    """
    if (folder := state.folder) is None:
        return
    # All files that a checkpoint names exist, because it was checked when it was read.
    if missing := [role for role in optimizers if not (folder / _file(role, OPTIMIZER)).exists()]:
        raise CheckpointError(
            f"{folder} has no {missing[0]}: it is of a run without one; name its adapter as "
            "model.start"
        )
    with _reporting_damage(folder):
        for role, optimizer in optimizers.items():
            model.load_adapter(role, load_file(regular(folder / _file(role, model.weights_file))))
            if role in model.heads:
                head = load_file(regular(folder / _file(role, score_head.FILE)))
                model.heads[role].load_state_dict(head)
            moments = load_file(regular(folder / _file(role, OPTIMIZER)))
            optim.load_state_tensors(optimizer, moments)


def earlier_adapters(state: RunState, max_versions: int) -> dict[int, dict[str, Tensor]]:
    """Adapters of up to this many steps before the checkpoint's, by learned steps; raises
    CheckpointError."""
    if (folder := state.folder) is None:
        return {}
    versions = range(max(0, state.step - max_versions), state.step)
    files = {version: folder / version_file(version) for version in versions}
    with _reporting_damage(folder):
        return {key: load_file(regular(file)) for key, file in files.items() if file.exists()}


@contextmanager
def _reporting_damage(folder: Path) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise  # a ValueError, too
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{folder} is damaged ({one_line(error)}); remove it to resume from the one before"
        ) from error


def version_file(version: int) -> str:
    """Name of the file with the adapter after ``version`` learned steps."""
    return f"version-{version:08d}.safetensors"


def _file(role: Role, name: str) -> str:
    """Name of a role's file in a checkpoint; the policy's have PEFT's own names."""
    return name if role == "policy" else f"{role}.{name}"
