"""This project's side: a step of the loop, from the sampler through the buffer to the optimizer.

Sizes come from the memory plan, as in a run. Lengths are forced by the random numbers that the
sampler draws with: the end token is the last of the vocabulary, so the largest number below 1 draws
it, and numbers below 0.999 never do. That costs nothing, and nothing else is changed.

Arguments: workload.json folder [bfloat16]
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.cpu_worker import Turns, accuracy, check_lengths, read_workload
from benchmarks.cpu_workloads import Workload
from reason_llm.config import Algorithm, Config, RewardSpec, ScoreSection
from reason_llm.model import Model, base, to_data
from reason_llm.model.plan import Machine, Plan, Shape, memory
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run import RolloutBuffer, RunIdentity
from reason_llm.sample import SamplingParams, TransformersSampler, sampling
from reason_llm.score import Scorer
from reason_llm.train import (
    Learner,
    Learners,
    LearningSettings,
    PolicyGradient,
    learning,
    with_advantages,
)

LARGEST_BELOW_ONE = 1.0 - 2.0**-24


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


def main() -> None:
    """Take as many steps as the workload has."""
    turns = Turns()
    workload, folder = read_workload(), Path(sys.argv[2])
    config = _config(workload, "bfloat16" if "bfloat16" in sys.argv[3:] else "float32")
    tokenizer = base.load_tokenizer(workload.model)
    plan = _plan(config, workload)
    run = RunIdentity("benchmark", "benchmark", config.model_dump(mode="json"))
    with (
        Model(config.model, tokenizer, workload.seed, None, checkpointing=False) as model,
        RolloutBuffer(folder / "buffer.json", run) as buffer,
    ):
        learner = Learner(model, _settings(config, plan))
        for step in range(len(workload.steps)):
            turns.wait()
            taken = _step(workload, step, plan, learner, buffer, config.algorithm.row())
            if workload.is_evaluated(step):
                taken["accuracy"] = accuracy(workload, _greedy(workload, model, plan))
            turns.answer(taken)
        turns.finish()


def _config(workload: Workload, dtype: str = "float32") -> Config:
    return Config.model_validate(
        {
            "run": {"seed": workload.seed, "steps": len(workload.steps)},
            "model": {
                "path": workload.model,
                "dtype": dtype,
                "adapter": {"rank": workload.rank, "alpha": workload.alpha},
            },
            "data": {"train": "given"},
            "sample": {
                "engine": "transformers",
                "prompts_per_step": len(workload.steps[0]),
                "completions_per_prompt": workload.completions_per_prompt,
                "max_new_tokens": workload.max_new_tokens,
            },
            "algorithm": {"name": "grpo", "kl": "none"},
            "train": {
                "learning_rate": workload.learning_rate,
                "schedule": workload.schedule,
                "gradient_checkpointing": False,
                "packing": "varlen",
            },
        }
    )


def _plan(config: Config, workload: Workload) -> Plan:
    longest = max(len(prompt.token_ids) for prompts in workload.steps for prompt in prompts)
    return memory.plan(
        config,
        Shape.of(base.check_model(config.model)),
        Machine.here(config, base.default_device()),
        base.context_limit(config.model),
        longest,
    )


def _settings(config: Config, plan: Plan) -> LearningSettings:
    return LearningSettings(
        objective=PolicyGradient(config.algorithm.row(), config.sample.max_new_tokens),
        train=config.train,
        temperature=config.sample.temperature,
        micro_batch_tokens=plan.micro_batch_tokens,
        seed=config.run.seed,
        total_optimizer_steps=config.run.steps,
        chunk_tokens=plan.chunk_tokens,
    )


def _step(
    workload: Workload,
    step: int,
    plan: Plan,
    learner: Learner,
    buffer: RolloutBuffer,
    algorithm: Algorithm,
) -> dict[str, float]:
    model, prompts = learner.model, workload.steps[step]
    started = time.perf_counter()
    if workload.learner_only:
        groups = _given(workload, prompts, step, len(model.tokenizer))
    else:
        groups = _sample(workload, model, prompts, step, plan)
    sampled = time.perf_counter()
    groups = _scored(workload, groups)
    if not workload.learner_only:
        groups = with_advantages(groups, algorithm)
        buffer.write(step, groups, whole=True)
    else:
        groups = with_advantages(groups, algorithm)
    ready = time.perf_counter()
    with learning(learner):
        Learners(learner).learn(step, to_data(groups), lambda rows: None)
    ended = time.perf_counter()
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    check_lengths(workload, lengths)
    return {
        "sampling": 0.0 if workload.learner_only else sampled - started,
        "learning": ended - ready,
        "total": ended - (ready if workload.learner_only else started),
        "tokens": sum(lengths),
    }


def _sample(
    workload: Workload, model: Model, prompts: Sequence[Prompt], step: int, plan: Plan
) -> list[Group]:
    params = SamplingParams(workload.completions_per_prompt, workload.max_new_tokens)
    with sampling(model, plan.cache_tokens) as sampler:
        assert isinstance(sampler, TransformersSampler)
        if workload.lengths is not None:
            sampler = ForcedLengths(sampler, workload.lengths)
        seed = step + 1_000_000 * workload.seed
        return sampler.sample(prompts, params, seed, lambda tokens, ended: None)


def _greedy(workload: Workload, model: Model, plan: Plan) -> list[str]:
    """Completions of the held-out prompts."""
    params = SamplingParams(1, workload.max_new_tokens, temperature=0.0)
    with sampling(model, plan.cache_tokens) as sampler:
        groups = sampler.sample(workload.held_out, params, 0, lambda tokens, ended: None)
    return [group.completions[0].text for group in groups]


def _given(
    workload: Workload, prompts: Sequence[Prompt], step: int, vocabulary: int
) -> list[Group]:
    rows = [
        Completion(tuple(ids), "", (-1.0,) * len(ids), "stop")
        for ids in workload.completions(step, vocabulary)
    ]
    size = workload.completions_per_prompt
    return [
        Group(prompt, tuple(rows[i * size : (i + 1) * size])) for i, prompt in enumerate(prompts)
    ]


def _scored(workload: Workload, groups: list[Group]) -> list[Group]:
    if workload.reward is not None:
        section = ScoreSection(rewards=[RewardSpec(name=workload.reward)])
        with Scorer(section, workload.max_new_tokens) as scorer:
            return scorer.score(groups)
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
