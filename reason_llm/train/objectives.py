"""Objectives of rollouts: the policy gradient, for every row of the algorithm table, and that of
PPO's critic. Those of the stages that learn from a set of rows are in ``stages``.

Shapes: B rows of a micro-batch, T tokens, N rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reason_llm.config import SURROGATES, Algorithm, CriticSection, Terms
from reason_llm.model import Datum
from reason_llm.train import advantages, losses

Output = Literal["logprobs", "values", "scores"]
"""Log-probs; values by the role's head; or a score of the row, at its last trained token."""
Unit = Literal["sequence", "pair"]
ROWS: dict[Unit, int] = {"sequence": 1, "pair": 2}


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over a whole optimizer batch, independent of its micro-batches."""

    denominator: float
    tokens: int
    """Trained tokens; of pairs, those of the chosen sides."""
    min_entropy: float = -math.inf
    """Tokens with a lower entropy are not trained."""
    baseline: float = 0.0
    """KTO's reference point: the KL over the batch."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch after its forward pass; every tensor is (B, T), entry t of token t."""

    mask_BT: Tensor
    logprobs_BT: Tensor
    """The objective's output of the model as it is now, with gradient; 0 outside the mask."""
    entropies_BT: Tensor
    """Entropies; 0 where the output is no log-prob."""
    columns: Mapping[str, Tensor]
    rewards_B: Tensor
    """Each row's number: its reward, its label, or the margin of its pair."""
    rewards: Sequence[float] = ()
    """The same in host memory."""

    @property
    def old_BT(self) -> Tensor:
        """The policy's log-probs before the step; the current ones while it has not moved."""
        return self.columns.get("old_logprobs", self.logprobs_BT.detach())


@dataclass(frozen=True, slots=True)
class Loss:
    """Loss of a micro-batch, with its metrics."""

    total: Tensor
    """The masked sum, to be divided by the optimizer batch's denominator."""
    values: Mapping[str, Tensor]
    """(B, T) by metric: logged as means over the masked tokens."""
    masked_out: Tensor | int = 0
    """Rows all of whose tokens the objective took out."""
    of_units: Mapping[str, Tensor] = field(default_factory=dict)
    """(U,) by metric, one for each row or pair: logged as means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    """A loss of rows. By default every row counts and nothing is measured before."""

    output: Output = "logprobs"
    unit: Unit = "sequence"
    """Unit that a micro-batch may not split. The sides of a pair follow each other."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss has a gradient in the entropies."""
        return False

    def measured(self, data: Sequence[Datum], updates: int) -> tuple[list[int], tuple[str, ...]]:
        """Rows and columns that are measured before the first of ``updates`` updates."""
        return [], ()

    def prepared(self, data: Sequence[Datum]) -> list[Datum]:
        """Rows with the columns that follow from the measured ones."""
        return list(data)

    def counted(self, data: Sequence[Datum]) -> list[int]:
        """The rows that count, in order."""
        return list(range(len(data)))

    def trained(self, data: Sequence[Datum]) -> list[int]:
        """The counted rows that have a gradient; the others need no pass."""
        return self.counted(data)

    def extra_rows(self, data: Sequence[Datum]) -> list[Datum]:
        """Further rows; ``count`` receives their log-probs by the policy and the reference."""
        return []

    def count(self, data: Sequence[Datum], extra: Sequence[tuple[Tensor, Tensor]] = ()) -> Counts:
        """Over the counted rows of an optimizer batch, trained or not; ``extra``: log-probs of the
        trained tokens of ``extra_rows``, by the policy and by the reference. By default all trained
        tokens are the denominator, or all pairs."""
        size = ROWS[self.unit]
        tokens = max(1, sum(datum.num_trained for datum in data[::size]))
        return Counts(float(tokens if size == 1 else max(1, len(data) // size)), tokens)

    @abstractmethod
    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """Masked sum of a micro-batch, with its metrics."""

    def describe(self, data: Sequence[Datum], counted: Sequence[int]) -> dict[str, float]:
        """Metrics of a step's rows, of which some are counted."""
        return {}


@dataclass(frozen=True, slots=True)
class PolicyGradient(Objective):
    """Objective of an algorithm's row."""

    row: Algorithm
    """Its correction is resolved: not ``auto``."""
    max_new_tokens: int
    rounding_nats: float = 0.0
    """Log-ratios of policy and sampler up to this many nats count as 0 in importance weights."""
    critic: CriticSection = field(default_factory=CriticSection)
    """For PPO's row: how values become advantages."""
    turn_weight: float = 0.0
    """Weight of the column earned in the rewards; 0: turns have no rewards of their own."""

    @property
    def entropy_gradient(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.row.entropy_coefficient > 0

    def measured(self, data: Sequence[Datum], updates: int) -> tuple[list[int], tuple[str, ...]]:
        """Old log-probs and entropies where the policy moves, or where they make advantages or say
        which tokens are trained; the base's log-probs where there is a KL."""
        row = self.row
        moves = row.needs_whole_step or updates > 1 or row.top_entropy_fraction < 1
        names: tuple[str, ...] = ("old_logprobs", "entropies") if moves else ()
        names += ("ref_logprobs",) if row.kl != "none" else ()
        names += ("teacher_logprobs",) if row.teacher else ()
        names += ("old_values",) if row.critic else ()
        if row.needs_whole_step:
            return list(range(len(data))), names
        # The highest entropies are a part of those of all counted tokens.
        return self.counted(data) if row.top_entropy_fraction < 1 else self.trained(data), names

    def prepared(self, data: Sequence[Datum]) -> list[Datum]:
        """With advantages from log-probs and values, where the row makes them so: the KL taken off
        the rewards, the critic's, or of each token the teacher's log-prob less the policy's.

        Source: arXiv:2306.13649 eq. 1 (teacher), whose gradient at beta = 1 this estimates.
        """
        if not self.row.needs_whole_step:
            return list(data)
        if self.row.critic:
            return with_critic(data, self.row, self.critic, self.turn_weight)
        if self.row.teacher:
            ratios = [_log_ratio(datum, "teacher_logprobs") for datum in data]
            shaped = [-ratio for ratio in ratios]
        else:
            shaped = shaped_advantages(data, self.row, self.turn_weight)
        return [d.with_trained("advantages", s) for d, s in zip(data, shaped, strict=True)]

    def counted(self, data: Sequence[Datum]) -> list[int]:
        """The rows that ``keep`` and ``truncated`` leave."""
        row, counted = self.row, list(range(len(data)))
        if row.keep == "positive":
            counted = [i for i in counted if mean_advantage(data[i]) > 0]
        elif row.keep != "all":
            groups: dict[int, dict[int, float]] = {}
            for datum in data:
                if datum.has_reward:
                    groups.setdefault(datum.group, {})[datum.rollout] = -datum.reward
            best = set[int]()
            for group in groups.values():
                best |= {n for _, n in sorted((r, n) for n, r in group.items())[: row.keep]}
            counted = [i for i in counted if data[i].rollout in best]
        return [i for i in counted if not _is_left_out(data[i], row)]

    def trained(self, data: Sequence[Datum]) -> list[int]:
        """The rows with an advantage, or all rows where another term has a gradient."""
        counted = self.counted(data)
        if self.row.kl != "none" or self.row.entropy_coefficient > 0:
            return counted
        return [i for i in counted if bool(data[i].columns["advantages"].any())]

    def count(self, data: Sequence[Datum], extra: Sequence[tuple[Tensor, Tensor]] = ()) -> Counts:
        """The row's denominator, and the entropy from which on a token is trained."""
        row = self.row
        lengths = [datum.num_trained for datum in data]
        total = losses.denominator(lengths, row.aggregation, self.max_new_tokens)
        if row.top_entropy_fraction == 1 or not data:
            return Counts(total, max(1, sum(lengths)))
        entropies_N = torch.cat([datum.on_trained("entropies") for datum in data])
        threshold = losses.top_entropy_threshold(entropies_N, row.top_entropy_fraction)
        return Counts(total, max(1, int((entropies_N >= threshold).sum())), threshold)

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """The surrogate with its importance weights, the KL, the entropy bonus."""
        row, mask_BT, logprobs_BT = self.row, batch.mask_BT, batch.logprobs_BT
        trained_BT = self._trained_mask(batch)
        masked_out = (mask_BT.any(1) & ~trained_BT.any(1)).sum()
        if row.top_entropy_fraction < 1:
            # Those from before the step: as the policy moves, the part stays the same.
            trained_BT = trained_BT & (batch.columns["entropies"] >= counts.min_entropy)
        weights_BT = None
        if row.correction not in ("auto", "none"):
            weights_BT = losses.importance_weights(
                batch.old_BT,
                batch.columns["sampler_logprobs"],
                mask_BT,
                row.correction,
                row.correction_cap,
                self.rounding_nats,
            )
        terms = Terms(
            logprobs_BT,
            batch.old_BT,
            batch.columns["advantages"],
            mask_BT,
            weights_BT,
            weight_is_shared=row.correction.startswith("sequence"),
        )
        loss_BT, clipped_BT = SURROGATES[row.surrogate].loss(row, terms)
        loss_BT = loss_BT * trained_BT
        measured = {"clip_fraction": clipped_BT, "entropy": batch.entropies_BT}
        if row.kl != "none":
            measured["kl"] = losses.kl_penalty(logprobs_BT, batch.columns["ref_logprobs"], row.kl)
            if row.kl_place == "loss":
                loss_BT = loss_BT + row.kl_coefficient * measured["kl"]
        if weights_BT is not None:
            measured["importance_weight"] = weights_BT
        total = losses.masked_sum(loss_BT, mask_BT, row.aggregation)
        if row.entropy_coefficient > 0:  # a mean over the trained tokens, whatever the sums
            bonus = (batch.entropies_BT * trained_BT).sum() / counts.tokens
            total = total - row.entropy_coefficient * bonus * counts.denominator
        return Loss(total, measured, masked_out)

    def describe(self, data: Sequence[Datum], counted: Sequence[int]) -> dict[str, float]:
        """The standard deviation of the counted rows' advantages; where it is off the reward, the
        KL of a whole completion of all rows, in nats; the reverse KL to the teacher, of a token."""
        advantages = torch.tensor([mean_advantage(data[i]) for i in counted], dtype=torch.float64)
        described = {"train/advantage_std": float(advantages.std()) if len(counted) > 1 else 0.0}
        if self.row.needs_whole_step and self.row.kl != "none":
            kl = sum(float(_log_ratio(datum, "ref_logprobs").sum()) for datum in data)
            described["train/kl_per_completion"] = kl / len({datum.rollout for datum in data})
        if self.row.teacher and counted:
            ratios = torch.cat([_log_ratio(data[i], "teacher_logprobs") for i in counted])
            described["train/teacher_kl"] = float(ratios.mean())
        return described

    def _trained_mask(self, batch: Batch) -> Tensor:
        """Mask of the tokens near enough to the policy; the denominator counts the others, too."""
        row, trained_BT = self.row, batch.mask_BT
        if row.off_policy_threshold:
            trained_BT = trained_BT & losses.is_near_policy(
                batch.logprobs_BT,
                batch.columns["sampler_logprobs"],
                batch.columns["advantages"],
                batch.mask_BT,
                row.off_policy_threshold,
            )
        return trained_BT


@dataclass(frozen=True, slots=True, kw_only=True)
class Values(Objective):
    """The critic's objective: the clipped squared error of its values."""

    clip: float = 0.2
    leaves_out_truncated: bool = False
    output: Output = "values"

    def counted(self, data: Sequence[Datum]) -> list[int]:
        """All, or those that the token limit did not cut off."""
        return [i for i, d in enumerate(data) if not (self.leaves_out_truncated and d.is_truncated)]

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """The error of each token's value."""
        loss_BT, clipped_BT = advantages.value_loss(
            batch.logprobs_BT, batch.columns["old_values"], batch.columns["returns"], self.clip
        )
        loss_BT = loss_BT * batch.mask_BT
        return Loss(loss_BT.sum(), {"clip_fraction": clipped_BT, "value": batch.logprobs_BT})


def mean_advantage(datum: Datum) -> float:
    """Mean advantage of the row's trained tokens; 0 without any."""
    values = datum.on_trained("advantages").double()
    return float(values.mean()) if len(values) else 0.0


def _log_ratio(datum: Datum, name: str) -> Tensor:
    """log pi_old less another's log-probs, of the trained tokens."""
    return datum.on_trained("old_logprobs") - datum.on_trained(name)


def _earned(data: Sequence[Datum], weight: float) -> Tensor:
    """(N, T) float64: the part of each row's reward that was earned before the token's turn."""
    rows = [torch.zeros(datum.num_trained, dtype=torch.float64) for datum in data]
    for i, datum in enumerate(data):
        if "earned" in datum.columns:
            rows[i] = weight * datum.on_trained("earned").double()
    return pad_sequence(rows, batch_first=True)


def _mask(lengths: Sequence[int], like_NT: Tensor) -> Tensor:
    """Mask (N, T): True for the first ``lengths`` tokens of each row."""
    places_T = torch.arange(like_NT.shape[1], device=like_NT.device)
    return places_T[None] < torch.tensor(lengths, device=like_NT.device)[:, None]


def with_critic(
    data: Sequence[Datum], row: Algorithm, critic: CriticSection, turn_weight: float = 0.0
) -> list[Datum]:
    """Rows with the columns ``advantages``, ``returns``, which the critic learns, and
    ``whole_returns``, those with lambda 1. A row without a reward, or one that is left out, has
    advantages of 0 and its values as returns, and does not count in the whitening.

    Args:
        data: with old_values and old_logprobs, and ref_logprobs where there is a KL in the rewards.

    Source: arXiv:1909.08593 eq. 2 (rewards); arXiv:1506.02438 eq. 16 (advantages).
    """

    def padded(name: str) -> Tensor:
        columns = [datum.on_trained(name).double() for datum in data]
        return pad_sequence(columns, batch_first=True)

    values_NT, lengths = padded("old_values"), [datum.num_trained for datum in data]
    mask_NT = _mask(lengths, values_NT)
    scores = [d.reward - row.missing_eos_penalty * d.is_truncated for d in data]
    scores_N = torch.tensor(scores, dtype=torch.float64, device=values_NT.device)
    off_reward = row.kl != "none" and row.kl_place == "token_reward"
    policy_NT = padded("old_logprobs")
    rewards_NT = advantages.kl_in_reward(
        policy_NT,
        padded("ref_logprobs") if off_reward else policy_NT,
        mask_NT,
        scores_N,
        row.kl_coefficient,
        row.kl,
    )
    earned_NT = _earned(data, turn_weight).to(rewards_NT)
    rewards_NT += earned_NT.diff(dim=1, append=earned_NT[:, :1] * 0)  # the rest at the row's end
    gamma, lam = critic.gamma, critic.lam
    advantages_NT, returns_NT = advantages.gae(rewards_NT, values_NT, mask_NT, gamma, lam)
    taught_NT = mask_NT & _teaches(data, row, mask_NT)
    advantages_NT = advantages_NT.masked_fill(~taught_NT, 0.0)
    returns_NT = torch.where(taught_NT, returns_NT, values_NT)
    if row.scale == "whiten":
        advantages_NT = advantages.whiten(advantages_NT, taught_NT)
    columns_NT = {
        "advantages": advantages_NT,
        "returns": returns_NT,
        "whole_returns": advantages.returns_to_go(rewards_NT, mask_NT, critic.gamma),
    }
    rows = list(data)
    for name, column_NT in columns_NT.items():
        for i, length in enumerate(lengths):
            rows[i] = rows[i].with_trained(name, column_NT[i, :length].float())
    return rows


def _is_left_out(datum: Datum, row: Algorithm) -> bool:
    """Whether ``truncated`` takes the row out of the loss, of the whitening and of the critic."""
    return row.truncated == "leave_out" and datum.is_truncated


def _teaches(data: Sequence[Datum], row: Algorithm, mask_NT: Tensor) -> Tensor:
    """Which rows have a reward and are not left out, (N, 1)."""
    chosen = [[datum.has_reward and not _is_left_out(datum, row)] for datum in data]
    return torch.tensor(chosen, device=mask_NT.device)


def shaped_advantages(
    data: Sequence[Datum], row: Algorithm, turn_weight: float = 0.0
) -> list[Tensor]:
    """Advantages of each row's trained tokens, with the KL to the base subtracted from the reward.

    ``reward``: ``r - beta sum_t k``, over all rows of the rollout, then baseline and scale as
    always. ``token_reward``: the term of each token off its own reward, returns to go, whitened.

    Args:
        data: with the columns ``old_logprobs`` and ``ref_logprobs``; groups of one size. A row
            without a reward counts in no baseline, and its advantages are 0.

    Source: arXiv:2402.14740 (reward); arXiv:2501.03262 (v9) eq. 4 and 5 (token_reward).
    """
    beta = row.kl_coefficient
    kl = [
        losses.kl_penalty(d.on_trained("old_logprobs"), d.on_trained("ref_logprobs"), row.kl)
        for d in data
    ]
    earned_NT = _earned(data, turn_weight)
    if row.kl_place == "reward":
        # A rollout may have several rows, and the KL of all is subtracted from its one reward.
        first: dict[int, Datum] = {}
        kl_of: dict[int, float] = {}
        for datum, k in zip(data, kl, strict=True):
            first.setdefault(datum.rollout, datum)
            kl_of[datum.rollout] = kl_of.get(datum.rollout, 0.0) + float(k.sum())
        less = [d.reward - beta * kl_of[n] if d.has_reward else math.nan for n, d in first.items()]
        rewards_N = torch.tensor(less, dtype=torch.float64)
        size = len(first) // len({datum.group for datum in data})
        counted_N = torch.tensor([not _is_left_out(datum, row) for datum in first.values()])
        advantages_TN = advantages.group_advantages(
            rewards_N,
            size,
            row.scale,
            row.baseline,
            counted_N=counted_N,
            earned_KN=earned_NT[: len(first)].T,
        )
        place = {rollout: i for i, rollout in enumerate(first)}
        return [
            advantages_TN[: len(k), place[d.rollout]].to(k) for d, k in zip(data, kl, strict=True)
        ]
    lengths = [len(k) for k in kl]
    rewards_NT = pad_sequence([-beta * k for k in kl], batch_first=True)
    mask_NT = _mask(lengths, rewards_NT)
    for index, datum in enumerate(data):
        rewards_NT[index, lengths[index] - 1] += datum.reward
    returns_NT = advantages.returns_to_go(rewards_NT, mask_NT) - earned_NT.to(rewards_NT)
    whitened_NT = advantages.whiten(returns_NT, mask_NT & _teaches(data, row, mask_NT))
    return [whitened_NT[index, :length] for index, length in enumerate(lengths)]
