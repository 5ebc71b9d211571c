"""The work done by this project: its own plan, model, phases and meter, as ``loop`` uses them."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from transformers import AutoTokenizer

from benchmarks import device, models
from benchmarks.work import TARGETS, Keep, Outcome, Work
from reason_llm.config import Config, resolve
from reason_llm.model import Model, default_device, meta_model, to_data
from reason_llm.model.plan import GIB, Machine, Meter, Plan, Shape, memory
from reason_llm.rollout import Group, Prompt
from reason_llm.sample import SamplingParams, VllmSampler, sampling
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


class FixedLengthSampler(VllmSampler):
    """No completion ends before its last token, so that every system samples as much."""

    def _vllm_params(self, params: SamplingParams) -> Any:
        made = super()._vllm_params(params)
        made.ignore_eos, made.stop_token_ids = True, []
        return made


def config_of(work: Work, backend: Literal["native", "unsloth"]) -> Config:
    """The work as a config of a run."""
    return Config.model_validate(
        {
            "model": {
                "path": work.model,
                "dtype": "bfloat16",
                "backend": backend,
                "quantize": "nf4" if work.kind == "nf4" else "none",
                "adapter": {"rank": work.rank, "alpha": 2 * work.rank, "targets": TARGETS},
            },
            "data": {"train": "none.jsonl"},
            "sample": {
                "engine": "vllm",
                "prompts_per_step": work.prompts,
                "completions_per_prompt": work.completions,
                "max_new_tokens": work.completion_tokens,
            },
            "algorithm": ALGORITHM,
            "train": {
                "learning_rate": 1e-5,
                "packing": "padded" if backend == "unsloth" else "varlen",
            },
            "memory": {"budget_gib": work.budget_gib or "auto"},
        }
    )


def plan_of(work: Work) -> Plan:
    """The sizes that follow; vLLM alone is given the same.

    Raises:
        ConfigError: it does not fit.
    """
    config = config_of(work, "native")
    shape = Shape.of(meta_model(config.model))
    machine = Machine.here(config, default_device())
    return memory.plan(config, shape, machine, models.POSITIONS, work.prompt_tokens)


def measure(work: Work, keep: Keep, backend: Literal["native", "unsloth"] = "native") -> Outcome:
    """Steps of sampling and learning, timed phase by phase and kept one by one.

    Raises:
        ReasonError: it does not fit, or an engine refuses.
    """
    config, meter = config_of(work, backend), Meter(default_device())
    plan = plan_of(work)
    texts = models.prompt_texts(work.model, work.prompts * work.steps, work.prompt_tokens, seed=0)
    rows = models.prompt_ids(work.model, texts)
    prompts = [Prompt(str(i), "", tuple(row), "") for i, row in enumerate(rows)]
    tokenizer = AutoTokenizer.from_pretrained(work.model)
    outcome = Outcome()
    with Model(config.model, tokenizer, 0, plan.engine, checkpointing=True) as model:
        settings = LearningSettings(
            PolicyGradient(ROW, work.completion_tokens),
            config.train,
            config.sample.temperature,
            plan.micro_batch_tokens,
            seed=0,
            total_optimizer_steps=work.steps,
            chunk_tokens=plan.chunk_tokens,
        )
        stage = _Stage(work, plan, meter, model, Learner(model, settings))
        for step in range(work.steps):
            values = stage.step(step, prompts[step * work.prompts : (step + 1) * work.prompts])
            if step > 0 or not work.warmup:
                for name, value in values.items():
                    outcome.values.setdefault(name, []).append(value)
            keep(outcome)
        del stage
    return outcome


class _Stage:
    """The model with its learner, and one timed step of the loop over them."""

    def __init__(
        self, work: Work, plan: Plan, meter: Meter, model: Model, learner: Learner
    ) -> None:
        self.work = work
        self.plan = plan
        self.meter = meter
        self.model = model
        self.learner = learner

    def step(self, step: int, prompts: list[Prompt]) -> dict[str, float]:
        """Seconds, tokens a second, and GiB of one step."""
        model, work, found = self.model, self.work, {}
        assert model.engine is not None and model.sync is not None
        model.engine.release()  # the first step finds the engine as the others do
        found["wake_seconds"] = _seconds(model.engine.wake)
        found["sync_seconds"] = _seconds(model.sync)
        params = SamplingParams(work.completions, work.completion_tokens)
        groups: list[Group] = []
        with sampling(model, self.plan.cache_tokens), self.meter.phase() as sampled:
            sampler = FixedLengthSampler(model)
            sampling_seconds = _seconds(
                lambda: groups.extend(sampler.sample(prompts, params, step, _quiet))
            )
        scored = to_data(rewarded(groups))
        found["release_seconds"] = _seconds(model.engine.release)
        with learning(self.learner), self.meter.phase() as learned:
            learning_seconds = _seconds(
                lambda: Learners(self.learner).learn(step, scored, lambda n: None)
            )
        sampled_tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
        switch = sum(found.values())
        return found | {
            "switch_seconds": switch,
            "step_seconds": switch + sampling_seconds + learning_seconds,
            "sampling_tokens_per_second": sampled_tokens / sampling_seconds,
            "learning_tokens_per_second": work.rollouts * work.context / learning_seconds,
            "sampling_gib": sampled.gib,
            "sampling_planned_gib": self.plan.sampling_bytes / GIB,
            "learning_gib": learned.gib,
            "learning_planned_gib": self.plan.learning_bytes / GIB,
        }


def rewarded(groups: list[Group]) -> list[Group]:
    """With rewards that differ within each group: an even one would need no pass."""
    return with_advantages(
        [
            replace(
                g,
                completions=tuple(replace(c, reward=float(i)) for i, c in enumerate(g.completions)),
            )
            for g in groups
        ],
        ROW,
    )


def _seconds(act: Callable[[], Any]) -> float:
    """How long it takes, until the GPU is done."""
    device.settle()
    started = time.perf_counter()
    act()
    device.settle()
    return time.perf_counter() - started


def _quiet(tokens: int, items: int) -> None:
    pass
