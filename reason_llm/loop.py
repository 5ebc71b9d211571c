"""The method, on one screen: sample -> score -> buffer -> train -> evaluate -> save, until the
steps are done.

``prepare`` checks everything that can be checked before a weight is read. ``run`` is the loop. A
run that dies at any moment goes on from its last checkpoint and its buffer when it is started
again.
"""

import logging
import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import transformers
from transformers import PreTrainedTokenizerBase

from reason_llm import checkpoint, config_file, memory, report
from reason_llm.buffer import RolloutBuffer, lock
from reason_llm.checkpoint import RunState
from reason_llm.config import Config
from reason_llm.console import Console
from reason_llm.evaluate import evaluate
from reason_llm.files import FileLock, check_writable, move_aside, write_atomically
from reason_llm.metrics import MetricsLog, Record
from reason_llm.model import adapters, base
from reason_llm.model.base import Model
from reason_llm.prompts import load_prompts, order, resolve_system_prompt
from reason_llm.rollout import Group, Prompt
from reason_llm.sample import Sampler, SamplingParams, sampling
from reason_llm.score import WeightedReward, find_rewards, score
from reason_llm.train.phase import Learner, LearningSettings, learning, with_advantages

logger = logging.getLogger(__name__)


def run(config: Config, console: Console) -> dict[str, Any]:
    """Train to ``run.steps`` and return the summary that is also written to ``summary.json``.

    Raises:
        ReasonError: anything that the user can mend; what was sampled and learned so far is kept.
    """
    started = time.perf_counter()
    job = prepare(config, console)
    if job.state.step >= config.run.steps and (job.folder / "summary.json").exists():
        console.line(
            f"{job.folder} is finished at step {job.state.step}: raise --run.steps to go on, or "
            f"--run.resume never"
        )
        return dict(orjson.loads((job.folder / "summary.json").read_bytes()))
    with job.held() as (buffer, log), Model(config.model, job.tokenizer, config.run.seed) as model:
        plan = Plan.of(config, model)
        learner = Learner(model, plan.learning)
        checkpoint.restore(job.state, model.policy, learner.optimizer)
        log.restart_clock(started)
        state = job.state if job.state.folder else _begin(job, log, model, learner, plan, console)
        record = _Record()
        for step in range(state.step, config.run.steps):
            if not buffer.holds(step):  # a killed run goes on between the phases
                with sampling(model, plan.cache_tokens) as sampler:
                    groups = collect(job, sampler, buffer, step, record, console)
                with record.timed("buffer"):
                    buffer.write(step, with_advantages(groups, plan.learning.algorithm))
            with (
                record.timed("learning"),
                learning(learner),
                console.phase("learning", _rollouts(config) * config.train.epochs) as progress,
            ):
                record.values |= learner.learn(
                    step, buffer.groups(step), lambda items: progress(0, items)
                )
            state = RunState(state.run, step + 1, None)
            if _evaluation_is_due(config, state.step):
                _evaluate(job, model, plan, record, console)
            record.values |= _describe(buffer.groups(step)) | {
                "memory/peak_rss_mib": memory.peak_rss_mib()
            }
            console.line(_step_line(config, log.write(state.step, record.values)))
            record = _Record()
            if state.step % config.run.save_every == 0 or state.step == config.run.steps:
                with record.timed("saving"):  # stands in the next step's record
                    state = _save(job, state, model, learner)
        summary = _finish(job, log, model, console)
        buffer.finish()
    return summary


@dataclass(frozen=True, slots=True)
class Job:
    """A run that was checked and has not loaded a weight yet."""

    config: Config
    folder: Path
    state: RunState
    tokenizer: PreTrainedTokenizerBase
    prompts: list[Prompt]
    held_out: list[Prompt]
    rewards: list[WeightedReward]

    @contextmanager
    def held(self) -> Iterator[tuple[RolloutBuffer, MetricsLog]]:
        """The run's folder and buffer, locked, the folder's files begun."""
        with ExitStack() as stack:
            buffer = stack.enter_context(RolloutBuffer(self.config.run.buffer, self.state.run))
            stack.enter_context(
                FileLock(self.folder / ".lock", what=f"the run directory {self.folder}")
            )
            write_atomically(
                self.folder / "resolved_config.yaml", config_file.to_yaml(self.config).encode()
            )
            yield buffer, MetricsLog(self.folder, self.state.step if self.state.folder else None)


@dataclass(frozen=True, slots=True)
class Plan:
    """The sizes that follow from the machine, the model and the config."""

    cache_tokens: int
    learning: LearningSettings

    @classmethod
    def of(cls, config: Config, model: Model) -> "Plan":
        """Derived from total memory, never from what is free now: a resumed run must batch as
        before."""
        train, budget = config.train, memory.budget_bytes(config.memory.budget_gib, model.device)
        element_bytes = model.head.weight.element_size()
        if train.micro_batch_tokens == "auto":
            micro_batch = memory.micro_batch_tokens(
                budget,
                model.text_config,
                element_bytes,
                train.gradient_checkpointing,
                model.device.type,
            )
        else:
            micro_batch = train.micro_batch_tokens
        settings = LearningSettings(
            algorithm=config.algorithm.row(),
            train=train,
            temperature=config.sample.temperature,
            max_new_tokens=config.sample.max_new_tokens,
            micro_batch_tokens=micro_batch,
            seed=config.run.seed,
            total_optimizer_steps=config.run.steps * train.epochs * train.optimizer_steps,
        )
        return cls(memory.kv_cache_tokens(budget, model.text_config, element_bytes), settings)


def prepare(config: Config, console: Console) -> Job:
    """Check config, rewards, model folder, data, the run's folder and its buffer, in this order;
    write nothing.

    ``run.resume: never`` moves an old run and its buffer aside once the rest is known to be good.
    """
    _quiet_libraries()
    rewards = find_rewards(config.score.rewards)
    tokenizer = base.load_tokenizer(config.model.path)
    base.check_weights(config.model.path)
    context = base.context_limit(config.model)
    data, first = config.data, config.score.rewards[0].name
    system_prompt = resolve_system_prompt(data.system_prompt, first)
    prompts = load_prompts(
        data.train,
        data.split,
        data.columns,
        system_prompt,
        tokenizer,
        context - config.sample.max_new_tokens,
    )
    held_out = []
    if data.eval is not None:
        room = context - _eval_tokens(config)
        held_out = load_prompts(
            data.eval, "test", data.columns, system_prompt, tokenizer, room, config.eval.limit
        )
    folder = config.run.directory / str(config.run.name)
    check_writable(folder)
    check_writable(config.run.buffer.parent)
    if config.run.resume == "never":
        with FileLock(folder / ".lock", what=f"the run directory {folder}"):
            move_aside(folder)
        with lock(config.run.buffer):
            move_aside(config.run.buffer)
    state = checkpoint.find(folder, str(config.run.name), config.model_dump(mode="json"))
    RolloutBuffer(config.run.buffer, state.run).check()
    where = f"goes on after step {state.step}" if state.folder else "begins"
    console.line(
        f"run {config.run.name} {where}: {len(prompts)} prompts, {len(held_out)} held out, model "
        f"{config.model.path}"
    )
    console.line("sampling with transformers, the only engine so far")
    return Job(config, folder, state, tokenizer, prompts, held_out, rewards)


def collect(
    job: Job,
    sampler: Sampler,
    buffer: RolloutBuffer,
    step: int,
    record: "_Record",
    console: Console,
) -> list[Group]:
    """The scored groups of a step, wave by wave; each wave but the last is on disk before the next
    begins."""
    config, sample = job.config, job.config.sample
    params = SamplingParams(
        sample.completions_per_prompt,
        sample.max_new_tokens,
        sample.temperature,
        sample.top_k,
        sample.top_p,
        sample.min_p,
    )
    indices = order(
        len(job.prompts), config.run.seed, step * sample.prompts_per_step, sample.prompts_per_step
    )
    prompts = [job.prompts[index] for index in indices]
    wave = sample.prompts_per_wave or sampler.prompts_at_once(prompts, params)
    groups = buffer.groups(step)
    with console.phase("sampling", _rollouts(config)) as progress:
        progress(0, len(groups) * sample.completions_per_prompt)
        while len(groups) < len(prompts):
            start = len(groups)
            seed = random.Random(f"{config.run.seed}/sample/{step}/{start}").getrandbits(63)
            with record.timed("sampling"):
                sampled = sampler.sample(prompts[start : start + wave], params, seed, progress)
            with record.timed("scoring"):
                groups += score(sampled, job.rewards)
            if len(groups) < len(prompts):
                with record.timed("buffer"):
                    buffer.add_wave(step, groups[start:])
    return groups


class _Record:
    """The values of a step as they come in."""

    def __init__(self) -> None:
        self.values: Record = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds within to ``time/<name>_seconds``."""
        started = time.perf_counter()
        yield
        key = f"time/{name}_seconds"
        self.values[key] = self.values.get(key, 0.0) + time.perf_counter() - started


def _begin(
    job: Job, log: MetricsLog, model: Model, learner: Learner, plan: Plan, console: Console
) -> RunState:
    """Evaluate the untrained policy and save it, so that the run has an identity before it has
    rollouts."""
    record = _Record()
    if job.held_out:
        _evaluate(job, model, plan, record, console)
        console.line(f"before training: held-out accuracy {record.values['eval/accuracy']:.1%}")
    log.write(0, record.values | {"memory/peak_rss_mib": memory.peak_rss_mib()})
    return _save(job, RunState(job.state.run, 0, None), model, learner)


def _save(job: Job, state: RunState, model: Model, learner: Learner) -> RunState:
    keep = job.config.run.keep_checkpoints
    return checkpoint.save(job.folder, state, model.policy, learner.optimizer, keep)


def _evaluate(job: Job, model: Model, plan: Plan, record: _Record, console: Console) -> None:
    with (
        record.timed("evaluation"),
        sampling(model, plan.cache_tokens) as sampler,
        console.phase("evaluating", len(job.held_out)) as progress,
    ):
        record.values |= evaluate(
            sampler, job.held_out, job.rewards[0], _eval_tokens(job.config), progress
        )


def _finish(job: Job, log: MetricsLog, model: Model, console: Console) -> dict[str, Any]:
    """Write adapter/, summary.json and curves.png."""
    folder, adapter = job.folder, job.folder / "adapter"
    adapters.save(model.policy, adapter)
    summary = log.summary(adapter)
    write_atomically(
        folder / "summary.json", orjson.dumps(summary, option=orjson.OPT_INDENT_2) + b"\n"
    )
    curves = report.draw_curves(
        folder, f"{job.config.run.name}: {job.config.algorithm.name} on {job.config.data.train}"
    )
    if summary["accuracy_before"] is not None:
        console.line(
            f"held-out accuracy {summary['accuracy_before']:.1%} -> {summary['accuracy_after']:.1%}"
        )
    console.line(
        f"{summary['steps']} steps in {summary['total_seconds']:.0f} s: "
        f"{summary['sampling_seconds']:.0f} s sampling, "
        f"{summary['learning_seconds']:.0f} s learning; adapter in {adapter}, curves in {curves}"
    )
    return summary


def _describe(groups: list[Group]) -> Record:
    """What the rollouts of a step were like, from the buffer alone."""
    completions = [completion for group in groups for completion in group.completions]
    count = len(completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    flat = sum(
        len({completion.reward for completion in group.completions}) == 1 for group in groups
    )
    rewards = {
        f"score/{name}": sum(completion.rewards[name] for completion in completions) / count
        for name in completions[0].rewards
    }
    return {
        "sample/tokens": tokens,
        "sample/completion_tokens": tokens / count,
        "sample/truncated_fraction": sum(
            completion.finish_reason == "length" for completion in completions
        )
        / count,
        "score/reward": sum(completion.reward or 0.0 for completion in completions) / count,
        "score/groups_without_signal_fraction": flat / len(groups),
        **rewards,
    }


def _step_line(config: Config, record: Record) -> str:
    sampling_seconds = record.get("time/sampling_seconds", 0.0)
    parts = [
        f"step {record['step']:.0f}/{config.run.steps}",
        f"reward {record['score/reward']:.3f}",
    ]
    if "eval/accuracy" in record:
        parts.append(f"held-out accuracy {record['eval/accuracy']:.1%}")
    speed = (
        f" ({record['sample/tokens'] / sampling_seconds:,.0f} tokens/s)"
        if sampling_seconds
        else " (from the buffer)"
    )
    parts.append(f"sampling {sampling_seconds:.1f} s{speed}")
    parts.append(f"learning {record['time/learning_seconds']:.1f} s")
    return "  ".join(parts)


def _evaluation_is_due(config: Config, step: int) -> bool:
    every = config.eval.every
    return config.data.eval is not None and (
        step == config.run.steps or (every > 0 and step % every == 0)
    )


def _eval_tokens(config: Config) -> int:
    return config.eval.max_new_tokens or config.sample.max_new_tokens


def _rollouts(config: Config) -> int:
    return config.sample.prompts_per_step * config.sample.completions_per_prompt


def _quiet_libraries() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
