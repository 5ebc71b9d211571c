"""Rollouts become micro-batches: filled to a token budget, longest first, padded on the right.

Right padding needs no attention mask: under causal attention no token sees what comes after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PADDING = 0.05
"""Of all tokens that go through the model."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """A prompt with one completion, as the learner needs it."""

    name: str
    """For messages: the prompt's id and the completion's index."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    sampler_logprobs: tuple[float, ...]
    advantage: float
    reward: float = 0.0
    is_truncated: bool = False
    """Cut off by the token limit."""

    @property
    def num_tokens(self) -> int:
        """Prompt and completion together."""
        return len(self.prompt_ids) + len(self.completion_ids)


def micro_batches(lengths: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Indices grouped so that rows * longest row <= budget, longest rows first, and no more than
    ``MOST_PADDING`` of all is padding.

    A row longer than the budget is a micro-batch of its own. Longest first: if memory does not
    suffice, it shows at once.
    """
    batches: list[list[int]] = []
    real = padded = 0  # tokens of all batches so far, without padding and with it
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        # The first row of a batch is its longest.
        longest = lengths[batches[-1][0]] if batches else 0
        fits = batches and (len(batches[-1]) + 1) * longest <= budget_tokens
        real += lengths[index]
        if fits and padded + longest - real <= MOST_PADDING * (padded + longest):
            batches[-1].append(index)
            padded += longest
        else:
            batches.append([index])
            padded += lengths[index]
    return batches


def collate(rollouts: Sequence[Rollout], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids_BT (int64) and mask_BT (True on completion tokens), padded on the right."""
    longest = max(rollout.num_tokens for rollout in rollouts)
    ids_BT = torch.zeros(len(rollouts), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(rollouts), longest, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        ids_BT[row, : rollout.num_tokens] = torch.tensor(
            rollout.prompt_ids + rollout.completion_ids
        )
        mask_BT[row, len(rollout.prompt_ids) : rollout.num_tokens] = True
    return ids_BT.to(device), mask_BT.to(device)
