"""GRPO on one page: a tiny model learns to add two numbers, in about a minute on two CPU cores.

    python examples/minimal.py

The method, with this package's own parts and nothing around them. ``python scripts/train.py`` does
the same steps on the same task; what it adds is left out here: the rollout buffer on disk and the
resume from it, vLLM, the memory plan, other rewards and algorithms, and the report.
``docs/method.md`` follows one group of rollouts through one step of this file, with its numbers.

Shapes: P prompts, G completions of each, N = P * G rollouts; B rows of a micro-batch, T tokens.
"""

import random
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from reason_llm import load_config
from reason_llm.config import Config
from reason_llm.config.surrogates import clipped_surrogate
from reason_llm.data import load_data
from reason_llm.model import (
    Datum,
    Model,
    collate,
    load_tokenizer,
    policy_logprobs,
    quiet_libraries,
)
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.sample import SamplingParams, sampling
from reason_llm.train.advantages import group_advantages

STEPS = 40
P, G = 64, 4
LEARNING_RATE = 2e-3
"""Of the first step; it falls to 0 in a line."""
CLIP = 0.2
"""A token's probability counts as changed by at most this fraction in one step."""
ROWS = 64
"""B: rows that pass through the model at once."""
CACHE_TOKENS = 64 * 1024
"""Room for keys and values while sampling."""
TRAINING = SamplingParams(num_completions=G, max_new_tokens=32)
GREEDY = SamplingParams(num_completions=1, max_new_tokens=32, temperature=0.0)


def reward(prompt: Prompt, completion: Completion) -> float:
    """1 for the right answer in its tags at the very end, else 0."""
    return float(completion.text.endswith(f"<answer>{prompt.answer}</answer>"))


def sample(model: Model, prompts: Sequence[Prompt], how: SamplingParams, seed: int) -> list[Group]:
    """G completions of each prompt, with the log-prob of each token under the policy."""
    with sampling(model, CACHE_TOKENS) as sampler:
        return sampler.sample(prompts, how, seed, progress=lambda tokens, completions: None)


def accuracy(model: Model, prompts: Sequence[Prompt]) -> float:
    """Fraction of held-out problems that the likeliest completion solves."""
    groups = sample(model, prompts, GREEDY, seed=0)
    return sum(reward(g.prompt, g.completions[0]) for g in groups) / len(groups)


def learn(model: Model, optimizer: torch.optim.Optimizer, rollouts: Sequence[Datum]) -> float:
    """One optimizer step on rows with advantages; returns the norm of the gradient.

    The loss is the mean over the N rollouts of the mean over each one's tokens. Every micro-batch
    adds its share of that one mean to the gradient, so their size does not change what is learned.
    Source: arXiv:2402.03300 eq. 3, without the KL term.
    """
    optimizer.zero_grad()
    for rows in micro_batches(rollouts):
        ids_BT, mask_BT = collate(rows, model.device)  # the mask is True on the model's own tokens
        logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)
        sampled_BT, advantages_BT = columns(rows, "sampler_logprobs"), columns(rows, "advantages")
        ratio_BT = torch.exp(logprobs_BT - sampled_BT)  # 1 before the first update
        loss_BT, _ = clipped_surrogate(ratio_BT, advantages_BT, CLIP, CLIP)
        mean_B = (loss_BT * mask_BT).sum(dim=1) / mask_BT.sum(dim=1)
        (mean_B.sum() / len(rollouts)).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters_of("policy"), max_norm=1.0)
    optimizer.step()
    return float(norm)


def micro_batches(rollouts: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Rows of similar length together. Rows with an advantage of 0 have no gradient: no pass."""
    taught = [row for row in rollouts if row.columns["advantages"].any()]
    taught.sort(key=lambda row: row.num_tokens)
    for start in range(0, len(taught), ROWS):
        yield taught[start : start + ROWS]


def columns(rows: Sequence[Datum], name: str) -> Tensor:
    """A column of each row, (B, T), 0 in the padding."""
    return torch.nn.utils.rnn.pad_sequence([row.columns[name] for row in rows], batch_first=True)


def to_rows(groups: Sequence[Group], advantages_N: Tensor) -> list[Datum]:
    """One row of tokens for each rollout; every token has its rollout's advantage."""
    rows: list[Datum] = []
    for number, group in enumerate(groups):
        for completion in group.completions:
            advantage = float(advantages_N[len(rows)])
            tokens = len(completion.token_ids)
            numbers = {
                "sampler_logprobs": completion.logprobs,
                "advantages": [advantage] * tokens,
            }
            ids = group.prompt.token_ids, completion.token_ids
            rows.append(Datum.of(*ids, group=number, columns=numbers))
    return rows


def train(config: Config, steps: int = STEPS) -> float:
    """Train, print each tenth step, and return the held-out accuracy at the end."""
    quiet_libraries()
    tokenizer = load_tokenizer(config.model.path)
    data = load_data(config, tokenizer, context_tokens=128)
    prompts, held_out = data.prompts, data.held_out_prompts
    with Model(config.model, tokenizer, config.run.seed) as model:  # base, and a fresh LoRA adapter
        optimizer = torch.optim.AdamW(model.parameters_of("policy"), weight_decay=0.0)
        print(f"before training: held-out accuracy {accuracy(model, held_out):.1%}")
        for step in range(steps):
            chosen = random.Random(f"{config.run.seed}/{step}").sample(prompts, P)
            groups = sample(model, chosen, TRAINING, seed=step)

            rewards_N = torch.tensor([reward(g.prompt, c) for g in groups for c in g.completions])
            advantages_N = group_advantages(rewards_N, G, scale="group")

            for settings in optimizer.param_groups:
                settings["lr"] = LEARNING_RATE * (1 - step / steps)
            model.policy.train()
            norm = learn(model, optimizer, to_rows(groups, advantages_N))
            if step % 10 == 9:
                print(f"step {step + 1}: reward {rewards_N.mean():.3f}, gradient {norm:.2f}")
        end = accuracy(model, held_out)
    print(f"after {steps} steps: held-out accuracy {end:.1%}")
    return end


if __name__ == "__main__":
    train(load_config("configs/quickstart.yaml"))
