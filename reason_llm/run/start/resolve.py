"""Decision of everything that a config leaves open, once, in order, before a weight is read."""

import hashlib
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from reason_llm.config import Config, file as config_file
from reason_llm.data import Data, check_ends, load_data, renderer_of
from reason_llm.errors import CheckpointError, ModelError, RolloutBufferError, one_line
from reason_llm.files import MIB, check_writable, sha256
from reason_llm.model import adapters, base_digest, end_token_ids, score_head
from reason_llm.model.plan import Subject, look_at, with_start
from reason_llm.run import reward_models
from reason_llm.run.reward_models import RewardModelFolder
from reason_llm.run.start import recovery, replica_count, saved_rollouts
from reason_llm.run.store import checkpoint, folder as run_folder
from reason_llm.run.watch import Watch
from reason_llm.sample import stop_strings
from reason_llm.score import Scorer

logger = logging.getLogger(__name__)

START = "start"
"""Folder in the run's with a copy of the adapter that the run began from."""


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run with everything decided; its config is final."""

    subject: Subject
    """Its model on this machine, and its config."""
    folder: Path
    checkpoints: list[Path]
    """Those of the run that were there."""
    replicas: int
    """0: as many as the cluster that it joins has GPUs for."""
    reward_models: list[RewardModelFolder]
    """Those that the rewards ask."""
    digests: tuple[str, str]
    """Of the base's config and of how prompts are written, which a reward model must fit."""
    saved_buffers: list[Path]
    """What run.from_buffer names, step by step; empty without it."""
    saved_run: str | None
    """Name of the run of the first of them."""
    identity: dict[str, Any]
    """The config with the digests of what it names, so that a run goes on only with the same."""

    @property
    def config(self) -> Config:
        """The config with the adapter's section, engine, backend, packing, steps and buffer."""
        return self.subject.config


def resolve(config: Config, scorer: Scorer, watch: Watch) -> tuple[ResolvedRun, Data]:
    """The run of a config, with its data; nothing is written.

    Decided are, in this order: the number of replicas, the adapter's section, engine, backend and
    packing, the steps, the buffer, the identity.

    Raises:
        ReasonError: the first problem of the model, the adapters or the data.
    """
    folder = config.run.directory / str(config.run.name)
    replicas = replica_count.count_of(config)
    start = config.model.start
    if start is not None and config.run.resume != "never" and checkpoint.listing(folder):
        start = folder / START  # the copy that the run made as it began
    if start is not None:
        with _reading_start(start, folder):
            config = with_start(config, start)
    subject = look_at(config)
    config = subject.config
    stop_strings(subject.tokenizer, tuple(config.sample.stop))
    digests = base_digest(subject.policy), renderer_of(config, subject.tokenizer).digest
    models = reward_models.check(config, *digests)
    read: dict[str, Any] = _check_adapters(subject, start, folder)
    read["score.custom_sha256"] = _custom_sources(config)  # with functions given in Python
    data = _load(subject, scorer, watch)
    config, saved = _with_steps_and_buffer(config, data, folder, watch)
    subject, saved_run = replace(subject, config=config), None
    if saved:
        first = saved_rollouts.read(saved[0], subject)
        saved_run = first.run.name
        watch.line(
            f"learning from saved rollouts: {len(saved)} steps, the first is step {first.step} of "
            f"the run {saved_run}"
        )
    check_writable(folder)
    return ResolvedRun(
        subject=subject,
        folder=folder,
        checkpoints=checkpoint.listing(folder),
        replicas=replicas,
        reward_models=models,
        digests=digests,
        saved_buffers=saved,
        saved_run=saved_run,
        identity=_identity(config, data, models, saved, read),
    ), data


@contextmanager
def _reading_start(start: Path, folder: Path) -> Iterator[None]:
    """Context in which the run's own copy of ``model.start`` is told apart from another adapter.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        yield
    except ModelError as error:
        if start != folder / START:
            raise
        raise CheckpointError(
            f"{start}, the run's copy of model.start, is damaged ({one_line(error)[:200]}); "
            "restore it, or start with --run.resume never, which moves the run aside"
        ) from error


def _check_adapters(subject: Subject, start: Path | None, folder: Path) -> dict[str, str]:
    """Digests of the adapters whose values count throughout the run, by their names in its
    identity. What only its beginning reads is checked all the same.

    Raises:
        ModelError: one of them is damaged or does not fit the model.
        CheckpointError: the run's own copy is.
    """
    config, policy, digests = subject.config, subject.policy, {}
    path = config.model.path
    if start is not None:
        with _reading_start(start, folder):
            adapters.check_fits(policy, start, path)
        if config.samples and run_folder.conditioning_of(start) is not None:
            logger.warning(
                "model.start=%s learned from prompts with a score (sft.condition); this run asks "
                "without one", config.model.start,
            )  # fmt: skip
        digests["model.start_sha256"] = sha256(start / adapters.WEIGHTS, adapters.MOST_BYTES)
    if (teacher := config.teacher.adapter) is not None:
        adapters.check_over(policy, teacher, path)
        digests["teacher.adapter_sha256"] = sha256(teacher / adapters.WEIGHTS, adapters.MOST_BYTES)
    if (critic := config.critic.start) is not None:
        adapters.check_over(policy, critic, path)
        score_head.check(critic, policy.get_base_model().get_output_embeddings().weight.shape[1])
    return digests


def _load(subject: Subject, scorer: Scorer, watch: Watch) -> Data:
    """The run's data. Rows to learn from are checked for their end tokens."""
    config, tokenizer, context = subject.config, subject.tokenizer, subject.context_tokens
    ends = end_token_ids(config.model.path, tokenizer)
    data = load_data(config, tokenizer, context, extra_columns=scorer.columns, end_token_ids=ends)
    if not config.samples:
        for line in check_ends(data.imitated, ends, tokenizer):
            watch.line(line)
    return data


def _with_steps_and_buffer(
    config: Config, data: Data, folder: Path, watch: Watch
) -> tuple[Config, list[Path]]:
    """Config in which ``run.steps`` says what run.from_buffer or run.epochs asks for and
    ``run.buffer`` is a path, and the files of run.from_buffer.

    Raises:
        ConfigError: another option contradicts so many steps.
        RolloutBufferError: there are no such files, or starting afresh would move them away.
    """
    run = config.run
    if run.from_buffer is not None:
        saved = _saved_buffers(config, folder)
        place, steps = f"run.from_buffer={run.from_buffer}", len(saved)
        buffer = folder / "buffer.json"  # data/buffer.json is for the runs that sample
    elif run.epochs is not None:
        total = sum(data.sizes)
        size = config.sample.prompts_per_step if config.samples else config.train.rows_per_step
        place, steps = f"run.epochs={run.epochs:g}", math.ceil(run.epochs * total / size)
        watch.line(f"{place} of {total} makes run.steps={steps}")
        saved, buffer = [], _buffer(config)
    else:
        return config.with_options({"run.buffer": _buffer(config)}), []
    decided = {"run.steps": steps, "run.epochs": None, "run.buffer": str(buffer)}
    return config_file.build(config.model_dump(mode="json"), Path(place), decided), saved


def _buffer(config: Config) -> Path:
    """Path of the run's buffer: where it is left out, data/buffer.json, or a file of the run's own
    beside it, while that holds rollouts of another unfinished run."""
    path, name = config.run.buffer_path, config.run.name
    if config.run.buffer is None and config.samples:
        own = path.with_name(f"{path.stem}.{name}{path.suffix}")
        holder = recovery.unfinished_run(path)
        if holder != name and (holder is not None or os.path.lexists(own)):
            return own
    return path


def _saved_buffers(config: Config, folder: Path) -> list[Path]:
    """Files of run.from_buffer, one for each step."""
    run = config.run
    assert run.from_buffer is not None
    files = saved_rollouts.files(run.from_buffer)
    if run.resume == "never" and folder.resolve() in files[0].resolve().parents:
        raise RolloutBufferError(
            f"run.from_buffer={run.from_buffer} is in {folder}, which --run.resume never moves "
            "aside; give this run a --run.name of its own"
        )
    if run.steps < len(files) and run.epochs is None:
        logger.warning(
            "run.steps=%d does not count: run.from_buffer=%s holds %d steps; for fewer, name a "
            "folder with fewer", run.steps, run.from_buffer, len(files),
        )  # fmt: skip
    return files


def _identity(
    config: Config,
    data: Data,
    models: Sequence[RewardModelFolder],
    saved: Sequence[Path],
    read: Mapping[str, Any],
) -> dict[str, Any]:
    prompts = [
        [
            [(prompt.token_ids, prompt.answer) for prompt in each.prompts],
            [(row.ids, sum(row.trained), row.value) for row in each.rows],
        ]
        for each in data.training
    ]
    digests: dict[str, Any] = {
        "model.weights_sha256": run_folder.weights_digest(config.model.path),
        **read,
        "data.prompts_sha256": _sha256(prompts),
        "score.reward_models_sha256": {each.key: each.digest for each in models},
    }
    if any(prompt.extra for prompt in data.prompts):
        columns = [[prompt.extra for prompt in each.prompts] for each in data.training]
        digests["data.columns_sha256"] = _sha256(columns)
    if saved:  # step by step from there on: a folder may grow meanwhile, and not lose its first
        digests["run.first_buffer"] = saved[0].name
    identity = config.model_dump(mode="json")
    for key, digest in digests.items():
        section, name = key.split(".")
        if digest:
            identity[section][name] = digest
    return identity


def _custom_sources(config: Config) -> dict[str, str]:
    """Digests of the files of custom rewards and of the sources of functions that were given in
    Python, by the reward's name."""
    digests = {}
    for each in config.score.rewards:
        place = Path(str(each.custom).rpartition(":")[0])
        if place.suffix == ".py" and place.is_file():
            digests[each.key] = sha256(place, MIB)[:16]
        elif each.source_sha256 is not None:
            digests[each.key] = each.source_sha256
    return digests


def _sha256(content: Any) -> str:
    return hashlib.sha256(orjson.dumps(content)).hexdigest()[:16]
