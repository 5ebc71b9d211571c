"""Direct preference optimization on one page: a tiny model learns to add from pairs of a better
and a worse completion, in about a minute on two CPU cores.

    python examples/dpo.py

Like ``minimal.py``, the method with this package's own parts and nothing around them. For
checkpoints, the memory plan, the report and the other losses run ``python scripts/train.py
configs/preference_tiny.yaml``, which trains on the same pairs.

Shapes: P pairs, 2P rows of a micro-batch, the chosen side before the rejected one; T tokens.
"""

import random
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from minimal import accuracy
from reason_llm import load_config
from reason_llm.config import Config
from reason_llm.data import load_data
from reason_llm.model import (
    Datum,
    Model,
    collate,
    end_token_ids,
    load_tokenizer,
    policy_logprobs,
    quiet_libraries,
)

STEPS = 30
PAIRS_PER_STEP = 32
LEARNING_RATE = 2e-4
"""Learning rate of the first step; it falls linearly to 0."""
BETA = 0.1
"""How strongly the policy is held to the reference."""
P = 16
"""Pairs that pass through the model at once."""

Pair = tuple[Datum, Datum, float]
"""The chosen row, the rejected row, and the reference's log-ratio between them."""


def log_ratios(model: Model, pairs: Sequence[tuple[Datum, Datum]]) -> Tensor:
    """log pi(chosen) - log pi(rejected) of each pair, (P,), summed over the completion's tokens."""
    rows = [row for pair in pairs for row in pair]
    ids_BT, mask_BT = collate(rows, model.device)
    logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)
    sums_B = (logprobs_BT * mask_BT).sum(dim=1)
    return sums_B[::2] - sums_B[1::2]


def with_reference(model: Model, pairs: Sequence[tuple[Datum, Datum]]) -> list[Pair]:
    """Pairs with their log-ratio under the reference.

    The reference is the model before training. A fresh adapter changes nothing, so one pass before
    the first step gives its log-probs, and no second model is needed.
    """
    with torch.no_grad():
        ratios = [
            ratio
            for start in range(0, len(pairs), P)
            for ratio in log_ratios(model, pairs[start : start + P]).tolist()
        ]
    return [(*pair, ratio) for pair, ratio in zip(pairs, ratios, strict=True)]


def learn(model: Model, optimizer: torch.optim.Optimizer, pairs: Sequence[Pair]) -> float:
    """Take one optimizer step; return the fraction of pairs whose chosen side is ahead.

    With h = log-ratio of the policy - log-ratio of the reference, the loss is the mean over the
    pairs of -log sigmoid(beta h). Source: arXiv:2305.18290 eq. 7.
    """
    optimizer.zero_grad()
    ahead = 0
    for start in range(0, len(pairs), P):
        part = pairs[start : start + P]
        reference_P = torch.tensor([ratio for _, _, ratio in part], device=model.device)
        policy_P = log_ratios(model, [(chosen, rejected) for chosen, rejected, _ in part])
        h_P = policy_P - reference_P
        (-logsigmoid(BETA * h_P).sum() / len(pairs)).backward()
        ahead += int((h_P > 0).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters_of("policy"), max_norm=1.0)
    optimizer.step()
    return ahead / len(pairs)


def train(config: Config, steps: int = STEPS) -> float:
    """Train, print each tenth step, and return the held-out accuracy at the end."""
    quiet_libraries()
    tokenizer = load_tokenizer(config.model.path)
    ends = end_token_ids(config.model.path, tokenizer)
    data = load_data(config, tokenizer, context_tokens=128, end_token_ids=ends)
    sides = [(Datum.of_row(chosen), Datum.of_row(rejected)) for chosen, rejected in data.units]
    with Model(config.model, tokenizer, config.run.seed) as model:  # base, and a fresh LoRA adapter
        optimizer = torch.optim.AdamW(model.parameters_of("policy"), weight_decay=0.0)
        print(f"before training: held-out accuracy {accuracy(model, data.held_out_prompts):.1%}")
        pairs = with_reference(model, sides)
        model.policy.train()
        for step in range(steps):
            for settings in optimizer.param_groups:
                settings["lr"] = LEARNING_RATE * (1 - step / steps)
            batch = random.Random(f"{config.run.seed}/{step}").sample(pairs, PAIRS_PER_STEP)
            ahead = learn(model, optimizer, batch)
            if step % 10 == 9:
                print(f"step {step + 1}: chosen side ahead in {ahead:.0%} of the pairs")
        end = accuracy(model, data.held_out_prompts)
    print(f"after {steps} steps: held-out accuracy {end:.1%}")
    return end


if __name__ == "__main__":
    train(load_config("configs/preference_tiny.yaml"))
