"""Supervised fine-tuning on one page: a tiny model learns to add from 600 demonstrations, in about
half a minute on two CPU cores.

    python examples/sft.py

Like ``minimal.py``, the method with this package's own parts and nothing around them. For
checkpoints, the memory plan and the report run ``python scripts/train.py configs/sft_tiny.yaml``,
which trains on the same rows.

Shapes: B rows of a micro-batch, T tokens.
"""

import itertools
import random
from collections.abc import Iterator, Sequence

import torch

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

STEPS = 40
ROWS_PER_STEP = 64
LEARNING_RATE = 2e-3
"""Learning rate of the first step; it falls linearly to 0."""
B = 32
"""Rows that pass through the model at once."""


def batches(rows: Sequence[Datum], seed: int) -> Iterator[list[Datum]]:
    """Endless batches of rows; every pass over the data has a new order."""
    left: list[Datum] = []
    for epoch in itertools.count():
        left += random.Random(f"{seed}/{epoch}").sample(rows, len(rows))
        while len(left) >= ROWS_PER_STEP:
            yield left[:ROWS_PER_STEP]
            del left[:ROWS_PER_STEP]


def learn(model: Model, optimizer: torch.optim.Optimizer, rows: Sequence[Datum]) -> float:
    """Take one optimizer step and return the loss: the mean of -log p over all trained tokens.

    Trained are the tokens of the completion and its end token, never those of the prompt. The sum
    is divided by the tokens of the whole step, so the size of a micro-batch does not change the
    gradient.
    """
    optimizer.zero_grad()
    tokens = sum(row.num_trained for row in rows)
    loss = 0.0
    for start in range(0, len(rows), B):
        ids_BT, mask_BT = collate(rows[start : start + B], model.device)
        logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, temperature=1.0)
        part = -(logprobs_BT * mask_BT).sum() / tokens
        part.backward()
        loss += part.item()
    torch.nn.utils.clip_grad_norm_(model.parameters_of("policy"), max_norm=1.0)
    optimizer.step()
    return loss


def train(config: Config, steps: int = STEPS) -> float:
    """Train, print each tenth step, and return the held-out accuracy at the end."""
    quiet_libraries()
    tokenizer = load_tokenizer(config.model.path)
    ends = end_token_ids(config.model.path, tokenizer)
    data = load_data(config, tokenizer, context_tokens=128, end_token_ids=ends)
    rows = [Datum.of_row(row) for (row,) in data.units]  # a unit of SFT is one row
    with Model(config.model, tokenizer, config.run.seed) as model:  # base, and a fresh LoRA adapter
        optimizer = torch.optim.AdamW(model.parameters_of("policy"), weight_decay=0.0)
        print(f"before training: held-out accuracy {accuracy(model, data.held_out_prompts):.1%}")
        model.policy.train()
        for step, batch in zip(range(steps), batches(rows, config.run.seed), strict=False):
            for settings in optimizer.param_groups:
                settings["lr"] = LEARNING_RATE * (1 - step / steps)
            loss = learn(model, optimizer, batch)
            if step % 10 == 9:
                print(f"step {step + 1}: loss {loss:.3f} nats per token")
        end = accuracy(model, data.held_out_prompts)
    print(f"after {steps} steps: held-out accuracy {end:.1%}")
    return end


if __name__ == "__main__":
    train(load_config("configs/sft_tiny.yaml"))
