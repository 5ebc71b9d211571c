"""Rollouts become micro-batches, filled to a token budget: rows padded on the right, or laid end to
end in one row ("varlen").

Right padding needs no attention mask: under causal attention no token sees what comes after it.
End to end there is no padding, and a prompt stands once for all its completions in the micro-batch:
they have the same keys and values of it, and its gradient is the sum of what each would give.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reason_llm.model.attention import MOST_KEYS_PER_TOKEN, Segments

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


def packed_batches(rollouts: Sequence[Rollout], budget_tokens: int) -> list[list[int]]:
    """Indices grouped so that all tokens together are within the budget, those of a prompt counted
    once; completions of a prompt side by side, the group with the longest row first.

    A row longer than the budget is a micro-batch of its own.
    """
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, rollout in enumerate(rollouts):
        groups.setdefault(rollout.prompt_ids, []).append(index)
    for group in groups.values():
        group.sort(key=lambda i: (-rollouts[i].num_tokens, i))
    batches: list[list[int]] = []
    tokens = keys = 0  # of the last batch
    prompts: set[tuple[int, ...]] = set()
    for group in sorted(groups.values(), key=lambda g: (-rollouts[g[0]].num_tokens, g[0])):
        for index in group:
            row = rollouts[index]
            more = len(row.completion_ids) if row.prompt_ids in prompts else row.num_tokens
            fits = tokens + more <= budget_tokens
            if batches and fits and keys + row.num_tokens <= MOST_KEYS_PER_TOKEN * budget_tokens:
                batches[-1].append(index)
                tokens, keys = tokens + more, keys + row.num_tokens
            else:
                batches.append([index])
                tokens = keys = row.num_tokens
                prompts = set()
            prompts.add(row.prompt_ids)
    return batches


@dataclass(frozen=True, slots=True)
class Layout:
    """Rollouts end to end in one row of N tokens, M of which are predicted by it and trained."""

    ids_1N: Tensor
    positions_1N: Tensor
    """Of each token in its own rollout."""
    predictors_M: Tensor
    """Where in the row the hidden state stands that predicts each completion token, in order."""
    segments: Segments


def lay_out(rollouts: Sequence[Rollout], device: torch.device) -> Layout:
    """Each rollout as a whole, or its completion alone where its prompt stands already."""
    ids: list[int] = []
    positions: list[int] = []
    predictors: list[int] = []
    keys: list[int] = []
    query_lengths: list[int] = []
    key_lengths: list[int] = []
    starts: dict[tuple[int, ...], int] = {}
    for rollout in rollouts:
        prompt, start = rollout.prompt_ids, len(ids)
        is_new = prompt not in starts
        added = prompt + rollout.completion_ids if is_new else rollout.completion_ids
        at = starts.setdefault(prompt, start)
        ids += added
        own = range(start, len(ids))
        positions += range(rollout.num_tokens - len(added), rollout.num_tokens)
        # The prompt's last token predicts the first of each of its completions.
        first = len(ids) - len(rollout.completion_ids)
        predictors += [at + len(prompt) - 1, *range(first, len(ids) - 1)]
        keys += [*(() if is_new else range(at, at + len(prompt))), *own]
        query_lengths.append(len(added))
        key_lengths.append(rollout.num_tokens)
    is_shared = len(starts) < len(rollouts)
    return Layout(
        ids_1N=torch.tensor([ids], device=device),
        positions_1N=torch.tensor([positions], device=device),
        predictors_M=torch.tensor(predictors, device=device),
        segments=Segments.of(query_lengths, key_lengths, keys if is_shared else None, device),
    )


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
