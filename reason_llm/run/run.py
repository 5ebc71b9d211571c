"""A running run: its resources, its two memory phases, and the end of each step."""

import gzip
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import orjson
from torch import Tensor

from reason_llm.config import Config
from reason_llm.data import order
from reason_llm.errors import OutOfMemory, Stopped
from reason_llm.files import replacing_folder, sealed, write_atomically
from reason_llm.model import Datum, Model, adapters, default_device, score_head
from reason_llm.model.plan import GIB, Meter, peak_rss_mib
from reason_llm.rollout import Group
from reason_llm.run import held_out, learners, references, reward_models
from reason_llm.run.collect import Step
from reason_llm.run.references import References
from reason_llm.run.reward_models import RewardModelFolder, RewardModels
from reason_llm.run.start.prepare import Job
from reason_llm.run.start.resolve import START
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store import (
    adapter_readme,
    best,
    best_adapter,
    checkpoint,
    folder as run_folder,
    metrics,
)
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.metrics import MetricsLog, Record, timed
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.run.team.alone import gather
from reason_llm.run.team.protocol import Team
from reason_llm.run.watch import Begun, Watch
from reason_llm.sample import Sampler, SamplingParams, prove_sampler_is_policy, sampling
from reason_llm.train import (
    Learners,
    learning,
    next_kl_coefficient,
    optim,
    with_learner_logprobs,
)

logger = logging.getLogger(__name__)


@contextmanager
def open_run(job: Job, watch: Watch) -> Iterator["Run"]:
    """Lock the run, load the model, restore the newest checkpoint, and evaluate a new run's policy
    before it learns."""
    started, config, plan = time.perf_counter(), job.config, job.plan
    for line in plan.table():
        watch.line(line)
    checkpointing = bool(config.train.gradient_checkpointing)
    meter = Meter(default_device())  # what is there by now is not the run's
    with (
        job.scorer,
        job.held() as (buffer, writer),
        gather(job, watch) as team,
        Model(
            config.model, job.run.subject.tokenizer, config.run.seed, plan.engine, checkpointing
        ) as model,
        StopSignal() as stop,
    ):
        log = job.begin(started)
        made = learners.make(config, job.folder, job.state, plan, model)
        made.policy.teacher_prompts = job.data.teacher_prompts
        checkpoint.restore(job.state, model, made.optimizers)
        if job.state.folder is not None and buffer is not None:
            buffer.checkpoint = str(job.state.folder)
        team.begin(made, checkpoint.earlier_adapters(job.state, config.run.max_staleness))
        if buffer is not None and not job.run.saved_buffers:
            buffer.version_of = team.version_of
        run = Run(job, model, made, team, buffer, writer, log, watch, stop, meter)
        run.restore_best()
        with watch.run(run.begun()):
            run.measure_references()
            if job.is_new:
                run.evaluate_untrained()
            stop.check()
            yield run


class Run:
    """State and resources of a run from its first step to its last; made by ``open_run``."""

    def __init__(
        self,
        job: Job,
        model: Model,
        made: Learners,
        team: Team,
        buffer: RolloutBuffer | None,
        writer: BackgroundWriter,
        log: MetricsLog,
        watch: Watch,
        stop: StopSignal,
        meter: Meter,
    ) -> None:
        self.job = job
        self.model = model
        self.learners = made
        """Of this process."""
        self._team = team
        self._reward_models = RewardModels()
        self._buffer = buffer
        self.writer = writer
        self.log = log
        self.watch = watch
        self.stop = stop
        self.state: RunState = job.state
        self.record: Record = {}
        """What is known so far for the record of the step under way."""
        self._best: dict[str, Tensor] | Path | None = None
        """The adapter of ``state.best``: its tensors until they are in a checkpoint, then that
        checkpoint; None: it is not kept."""
        sets, rows = job.data.held_out, job.data.held_out_rows
        self._held_out_digest = best.held_out_digest(
            sets[0].prompts if sets else (),
            [] if rows is None else [(row.ids, row.value) for row in rows.rows],
            job.config.eval_max_new_tokens,
        )
        self._references = References()
        self._meter = meter

    @property
    def buffer(self) -> RolloutBuffer:
        """The rollouts of a stage that samples."""
        assert self._buffer is not None
        return self._buffer

    @property
    def config(self) -> Config:
        """Config with every ``auto`` resolved."""
        return self.job.config

    def begun(self) -> Begun:
        """The run's start, for a ``Watch``."""
        run = self.config.run
        return Begun(
            self.job.folder, self.state.run.id, str(run.name), self.state.step, run.steps,
            self.log.records(), self.config.score.judged_by,
        )  # fmt: skip

    def remaining(self) -> Iterator[int]:
        """Steps that are not learned yet; none where ``eval.patience`` ends the run early."""
        while self.state.step < self.config.run.steps and not self.ends_early:
            yield self.state.step

    @property
    def ends_early(self) -> bool:
        """Whether ``eval.patience`` ends the run here."""
        return self.job.ends_early(self.state)

    def restore_best(self) -> None:
        """Have in ``adapter_best/`` what the checkpoint says is the best adapter."""
        state = self.state
        if state.best is None or state.folder is None or not self.config.run.keep_best:
            return
        if not best_adapter.is_in(state.folder):
            logger.warning(
                "the adapter of the best evaluation so far (%s) was not kept: the best one from "
                "here on is", state.best,
            )  # fmt: skip
            self.state = replace(state, best=None)
            return
        self._best = state.folder
        if not best_adapter.is_written(self.job.folder, state.folder, state.best):
            self._write_best(state.folder)

    def step(self, number: int) -> Step:
        """The step that is to be learned, to be collected."""
        return Step(
            number, self.state.drawn, self.job, self.buffer, self.stop, self.watch, self.record
        )

    @contextmanager
    def sampling(self, step: int) -> Iterator[Sampler]:
        """Sampling phase of a step, after the check that the sampler is the policy."""
        with self._saved_if_stopped():
            with self._sampling_by(self._team.version_of(step)) as sampler:
                yield self._team.dealing(sampler)
            self.stop.check()

    @contextmanager
    def _sampling_by(self, version: int) -> Iterator[Sampler]:
        """The sampler of this process, by the policy of so many learned steps."""
        with (
            self._team.at(version),
            sampling(self.model, self.job.plan.cache_tokens) as sampler,
            self._meter.phase() as peak,
        ):
            if self.model.engine is not None:
                prompts = self.job.data.prompts
                self.record |= prove_sampler_is_policy(sampler, self.model, prompts)
            yield sampler
        name = "memory/sampling_peak_gib"  # a step may be sampled in several phases
        self.record[name] = max(peak.gib, float(self.record.get(name) or 0))

    def rows(self, step: int) -> list[Datum]:
        """The rows of a step, in a stage that learns from a set of rows."""
        return self._references.of(self._drawn(self.state.drawn, self.config.train.rows_per_step))

    def _drawn(self, start: int, count: int) -> list[Datum]:
        """The rows of the units from ``start`` on in the run's order."""
        data = self.job.data
        units = data.units
        drawn = order(data.sizes, data.weights, self.config.run.seed, start, count)
        return [
            replace(Datum.of_row(row), group=number)
            for number, index in enumerate(drawn)
            for row in units[index]
        ]

    def measure_references(self) -> None:
        """Measure the reference's log-probs of all rows of the run, or read those on disk, where
        the loss compares with a frozen reference."""
        config, learner = self.config, self.learners.policy
        if config.stage != "preference" or not config.preference.row().needs_reference:
            return
        folder, count = self.job.folder, config.train.rows_per_step
        size = 2 if config.learns_pairs else 1
        drawn = self._drawn(0, config.run.steps * count)
        steps = [drawn[n : n + count * size] for n in range(0, len(drawn), count * size)]
        steps.append(self._held_out_rows())
        self._references = References(references.path_of(config, folder, folder / START))
        self._references.read(references.most_bytes(steps))
        if missing := self._references.missing(steps):
            with timed(self.record, "reference"), learning(learner):
                self._references.measure(missing, learner, self.watch, self.stop)

    def _held_out_rows(self) -> list[Datum]:
        data_set = self.job.data.held_out_rows
        rows = [] if data_set is None else data_set.rows
        return self._references.of([Datum.of_row(row) for row in rows])

    def model_scores(self, model: RewardModelFolder, groups: Sequence[Group]) -> Sequence[float]:
        """Score of each completion by a reward model, in a phase of its own."""
        count = sum(len(group.completions) for group in groups)
        with self._saved_if_stopped():
            self.stop.check()
            with (
                timed(self.record, "scoring"),
                learning(self.learners.policy),
                self._meter.phase() as peak,
                self.watch.phase("scoring with reward models", count) as progress,
            ):
                scores = self._reward_models.scores(
                    model, groups, self.learners.policy, lambda rows: progress(0, rows)
                )
        self.record["memory/scoring_peak_gib"] = peak.gib
        return scores

    @contextmanager
    def learning(self, step: int, data: Sequence[Datum]) -> Iterator[Callable[[], Record]]:
        """Learning phase of a step over these rows; what it yields learns them."""
        if self.state.kl_coefficient is not None:
            self._team.set_kl_coefficient(self.state.kl_coefficient)
        ahead: AbstractContextManager[None] = nullcontext()
        if self.config.samples:
            ahead = self._team.sampling_ahead(self.step(step), self._sampling_by)
        try:
            with (
                ahead,
                timed(self.record, "learning"),
                learning(self.learners.policy),
                self._meter.phase() as peak,
                self.watch.phase("learning", len(data) * self.config.train.epochs) as progress,
            ):
                yield lambda: self._team.learn(step, data, lambda rows: progress(0, rows))
        except OutOfMemory:
            if self.state.folder is None and not self.learners.moved_in_step:
                self._save()  # run.save_every left it unsaved
            raise
        self.record["memory/learning_peak_gib"] = peak.gib

    def end(self, step: int, learned: Record) -> None:
        """Archive, evaluate, log and save a step.

        Raises:
            Stopped: a signal asked for the end; everything is saved.
        """
        self.record |= learned
        if self.config.samples:
            self._archive(step)
            drawn = self.buffer.drawn(step)
        else:
            drawn = self.config.train.rows_per_step
        self.state = replace(
            self.state, step=step + 1, folder=None, drawn=self.state.drawn + drawn,
            kl_coefficient=self._next_kl_coefficient(learned),
        )  # fmt: skip
        if self._evaluation_is_due():
            self._evaluate()
        self._log(step)
        run = self.config.run
        is_last = self.state.step == run.steps or self.ends_early
        if is_last or self.state.step % run.save_every == 0 or self.stop.requested:
            with timed(self.record, "saving"):  # stands in the next step's record
                self._save()
            self.stop.check()  # a signal that comes later finds what to save

    def finish(self) -> dict[str, Any]:
        """Write adapter/, release the buffer, and write summary.json last."""
        folder = self.job.folder
        self.writer.wait()
        with replacing_folder(folder / "adapter") as beside:
            self._write_adapter(beside, self.log.records())
        learner = self.learners.policy
        if optim.averaged_steps(learner.optimizer):
            told = f"An exponential moving average (train.ema={self.config.train.ema})."
            with (
                optim.averaged(learner.optimizer),
                replacing_folder(folder / run_folder.EMA) as beside,
            ):
                self._write_adapter(beside, [self._judge_rows()], told)
        if self._buffer is not None:
            self._buffer.finish()
        records, since = self.log.records(), self.log.seconds_since()
        summary = metrics.summarize(records, folder / "adapter", since)
        found, patience = self.state.best, self.config.eval.patience
        summary["best"] = None if found is None else asdict(found)
        summary["judged_by"] = self.config.score.judged_by
        summary["ended_early"] = None
        if self.state.step < self.config.run.steps:
            summary["ended_early"] = (
                f"ended early at step {self.state.step} of {self.config.run.steps}: {patience} "
                f"evaluations in a row were no better than {found} (eval.patience)"
            )
        content = orjson.dumps(summary, option=orjson.OPT_INDENT_2)
        write_atomically(folder / "summary.json", sealed(content))
        return summary

    def evaluate_untrained(self) -> None:
        """Evaluate the policy before it learns and save it, so that the run has an identity before
        it has rollouts."""
        if self._can_evaluate:
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
        logprobs, folder = self.learners.policy.logprobs_at_start, self.job.folder
        learns = self.config.learns

        def write() -> None:
            groups = document.groups
            if learns:
                groups = with_learner_logprobs(groups, logprobs)
            archive.add(replace(document, groups=groups), checkpoint.needed_from(folder))

        self.writer.submit(write)

    def _log(self, step: int) -> None:
        """Write the step's record and show it."""
        counts = self.job.scorer.take_counts()  # of the evaluation; the others are with the groups
        last: Group | None = None
        if self.config.samples:
            groups, document = self.buffer.groups(step), self.buffer.document(step)
            last = groups[-1]
            self.record |= metrics.describe(groups, self.config.score.rewards[0].key)
            counts = metrics.added(counts, document.counts if document else {})
            self.record["sample/groups_dropped"] = self.buffer.drawn(step) - len(groups)
            if self.config.run.max_staleness and document and document.weight_version is not None:
                self.record["sample/staleness_steps"] = step - document.weight_version
        else:
            self.record["data/epoch"] = self.state.drawn / sum(self.job.data.sizes)
        self.record |= self._memory() | counts
        self.record = self._team.take_record(step) | self.record
        self.record["time/writing_seconds"] = self.writer.take_seconds()
        record = self.log.write(self.state.step, self.record)
        self.record = {}
        self.watch.step(record, last)
        self.writer.submit(self.log.sync)

    def _memory(self) -> Record:
        return {
            "memory/sampling_planned_gib": self.job.plan.sampling_bytes / GIB,
            "memory/learning_planned_gib": self.job.plan.learning_bytes / GIB,
            "memory/peak_rss_mib": peak_rss_mib(),
        }

    def _evaluation_is_due(self) -> bool:
        section, step = self.config.eval, self.state.step
        return self._can_evaluate and (
            step == self.config.run.steps or (section.every > 0 and step % section.every == 0)
        )

    @property
    def _can_evaluate(self) -> bool:
        return bool(self.job.data.held_out) or self.job.data.held_out_rows is not None

    def _evaluate(self) -> None:
        with timed(self.record, "evaluation"):
            if self.job.data.held_out:
                self._evaluate_answers()
            self.record |= self._judge_rows()
        if self.config.learns:
            self._take_best()

    def _judge_rows(self) -> Record:
        """Loss and metrics of the held-out rows; empty without any."""
        if self.job.data.held_out_rows is None:
            return {}
        with learning(self.learners.policy):
            return held_out.judge(self.learners.policy, self._held_out_rows())

    def _take_best(self) -> None:
        """Note whether this evaluation is the best one, and its adapter."""
        found = best.after(
            self.state.best, self.state.step, self.record, self._held_out_digest,
            self.config.score.judged_by,
        )  # fmt: skip
        self.state = replace(self.state, best=found)
        if self.config.run.keep_best and found is not None and found.step == self.state.step:
            self._best = checkpoint.best_tensors(self.model)

    def _evaluate_answers(self) -> None:
        with (
            sampling(self.model, self.job.plan.cache_tokens) as sampler,
            self.watch.phase("evaluating", len(self.job.data.held_out_prompts)) as progress,
        ):
            dealing = self._team.dealing(sampler)
            params = SamplingParams(
                num_completions=1, max_new_tokens=self.config.eval_max_new_tokens, temperature=0.0,
                stop=tuple(self.config.sample.stop),
            )  # fmt: skip
            found = [
                held_out.evaluate(
                    dealing, each.prompts, self.job.scorer, params, progress
                )
                for each in self.job.data.held_out
            ]  # fmt: skip
        self.record |= found[0][0]
        content = b""
        for each, (values, groups) in zip(self.job.data.held_out, found, strict=True):
            self.record |= metrics.by_name(values, each.name) if each.name else {}
            content += held_out.to_lines(each.name or "held_out", groups)
        if self.config.eval.keep_completions:
            path = self.job.folder / "evaluations" / f"step-{self.state.step:08d}.jsonl.gz"
            self.writer.submit(lambda: write_atomically(path, gzip.compress(content, mtime=0)))

    def _write_best(self, source: Path) -> None:
        """Write ``adapter_best/`` from a checkpoint, once that is on disk."""
        found, folder = self.state.best, self.job.folder
        assert found is not None
        readme = adapter_readme.readme(
            self.config, found.step, f"Its evaluation was the best: {found}."
        )
        others = {adapter_readme.NAME: readme}
        if self.config.of_stage.scores:
            records = [each for each in self.log.records() if each["step"] <= found.step]
            described = reward_models.describe(records, *self.job.run.digests)
            others[reward_models.SCALE] = described
        conditioning = self.job.data.conditioning
        self.writer.submit(lambda: best_adapter.write(folder, source, found, conditioning, others))

    def _write_adapter(self, folder: Path, records: Sequence[Record], told: str = "") -> None:
        """The policy's adapter, with a README that says ``told`` of it, a reward model's head and
        its scale by the last of the records, and how scores are written into prompts."""
        adapters.save(self.model.policy, folder)
        (folder / adapter_readme.NAME).write_bytes(
            adapter_readme.readme(self.config, self.state.step, told)
        )
        if self.job.data.conditioning is not None:
            self.job.data.conditioning.write(folder)
        if (head := self.model.heads.get("policy")) is not None:
            score_head.save(score_head.state(head), folder)
            described = reward_models.describe(records, *self.job.run.digests)
            write_atomically(folder / reward_models.SCALE, described)

    def _next_kl_coefficient(self, learned: Record) -> float | None:
        """The KL's weight in the next step; None where it stays as the row says."""
        row = self.config.algorithm.row()
        if not self.config.samples or row.kl_target == 0:
            return None
        now = self.state.kl_coefficient
        now = row.kl_coefficient if now is None else now
        self.record["train/kl_coefficient"] = now
        if self.state.step < self.config.first_policy_step:
            return now  # the policy has not moved: its KL says nothing of this weight
        kl, count = learned["train/kl_per_completion"], self.config.sample.rollouts_per_step
        return next_kl_coefficient(now, kl, count, row.kl_target, row.kl_horizon)

    def _save(self) -> None:
        tokens = self.learners.policy.micro_batches.tokens
        planned = self.job.plan.micro_batch_tokens
        state = replace(
            self.state, micro_batch_tokens=tokens if tokens < planned else None,
            metrics_sha256=self.log.sha256,
        )  # fmt: skip
        self.state = checkpoint.save(
            self.job.folder, state, self.model, self.learners.optimizers,
            self.config.run.keep_checkpoints, self.writer, self._best,
            self._team.earlier_adapters,
        )  # fmt: skip
        assert self.state.folder is not None
        if isinstance(self._best, dict):
            self._write_best(self.state.folder)
        self._best = None if self._best is None else self.state.folder
        if self._buffer is not None:
            self._buffer.checkpoint = str(self.state.folder)
