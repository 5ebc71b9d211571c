"""The method, on one screen: sample -> score -> buffer -> train -> evaluate -> save, until the
steps are done.

A run that dies at any moment goes on from its last checkpoint and its buffer when it is started
again. What is checked before a weight is read is in ``job``.
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from reason_llm.app.console import Console
from reason_llm.app.report import curves
from reason_llm.app.report.page import write_report
from reason_llm.app.trackers import Trackers
from reason_llm.config import Config
from reason_llm.errors import OutOfMemory, Stopped, one_line
from reason_llm.evaluate.held_out import evaluate
from reason_llm.files import replacing_folder, write_atomically
from reason_llm.model import adapters
from reason_llm.model.base import Model, default_device
from reason_llm.model.datum import to_data
from reason_llm.model.plan.machine import GIB
from reason_llm.model.plan.memory import Plan
from reason_llm.model.plan.meter import Meter, peak_rss_mib
from reason_llm.run import checkpoint, metrics, saved_rollouts
from reason_llm.run.buffer import Document, RolloutBuffer
from reason_llm.run.checkpoint import RunState
from reason_llm.run.collect import collect
from reason_llm.run.metrics import MetricsLog, Record, timed
from reason_llm.run.prepare import Job, prepare
from reason_llm.run.stopping import StopSignal
from reason_llm.run.writer import BackgroundWriter
from reason_llm.sample import prove_sampler_is_policy, sampling
from reason_llm.train.learner import Learner, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient
from reason_llm.train.scored import (
    with_advantages,
    with_learner_logprobs,
    without_learner_logprobs,
)

logger = logging.getLogger(__name__)


def run(config: Config, console: Console) -> dict[str, Any]:
    """Train to ``run.steps`` and return the summary that is also written to ``summary.json``.

    Raises:
        ReasonError: anything that the user can mend; what was sampled and learned so far is kept.
    """
    started = time.perf_counter()
    job = prepare(config, console)
    if job.state.step >= job.config.run.steps and (summary := job.finished()):
        console.line(
            f"{job.folder} is finished at step {job.state.step}: raise --run.steps to go on, "
            "or start afresh with --run.resume never"
        )
        return summary
    config, plan = job.config, job.plan
    for line in plan.table():
        console.line(line)
    meter = Meter(default_device())
    with (
        Trackers(config.log.trackers) as trackers,
        console.screen(str(config.run.name), job.state.step, config.run.steps),
        job.scorer,
        job.held() as (buffer, writer),
        Model(
            config.model,
            job.tokenizer,
            config.run.seed,
            plan.engine,
            checkpointing=bool(config.train.gradient_checkpointing),
        ) as model,
        StopSignal() as stop,
    ):
        halved = job.state.micro_batch_tokens or plan.micro_batch_tokens
        tokens = min(halved, plan.micro_batch_tokens)  # which the user may have lowered since
        learner = Learner(model, _learning_settings(config, tokens, plan.chunk_tokens))
        checkpoint.restore(job.state, model.policy, learner.optimizer)
        if job.state.folder is not None:
            buffer.checkpoint = str(job.state.folder)
        under_way = _Run(job, model, learner, buffer, writer, job.begin(started), console)
        console.take(under_way.log.records())
        state = _begin(under_way) if job.is_new else job.state
        trackers.start(job.folder, job.state.run.id)
        stop.check()
        record: Record = {}
        for step in range(state.step, config.run.steps):
            if not buffer.holds(step) and (saved := job.saved(step)):
                _take(under_way, step, saved)
            with _saved_if_stopped(under_way, state):
                if not buffer.holds(step):  # a killed run goes on between the phases
                    with sampling(model, plan.cache_tokens) as sampler, meter.phase() as peak:
                        if model.engine is not None:
                            record |= prove_sampler_is_policy(sampler, model, job.data.prompts)
                        groups, drawn, counts = collect(
                            job, sampler, buffer, step, state.drawn, record, console, stop
                        )
                    record["memory/sampling_peak_gib"] = peak.gib
                    with timed(record, "buffer"):
                        row, weights = config.learned_row, job.scorer.weights
                        buffer.write(step, with_advantages(groups, row, weights), drawn, counts)
                stop.check()
            with timed(record, "learning"), learning(learner), meter.phase() as peak:
                record |= _learn(under_way, state)
            record["memory/learning_peak_gib"] = peak.gib
            _archive(under_way, step)
            state = _learned(under_way, state)
            if _evaluation_is_due(config, state.step):
                _evaluate(under_way, record)
            _log(under_way, state, record)
            record = {}
            is_due = state.step % config.run.save_every == 0 or state.step == config.run.steps
            if is_due or stop.requested:
                with timed(record, "saving"):  # stands in the next step's record
                    state = _save(under_way, state)
                stop.check()  # a signal that comes later finds what to save
        return _finish(under_way)


@dataclass(frozen=True, slots=True)
class _Run:
    """What a run that is under way has at hand."""

    job: Job
    model: Model
    learner: Learner
    buffer: RolloutBuffer
    writer: BackgroundWriter
    log: MetricsLog
    console: Console


@contextmanager
def _saved_if_stopped(run: _Run, state: RunState) -> Iterator[None]:
    """If a signal ends the run in here, what ``run.save_every`` left unsaved is saved before."""
    try:
        yield
    except Stopped:
        if state.folder is None:
            _save(run, state)
        raise


def _learning_settings(
    config: Config, micro_batch_tokens: int, chunk_tokens: int
) -> LearningSettings:
    train = config.train
    return LearningSettings(
        objective=PolicyGradient(
            config.learned_row, config.sample.max_new_tokens, saved_rollouts.rounding_nats(config)
        ),
        train=train,
        temperature=config.sample.temperature,
        micro_batch_tokens=micro_batch_tokens,
        seed=config.run.seed,
        total_optimizer_steps=config.run.steps * train.epochs * train.optimizer_steps,
        chunk_tokens=chunk_tokens,
    )


def _begin(run: _Run) -> RunState:
    """Evaluate the policy before it learns and save it, so that the run has an identity before it
    has rollouts."""
    state, record = run.job.state, Record()
    if run.job.data.held_out:
        _evaluate(run, record)
        record |= run.job.scorer.take_counts()
        run.console.line(f"before training: {_accuracy(record)}")
    run.console.take([run.log.write(state.step, record | _memory(run.job.plan))])
    return _save(run, state)


def _take(run: _Run, step: int, saved: Document) -> None:
    """Have the buffer hold rollouts that were saved before, as this run's algorithm sees them."""
    algorithm, weights = run.job.config.learned_row, run.job.scorer.weights
    groups = with_advantages(saved.groups, algorithm, weights)
    run.buffer.take(step, without_learner_logprobs(groups), saved.drawn, saved.counts)


def _learn(run: _Run, state: RunState) -> Record:
    """One step's gradient steps; its metrics."""
    config, groups = run.job.config, run.buffer.groups(state.step)
    rollouts = sum(len(group.completions) for group in groups) * config.train.epochs
    with run.console.phase("learning", rollouts) as progress:
        try:
            return run.learner.learn(state.step, to_data(groups), lambda items: progress(0, items))
        except OutOfMemory:
            if state.folder is None and run.learner.updates_in_step == 0:
                _save(run, state)  # run.save_every left it unsaved
            raise


def _archive(run: _Run, step: int) -> None:
    """Keep the rollouts that were just learned from, with the learner's log-probs of them."""
    document, archive = run.buffer.document(step), run.job.archive
    if document is not None and archive.wants(step):
        logprobs = run.learner.logprobs_at_start
        run.writer.submit(
            lambda: archive.add(
                replace(document, groups=with_learner_logprobs(document.groups, logprobs)),
                checkpoint.needed_from(run.job.folder),
            )
        )


def _learned(run: _Run, state: RunState) -> RunState:
    """The state after another step; not saved yet."""
    return replace(
        state,
        step=state.step + 1,
        folder=None,
        drawn=state.drawn + run.buffer.drawn(state.step),
    )


def _log(run: _Run, state: RunState, record: Record) -> None:
    """Write the record of the step that led to ``state``, and show it."""
    step, config = state.step - 1, run.job.config
    groups, document = run.buffer.groups(step), run.buffer.document(step)
    counts = run.job.scorer.take_counts()  # of the evaluation; the others are with the rollouts
    record |= metrics.describe(groups) | _memory(run.job.plan)
    record |= metrics.added(counts, document.counts if document else {})
    record["sample/groups_dropped"] = run.buffer.drawn(step) - len(groups)
    record["time/writing_seconds"] = run.writer.take_seconds()
    record = run.log.write(state.step, record)
    run.console.step(_step_line(config, record), record, groups[-1])
    run.writer.submit(run.log.sync)


def _memory(plan: Plan) -> Record:
    return {
        "memory/sampling_planned_gib": plan.sampling_bytes / GIB,
        "memory/learning_planned_gib": plan.learning_bytes / GIB,
        "memory/peak_rss_mib": peak_rss_mib(),
    }


def _save(run: _Run, state: RunState) -> RunState:
    state = replace(state, micro_batch_tokens=_halved(run))
    keep = run.job.config.run.keep_checkpoints
    policy, optimizer = run.model.policy, run.learner.optimizer
    state = checkpoint.save(run.job.folder, state, policy, optimizer, keep, run.writer)
    run.buffer.checkpoint = str(state.folder)
    return state


def _halved(run: _Run) -> int | None:
    """Tokens of a micro-batch, if out of memory made them fewer than planned."""
    tokens = run.learner.micro_batches.tokens
    return tokens if tokens < run.job.plan.micro_batch_tokens else None


def _evaluate(run: _Run, record: Record) -> None:
    job, data = run.job, run.job.data
    with (
        timed(record, "evaluation"),
        sampling(run.model, job.plan.cache_tokens) as sampler,
        run.console.phase("evaluating", len(data.held_out_prompts)) as progress,
    ):
        found = [
            evaluate(sampler, each.prompts, job.scorer, job.config.eval_max_new_tokens, progress)
            for each in data.held_out
        ]
    record |= found[0]
    for each, values in zip(data.held_out, found, strict=True):
        record |= metrics.by_name(values, each.name) if each.name else {}


def _finish(run: _Run) -> dict[str, Any]:
    """Write adapter/ and curves.png, let go of the buffer, and last of all write summary.json."""
    config, folder, console = run.job.config, run.job.folder, run.console
    adapter = folder / "adapter"
    run.writer.wait()
    with replacing_folder(adapter) as beside:
        adapters.save(run.model.policy, beside)
    sources = " + ".join(each.source for each in config.data.sources)
    title = f"{config.run.name}: {config.algorithm.name} on {sources}"
    records = run.log.records()
    write_atomically(folder / "curves.png", curves.draw_curves(records, title))
    run.buffer.finish()
    summary = metrics.summarize(records, adapter, run.log.seconds_since())
    write_atomically(folder / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2))
    if summary["accuracy_before"] is not None:
        console.line(
            f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}"
        )
    for name, (before, after) in summary["accuracy_of_sets"].items():
        console.line(f"  {name} {before:.1%} -> {after:.1%}")
    console.line(
        f"memory: sampling {summary['sampling_peak_gib']} GiB "
        f"({summary['sampling_planned_gib']} planned), learning {summary['learning_peak_gib']} GiB "
        f"({summary['learning_planned_gib']} planned)"
    )
    console.line(
        f"{summary['steps']} steps in {summary['total_seconds']:.0f} s: "
        f"{summary['sampling_seconds']:.0f} s sampling, {summary['learning_seconds']:.0f} s "
        f"learning, {summary['buffer_seconds'] + summary['saving_seconds']:.1f} s saving; adapter "
        f"in {adapter}, curves in {folder / 'curves.png'}"
    )
    _report(folder, console)
    return summary


def _report(folder: Path, console: Console) -> None:
    """Write report.html when all else is written: nothing that is wrong with it may end the run as
    a failed one."""
    try:
        alarms = write_report([folder], folder / "report.html")
    except Exception as error:  # noqa: BLE001
        logger.warning("no report was written: %s: %s", type(error).__name__, one_line(error))
    else:
        told = f"alarms: {'; '.join(alarms)}" if alarms else "no alarms"
        console.line(f"report in {folder / 'report.html'}, {told}")


def _step_line(config: Config, record: Record) -> str:
    parts = [
        f"step {record['step']:.0f}/{config.run.steps}",
        f"reward {record['score/reward']:.3f}",
    ]
    if "eval/accuracy" in record:
        parts.append(_accuracy(record))
    if "sample/tokens_per_second" in record:
        seconds, speed = record["time/sampling_seconds"], record["sample/tokens_per_second"]
        parts.append(f"sampling {seconds:.1f} s ({speed:,.0f} tokens/s)")
    else:
        parts.append("sampled before")
    parts.append(f"learning {record['time/learning_seconds']:.1f} s")
    return "  ".join(parts)


def _accuracy(record: Record) -> str:
    named = ", ".join(f"{name} {value:.1%}" for name, value in metrics.accuracies(record).items())
    return f"held-out accuracy {record['eval/accuracy']:.1%}" + (named and f" ({named})")


def _evaluation_is_due(config: Config, step: int) -> bool:
    every = config.eval.every
    return bool(config.evaluation_sets) and (
        step == config.run.steps or (every > 0 and step % every == 0)
    )
