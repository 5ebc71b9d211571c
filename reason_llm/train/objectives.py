"""Objectives: the rows that count, the columns measured before the first update, the loss of a
micro-batch, and the denominator of an optimizer batch.

The policy gradient serves every row of the algorithm table. Adding a surrogate is a function in
``losses.py``; adding an objective is a record here that has what ``Objective`` asks for.

Shapes: B rows of a micro-batch, T tokens, N rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from reason_llm.config import Algorithm
from reason_llm.model import Datum
from reason_llm.train import advantages, losses


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts over a whole optimizer batch, independent of its micro-batches."""

    denominator: float
    """What the sum of the losses is divided by."""
    tokens: int
    """Trained tokens: those of the highest entropies, if only those are trained."""
    min_entropy: float
    """Tokens below it are not trained."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch after its forward pass; every tensor is (B, T), entry t of token t."""

    mask_BT: Tensor
    """True where a token is trained."""
    logprobs_BT: Tensor
    """Of the policy as it is now, with gradient; 0 outside the mask."""
    entropies_BT: Tensor
    columns: Mapping[str, Tensor]
    """Of the rows, by name."""

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
    """(B, T) by metric: their means over the masked tokens are told."""
    masked_out: int = 0
    """Rows all of whose tokens the objective took out."""


class Objective(Protocol):
    """Interface of an objective."""

    @property
    def unit(self) -> Literal["sequence", "pair"]:
        """Unit that a micro-batch may not split."""
        ...

    @property
    def entropy_gradient(self) -> bool:
        """Whether the loss has a gradient in the entropies."""
        ...

    def measured(self, data: Sequence[Datum], updates: int) -> tuple[list[int], tuple[str, ...]]:
        """Rows and columns that are measured before the first of ``updates`` updates."""
        ...

    def prepared(self, data: Sequence[Datum]) -> list[Datum]:
        """Rows with the columns that follow from the measured ones."""
        ...

    def counted(self, data: Sequence[Datum]) -> list[int]:
        """The rows that count, in order."""
        ...

    def trained(self, data: Sequence[Datum]) -> list[int]:
        """The counted rows that have a gradient; the others need no pass."""
        ...

    def count(self, data: Sequence[Datum]) -> Counts:
        """Over the counted rows of an optimizer batch, trained or not."""
        ...

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """Masked sum of a micro-batch, with its metrics."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyGradient:
    """Objective of an algorithm's row."""

    row: Algorithm
    """Its correction is resolved: not ``auto``."""
    max_new_tokens: int
    rounding_nats: float = 0.0
    """Log-ratios of policy and sampler up to this count as 0 in the importance weights."""
    unit: Literal["sequence", "pair"] = "sequence"

    @property
    def entropy_gradient(self) -> bool:
        """Whether there is an entropy bonus."""
        return self.row.entropy_coefficient > 0

    def measured(self, data: Sequence[Datum], updates: int) -> tuple[list[int], tuple[str, ...]]:
        """Old log-probs and entropies where the policy moves, or where they make advantages or say
        which tokens are trained; the base's log-probs where there is a KL."""
        row = self.row
        names: tuple[str, ...] = ()
        if self._is_shaped or updates > 1 or row.top_entropy_fraction < 1:
            names += ("old_logprobs", "entropies")
        if row.kl != "none":
            names += ("ref_logprobs",)
        if self._is_shaped:
            return list(range(len(data))), names
        # The highest entropies are a part of those of all counted tokens.
        return self.counted(data) if row.top_entropy_fraction < 1 else self.trained(data), names

    def prepared(self, data: Sequence[Datum]) -> list[Datum]:
        """With the KL taken off the rewards, where the row has it there."""
        if not self._is_shaped:
            return list(data)
        found = shaped_advantages(data, self.row)
        return [
            datum.with_trained("advantages", values)
            for datum, values in zip(data, found, strict=True)
        ]

    def counted(self, data: Sequence[Datum]) -> list[int]:
        """The rows that ``keep`` and ``truncated`` leave."""
        row, kept = self.row, list(range(len(data)))
        if row.keep == "positive":
            kept = [i for i in kept if mean_advantage(data[i]) > 0]
        elif row.keep == "top_k":
            groups: dict[int, list[int]] = {}
            for i in kept:
                groups.setdefault(data[i].group, []).append(i)
            best = [
                sorted(group, key=lambda i: (-data[i].reward, i))[: row.top_k]
                for group in groups.values()
            ]
            kept = sorted(i for group in best for i in group)
        if row.truncated == "leave_out":
            kept = [i for i in kept if not data[i].is_truncated]
        return kept

    def trained(self, data: Sequence[Datum]) -> list[int]:
        """Those with an advantage, or all where something else has a gradient."""
        counted = self.counted(data)
        if self.row.kl != "none" or self.row.entropy_coefficient > 0:
            return counted
        return [i for i in counted if bool(data[i].columns["advantages"].any())]

    def count(self, data: Sequence[Datum]) -> Counts:
        """The row's denominator, and the entropy from which on a token is trained."""
        row = self.row
        lengths = [datum.num_trained for datum in data]
        total = losses.denominator(lengths, row.aggregation, self.max_new_tokens)
        if row.top_entropy_fraction == 1 or not data:
            return Counts(total, max(1, sum(lengths)), -math.inf)
        entropies_N = torch.cat([datum.on_trained("entropies") for datum in data])
        threshold = losses.top_entropy_threshold(entropies_N, row.top_entropy_fraction)
        return Counts(total, max(1, int((entropies_N >= threshold).sum())), threshold)

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """The surrogate with its importance weights, the KL, the entropy bonus."""
        row, mask_BT, logprobs_BT = self.row, batch.mask_BT, batch.logprobs_BT
        kept_BT = self._kept(batch)
        masked_out = int((mask_BT.any(1) & ~kept_BT.any(1)).sum())
        if row.top_entropy_fraction < 1:
            # Those from before the step: as the policy moves, the part stays the same.
            kept_BT = kept_BT & (batch.columns["entropies"] >= counts.min_entropy)
        terms = losses.Terms(
            logprobs_BT, batch.old_BT, batch.columns["advantages"], mask_BT, self._weights(batch)
        )
        loss_BT, clipped_BT = losses.policy_loss(row, terms)
        loss_BT = loss_BT * kept_BT
        values = {"clip_fraction": clipped_BT, "entropy": batch.entropies_BT}
        if row.kl != "none":
            values["kl"] = losses.kl_penalty(logprobs_BT, batch.columns["ref_logprobs"], row.kl)
            if row.kl_place == "loss":
                loss_BT = loss_BT + row.kl_coefficient * values["kl"]
        if terms.weights_BT is not None:
            values["correction"] = terms.weights_BT
        total = losses.masked_sum(loss_BT, mask_BT, row.aggregation)
        if row.entropy_coefficient > 0:  # a mean over the trained tokens, whatever the sums
            bonus = (batch.entropies_BT * kept_BT).sum() / counts.tokens
            total = total - row.entropy_coefficient * bonus * counts.denominator
        return Loss(total, values, masked_out)

    @property
    def _is_shaped(self) -> bool:
        """Whether the KL is in the reward."""
        return self.row.kl_place != "loss"

    def _weights(self, batch: Batch) -> Tensor | None:
        row = self.row
        if row.correction in ("auto", "none"):
            return None
        return losses.importance_weights(
            batch.old_BT, batch.columns["sampler_logprobs"], batch.mask_BT, row.correction,
            row.correction_cap, row.correction_floor, self.rounding_nats,
        )  # fmt: skip

    def _kept(self, batch: Batch) -> Tensor:
        """Mask of the tokens that are near enough to the policy; the others still count in the
        denominator."""
        row, kept_BT = self.row, batch.mask_BT
        if row.off_policy_threshold:
            kept_BT = kept_BT & losses.is_near_policy(
                batch.logprobs_BT, batch.columns["sampler_logprobs"], batch.columns["advantages"],
                batch.mask_BT, row.off_policy_threshold,
            )  # fmt: skip
        if row.max_ratio:
            log_ratio_BT = (batch.logprobs_BT.detach() - batch.old_BT) * batch.mask_BT
            largest_B1 = log_ratio_BT.amax(dim=1, keepdim=True)
            kept_BT = kept_BT & (largest_B1 <= math.log(row.max_ratio))
        return kept_BT


def mean_advantage(datum: Datum) -> float:
    """Mean advantage of the row's trained tokens; 0 without any."""
    values = datum.on_trained("advantages").double()
    return float(values.mean()) if len(values) else 0.0


def shaped_advantages(data: Sequence[Datum], row: Algorithm) -> list[Tensor]:
    """Advantages of each row's trained tokens, with the KL to the base subtracted from the reward.

    ``reward``: ``r - beta sum_t k``, then baseline and scale as always, where k is the row's
    estimator of the KL; k1 is ``log pi_old - log pi_ref``. ``token_reward``: the term of each token
    off its own reward, returns to go, whitened over all.

    Args:
        data: with the columns ``old_logprobs`` and ``ref_logprobs``; groups of one size.

    Source: arXiv:2402.14740 (reward); arXiv:2501.03262 (v9) eq. 4 and 5 (token_reward).
    """
    beta = row.kl_coefficient
    kl = [
        losses.kl_penalty(d.on_trained("old_logprobs"), d.on_trained("ref_logprobs"), row.kl)
        for d in data
    ]
    if row.kl_place == "reward":
        rewards_N = torch.tensor(
            [d.reward - beta * float(k.sum()) for d, k in zip(data, kl, strict=True)],
            dtype=torch.float64,
        )
        size = len(data) // len({datum.group for datum in data})
        found_N = advantages.group_advantages(rewards_N, size, row.scale, row.baseline)
        return [torch.full_like(k, float(value)) for k, value in zip(kl, found_N, strict=True)]
    lengths = [len(k) for k in kl]
    rewards_NT = torch.nn.utils.rnn.pad_sequence([-beta * k for k in kl], batch_first=True)
    mask_NT = torch.arange(rewards_NT.shape[1])[None] < torch.tensor(lengths)[:, None]
    mask_NT = mask_NT.to(rewards_NT.device)
    for index, datum in enumerate(data):
        rewards_NT[index, lengths[index] - 1] += datum.reward
    returns_NT = advantages.returns_to_go(rewards_NT, mask_NT)
    whitened_NT = advantages.whiten(returns_NT, mask_NT)
    return [whitened_NT[index, :length] for index, length in enumerate(lengths)]
