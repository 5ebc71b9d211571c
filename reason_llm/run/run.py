"""A running run: its steps, and the end of each."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from reason_llm.config import Config
from reason_llm.data import order
from reason_llm.errors import OutOfMemory
from reason_llm.model import Datum
from reason_llm.model.plan import GIB, Meter, peak_rss_mib
from reason_llm.readers import OutsideReader, RewardReader
from reason_llm.rollout import LOGGED, Group
from reason_llm.run.collect import Step
from reason_llm.run.held_out import HeldOut
from reason_llm.run.phases import Phases
from reason_llm.run.start.prepare import Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store import best, checkpoint, kept_adapters, metrics
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.metrics import MetricsLog, Record, timed
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.run.team import Team
from reason_llm.run.watch import Watch
from reason_llm.sample import Sampler
from reason_llm.train import Learners


@dataclass(eq=False)
class Run:
    """State and resources of a run from its first step to its last; made by ``open_run``."""

    job: Job
    learners: Learners
    """The learners in this process."""
    _team: Team
    _buffer: RolloutBuffer
    _archive: Archive
    _writer: BackgroundWriter
    _log: MetricsLog
    _watch: Watch
    _stop: StopSignal
    _meter: Meter

    def __post_init__(self) -> None:
        job, policy = self.job, self.learners.policy
        self.model = policy.model
        self.phases = Phases(
            job, policy, self._team, self._watch, self._stop, self._meter, self._save
        )
        self._held_out = HeldOut(job, policy, self._team)
        self._kept = kept_adapters.KeptAdapters(
            job.config,
            job.folder,
            job.run.digests,
            self.model,
            self._log,
            self._writer,
        )
        self.state = self._kept.restore(job.state)
        self._saved = None if job.is_new else self.state
        """The state in the run's newest checkpoint."""
        self._pace = checkpoint.Pace()

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
            number,
            self.state.drawn,
            self._team.version_of(number),
            None if self._saved is None else str(self._saved.folder),
            self.job,
            self._buffer,
            self._stop,
            self._watch,
            self.phases.record,
            self._log.records,
        )

    def batch(self, step: int) -> list[Datum]:
        """The rows of a step, in a stage that learns from a set of rows, in the run's order."""
        data, seed = self.job.data, self.config.run.seed
        count = self.config.train.rows_per_step
        drawn = order(data.sizes, data.weights, seed, self.state.drawn, count)
        return [
            replace(Datum.of_row(row), group=number)
            for number, index in enumerate(drawn)
            for row in data.units[index]
        ]

    @contextmanager
    def sampling(self, step: int) -> Iterator[Sampler]:
        """Sampling phase of a step, after the check that the sampler is the policy."""
        with self.phases.saved_if_stopped():
            with self.phases.sampling(self._team.version_of(step)) as sampler:
                dealing = self._team.dealing(sampler)
                yield self.job.run.episodes.over(dealing)
            self._stop.check()

    def rewards_of(self, reader: RewardReader, groups: Sequence[Group]) -> Sequence[float]:
        """Reward of each completion by another model, in a separate memory phase."""
        count = sum(len(group.completions) for group in groups)
        with self.phases.reading(reader.title, count) as progress:
            return reader.rewards(groups, self.learners.policy, progress)

    def read(self, data: list[Datum]) -> list[Datum]:
        """The step's rows with the columns of models with separate weights, one memory phase each;
        the base's roles are read in the learning phase."""
        for reader in self.job.run.readers:
            if isinstance(reader, OutsideReader):
                with self.phases.reading(reader.title, len(data)) as progress:
                    data = reader.read(data, self.learners.policy, progress)
        return data

    @contextmanager
    def learning(self, step: int, data: Sequence[Datum]) -> Iterator[Callable[[], Record]]:
        """Learning phase of a step over these rows; it yields the function that learns them."""
        others: AbstractContextManager[None] = nullcontext()
        if self.config.samples:
            others = self._team.learning(self.step(step), self.phases.sampling)
        try:
            with others, self.phases.learning(len(data) * self.config.train.epochs) as progress:
                yield lambda: self._team.learn(step, data, progress)
        except OutOfMemory:
            if not any(learner.updates_in_step for learner in self.learners.by_role.values()):
                self._save()
            raise

    def end(self, step: int, learned: Record) -> None:
        """Archive, evaluate, log and save a step; raises Stopped, when everything is saved, and the
        writer's errors of the step before."""
        self._writer.wait()  # so that one step at most is on its way to the disk
        record, last, sampled_by = self.phases.record, None, None
        record |= learned
        drawn = self.config.train.rows_per_step
        if self.config.samples:
            document = self._buffer.find(step)
            assert document is not None
            if self._archive.max_bytes:
                needed = partial(checkpoint.needed_from, self.job.folder)
                self._writer.submit(lambda: self._archive.add(document, needed()))
            drawn, last = document.drawn, document.groups[-1]
            sampled_by = document.weight_version
            record |= metrics.of_rollouts(document, self.config, self.job.scorer.finds)
        self.state = replace(self.state, step=step + 1, drawn=self.state.drawn + drawn)
        if not self.config.samples:
            record["data/epoch"] = self.state.drawn / sum(self.job.data.sizes)
        self._evaluate_if(self._held_out.is_due(self.state.step))
        self._kept.take(self.state)
        self.phases.record = self._team.take_record(step, sampled_by) | record
        self._show(last)
        self._writer.submit(self._log.sync)
        every = self.config.run.save_every
        is_due = self.state.step % every == 0 if isinstance(every, int) else self._pace.is_due
        is_last = self.state.step == self.config.run.steps or self.job.ends_early(self.state)
        if is_last or is_due or self._stop.requested:
            with timed(self.phases.record, "saving"):  # goes into the next step's record
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
        self._kept.finish(state.step)
        if self.config.samples:
            self._buffer.finish()
        records, since = self._log.records(), self._log.seconds_since()
        last = folder / kept_adapters.kept_name("last", self.config.model.train)
        summary = metrics.summarize(records, last, since)
        summary["best"] = None if state.best is None else asdict(state.best)
        summary["judged_by"] = self.config.score.judged_by
        summary["kept"] = kept_adapters.written(folder, self.config.model.train)
        summary["ended_early"] = None
        if state.step < self.config.run.steps:
            summary["ended_early"] = (
                f"ended early at step {state.step} of {self.config.run.steps}: "
                f"{self.config.eval.patience} evaluations in a row were no better than "
                f"{state.best} (eval.patience)"
            )
        metrics.write_summary(folder, summary)
        return summary

    def _evaluate_if(self, is_due: bool) -> None:
        """Evaluate the policy, and keep it if it is the best so far."""
        if is_due:
            with timed(self.phases.record, "evaluation"):
                step = self.state.step
                self.phases.record |= self._held_out.evaluate(step, self._watch, self._writer)
                if self.config.learns:
                    digest, judged_by = self._held_out.digest, self.config.score.judged_by
                    best_now = best.after(
                        self.state.best, step, self.phases.record, digest, judged_by
                    )
                    self.state = replace(self.state, best=best_now)
        for name, count in self.job.scorer.take_counts().items():
            if not name.startswith(LOGGED):  # these are of training alone
                self.phases.record[name] = self.phases.record.get(name, 0.0) + count

    def _show(self, last: Group | None) -> None:
        """Write and show the record of the steps so far; a new one begins."""
        plan = self.job.plan
        memory = {
            "memory/sampling_planned_gib": plan.peak.sampling / GIB,
            "memory/learning_planned_gib": plan.peak.learning / GIB,
            "memory/peak_rss_mib": peak_rss_mib(),
        }
        record = self._log.write(self.state.step, self.phases.record | memory)
        self.phases.record = {}
        self._watch.step(record, last)

    def _save(self) -> None:
        """Save the state, if it is not saved yet."""
        if self.state is self._saved:
            return
        # A size lowered as memory ran out holds after resuming; a planned one does not.
        tokens = self.learners.policy.micro_batches.tokens
        planned = self.job.plan.micro_batch_tokens
        state = replace(
            self.state,
            micro_batch_tokens=tokens if tokens < planned else None,
            metrics_sha256=self._log.sha256,
        )
        versions = {
            checkpoint.version_file(version): adapter
            for version, adapter in self._team.adapters.items()
            if version < state.step
        }
        self._writer.submit(self._pace.begin)
        self.state = self._saved = checkpoint.save(
            self.job.folder,
            state,
            self.model,
            self.learners.optimizers,
            self.config.run.keep_checkpoints,
            self._writer,
            self._kept.files | versions,
        )
        self._kept.saved(self.state)
        self._writer.submit(self._pace.end)
