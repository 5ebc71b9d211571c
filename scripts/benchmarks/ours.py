"""This project's side: its own plan, model, phases and learner, as ``loop`` uses them.

Lengths of completions are given. vLLM's end of a sequence ends nothing. In the Transformers sampler
they are forced by the random numbers that it draws with: the end token is the last of the
vocabulary, so the largest number below 1 draws it, and numbers below 0.999 never do. That costs
nothing, and nothing else is changed.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from benchmarks import device
from benchmarks.sides import Turns
from benchmarks.work import TARGETS, Work, completions, lengths, prompts
from reason_llm.config import Config, resolve
from reason_llm.errors import ConfigError, OutOfMemory
from reason_llm.model import (
    Datum,
    Model,
    attention,
    base,
    default_device,
    load_tokenizer,
    meta_model,
    to_data,
)
from reason_llm.model.plan import GIB, Machine, Meter, Plan, Shape, memory
from reason_llm.model.plan.meter import Peak
from reason_llm.rollout import Completion, Group
from reason_llm.run import RolloutBuffer, RunIdentity
from reason_llm.sample import Sampler, SamplingParams, TransformersSampler, VllmSampler, sampling
from reason_llm.train import (
    Learner,
    Learners,
    LearningSettings,
    PolicyGradient,
    learning,
    with_advantages,
)

ALGORITHM = {"name": "grpo", "kl": "none"}
ROW = resolve("grpo", {"kl": "none", "correction": "token_truncate"})  # as auto is with vLLM
LARGEST_BELOW_ONE = 1.0 - 2.0**-24


class FixedLengthSampler(VllmSampler):
    """No completion ends before its last token, so that every system samples as much."""

    def _vllm_params(self, params: SamplingParams, seed: int) -> Any:
        vllm_params = super()._vllm_params(params, seed)
        vllm_params.ignore_eos, vllm_params.stop_token_ids = True, []
        return vllm_params


class ForcedLengths(TransformersSampler):
    """The project's sampler with random numbers that end each row at its length."""

    def __init__(self, sampler: TransformersSampler, lengths: Sequence[int]) -> None:
        super().__init__(sampler.model, sampler.cache_tokens)
        self.lengths = lengths

    def uniforms(self, num_rows: int, num_tokens: int, seed: int) -> torch.Tensor:
        """See ``TransformersSampler.uniforms``."""
        uniforms_NL = super().uniforms(num_rows, num_tokens, seed) * 0.999
        last_N = torch.tensor(self.lengths) - 1
        uniforms_NL[torch.arange(num_rows), last_N] = LARGEST_BELOW_ONE
        return uniforms_NL


def config_of(work: Work, backend: Literal["native", "unsloth"] = "native") -> Config:
    """The work as a config of a run."""
    is_vllm = work.engine == "vllm"
    text = base.read_config(work.model).get_text_config(decoder=True)
    dtype = torch.float32 if work.kind == "float32" else torch.bfloat16
    # Rows lie end to end only where attention keeps them apart.
    is_padded = backend == "unsloth" or attention.unfit(text, dtype, default_device()) is not None
    tree: dict[str, Any] = {
        "run": {"seed": work.seed, "steps": work.steps},
        "model": {
            "path": work.model,
            "dtype": "float32" if work.kind == "float32" else "bfloat16",
            "backend": backend,
            "quantize": "nf4" if work.kind == "nf4" else "none",
            "adapter": {"rank": work.rank, "alpha": 2 * work.rank, "targets": TARGETS},
        },
        "data": {"train": "given"},
        "train": {
            "learning_rate": work.learning_rate,
            "gradient_checkpointing": is_vllm,
            "packing": "padded" if is_padded else "varlen",
        },
        "memory": {"budget_gib": work.budget_gib or "auto"},
        "algorithm": ALGORITHM,
        "sample": {
            "engine": work.engine,
            "fold": work.is_folded,
            "prompts_per_step": work.prompts,
            "completions_per_prompt": work.completions,
            "max_new_tokens": work.completion_tokens,
        },
    }
    return Config.model_validate(tree)


def plan_of(work: Work) -> Plan:
    """The sizes that follow; vLLM alone is given the same.

    Raises:
        ConfigError: it does not fit.
    """
    config = config_of(work)
    return memory.plan(
        config,
        Shape.of(meta_model(config.model)),
        Machine.here(config, default_device().type),
        base.context_limit(config.model),
        work.prompt_tokens,
    )


def settings_of(config: Config, work: Work, plan: Plan) -> LearningSettings:
    """Return the settings of the learner."""
    row = ROW if work.engine == "vllm" else config.algorithm.row()
    return LearningSettings(
        objective=PolicyGradient(row, work.completion_tokens),
        train=config.train,
        temperature=1.0,
        micro_batch_tokens=plan.micro_batch_tokens,
        seed=work.seed,
        total_optimizer_steps=work.steps,
        chunk_tokens=plan.chunk_tokens,
    )


def measure(work: Work, turns: Turns, backend: Literal["native", "unsloth"] = "native") -> None:
    """Steps of sampling and learning, timed phase by phase.

    Raises:
        ReasonError: it does not fit, or an engine refuses.
    """
    config, meter, plan = config_of(work, backend), Meter(default_device()), plan_of(work)
    run = RunIdentity("benchmark", "benchmark", config.model_dump(mode="json"))
    checkpointing = work.engine == "vllm"
    with (
        TemporaryDirectory() as folder,
        Model(
            config.model, load_tokenizer(work.model), work.seed, plan.engine, checkpointing
        ) as model,
        RolloutBuffer(Path(folder) / "buffer.json", run) as buffer,
    ):
        steps = _Steps(work, plan, meter, model, Learner(model, settings_of(config, work, plan)))
        for step in range(work.steps):
            turns.wait()
            answer = steps.step(step, buffer)
            if work.longest_tokens:
                answer |= steps.longest()
            turns.answer(answer)
        del steps


class _Steps:
    """State of the steps."""

    def __init__(
        self, work: Work, plan: Plan, meter: Meter, model: Model, learner: Learner
    ) -> None:
        self.work = work
        self.plan = plan
        self.meter = meter
        self.model = model
        self.learner = learner

    def step(self, step: int, buffer: RolloutBuffer) -> dict[str, float]:
        """Seconds, tokens a second, and GiB of one step of sampling and learning."""
        model, measures = self.model, dict[str, float]()
        if model.engine is not None and model.sync is not None:
            model.engine.release()  # the first step finds the engine as the others do
            measures["wake_seconds"] = _seconds(model.engine.wake)
            measures["sync_seconds"] = _seconds(model.sync)
        started = time.perf_counter()
        is_random = self.work.is_random
        groups = random_groups(self.work, step) if is_random else self._sample(step, measures)
        groups = with_advantages(rewarded(groups), ROW)
        if not is_random:
            buffer.write(step, groups, whole=True)
            measures["step_seconds"] = time.perf_counter() - started
        if model.engine is not None:
            measures["release_seconds"] = _seconds(model.engine.release)
            switch = ("wake_seconds", "sync_seconds", "release_seconds")
            measures["switch_seconds"] = sum(measures[name] for name in switch)
        before = measures.get("step_seconds", 0.0) + measures.get("switch_seconds", 0.0)
        learned = self.learn(step, to_data(groups))
        return measures | learned | {"step_seconds": before + learned["step_seconds"]}

    def _sample(self, step: int, measures: dict[str, float]) -> list[Group]:
        work = self.work
        params = SamplingParams(work.completions, work.completion_tokens)
        seed = step + 1_000_000 * work.seed
        started = time.perf_counter()
        with sampling(self.model, self.plan.cache_tokens) as sampler, self._phase() as peak:
            groups = self._forced(sampler).sample(prompts(work, step), params, seed, _quiet)
            device.settle()
        measures["sampling_seconds"] = time.perf_counter() - started
        tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
        measures["sampling_tokens_per_second"] = tokens / measures["sampling_seconds"]
        self._keep_peak(measures, "sampling", peak, self.plan.peak.sampling)
        return groups

    def _forced(self, sampler: Sampler) -> Sampler:
        if isinstance(sampler, VllmSampler):
            return FixedLengthSampler(self.model)
        assert isinstance(sampler, TransformersSampler)
        return ForcedLengths(sampler, lengths(self.work))

    def learn(self, step: int, rows: list[Datum]) -> dict[str, float]:
        """The learning phase alone."""
        measures = dict[str, float]()
        started = time.perf_counter()
        with learning(self.learner), self._phase() as peak:
            Learners(self.learner).learn(step, rows, lambda n: None)
            device.settle()
        seconds = time.perf_counter() - started
        self._keep_peak(measures, "learning", peak, self.plan.peak.learning)
        passed = sum(row.num_tokens for row in rows)
        return measures | {
            "step_seconds": seconds,
            "learning_seconds": seconds,
            "learning_tokens_per_second": passed / seconds,
            "tokens": sum(row.num_trained for row in rows),
        }

    def longest(self) -> dict[str, float]:
        """Tokens of the longest rows that are planned, and of those that are learned: 0 if memory
        runs out."""
        work = replace(self.work, is_random=True, prompt_tokens=min(256, self.work.prompt_tokens))

        def of_length(tokens: int) -> Work:
            return replace(work, completion_tokens=tokens - work.prompt_tokens)

        def is_too_long(tokens: int) -> bool:
            try:
                plan_of(of_length(tokens))
            except ConfigError:
                return True
            return False

        ladder = range(2 * work.prompt_tokens, work.longest_tokens + 1, 2 * work.prompt_tokens)
        planned = ladder[max(0, bisect_left(ladder, True, key=is_too_long) - 1)]
        rows = with_advantages(rewarded(random_groups(of_length(planned), 0)), ROW)
        try:
            self.learn(work.steps, to_data(rows))
        except OutOfMemory:
            return {"longest_planned_tokens": planned, "longest_tokens": 0}
        return {"longest_planned_tokens": planned, "longest_tokens": planned}

    @contextmanager
    def _phase(self) -> Iterator[Peak]:
        """The peak of this process alone, where NVML says it. With Transformers there is none: the
        meter would forget the process's peak, which is measured there."""
        if self.work.engine != "vllm":
            yield Peak()
            return
        with self.meter.phase() as peak:
            yield peak
        own_bytes = device.process_bytes()
        peak.gib = peak.gib if own_bytes is None else own_bytes / GIB

    def _keep_peak(self, measures: dict[str, float], phase: str, peak: Any, planned: int) -> None:
        if self.work.engine == "vllm":
            measures[f"{phase}_gib"], measures[f"{phase}_planned_gib"] = peak.gib, planned / GIB


def random_groups(work: Work, step: int) -> list[Group]:
    """A step's groups where nothing is sampled."""
    rows = [Completion(ids, "", (-1.0,) * len(ids), "stop") for ids in completions(work, step)]
    size = work.completions
    return [
        Group(prompt, tuple(rows[i * size : (i + 1) * size]))
        for i, prompt in enumerate(prompts(work, step))
    ]


def rewarded(groups: list[Group]) -> list[Group]:
    """Paid 0 and 1 in turn, so that every row has an advantage."""
    return [
        replace(
            group,
            completions=tuple(
                replace(c, rewards={"in_turn": i % 2}, reward=float(i % 2))
                for i, c in enumerate(group.completions)
            ),
        )
        for group in groups
    ]


def _seconds(act: Callable[[], Any]) -> float:
    """Return the seconds of a call, including the GPU's work."""
    device.settle()
    started = time.perf_counter()
    act()
    device.settle()
    return time.perf_counter() - started


def _quiet(tokens: int, items: int) -> None:
    pass
