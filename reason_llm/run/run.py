"""A running run: its resources, its two memory phases, and the end of each step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import orjson

from reason_llm.config import Config
from reason_llm.errors import OutOfMemory, Stopped
from reason_llm.files import replacing_folder, write_atomically
from reason_llm.model import Model, adapters, default_device
from reason_llm.model.plan import GIB, Meter, peak_rss_mib
from reason_llm.run import checkpoint, metrics, saved_rollouts
from reason_llm.run.buffer import RolloutBuffer
from reason_llm.run.checkpoint import RunState
from reason_llm.run.held_out import evaluate
from reason_llm.run.metrics import MetricsLog, Record, timed
from reason_llm.run.prepare import Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.watch import Begun, Progress, Watch
from reason_llm.run.writer import BackgroundWriter
from reason_llm.sample import Sampler, prove_sampler_is_policy, sampling
from reason_llm.train import (
    Learner,
    LearningSettings,
    PolicyGradient,
    learning,
    with_learner_logprobs,
)


@contextmanager
def open_run(job: Job, watch: Watch) -> Iterator["Run"]:
    """Lock the run, load the model, restore the newest checkpoint, and evaluate a new run's policy
    before it learns."""
    started, config, plan = time.perf_counter(), job.config, job.plan
    for line in plan.table():
        watch.line(line)
    checkpointing = bool(config.train.gradient_checkpointing)
    with (
        job.scorer,
        job.held() as (buffer, writer),
        Model(config.model, job.tokenizer, config.run.seed, plan.engine, checkpointing) as model,
        StopSignal() as stop,
    ):
        learner = Learner(model, learning_settings(job))
        checkpoint.restore(job.state, model.policy, learner.optimizer)
        if job.state.folder is not None:
            buffer.checkpoint = str(job.state.folder)
        run = Run(job, model, learner, buffer, writer, job.begin(started), watch, stop)
        with watch.run(run.begun()):
            if job.is_new:
                run.evaluate_untrained()
            stop.check()
            yield run


def learning_settings(job: Job) -> LearningSettings:
    """Settings of the run's learner."""
    config, plan, train = job.config, job.plan, job.config.train
    halved = job.state.micro_batch_tokens or plan.micro_batch_tokens
    objective = PolicyGradient(
        config.learned_row, config.sample.max_new_tokens, saved_rollouts.rounding_nats(config)
    )
    return LearningSettings(
        objective=objective,
        train=train,
        temperature=config.sample.temperature,
        micro_batch_tokens=min(halved, plan.micro_batch_tokens),  # which may be lower by now
        seed=config.run.seed,
        total_optimizer_steps=config.run.steps * train.epochs * train.optimizer_steps,
        chunk_tokens=plan.chunk_tokens,
    )


class Run:
    """State and resources of a run from its first step to its last; made by ``open_run``."""

    def __init__(
        self,
        job: Job,
        model: Model,
        learner: Learner,
        buffer: RolloutBuffer,
        writer: BackgroundWriter,
        log: MetricsLog,
        watch: Watch,
        stop: StopSignal,
    ) -> None:
        self.job = job
        self.model = model
        self.learner = learner
        self.buffer = buffer
        self.writer = writer
        self.log = log
        self.watch = watch
        self.stop = stop
        self.state: RunState = job.state
        self.record: Record = {}
        """What is known so far for the record of the step under way."""
        self._meter = Meter(default_device())

    @property
    def config(self) -> Config:
        """Config with every ``auto`` resolved."""
        return self.job.config

    def begun(self) -> Begun:
        """The run's start, for a ``Watch``."""
        run = self.config.run
        return Begun(
            self.job.folder, self.state.run.id, str(run.name), self.state.step, run.steps,
            self.log.records(),
        )  # fmt: skip

    def remaining(self) -> Iterator[int]:
        """Steps that are not learned yet."""
        while self.state.step < self.config.run.steps:
            yield self.state.step

    @contextmanager
    def sampling(self) -> Iterator[Sampler]:
        """Sampling phase, after the check that the sampler is the policy."""
        with self._saved_if_stopped():
            with (
                sampling(self.model, self.job.plan.cache_tokens) as sampler,
                self._meter.phase() as peak,
            ):
                if self.model.engine is not None:
                    prompts = self.job.data.prompts
                    self.record |= prove_sampler_is_policy(sampler, self.model, prompts)
                yield sampler
            self.record["memory/sampling_peak_gib"] = peak.gib
            self.stop.check()

    @contextmanager
    def learning(self, rows: int) -> Iterator[tuple[Learner, Progress]]:
        """Learning phase over this number of rows."""
        try:
            with (
                timed(self.record, "learning"),
                learning(self.learner),
                self._meter.phase() as peak,
                self.watch.phase("learning", rows * self.config.train.epochs) as progress,
            ):
                yield self.learner, progress
        except OutOfMemory:
            if self.state.folder is None and self.learner.updates_in_step == 0:
                self._save()  # run.save_every left it unsaved
            raise
        self.record["memory/learning_peak_gib"] = peak.gib

    def end(self, step: int, learned: Record) -> None:
        """Archive, evaluate, log and save a step.

        Raises:
            Stopped: a signal asked for the end; everything is saved.
        """
        self.record |= learned
        self._archive(step)
        drawn = self.state.drawn + self.buffer.drawn(step)
        self.state = replace(self.state, step=step + 1, folder=None, drawn=drawn)
        if self._evaluation_is_due():
            self._evaluate()
        self._log(step)
        run = self.config.run
        is_due = self.state.step % run.save_every == 0 or self.state.step == run.steps
        if is_due or self.stop.requested:
            with timed(self.record, "saving"):  # stands in the next step's record
                self._save()
            self.stop.check()  # a signal that comes later finds what to save

    def finish(self) -> dict[str, Any]:
        """Write adapter/, release the buffer, and write summary.json last."""
        folder = self.job.folder
        self.writer.wait()
        with replacing_folder(folder / "adapter") as beside:
            adapters.save(self.model.policy, beside)
        self.buffer.finish()
        records, since = self.log.records(), self.log.seconds_since()
        summary = metrics.summarize(records, folder / "adapter", since)
        write_atomically(folder / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
        return summary

    def evaluate_untrained(self) -> None:
        """Evaluate the policy before it learns and save it, so that the run has an identity before
        it has rollouts."""
        if self.job.data.held_out:
            self._evaluate()
            self.record |= self.job.scorer.take_counts()
        record = self.log.write(self.state.step, self.record | self._memory())
        self.record = {}
        self.watch.step(record, None)
        self._save()

    @contextmanager
    def _saved_if_stopped(self) -> Iterator[None]:
        """Save what ``run.save_every`` left unsaved, if a signal ends the run in this block."""
        try:
            yield
        except Stopped:
            if self.state.folder is None:
                self._save()
            raise

    def _archive(self, step: int) -> None:
        """Archive the rollouts of the step, with the learner's log-probs."""
        document, archive = self.buffer.document(step), self.job.archive
        if document is None or not archive.wants(step):
            return
        logprobs, folder = self.learner.logprobs_at_start, self.job.folder

        def write() -> None:
            groups = with_learner_logprobs(document.groups, logprobs)
            archive.add(replace(document, groups=groups), checkpoint.needed_from(folder))

        self.writer.submit(write)

    def _log(self, step: int) -> None:
        """Write the step's record and show it."""
        groups, document = self.buffer.groups(step), self.buffer.document(step)
        counts = self.job.scorer.take_counts()  # of the evaluation; the others are with the groups
        self.record |= metrics.describe(groups) | self._memory()
        self.record |= metrics.added(counts, document.counts if document else {})
        self.record["sample/groups_dropped"] = self.buffer.drawn(step) - len(groups)
        self.record["time/writing_seconds"] = self.writer.take_seconds()
        record = self.log.write(self.state.step, self.record)
        self.record = {}
        self.watch.step(record, groups[-1])
        self.writer.submit(self.log.sync)

    def _memory(self) -> Record:
        return {
            "memory/sampling_planned_gib": self.job.plan.sampling_bytes / GIB,
            "memory/learning_planned_gib": self.job.plan.learning_bytes / GIB,
            "memory/peak_rss_mib": peak_rss_mib(),
        }

    def _evaluation_is_due(self) -> bool:
        section, step = self.config.eval, self.state.step
        return bool(self.config.evaluation_sets) and (
            step == self.config.run.steps or (section.every > 0 and step % section.every == 0)
        )

    def _evaluate(self) -> None:
        with (
            timed(self.record, "evaluation"),
            sampling(self.model, self.job.plan.cache_tokens) as sampler,
            self.watch.phase("evaluating", len(self.job.data.held_out_prompts)) as progress,
        ):
            found = [
                evaluate(sampler, each.prompts, self.job.scorer, self.config.eval_max_new_tokens,
                         progress)
                for each in self.job.data.held_out
            ]  # fmt: skip
        self.record |= found[0]
        for each, values in zip(self.job.data.held_out, found, strict=True):
            self.record |= metrics.by_name(values, each.name) if each.name else {}

    def _save(self) -> None:
        tokens, planned = self.learner.micro_batches.tokens, self.job.plan.micro_batch_tokens
        state = replace(self.state, micro_batch_tokens=tokens if tokens < planned else None)
        self.state = checkpoint.save(
            self.job.folder, state, self.model.policy, self.learner.optimizer,
            self.config.run.keep_checkpoints, self.writer,
        )  # fmt: skip
        self.buffer.checkpoint = str(self.state.folder)
