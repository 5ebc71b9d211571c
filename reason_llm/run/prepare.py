"""Preparation of a run: everything that can be checked before a weight is read, and its locks."""

import hashlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
from transformers import PreTrainedTokenizerBase

from reason_llm.config import Config, file as config_file
from reason_llm.data import Data, load_data
from reason_llm.errors import BusyError, CheckpointError, ConfigError, RolloutBufferError
from reason_llm.files import (
    MIB,
    FileLock,
    check_writable,
    move_aside,
    read_bounded,
    write_atomically,
)
from reason_llm.model.plan import GIB, Plan, look_at
from reason_llm.run import checkpoint, environment, recovery, saved_rollouts
from reason_llm.run.archive import Archive
from reason_llm.run.buffer import Document, RolloutBuffer
from reason_llm.run.checkpoint import RunState
from reason_llm.run.metrics import MetricsLog
from reason_llm.run.watch import Watch
from reason_llm.run.writer import BackgroundWriter
from reason_llm.score import Scorer
from reason_llm.train import with_advantages, without_learner_logprobs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """A checked run that has not loaded a weight yet."""

    config: Config
    folder: Path
    state: RunState
    tokenizer: PreTrainedTokenizerBase
    data: Data
    scorer: Scorer
    plan: Plan
    archive: Archive
    checkpoints: list[Path]
    """Those that were there."""
    saved_buffers: list[Path]
    """What run.from_buffer names, step by step; empty without it."""
    saved_name: str | None
    """The run of the first of them."""
    room: tuple[int, int]
    """Longest prompt plus completion in tokens, and how many token ids the model has."""

    @property
    def is_new(self) -> bool:
        """Whether the run has no checkpoint of its own."""
        return self.state.folder not in self.checkpoints

    @contextmanager
    def held(self) -> Iterator[tuple[RolloutBuffer, BackgroundWriter]]:
        """The run's buffer, with run and buffer locked against other processes, and the thread that
        writes into the run's folder."""
        run, never = self.config.run, self.config.run.resume == "never"
        run_lock = FileLock(run.directory / f".{run.name}.lock", what=f"the run {self.folder}")
        writer = BackgroundWriter()
        buffer = RolloutBuffer(
            run.buffer, self.state.run, discard=never, settle=writer.wait, elsewhere=self._saved
        )
        with buffer, run_lock, writer:
            # Another process may have gone on since ``prepare`` looked.
            if not never and checkpoint.listing(self.folder) != self.checkpoints:
                raise BusyError(f"another process has just gone on with {self.folder}; call again")
            yield buffer, writer

    def _saved(self, step: int) -> Document | None:
        """Rollouts of this step on disk beside the buffer, with this run's advantages: those of
        run.from_buffer, or those that a killed run had learned from since its last checkpoint.

        Raises:
            RolloutBufferError: they are damaged or do not fit the model.
        """
        if self.saved_buffers:
            path = self.saved_buffers[step]
            found = saved_rollouts.read(path, self.config, *self.room)
            saved_rollouts.warn_of_another(path, found, self.saved_name)
        elif (archived := self.archive.read(step, self.state.run)) is not None:
            found = archived
        else:
            return None
        groups = with_advantages(found.groups, self.config.learned_row, self.scorer.weights)
        return replace(found, groups=without_learner_logprobs(groups))

    def begin(self, started: float) -> MetricsLog:
        """Make the first changes on disk, after all checks.

        Args:
            started: ``time.perf_counter()`` from which the first record's seconds count.
        """
        if self.config.run.resume == "never":
            if any(self.folder.glob("[!.]*")):  # more than the lock of a buffer in it
                move_aside(self.folder)
            move_aside(self.config.run.buffer)
        resolved = config_file.to_yaml(self.config).encode()
        write_atomically(self.folder / "resolved_config.yaml", resolved)
        step = 0 if self.is_new else self.state.step
        environment.record_start(self.folder, step, self.data, self.plan)
        return MetricsLog(self.folder, None if self.is_new else self.state.step, started)

    def finished(self, watch: Watch) -> dict[str, Any] | None:
        """Summary of the run if it is finished, else None; a run writes it last."""
        if self.state.step < self.config.run.steps:
            return None
        try:
            summary = orjson.loads(read_bounded(self.folder / "summary.json", 16 * MIB))
        except (OSError, orjson.JSONDecodeError):
            return None
        if not isinstance(summary, dict) or summary.get("steps") != self.state.step:
            return None
        watch.line(
            f"{self.folder} is finished at step {self.state.step}: raise --run.steps to go on, "
            "or start afresh with --run.resume never"
        )
        return summary


def prepare(config: Config, watch: Watch) -> Job:
    """Check rewards, model, data, the run's folder and its buffer, in this order; write nothing."""
    scorer = Scorer(config.score, config.sample.max_new_tokens)
    subject = look_at(config)
    config = subject.config
    if config.data.form in ("demonstrations", "preferences"):
        raise ConfigError(
            f"data.form={config.data.form} can be checked with --data-check and not trained on "
            "yet; take rows of the form problems or prompts"
        )
    data = load_data(
        config, subject.tokenizer, subject.context_tokens, extra_columns=scorer.columns
    )
    folder = config.run.directory / str(config.run.name)
    config, saved = _with_saved_buffers(config, folder)
    room = subject.context_tokens, subject.vocabulary
    first = saved_rollouts.read(saved[0], config, *room) if saved else None
    check_writable(folder)
    check_writable(config.run.buffer.parent)
    identity = config.model_dump(mode="json")
    identity["data"]["prompts_sha256"] = _digest(data)
    if saved:  # step by step from there on: a folder may grow meanwhile, and not lose its first
        identity["run"]["first_buffer"] = saved[0].name
    state = _state(config, folder, identity)
    if config.run.resume != "never":
        found = RolloutBuffer(config.run.buffer, state.run).check()
        if found is not None and found.run.id == state.run.id:
            saved_rollouts.check_context(config.run.buffer, found, subject.context_tokens)
            saved_rollouts.check_vocabulary(config.run.buffer, found, subject.vocabulary)
    where = f"goes on after step {state.step}" if state.folder else "begins"
    watch.line(
        f"run {config.run.name} {where}: {len(data.prompts)} prompts, "
        f"{len(data.held_out_prompts)} held out, model {config.model.path}"
    )
    if first is not None:
        watch.line(
            f"learning from saved rollouts: {len(saved)} steps, the first is step {first.step} of "
            f"the run {first.run.name}"
        )
    for line in data.notes():
        watch.line(line)
    if warning := data.contamination_warning():
        logger.warning("%s", warning)
    for line in (*subject.why, *scorer.descriptions):
        watch.line(line)
    longest = max(len(each.token_ids) for each in (*data.prompts, *data.held_out_prompts))
    plan = replace(subject, config=config).plan(longest)
    archive = Archive(folder, config.run.keep_buffers, int(config.run.keep_buffers_gib * GIB))
    return Job(
        config, folder, state, subject.tokenizer, data, scorer, plan,
        archive, checkpoint.listing(folder), saved, first.run.name if first else None, room,
    )  # fmt: skip


def _with_saved_buffers(config: Config, folder: Path) -> tuple[Config, list[Path]]:
    """Config and files of run.from_buffer: the config takes as many steps as there are files, and
    leaves data/buffer.json to the runs that sample.

    Raises:
        RolloutBufferError: there is none, or starting afresh would move them away.
    """
    run = config.run
    if run.from_buffer is None:
        return config, []
    files = saved_rollouts.files(run.from_buffer)
    if run.resume == "never" and folder.resolve() in files[0].resolve().parents:
        raise RolloutBufferError(
            f"run.from_buffer={run.from_buffer} is in {folder}, which --run.resume never moves "
            "aside; give this run a --run.name of its own"
        )
    if run.steps < len(files):
        logger.warning(
            "run.steps=%d does not count: run.from_buffer=%s holds %d steps; for fewer, name a "
            "folder with fewer", run.steps, run.from_buffer, len(files),
        )  # fmt: skip
    changed = run.model_copy(update={"steps": len(files), "buffer": folder / "buffer.json"})
    return config.model_copy(update={"run": changed}), files


def _state(config: Config, folder: Path, identity: dict[str, Any]) -> RunState:
    """State of the run by ``run.resume``.

    Raises:
        CheckpointError: it cannot go on from there.
    """
    name, resume = str(config.run.name), config.run.resume
    if resume == "never":
        return checkpoint.fresh(name, identity)
    if resume == "auto":
        found = checkpoint.find(folder, name, identity)
        if found.folder is not None:
            return found
        return recovery.from_buffer(config.run.buffer, name, identity) or found
    has_begun = bool(checkpoint.listing(folder))
    try:
        begun = checkpoint.begin_from(Path(resume), name, identity)
    except CheckpointError as error:
        if has_begun:
            way_on = f"or leave --run.resume out to go on with the run in {folder}"
            raise CheckpointError(f"{error}; {way_on}") from error
        raise
    if not has_begun and not (folder / "summary.json").exists():
        return recovery.from_copy(begun, config.run.buffer) or begun
    found = checkpoint.find(folder, name, identity)
    if found.run.id != begun.run.id and not recovery.went_on_from(begun, found):
        raise CheckpointError(
            f"{folder} holds a run that did not begin from run.resume={resume}; give this run a "
            "--run.name of its own, or leave --run.resume out to go on with that run"
        )
    return found


def _digest(data: Data) -> str:
    """Digest of the prompts and gold answers, so that a run is not resumed on other data."""
    content = [
        [(prompt.token_ids, prompt.answer) for prompt in each.prompts] for each in data.training
    ]
    return hashlib.sha256(orjson.dumps(content)).hexdigest()[:16]
