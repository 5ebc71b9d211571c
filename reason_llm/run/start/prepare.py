"""Preparation of a run: everything that can be checked before a weight is read, and its locks."""

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
from transformers import PreTrainedTokenizerBase

from reason_llm.config import Config, file as config_file
from reason_llm.data import (
    Data,
    check_ends,
    load_data,
    prompt_tokens,
    renderer_of,
)
from reason_llm.errors import (
    CheckpointError,
    DataError,
    ModelError,
    RolloutBufferError,
    one_line,
)
from reason_llm.files import (
    MIB,
    check_writable,
    move_aside,
    read_object,
    sha256,
    write_atomically,
)
from reason_llm.model import adapters, base_digest, end_token_ids, score_head
from reason_llm.model.plan import GIB, Plan, Subject, look_at, with_start
from reason_llm.run import reward_models
from reason_llm.run.reward_models import RewardModelFolder
from reason_llm.run.start import recovery, replica_count, saved_rollouts
from reason_llm.run.store import (
    best,
    checkpoint,
    environment,
    folder as run_folder,
    kept_adapters,
)
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.buffer import RolloutBuffer, read_ahead
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.document import Document
from reason_llm.run.store.metrics import MetricsLog
from reason_llm.run.watch import Watch
from reason_llm.sample import stop_strings
from reason_llm.score import Scorer
from reason_llm.train import (
    check_schedule,
    kto_desirable_weights,
)

logger = logging.getLogger(__name__)

START = "start"
"""Folder in the run's with a copy of the adapter that the run began from."""


AHEAD = "ahead"
"""Folder in the run's with the rollouts of steps that are sampled ahead."""


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
    reward_models: list[RewardModelFolder]
    """Those that the rewards ask."""
    digests: tuple[str, str]
    """Of the base's config and of how prompts are written, which a reward model must fit."""

    @property
    def is_new(self) -> bool:
        """Whether the run has no checkpoint of its own."""
        return self.state.folder not in self.checkpoints

    def begin(self, started: float) -> MetricsLog:
        """Make the first changes on disk, after all checks.

        Args:
            started: ``time.perf_counter()`` from which the first record's seconds count.
        """
        if self.config.run.resume == "never":
            if any(self.folder.glob("[!.]*")):  # more than the lock of a buffer in it
                move_aside(self.folder)
            if self.config.samples:
                move_aside(self.config.run.buffer_path)
        resolved = run_folder.config_to_bytes(self.config)
        write_atomically(self.folder / run_folder.CONFIG, resolved)
        step = 0 if self.is_new else self.state.step
        environment.record_start(self.folder, step, self.data, self.plan)
        if self.data.conditioning is not None:
            self.data.conditioning.write(self.folder)
        if self.config.model.start is not None and self.is_new:
            adapters.copy_folder(self.config.model.start, self.folder / START)
        return MetricsLog(self.folder, None if self.is_new else self.state.step, started)

    def finished(self, watch: Watch) -> dict[str, Any] | None:
        """Summary of the run if it is finished, else None; a run writes it last."""
        if self.state.step < self.config.run.steps and not self.ends_early(self.state):
            return None
        read = "summary.json"
        try:
            summary = read_object(self.folder / read, 16 * MIB)
            if summary.get("steps") != self.state.step:
                return None
            read = "adapters"
            if self.state.folder is not None:
                best_of = self.state.best if self.config.run.keep_best else None
                kept_adapters.check_written(self.folder, self.state.folder, best_of)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning(
                "%s: %s: %s; written again from %s",
                self.folder, read, one_line(error), self.state.folder,
            )  # fmt: skip
            return None
        if self.ends_early(self.state):
            watch.line(
                f"{self.folder} was ended early at step {self.state.step} by eval.patience: raise "
                "it to go on, or start afresh with --run.resume never"
            )
        else:
            watch.line(
                f"{self.folder} is finished at step {self.state.step}: raise --run.steps to go on, "
                "or start afresh with --run.resume never"
            )
        return summary

    def ends_early(self, state: RunState) -> bool:
        """Whether ``eval.patience`` ends the run in this state."""
        return best.ends_early(state.best, self.config.eval.patience)


def prepare(config: Config, watch: Watch) -> Job:
    """Check rewards, model, data, the run's folder and its buffer, in this order; write nothing."""
    folder = config.run.directory / str(config.run.name)
    replica_count.count_of(config)
    scorer = Scorer(config.score, config.sample.max_new_tokens, answers=folder / run_folder.ANSWERS)
    start = _start(config, folder)
    if start is not None:
        with _reading_start(start, folder):
            config = with_start(config, start)
    subject = look_at(config)
    config = subject.config
    stop_strings(subject.tokenizer, tuple(config.sample.stop))
    template = renderer_of(config, subject.tokenizer).digest
    of_base = base_digest(subject.policy), template
    models = reward_models.check(config, *of_base)
    digests = _check_adapters(config, subject, start, folder)
    data = _load(config, subject, scorer, watch)
    config = _with_steps(config, data, watch)
    config, saved = _with_saved_buffers(_with_buffer(config), folder)
    check_schedule(config.train, config.policy_optimizer_steps)
    room = subject.context_tokens, subject.vocabulary
    first = saved_rollouts.read(saved[0], config, *room) if saved else None
    check_writable(folder)
    identity = _identity(config, data, models, digests, saved)
    state = _state(config, folder, identity)
    if config.samples:
        _check_buffer(config, state, subject, folder / AHEAD)
    for line in _lines(config, state, data, saved, first, models, scorer, subject):
        watch.line(line)
    if warning := data.contamination_warning():
        logger.warning("%s", warning)
    prompts = [len(each.token_ids) for each in (*data.prompts, *data.held_out_prompts)]
    longest_row = _longest_row(config, data, subject.context_tokens)
    if asked := data.teacher_prompts:
        longest = max(len(prompt) for prompt in asked.values())
        longest_row = longest + config.sample.max_new_tokens  # the student's answer to it
    plan = replace(subject, config=config).plan(
        max(prompts, default=0), learns=config.learns, longest_row=longest_row
    )
    archive = Archive(folder, config.run.keep_buffers, int(config.run.keep_buffers_gib * GIB))
    return Job(
        config, folder, state, subject.tokenizer, data, scorer, plan,
        archive, checkpoint.listing(folder), saved, first.run.name if first else None, room,
        models, of_base,
    )  # fmt: skip


def _identity(
    config: Config,
    data: Data,
    models: Sequence[RewardModelFolder],
    adapter_digests: Mapping[str, Mapping[str, str]],
    saved: Sequence[Path],
) -> dict[str, Any]:
    """The config with the digests of what it names, so that a run goes on only with the same."""
    identity = config.model_dump(mode="json")
    identity["model"]["weights_sha256"] = run_folder.weights_digest(config.model.path)
    if sources := _custom_sources(config):
        identity["score"]["custom_sha256"] = sources
    identity["data"]["prompts_sha256"] = _digest(data)
    if any(prompt.extra for prompt in data.prompts):
        columns = [[prompt.extra for prompt in each.prompts] for each in data.training]
        identity["data"]["columns_sha256"] = _sha256(columns)
    if models:
        identity["score"]["reward_models_sha256"] = {each.key: each.digest for each in models}
    for section, names in adapter_digests.items():
        identity[section] |= names
    if saved:  # step by step from there on: a folder may grow meanwhile, and not lose its first
        identity["run"]["first_buffer"] = saved[0].name
    return identity


def _lines(
    config: Config,
    state: RunState,
    data: Data,
    saved: Sequence[Path],
    first: Document | None,
    models: Sequence[RewardModelFolder],
    scorer: Scorer,
    subject: Subject,
) -> Iterator[str]:
    """What the user is told of the run that is about to begin or to go on."""
    where = f"goes on after step {state.step}" if state.folder else "begins"
    kind = "prompts" if config.samples else "pairs" if config.learns_pairs else "rows"
    yield (
        f"run {config.run.name} {where}: {sum(data.sizes)} {kind}, "
        f"{len(data.held_out_prompts)} held out, model {config.model.path}"
    )
    if first is not None:
        yield (
            f"learning from saved rollouts: {len(saved)} steps, the first is step {first.step} of "
            f"the run {first.run.name}"
        )
    yield from data.notes()
    for each in models:
        kind = "a model of its own" if each.is_outside else "an adapter over the base"
        yield f"the reward {each.key} is given by {each.folder}, {kind}"
    yield from subject.why if config.learns else subject.why[:-1]
    if config.judges_answers:
        yield from scorer.descriptions


def _start(config: Config, folder: Path) -> Path | None:
    """The adapter that the run begins from; once it has begun, its own copy."""
    if config.model.start is None:
        return None
    has_begun = config.run.resume != "never" and bool(checkpoint.listing(folder))
    return folder / START if has_begun else config.model.start


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


def _check_adapters(
    config: Config, subject: Subject, start: Path | None, folder: Path
) -> dict[str, dict[str, str]]:
    """Digests of the adapters whose values count throughout the run, by config section, so that it
    is not resumed with others. What only its beginning reads is checked all the same.

    Raises:
        ModelError: one of them is damaged or does not fit the model.
        CheckpointError: the run's own copy is.
    """
    policy, path, found = subject.policy, config.model.path, {}
    if start is not None:
        with _reading_start(start, folder):
            adapters.check_fits(policy, start, path)
        if config.samples and run_folder.conditioning_of(start) is not None:
            logger.warning(
                "model.start=%s learned from prompts with a score (sft.condition); this run asks "
                "without one", config.model.start,
            )  # fmt: skip
        found["model"] = {"start_sha256": sha256(start / adapters.WEIGHTS, adapters.MOST_BYTES)}
    if (teacher := config.teacher.adapter) is not None:
        adapters.check_over(policy, teacher, path)
        digest = sha256(teacher / adapters.WEIGHTS, adapters.MOST_BYTES)
        found["teacher"] = {"adapter_sha256": digest}
    if (critic := config.critic.start) is not None:
        adapters.check_over(policy, critic, path)
        score_head.check(critic, policy.get_base_model().get_output_embeddings().weight.shape[1])
    return found


def _load(config: Config, subject: Subject, scorer: Scorer, watch: Watch) -> Data:
    """The run's data. Rows to learn from are checked for their end tokens."""
    tokenizer, context = subject.tokenizer, subject.context_tokens
    ends = end_token_ids(config.model.path, tokenizer)
    data = load_data(config, tokenizer, context, extra_columns=scorer.columns, end_token_ids=ends)
    if config.stage == "preference" and not config.learns_pairs:
        _check_labels(config, data)
    if not config.samples:
        for line in check_ends(data.imitated, ends, tokenizer):
            watch.line(line)
    return data


def _check_labels(config: Config, data: Data) -> None:
    """Warn of weights of KTO under which one label outweighs the other.

    Raises:
        DataError: the held-out rows are one alone, which has no other to be compared with.
    """
    if data.held_out_rows is not None and len(data.held_out_rows.rows) == 1:
        raise DataError(
            f"eval.rows={config.eval.rows} holds one row, and {config.preference.name} compares "
            "each row with another one; add a row, or leave eval.rows out"
        )
    row, good, bad = config.preference.row(), 0.0, 0.0
    for each, weight in zip(data.training, data.weights, strict=True):
        share = sum(token_row.value > 0 for token_row in each.rows) / len(each.rows)
        good, bad = good + weight * share, bad + weight * (1 - share)
    if not (good and bad):
        return  # which is told beside the rows
    low, high = kto_desirable_weights(good, bad, row.undesirable_weight)
    if not 0.95 * low <= row.desirable_weight <= 1.05 * high:
        logger.warning(
            "preference.desirable_weight=%g leaves the labels out of balance: %.0f %% of the rows "
            "are good ones; set it to a number from %.3g to %.3g", row.desirable_weight,
            100 * good / (good + bad), low, high,
        )  # fmt: skip


def _longest_row(config: Config, data: Data, context_tokens: int) -> int:
    """Tokens of the longest row that is passed; 0 without rows. KTO's baseline takes each prompt
    with the completion of another row, too.

    Raises:
        DataError: such a row does not fit into the context.
    """
    sets = [*data.training, *([data.held_out_rows] if data.held_out_rows else [])]
    all_rows = [row for each in sets for row in each.rows]
    longest = max((len(row.ids) for row in all_rows), default=0)
    if config.stage != "preference" or config.learns_pairs:
        return longest
    prompts = [prompt_tokens(row) for row in all_rows]
    mixed = max(prompts) + max(
        len(row.ids) - prompt for row, prompt in zip(all_rows, prompts, strict=True)
    )
    if mixed > context_tokens:
        raise DataError(
            f"kto passes each prompt with the completion of another row, and the longest of both "
            f"have {mixed} tokens together, which is more than the context of {context_tokens}; "
            "drop long rows with data.max_tokens, or raise model.context_tokens"
        )
    return max(longest, mixed)


def _check_buffer(config: Config, state: RunState, subject: Subject, ahead: Path) -> None:
    """Raises RolloutBufferError: the buffer there is another run's, or does not fit the model."""
    check_writable(config.run.buffer_path.parent)
    if config.run.resume == "never":
        return
    found = RolloutBuffer(config.run.buffer_path, state.run).check()
    own = [*read_ahead(ahead, state.run)] if config.run.max_staleness else []
    if found is not None and found.run.id == state.run.id:
        own.append((config.run.buffer_path, found))
    for path, document in own:
        saved_rollouts.check_context(path, document, subject.context_tokens)
        saved_rollouts.check_vocabulary(path, document, subject.vocabulary)


def _with_steps(config: Config, data: Data, watch: Watch) -> Config:
    """Config in which ``run.steps`` says what ``run.epochs`` asks for.

    Raises:
        ConfigError: another option contradicts so many steps.
    """
    run = config.run
    if run.epochs is None:
        return config
    total = sum(data.sizes)
    size = config.sample.prompts_per_step if config.samples else config.train.rows_per_step
    steps = math.ceil(run.epochs * total / size)
    watch.line(f"run.epochs={run.epochs:g} of {total} makes run.steps={steps}")
    tree = config.model_dump(mode="json")
    overrides = {"run.steps": steps, "run.epochs": None}
    return config_file.build(tree, Path(f"run.epochs={run.epochs:g}"), overrides)


def _with_buffer(config: Config) -> Config:
    """Config with the path of the run's buffer: where it is left out, data/buffer.json, or a file
    of the run's own beside it, while that holds rollouts of another unfinished run."""
    run = config.run
    path = run.buffer_path
    if run.buffer is None and config.samples:
        own = path.with_name(f"{path.stem}.{run.name}{path.suffix}")
        holder = recovery.unfinished_run(path)
        if holder != run.name and (holder is not None or os.path.lexists(own)):
            path = own
    return config.model_copy(update={"run": run.model_copy(update={"buffer": path})})


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
    overrides = {"run.steps": len(files), "run.buffer": str(folder / "buffer.json")}
    place = Path(f"run.from_buffer={run.from_buffer}")
    return config_file.build(config.model_dump(mode="json"), place, overrides), files


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
        if not config.samples:
            return found
        return recovery.from_buffer(config.run.buffer_path, name, identity) or found
    has_begun = bool(checkpoint.listing(folder))
    try:
        begun = checkpoint.begin_from(Path(resume), name, identity)
    except CheckpointError as error:
        if has_begun:
            way_on = f"or leave --run.resume out to go on with the run in {folder}"
            raise CheckpointError(f"{error}; {way_on}") from error
        raise
    if not has_begun and not (folder / "summary.json").exists():
        if not config.samples:
            return begun
        return recovery.from_copy(begun, config.run.buffer_path) or begun
    found = checkpoint.find(folder, name, identity)
    if found.run.id != begun.run.id and not recovery.went_on_from(begun, found):
        raise CheckpointError(
            f"{folder} holds a run that did not begin from run.resume={resume}; give this run a "
            "--run.name of its own, or leave --run.resume out to go on with that run"
        )
    return found


def _digest(data: Data) -> str:
    """Digest of the prompts and gold answers, or of the rows, so that a run is not resumed on other
    data."""
    return _sha256(
        [
            [
                [(prompt.token_ids, prompt.answer) for prompt in each.prompts],
                [(row.ids, sum(row.trained), row.value) for row in each.rows],
            ]
            for each in data.training
        ]
    )


def _custom_sources(config: Config) -> dict[str, str]:
    """Digests of the files of custom rewards, by the reward's name."""
    places = {each.key: str(each.custom).rpartition(":")[0] for each in config.score.rewards}
    return {
        key: sha256(Path(place), MIB)[:16]
        for key, place in places.items()
        if place.endswith(".py") and Path(place).is_file()
    }


def _sha256(content: Any) -> str:
    return hashlib.sha256(orjson.dumps(content)).hexdigest()[:16]
