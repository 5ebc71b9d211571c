"""The method, on one screen: sample -> score -> buffer -> train -> evaluate -> save, until the
steps are done.

A run that dies at any moment goes on from its last checkpoint and its buffer when it is started
again. What is checked before a weight is read is in ``job``.
"""

import time
from dataclasses import replace
from typing import Any

import orjson

from reason_llm import checkpoint, metrics, report
from reason_llm.buffer import RolloutBuffer
from reason_llm.checkpoint import RunState
from reason_llm.collection import collect
from reason_llm.config import Config
from reason_llm.console import Console
from reason_llm.errors import OutOfMemory
from reason_llm.evaluate import evaluate, prove_sampler_is_policy
from reason_llm.files import replacing_folder, write_atomically
from reason_llm.job import Job, prepare
from reason_llm.memory import Plan
from reason_llm.meter import GIB, Meter, peak_rss_mib
from reason_llm.metrics import MetricsLog, Record, timed
from reason_llm.model import adapters
from reason_llm.model.base import Model, default_device
from reason_llm.sample import sampling
from reason_llm.train.algorithms import Algorithm
from reason_llm.train.phase import Learner, LearningSettings, learning
from reason_llm.train.preparation import with_advantages


def run(config: Config, console: Console) -> dict[str, Any]:
    """Train to ``run.steps`` and return the summary that is also written to ``summary.json``.

    Raises:
        ReasonError: anything that the user can mend; what was sampled and learned so far is kept.
    """
    started = time.perf_counter()
    job = prepare(config, console)
    if job.state.step >= config.run.steps and (summary := job.finished()):
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
        job.scorer,
        job.held() as buffer,
        Model(
            config.model,
            job.tokenizer,
            config.run.seed,
            plan.engine,
            checkpointing=bool(config.train.gradient_checkpointing),
        ) as model,
    ):
        learner = Learner(model, _learning_settings(config, plan.micro_batch_tokens))
        checkpoint.restore(job.state, model.policy, learner.optimizer)
        log = job.begin(started)
        state = job.state if job.state.folder else _begin(job, log, model, learner, console)
        record: Record = {}
        for step in range(state.step, config.run.steps):
            if not buffer.holds(step):  # a killed run goes on between the phases
                with sampling(model, plan.cache_tokens) as sampler, meter.phase() as peak:
                    if model.engine is not None:
                        record |= prove_sampler_is_policy(sampler, model, job.data.prompts)
                    groups, drawn = collect(job, sampler, buffer, step, record, console)
                record["memory/sampling_peak_gib"] = peak.gib
                with timed(record, "buffer"):
                    row, weights = learner.settings.algorithm, job.scorer.weights
                    scored = with_advantages(groups, row, weights)
                    buffer.write(step, scored, drawn)
            with (
                timed(record, "learning"),
                learning(learner),
                meter.phase() as peak,
                console.phase(
                    "learning", config.sample.rollouts_per_step * config.train.epochs
                ) as progress,
            ):
                try:
                    record |= learner.learn(
                        step, buffer.groups(step), lambda items: progress(0, items)
                    )
                except OutOfMemory:
                    if state.folder is None and learner.updates_in_step == 0:
                        _save(job, state, model, learner)  # run.save_every left it unsaved
                    raise
            record["memory/learning_peak_gib"] = peak.gib
            state = RunState(state.run, step + 1, None)
            if _evaluation_is_due(config, state.step):
                _evaluate(job, model, record, console)
            record |= metrics.describe(buffer.groups(step)) | _memory(plan)
            record |= job.scorer.take_counts()
            record["sample/groups_dropped"] = buffer.drawn(step) - len(buffer.groups(step))
            console.line(_step_line(config, log.write(state.step, record)))
            record = {}
            if state.step % config.run.save_every == 0 or state.step == config.run.steps:
                with timed(record, "saving"):  # stands in the next step's record
                    state = _save(job, state, model, learner)
        return _finish(job, log, model, buffer, console)


def _learning_settings(config: Config, micro_batch_tokens: int) -> LearningSettings:
    train = config.train
    return LearningSettings(
        algorithm=_with_correction(config),
        train=train,
        temperature=config.sample.temperature,
        max_new_tokens=config.sample.max_new_tokens,
        micro_batch_tokens=micro_batch_tokens,
        seed=config.run.seed,
        total_optimizer_steps=config.run.steps * train.epochs * train.optimizer_steps,
    )


def _with_correction(config: Config) -> Algorithm:
    """The row, ``correction: auto`` resolved: only vLLM's log-probs are not the learner's own."""
    row, sample = config.algorithm.row(), config.sample
    if row.correction != "auto":
        return row
    filtered = sample.top_p < 1 or sample.top_k > 0 or sample.min_p > 0
    needed = sample.engine == "vllm" and not filtered
    return replace(row, correction="token_truncate" if needed else "none")


def _begin(job: Job, log: MetricsLog, model: Model, learner: Learner, console: Console) -> RunState:
    """Evaluate the untrained policy and save it, so that the run has an identity before it has
    rollouts."""
    record: Record = {}
    if job.data.held_out:
        _evaluate(job, model, record, console)
        console.line(f"before training: {_accuracy(record)}")
    log.write(0, record | _memory(job.plan))
    return _save(job, RunState(job.state.run, 0, None), model, learner)


def _memory(plan: Plan) -> Record:
    return {
        "memory/sampling_planned_gib": plan.sampling_bytes / GIB,
        "memory/learning_planned_gib": plan.learning_bytes / GIB,
        "memory/peak_rss_mib": peak_rss_mib(),
    }


def _save(job: Job, state: RunState, model: Model, learner: Learner) -> RunState:
    keep = job.config.run.keep_checkpoints
    return checkpoint.save(job.folder, state, model.policy, learner.optimizer, keep)


def _evaluate(job: Job, model: Model, record: Record, console: Console) -> None:
    with (
        timed(record, "evaluation"),
        sampling(model, job.plan.cache_tokens) as sampler,
        console.phase("evaluating", len(job.data.held_out_prompts)) as progress,
    ):
        found = [
            evaluate(sampler, each.prompts, job.scorer, job.config.eval_max_new_tokens, progress)
            for each in job.data.held_out
        ]
    record |= found[0]
    for each, values in zip(job.data.held_out, found, strict=True):
        record |= metrics.by_name(values, each.name) if each.name else {}


def _finish(
    job: Job, log: MetricsLog, model: Model, buffer: RolloutBuffer, console: Console
) -> dict[str, Any]:
    """Write adapter/ and curves.png, let go of the buffer, and last of all write summary.json."""
    folder, adapter = job.folder, job.folder / "adapter"
    with replacing_folder(adapter) as beside:
        adapters.save(model.policy, beside)
    sources = " + ".join(each.source for each in job.config.data.sources)
    title = f"{job.config.run.name}: {job.config.algorithm.name} on {sources}"
    write_atomically(folder / "curves.png", report.draw_curves(log.records, title))
    buffer.finish()
    summary = log.summary(adapter)
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
        f"learning; adapter in {adapter}, curves in {folder / 'curves.png'}"
    )
    return summary


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
