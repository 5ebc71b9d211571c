"""A running run: its resources, its two memory phases, and the end of each step."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import orjson

from reason_llm.config import Config
from reason_llm.errors import BusyError, OutOfMemory, Stopped
from reason_llm.files import FileLock, sealed, write_atomically
from reason_llm.model import Datum, Model, default_device
from reason_llm.model.plan import GIB, Meter, peak_rss_mib
from reason_llm.readers import OutsideReader, RewardReader
from reason_llm.rollout import LOGGED, Group, without_learner_logprobs
from reason_llm.run import learners
from reason_llm.run.collect import Step
from reason_llm.run.held_out import HeldOut
from reason_llm.run.rows import Rows
from reason_llm.run.start import saved_rollouts
from reason_llm.run.start.prepare import Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store import best, checkpoint, metrics
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.buffer import AHEAD, RolloutBuffer
from reason_llm.run.store.document import Document, RunIdentity
from reason_llm.run.store.folder import kept_name
from reason_llm.run.store.kept_adapters import KeptAdapters, written
from reason_llm.run.store.metrics import MetricsLog, Record, timed
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.run.team import Team
from reason_llm.run.watch import Begun, Watch
from reason_llm.sample import Sampler, closing, in_environment, prove_sampler_is_policy, sampling
from reason_llm.train import (
    Learners,
    learning,
    next_kl_coefficient,
    with_advantages,
    with_learner_logprobs,
)


@contextmanager
def open_run(job: Job, watch: Watch) -> Iterator["Run"]:
    """Lock the run, load the model, restore the newest checkpoint, and evaluate a new run's
    policy."""
    started, config, plan = time.perf_counter(), job.config, job.plan
    for line in plan.table():
        watch.line(line)
    job.try_rewards()
    checkpointing = bool(config.train.gradient_checkpointing)
    meter = Meter(default_device())  # memory in use so far is not the run's
    with (
        job.scorer,
        closing(job.run.environments),
        _locked(job) as (buffer, writer),
        _team_of(job, watch) as team,
        Model(
            config.model, job.run.subject.tokenizer, config.run.seed, plan.engine, checkpointing
        ) as model,
        StopSignal() as stop,
    ):
        log = job.begin(started)
        made = learners.make(config, job.folder, job.state, plan, model, job.run.readers)
        checkpoint.restore(job.state, model, made.optimizers)
        team.begin(made, checkpoint.earlier_adapters(job.state, config.run.max_staleness))
        run = Run(job, made, team, buffer, writer, log, watch, stop, meter)
        begun = Begun(
            job.folder,
            job.state.run.id,
            str(config.run.name),
            job.state.step,
            config.run.steps,
            log.records(),
            config.score.judged_by,
        )
        if not config.samples:
            run.rows.write_texts()
        with watch.run(begun):
            run.rows.measure(made.policy, run.record, watch, stop)
            if job.is_new:
                run.evaluate_untrained()
            stop.check()
            yield run


@contextmanager
def _locked(job: Job) -> Iterator[tuple[RolloutBuffer, BackgroundWriter]]:
    """The run's buffer and the thread that writes into the run's folder. The run is locked against
    other processes, and so is the buffer where the run samples."""
    run, never = job.config.run, job.config.run.resume == "never"
    run_lock = FileLock(run.directory / f".{run.name}.lock", what=f"the run {job.folder}")
    writer = BackgroundWriter()
    saved, archive = partial(_saved_rollouts, job), _archive_of(job)
    buffer = RolloutBuffer(
        run.buffer_path,
        job.state.run,
        [saved if job.run.saved_buffers else archive.read],
        ahead=job.folder / AHEAD if run.max_staleness else None,
        writer=writer,
        discard=never,
    )
    with buffer if job.config.samples else nullcontext(), run_lock, writer:
        # Another process may have gone on since ``prepare`` looked.
        if not never and checkpoint.listing(job.folder) != job.run.checkpoints:
            raise BusyError(f"another process has just gone on with {job.folder}; call again")
        yield buffer, writer


def _archive_of(job: Job) -> Archive:
    run = job.config.run
    return Archive(job.folder, run.keep_buffers, int(run.keep_buffers_gib * GIB))


def _saved_rollouts(job: Job, step: int, run: RunIdentity) -> Document:
    """The rollouts of ``run.from_buffer`` to learn from in this step, with this run's
    advantages."""
    path = job.run.saved_buffers[step]
    document = saved_rollouts.read(path, job.run.subject)
    saved_rollouts.warn_of_another(path, document, job.run.saved_run)
    weights = job.scorer.weights, job.config.turn_weight
    groups = with_advantages(document.groups, job.config.learned_row, *weights)
    return replace(document, step=step, groups=without_learner_logprobs(groups))


def _team_of(job: Job, watch: Watch) -> AbstractContextManager[Team]:
    """The run's team, whose other processes start while this one goes on. With one process and one
    shard nothing of Ray, shards or sampling ahead is imported."""
    run, count = job.config.run, job.run.replicas
    if count == 1 and run.shards == 1 and not run.samplers and not run.max_staleness:
        return nullcontext(Team(job.config.learns))
    many = import_module("reason_llm.replicas.many")
    team: AbstractContextManager[Team] = many.start(job, watch, count)
    return team


@dataclass(eq=False)
class Run:
    """State and resources of a run from its first step to its last; made by ``open_run``."""

    job: Job
    learners: Learners
    """The learners in this process."""
    _team: Team
    _buffer: RolloutBuffer
    _writer: BackgroundWriter
    _log: MetricsLog
    _watch: Watch
    _stop: StopSignal
    _meter: Meter

    def __post_init__(self) -> None:
        job, policy = self.job, self.learners.policy
        self.model = policy.model
        self.rows = Rows(job)
        self.record: Record = {}
        """The record of the current step, as far as it is known."""
        self._archived = _archive_of(job)
        self._held_out = HeldOut(job, policy, self.rows, self._team)
        self._kept = KeptAdapters(
            job.config,
            job.folder,
            job.run.digests,
            self.model,
            policy.optimizer,
            self._log,
            self._writer,
        )
        self.state = self._kept.restore(job.state)
        self._saved = None if job.is_new else self.state
        """The state in the run's newest checkpoint."""

    @property
    def config(self) -> Config:
        """Config with every ``auto`` resolved."""
        return self.job.config

    def remaining(self) -> Iterator[int]:
        """Steps that are not learned yet; none where ``eval.patience`` ends the run early."""
        while self.state.step < self.config.run.steps and not self.job.ends_early(self.state):
            yield self.state.step

    def step(self, number: int) -> Step:
        """The step that is learned next, ready to be collected."""
        return Step(
            number, self.state.drawn, self._team.version_of(number),
            None if self._saved is None else str(self._saved.folder),
            self.job, self._buffer, self._stop, self._watch, self.record,
            metrics.failed_steps(self._log.records()),
        )  # fmt: skip

    def batch(self, step: int) -> list[Datum]:
        """The rows of a step, in a stage that learns from a set of rows."""
        return self.rows.drawn(self.state.drawn, self.config.train.rows_per_step)

    @contextmanager
    def sampling(self, step: int) -> Iterator[Sampler]:
        """Sampling phase of a step, after the check that the sampler is the policy."""
        with self._saved_if_stopped():
            with self._sampling_by(self._team.version_of(step)) as sampler:
                dealing = self._team.dealing(sampler)
                yield in_environment(dealing, self.job.run.environments)
            self._stop.check()

    @contextmanager
    def _sampling_by(self, version: int) -> Iterator[Sampler]:
        """This process's sampler, with the policy of the given number of learned steps."""
        with (
            self._team.at(version),
            sampling(self.model, self.job.plan.cache_tokens) as sampler,
            self._measured("sampling"),
        ):
            if self.model.engine is not None:
                prompts = self.job.data.prompts
                proof = prove_sampler_is_policy(sampler, self.model, prompts)
                self.record |= proof
                share = proof.get("sample/route_agreement")
                if share is not None and self.state.step == self.job.state.step:
                    self._watch.line(
                        f"routes: sampler and learner choose the same experts for {share:.1%} of "
                        "tokens and layers"
                    )
            yield sampler

    @contextmanager
    def _measured(self, phase: str) -> Iterator[None]:
        """Note the peak of memory in the block; a step may be sampled or scored in several."""
        with self._meter.phase() as peak:
            yield
        name = f"memory/{phase}_peak_gib"
        self.record[name] = max(peak.gib, float(self.record.get(name) or 0))

    def rewards_of(self, reader: RewardReader, groups: Sequence[Group]) -> Sequence[float]:
        """Reward of each completion by another model, in a memory phase of its own."""
        count = sum(len(group.completions) for group in groups)
        with self._reading(reader.title, count) as progress:
            return reader.rewards(groups, self.learners.policy, progress)

    def read(self, data: list[Datum]) -> list[Datum]:
        """The step's rows with the columns of models that have weights of their own, one memory
        phase each; those of the base's roles are read in the learning phase."""
        for reader in self.job.run.readers:
            if isinstance(reader, OutsideReader):
                with self._reading(reader.title, len(data)) as progress:
                    data = reader.read(data, self.learners.policy, progress)
        return data

    @contextmanager
    def _reading(self, what: str, count: int) -> Iterator[Callable[[int], None]]:
        """Memory phase in which another model reads the step's rollouts; yields the callback of
        its progress."""
        with self._saved_if_stopped():
            self._stop.check()
            with (
                timed(self.record, "scoring"),
                learning(self.learners.policy),
                self._measured("scoring"),
                self._watch.phase(what, count) as progress,
            ):
                yield lambda rows: progress(0, rows)

    @contextmanager
    def learning(self, step: int, data: Sequence[Datum]) -> Iterator[Callable[[], Record]]:
        """Learning phase of a step over these rows; it yields the function that learns them."""
        ahead: AbstractContextManager[None] = nullcontext()
        if self.config.samples:
            ahead = self._team.sampling_ahead(self.step(step), self._sampling_by)
        try:
            with (
                ahead,
                timed(self.record, "learning"),
                learning(self.learners.policy),
                self._measured("learning"),
                self._watch.phase("learning", len(data) * self.config.train.epochs) as progress,
            ):
                kl = self.state.kl_coefficient
                yield lambda: self._team.learn(step, data, lambda rows: progress(0, rows), kl)
        except OutOfMemory:
            if not any(each.updates_in_step for each in self.learners.by_role.values()):
                self._save()
            raise

    def end(self, step: int, learned: Record) -> None:
        """Archive, evaluate, log and save a step; raises Stopped, when everything is saved, and the
        writer's errors of the step before."""
        self._writer.wait()  # so that one step at most is on its way to the disk
        self.record |= learned
        drawn, last = self.config.train.rows_per_step, None
        if self.config.samples:
            document = self._buffer.find(step)
            assert document is not None
            self._archive(document)
            drawn, last = document.drawn, document.groups[-1]
            self.record |= self._of_rollouts(document)
        self.state = replace(
            self.state,
            step=step + 1,
            drawn=self.state.drawn + drawn,
            kl_coefficient=self._next_kl_coefficient(learned),
        )
        if not self.config.samples:
            self.record["data/epoch"] = self.state.drawn / sum(self.job.data.sizes)
        self._evaluate_if(self._held_out.is_due(self.state.step))
        self._kept.take(self.state)
        self.record = self._team.take_record(step) | self.record
        self.record["time/writing_seconds"] = self._writer.take_seconds()
        self._show(last)
        self._writer.submit(self._log.sync)
        run = self.config.run
        is_last = self.state.step == run.steps or self.job.ends_early(self.state)
        if is_last or self.state.step % run.save_every == 0 or self._stop.requested:
            with timed(self.record, "saving"):  # goes into the next step's record
                self._save()
            self._stop.check()  # so that a later signal saves it

    def evaluate_untrained(self) -> None:
        """Evaluate and save the untrained policy, which gives the run an identity."""
        self._evaluate_if(self._held_out.exists)
        self._kept.take(self.state)
        self._show(None)
        self._save()

    def finish(self) -> dict[str, Any]:
        """Write the kept adapters, release the buffer, and write summary.json last."""
        folder, state = self.job.folder, self.state
        self._writer.wait()
        self._kept.finish(state.step, self._held_out.judge_rows)
        if self.config.samples:
            self._buffer.finish()
        records, since = self._log.records(), self._log.seconds_since()
        last = folder / kept_name("last", self.config.model.train)
        summary = metrics.summarize(records, last, since)
        summary["best"] = None if state.best is None else asdict(state.best)
        summary["judged_by"] = self.config.score.judged_by
        summary["kept"] = written(folder, self.config.model.train)
        summary["ended_early"] = None
        if state.step < self.config.run.steps:
            summary["ended_early"] = (
                f"ended early at step {state.step} of {self.config.run.steps}: "
                f"{self.config.eval.patience} evaluations in a row were no better than "
                f"{state.best} (eval.patience)"
            )
        content = orjson.dumps(summary, option=orjson.OPT_INDENT_2)
        write_atomically(folder / "summary.json", sealed(content))
        return summary

    def _archive(self, document: Document) -> None:
        if not self._archived.wants(document.step):
            return
        logprobs, folder = self.learners.policy.logprobs_at_start, self.job.folder
        learns = self.config.learns

        def write() -> None:
            groups = document.groups
            if learns:
                groups = with_learner_logprobs(groups, logprobs)
            archived = replace(document, groups=groups)
            self._archived.add(archived, checkpoint.needed_from(folder))

        self._writer.submit(write)

    def _of_rollouts(self, document: Document) -> Record:
        first, finds = self.config.score.rewards[0].key, self.job.scorer.finds
        record = metrics.describe(document.groups, first, finds)
        record |= metrics.with_means(document.counts)
        record["sample/groups_dropped"] = document.drawn - len(document.groups)
        if self.config.run.max_staleness and document.weight_version is not None:
            record["sample/staleness_steps"] = document.step - document.weight_version
        return record

    def _evaluate_if(self, is_due: bool) -> None:
        """Evaluate the policy, and keep it if it is the best so far."""
        if is_due:
            with timed(self.record, "evaluation"):
                step = self.state.step
                self.record |= self._held_out.evaluate(step, self._watch, self._writer)
                if self.config.learns:
                    digest, judged_by = self._held_out.digest, self.config.score.judged_by
                    best_now = best.after(self.state.best, step, self.record, digest, judged_by)
                    self.state = replace(self.state, best=best_now)
        for name, count in self.job.scorer.take_counts().items():
            if not name.startswith(LOGGED):  # these are of training alone
                self.record[name] = self.record.get(name, 0.0) + count

    def _show(self, last: Group | None) -> None:
        """Write and show the record of the steps so far; a new one begins."""
        plan = self.job.plan
        memory = {
            "memory/sampling_planned_gib": plan.peak.sampling / GIB,
            "memory/learning_planned_gib": plan.peak.learning / GIB,
            "memory/peak_rss_mib": peak_rss_mib(),
        }
        record = self._log.write(self.state.step, self.record | memory)
        self.record = {}
        self._watch.step(record, last)

    def _next_kl_coefficient(self, learned: Record) -> float | None:
        """The KL's weight in the next step; None if it does not change."""
        row = self.config.algorithm.row()
        if not self.config.samples or row.kl_target == 0:
            return None
        now = self.state.kl_coefficient
        now = row.kl_coefficient if now is None else now
        self.record["train/kl_coefficient"] = now
        if self.state.step < self.config.first_policy_step:
            return now  # the policy has not moved, so its KL does not depend on this weight
        kl, count = learned["train/kl_per_completion"], self.config.sample.rollouts_per_step
        return next_kl_coefficient(now, kl, count, row.kl_target, row.kl_horizon)

    @contextmanager
    def _saved_if_stopped(self) -> Iterator[None]:
        """If a signal ends the run in this block, save the steps that are not saved yet."""
        try:
            yield
        except Stopped:
            self._save()
            raise

    def _save(self) -> None:
        """Save the state, if it is not saved yet."""
        if self.state is self._saved:
            return
        tokens = self.learners.policy.micro_batches.tokens
        planned = self.job.plan.micro_batch_tokens
        state = replace(
            self.state,
            micro_batch_tokens=tokens if tokens < planned else None,
            metrics_sha256=self._log.sha256,
        )
        beside = {
            checkpoint.version_file(version): adapter
            for version, adapter in self._team.adapters.items()
            if version < state.step
        }
        self.state = self._saved = checkpoint.save(
            self.job.folder,
            state,
            self.model,
            self.learners.optimizers,
            self.config.run.keep_checkpoints,
            self._writer,
            self._kept.beside | beside,
        )
        self._kept.saved(self.state)
