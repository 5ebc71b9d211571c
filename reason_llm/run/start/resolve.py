"""Decision of everything that a config leaves open, once, in order, before a weight is read."""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from reason_llm.config import Config, file as config_file
from reason_llm.data import (
    Data,
    Renderer,
    load_kept,
    own_sources,
    player_of,
    renderer_of,
)
from reason_llm.errors import RolloutBufferError
from reason_llm.files import check_writable
from reason_llm.model import (
    adapters,
    base_digest,
    digests as model_digests,
    end_token_ids,
    folder as model_folder,
)
from reason_llm.model.plan import Subject, look_at, with_start
from reason_llm.readers import Base, Reader, RewardReader, open_readers, reference
from reason_llm.run.start import saved_rollouts
from reason_llm.run.start.dates import with_date
from reason_llm.run.start.locks import buffer_path
from reason_llm.run.start.processes import Processes, processes_of
from reason_llm.run.store import checkpoint, folder as run_folder
from reason_llm.run.watch import Watch
from reason_llm.sample import Episodes, episodes_of, stop_strings
from reason_llm.score import Scorer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedRun:
    """A run with everything decided; its config is final."""

    subject: Subject
    """The model on this machine, and the config."""
    folder: Path
    checkpoints: list[Path]
    """Checkpoints of the run at its start."""
    processes: Processes
    """Those that sample and learn it."""
    readers: list[Reader]
    """The models other than the policy that read the rollouts."""
    episodes: Episodes
    """The form of its rollouts: of one answer or of several turns."""
    digests: tuple[str, str]
    """Digests of the base's config and of the prompts' form, which a reward model must match."""
    saved_buffers: list[Path]
    """The buffers of run.from_buffer, one for each step; empty without it."""
    saved_run: str | None
    """Name of the run that sampled the first of them."""
    identity: dict[str, Any]
    """The config with the digests of what it names, so that a run resumes only with the same."""

    @property
    def config(self) -> Config:
        """The config with the adapter's section, engine, backend, packing, steps and buffer."""
        return self.subject.config

    @property
    def reward_readers(self) -> list[RewardReader]:
        """The models that pay."""
        return [reader for reader in self.readers if isinstance(reader, RewardReader)]


def resolve(config: Config, scorer: Scorer, watch: Watch) -> tuple[ResolvedRun, Data]:
    """The run of a config, with its data; nothing is written."""
    folder = config.run.directory / str(config.run.name)
    processes = processes_of(config)
    start = config.model.start
    others = config.other_adapters
    if others and (config.run.resume == "never" or not checkpoint.listing(folder)):
        for option, adapter in others.items():
            run_folder.check_exists(option, adapter)
            run_folder.check_ended(option, adapter)
    elif start is not None:
        start = folder / reference.START  # the copy that the run made at its start
    if start is not None:
        config = with_start(config, start)
    subject = look_at(config)
    renderer = renderer_of(subject.config, subject.tokenizer)
    buffer = buffer_path(subject.config)
    if buffer != config.run.buffer_path and config.run.from_buffer is None:
        watch.line(f"{config.run.buffer_path} is another run's: rollouts are saved in {buffer}")
    config = with_date(subject.config, renderer, buffer)
    if config.data.date is not None:
        watch.line(f"chat templates read the date {config.data.date}, on later days, too")
    subject, renderer = replace(subject, config=config), renderer.on(config.data.date)
    digests = base_digest(subject.policy), renderer.digest
    readers = open_readers(config, subject, Base(*digests))
    for reader in readers:
        if (most := reader.context_tokens) is not None:
            subject = replace(subject, context_tokens=min(subject.context_tokens, most))
    stop_strings(subject.tokenizer, tuple(config.sample.stop))
    episodes = episodes_of(config, renderer, subject.context_tokens)
    if start is not None:
        adapters.check_fits(subject.policy, start, subject.config.model.path)
    data = _load(subject, scorer, watch)
    if data.attachments is not None:
        data.attachments.check(config, processes.is_alone)
    for reader in readers:
        reader.take(data)
    config, saved = _with_steps_and_buffer(config, data, folder, buffer, watch)
    subject, saved_run = replace(subject, config=config), None
    if saved:
        first = saved_rollouts.read(saved[0], subject)
        saved_run = first.run.name
        kinds = (each.kind for group in first.groups for each in group.prompt.attachments)
        if data.attachments is None and (kind := next(kinds, None)) is not None:
            raise RolloutBufferError(
                f"{saved[0]} holds rollouts of prompts with {kind}, and the data has none; name "
                "the data that it was sampled from as data.train"
            )
        watch.line(
            f"learning from saved rollouts: {len(saved)} steps, the first is step {first.step} of "
            f"the run {saved_run}"
        )
    for written in [folder, *([config.run.buffer_path.parent] if config.samples else [])]:
        check_writable(written)
    return ResolvedRun(
        subject=subject,
        folder=folder,
        checkpoints=checkpoint.listing(folder),
        processes=processes,
        readers=readers,
        episodes=episodes,
        digests=digests,
        saved_buffers=saved,
        saved_run=saved_run,
        identity=_identity(
            config, start, data, readers, saved, _reading(config, subject, renderer)
        ),
    ), data


def _load(subject: Subject, scorer: Scorer, watch: Watch) -> Data:
    """The run's data."""
    config, tokenizer, context = subject.config, subject.tokenizer, subject.context_tokens
    ends = end_token_ids(config.model.path, tokenizer)
    return load_kept(config, tokenizer, context, scorer.columns, ends, watch.line)


def _with_steps_and_buffer(
    config: Config, data: Data, folder: Path, buffer: Path, watch: Watch
) -> tuple[Config, list[Path]]:
    """Config in which ``run.steps`` says what run.from_buffer or run.epochs asks for and
    ``run.buffer`` is a path, and the files of run.from_buffer."""
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
        saved = []
    else:
        return config.with_options({"run.buffer": buffer}), []
    decided = {"run.steps": steps, "run.epochs": None, "run.buffer": buffer}
    tree = config.model_dump(mode="json")
    config_file.build(tree, Path(place), decided | {"run.buffer": str(buffer)})  # it is checked
    return config.with_options(decided), saved


def _saved_buffers(config: Config, folder: Path) -> list[Path]:
    run = config.run
    assert run.from_buffer is not None
    files = saved_rollouts.files(run.from_buffer)
    if run.resume == "never" and folder.resolve() in files[0].resolve().parents:
        raise RolloutBufferError(
            f"run.from_buffer={run.from_buffer} is in {folder}, which --run.resume never moves "
            "aside; give this run another --run.name"
        )
    if run.steps < len(files) and run.epochs is None:
        logger.warning(
            "run.steps=%d is not used: run.from_buffer=%s holds %d steps; for fewer, name a "
            "folder with fewer", run.steps, run.from_buffer, len(files),
        )  # fmt: skip
    return files


def _identity(
    config: Config,
    start: Path | None,
    data: Data,
    readers: Sequence[Reader],
    saved: Sequence[Path],
    reading: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """The config, with the digests of what it names whose values count throughout the run."""
    sources = [source.source for source in config.data.sources]
    digests: dict[str, Any] = {
        **reading,
        "model.weights_sha256": model_digests.weights_digest(config.model.path),
        "score.custom_sha256": own_sources(config.score.rewards, player_of(config), sources),
        "data.prompts_sha256": data.digests[0],
        "data.columns_sha256": data.digests[1],
    }
    if start is not None:
        named, found = config.model.start, [start]
        if named is not None and run_folder.is_adapter(named):
            found.append(named)  # differs from the run's copy if it was written again since
        ones = [model_digests.folder_digest(each, adapters.WEIGHTS)[:16] for each in found]
        digests["model.start_sha256"] = " and ".join(dict.fromkeys(ones))
    for reader in readers:
        for name, digest in reader.digests().items():
            several = isinstance(digest, dict)
            digests[name] = {**digests.get(name, {}), **digest} if several else digest
    if saved:  # step by step: the folder may grow meanwhile, but may not lose its first file
        digests["run.first_buffer"] = saved[0].name
    identity = config.model_dump(mode="json")
    for key, digest in digests.items():
        section, name = key.split(".")
        if digest:
            identity[section][name] = digest
    return identity


def _reading(config: Config, subject: Subject, renderer: Renderer) -> dict[str, Any]:
    """Digests of what turns text into token ids, and the ids that end an answer."""
    path, trusted = config.model.path, config.model.trust_remote_code
    template = renderer.template.jinja or subject.tokenizer.chat_template
    return {
        "model.files_sha256": model_folder.digests_of_small_files(path, trusted),
        "model.end_token_ids": end_token_ids(path, subject.tokenizer),
        "data.template_sha256": hashlib.sha256(orjson.dumps(str(template))).hexdigest()[:16],
    }
