"""Scored groups become the learner's rows: advantages, and which completions count."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reason_llm.config.algorithms import Algorithm
from reason_llm.model.layout import Rollout
from reason_llm.rollout import Group
from reason_llm.run.buffer import shortest_decimals
from reason_llm.train import advantages, losses


@dataclass(slots=True)
class Row:
    """A rollout with what stays as it is over the step; None where it is not needed."""

    rollout: Rollout
    is_trained: bool
    """False: its gradient is 0, and it needs no pass."""
    old: Tensor | None = None
    """Log-probs (T,) of the policy before the step."""
    ref: Tensor | None = None
    """Log-probs (T,) of the base."""
    entropies: Tensor | None = None
    """(T,) of the policy before the step."""
    advantages: Tensor | None = None
    """(T,), where tokens differ in them."""
    seen: Tensor | None = None
    """Log-probs (T,) of the policy before the step, from its first update's own pass."""

    @property
    def at_start(self) -> Tensor | None:
        """Log-probs (T,) of the policy before the step, if any pass has given them."""
        known = self.seen if self.old is None else self.old
        return None if known is None else known.float().cpu()


def with_advantages(
    groups: Sequence[Group], algorithm: Algorithm, weights: Mapping[str, float] | None = None
) -> list[Group]:
    """The scored groups with an advantage on every completion, from the rewards alone.

    Args:
        weights: of each reward by name, for ``normalization: per_reward``; None: 1 each.
    """
    size = len(groups[0].completions)
    completions = [c for group in groups for c in group.completions]
    if algorithm.normalization == "per_reward":
        names = list(completions[0].rewards)
        rewards_RN = torch.tensor(
            [[c.rewards[name] for c in completions] for name in names], dtype=torch.float64
        )
        weights_R = torch.tensor(
            [weights[name] if weights else 1.0 for name in names], dtype=torch.float64
        )
        found = advantages.per_reward_advantages(rewards_RN, weights_R, size, algorithm.scale)
    else:
        rewards_N = torch.tensor([c.reward for c in completions], dtype=torch.float64)
        found = advantages.group_advantages(rewards_N, size, algorithm.scale, algorithm.baseline)
    values = iter(found.tolist())
    return [
        replace(
            group, completions=tuple(replace(c, advantage=next(values)) for c in group.completions)
        )
        for group in groups
    ]


def with_learner_logprobs(
    groups: Sequence[Group], logprobs: Sequence[Tensor | None]
) -> list[Group]:
    """The groups with the learner's log-probs (T,) on every completion, in ``to_rollouts``'s order;
    None where it computed none."""
    found = iter(None if each is None else tuple(shortest_decimals(each)) for each in logprobs)
    return [
        replace(
            group,
            completions=tuple(replace(c, learner_logprobs=next(found)) for c in group.completions),
        )
        for group in groups
    ]


def without_learner_logprobs(groups: Sequence[Group]) -> list[Group]:
    """The groups as they were before learning."""
    return with_learner_logprobs(groups, [None] * sum(len(g.completions) for g in groups))


def to_rollouts(groups: Sequence[Group]) -> list[Rollout]:
    """The buffer's groups as the learner's rows, in order."""
    return [
        Rollout(
            name=f"{g.prompt.id}#{i}",
            prompt_ids=g.prompt.token_ids,
            completion_ids=c.token_ids,
            sampler_logprobs=c.logprobs,
            advantage=float(c.advantage or 0.0),
            reward=float(c.reward or 0.0),
            is_truncated=c.finish_reason == "length",
        )
        for g in groups
        for i, c in enumerate(g.completions)
    ]


def counted(rollouts: Sequence[Rollout], group_size: int, algorithm: Algorithm) -> list[int]:
    """The rows that ``keep`` and ``truncated`` leave, in order; the others count nowhere."""
    kept = list(range(len(rollouts)))
    if algorithm.keep == "positive":
        kept = [i for i in kept if rollouts[i].advantage > 0]
    elif algorithm.keep == "top_k":
        kept = []
        for start in range(0, len(rollouts), group_size):
            group = range(start, start + group_size)
            best = sorted(group, key=lambda i: (-rollouts[i].reward, i))[: algorithm.top_k]
            kept += sorted(best)
    if algorithm.truncated == "leave_out":
        kept = [i for i in kept if not rollouts[i].is_truncated]
    return kept


def least_entropy(rows: Sequence[Row], fraction: float) -> tuple[float, int]:
    """The entropy from which on a token of an optimizer batch's counted rows is trained, and how
    many tokens that are."""
    if fraction == 1 or not rows:
        return -math.inf, sum(len(row.rollout.completion_ids) for row in rows)
    entropies_N = torch.cat([row.entropies for row in rows if row.entropies is not None])
    least = losses.top_entropy_threshold(entropies_N, fraction)
    return least, int((entropies_N >= least).sum())


def shaped_advantages(
    rollouts: Sequence[Rollout],
    group_size: int,
    algorithm: Algorithm,
    old: Sequence[Tensor],
    ref: Sequence[Tensor],
) -> list[Tensor]:
    """Advantages (T,) of each completion's tokens, with the KL to the base taken off the reward.

    ``reward``: ``r - beta sum_t k``, then baseline and scale as always, where k is the row's
    estimator of the KL; k1 is ``log pi_old - log pi_ref``. ``token_reward``: the term of each token
    off its own reward, returns to go, whitened over all.

    Args:
        old, ref: log-probs (T,) of each completion under the policy and the base.

    Source: arXiv:2402.14740 (reward); arXiv:2501.03262 (v9) eq. 4 and 5 (token_reward).
    """
    beta = algorithm.kl_coefficient
    kl = [losses.kl_penalty(o, r, algorithm.kl) for o, r in zip(old, ref, strict=True)]
    if algorithm.kl_place == "reward":
        rewards_N = torch.tensor(
            [r.reward - beta * float(k.sum()) for r, k in zip(rollouts, kl, strict=True)],
            dtype=torch.float64,
        )
        found_N = advantages.group_advantages(
            rewards_N, group_size, algorithm.scale, algorithm.baseline
        )
        return [torch.full_like(k, float(value)) for k, value in zip(kl, found_N, strict=True)]
    lengths = [len(k) for k in kl]
    rewards_NT = torch.nn.utils.rnn.pad_sequence([-beta * k for k in kl], batch_first=True)
    mask_NT = torch.arange(rewards_NT.shape[1])[None] < torch.tensor(lengths)[:, None]
    mask_NT = mask_NT.to(rewards_NT.device)
    for row, rollout in enumerate(rollouts):
        rewards_NT[row, lengths[row] - 1] += rollout.reward
    returns_NT = advantages.returns_to_go(rewards_NT, mask_NT)
    whitened_NT = advantages.whiten(returns_NT, mask_NT)
    return [whitened_NT[row, :length] for row, length in enumerate(lengths)]


def split(count: int, parts: int, seed: str) -> list[list[int]]:
    """``0 .. count`` shuffled and cut into ``parts`` of nearly equal size."""
    indices = list(range(count))
    if parts > 1:
        random.Random(seed).shuffle(indices)
    return [indices[count * part // parts : count * (part + 1) // parts] for part in range(parts)]
