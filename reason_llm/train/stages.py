"""The objective of each stage; those of the stages that learn from a set of rows are here:
supervised, pairs, labels, reward models.

Shapes: B rows of a micro-batch, T tokens, P pairs. Of a pair, the even row is the chosen side and
the row after it the rejected one; both have the same prompt.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reason_llm.config import Config, PreferenceRow, StageName
from reason_llm.model import Datum
from reason_llm.train import losses, preferences, rewards
from reason_llm.train.objectives import Batch, Counts, Loss, Objective, Output, PolicyGradient, Unit

ROUNDING_NATS = 1e-3
"""More than float32 log-probs of one policy differ between sampling and learning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervised(Objective):
    """Negative log-likelihood of the trained tokens."""

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """``-log p`` of each token."""
        nll_BT = -batch.logprobs_BT
        total = losses.masked_sum(nll_BT, batch.mask_BT, "token_mean")
        return Loss(total, {"nll": nll_BT, "entropy": batch.entropies_BT})


@dataclass(frozen=True, slots=True, kw_only=True)
class PairLoss(Objective):
    """A row of the preference table over pairs; ``Labels`` is KTO's, which has none."""

    row: PreferenceRow
    unit: Unit = "pair"

    def measured(self, data: Sequence[Datum], updates: int) -> tuple[list[int], tuple[str, ...]]:
        """The reference's log-probs, where the loss compares with them."""
        return list(range(len(data))), ("ref_logprobs",) if self.row.needs_reference else ()

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """The table's loss of each pair, and the chosen side's NLL per token of the batch."""
        row, policy_B = self.row, batch.logprobs_BT.sum(1)
        lengths_B = batch.mask_BT.sum(1).clamp(min=1)
        mean_B = policy_B / lengths_B
        metrics: dict[str, Tensor] = {}
        if row.needs_reference:
            ref_B = batch.columns["ref_logprobs"].sum(1)
            ratio_B = (policy_B - ref_B).detach()
            metrics["chosen_log_ratio"], metrics["rejected_log_ratio"] = ratio_B[::2], ratio_B[1::2]
            ahead_P = ratio_B[::2] - ratio_B[1::2]
            if row.normalize_length:
                policy_B, ref_B = mean_B, ref_B / lengths_B
            h_P = (policy_B - ref_B)[::2] - (policy_B - ref_B)[1::2]
            if row.loss == "ipo":
                loss_P = preferences.ipo(h_P, row.beta)
            else:
                function = preferences.rdpo if row.loss == "robust" else preferences.cdpo
                loss_P = function(h_P, row.beta, row.label_smoothing)
        else:
            ahead_P = (mean_B[::2] - mean_B[1::2]).detach()
            if row.loss == "orpo":
                loss_P = preferences.orpo(mean_B[::2], mean_B[1::2], row.beta)
            else:
                loss_P = preferences.simpo(mean_B[::2], mean_B[1::2], row.beta, row.margin)
        metrics["margin"] = ahead_P if row.loss == "orpo" else row.beta * ahead_P
        metrics |= {
            "pair_accuracy": rewards.in_order(ahead_P),
            "chosen_logprob": mean_B[::2].detach(),
            "rejected_logprob": mean_B[1::2].detach(),
        }
        total = loss_P.sum()
        # counts.denominator is in pairs: the learner divides by it what is a mean over tokens here.
        if row.nll_coefficient:
            nll = -batch.logprobs_BT.sum(1)[::2].sum() / counts.tokens * counts.denominator
            total = total + row.nll_coefficient * nll
        return Loss(total, {"entropy": batch.entropies_BT}, of_units=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels(Objective):
    """KTO: single completions with a label, against the KL of the optimizer batch."""

    row: PreferenceRow

    def measured(self, data: Sequence[Datum], updates: int) -> tuple[list[int], tuple[str, ...]]:
        """The reference's log-probs."""
        return list(range(len(data))), ("ref_logprobs",)

    def extra_rows(self, data: Sequence[Datum]) -> list[Datum]:
        """Each prompt with the completion of the row before it."""
        return [
            data[other].with_prompt(datum.prompt_ids)
            for datum, other in zip(data, preferences.mismatched(len(data)), strict=True)
        ]

    def count(self, data: Sequence[Datum], extra: Sequence[tuple[Tensor, Tensor]] = ()) -> Counts:
        """All rows, and the batch's KL by the extra rows."""
        policy_N = torch.stack([policy.sum() for policy, _ in extra])
        ref_N = torch.stack([reference.sum() for _, reference in extra])
        baseline = float(preferences.kto_baseline(policy_N, ref_N))
        return Counts(float(max(1, len(data))), 1, baseline=baseline)

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """The loss of each completion by its label."""
        row, policy_B = self.row, batch.logprobs_BT.sum(1)
        ref_B = batch.columns["ref_logprobs"].sum(1)
        desirable_B = batch.rewards_B > 0
        loss_B = preferences.kto(
            policy_B,
            ref_B,
            desirable_B,
            policy_B.new_full((), counts.baseline),
            row.beta,
            row.desirable_weight,
            row.undesirable_weight,
        )
        ratio_B = (policy_B - ref_B).detach()
        of_label = {True: [ratio_B[:0]], False: [ratio_B[:0]]}
        for i, label in enumerate(batch.rewards):  # a mask's number of rows would be the card's
            of_label[label > 0].append(ratio_B[i : i + 1])
        metrics: Mapping[str, Tensor] = {
            "chosen_log_ratio": torch.cat(of_label[True]),
            "rejected_log_ratio": torch.cat(of_label[False]),
            "kl_baseline": torch.full_like(ratio_B, counts.baseline),
        }
        return Loss(loss_B.sum(), {"entropy": batch.entropies_BT}, of_units=metrics)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel(Objective):
    """Bradley-Terry over pairs."""

    centering: float = 0.01
    output: Output = "scores"
    unit: Unit = "pair"

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """``-log sigmoid`` of the difference of the two scores, less the margin."""
        scores_B = batch.logprobs_BT.sum(1)
        chosen_P, rejected_P = scores_B[::2], scores_B[1::2]
        margins_P = batch.rewards_B[::2]
        loss_P = rewards.bradley_terry(chosen_P, rejected_P, margins_P, self.centering)
        metrics = {
            "pair_accuracy": rewards.in_order(chosen_P - rejected_P),
            "margin": chosen_P - rejected_P,
            "chosen_reward": chosen_P,
            "rejected_reward": rejected_P,
        }
        return Loss(loss_P.sum(), {}, of_units=metrics)


def _of_rollouts(config: Config) -> Objective:
    """The algorithm's. A run that learns its own algorithm from its own rollouts again, in float32,
    has importance weights of exactly 1, and the same adapter to the last bit."""
    rounds = config.algorithm.row().correction == "auto" and config.is_off_policy
    return PolicyGradient(
        config.learned_row,
        config.sample.max_new_tokens,
        ROUNDING_NATS if rounds else 0.0,
        config.critic,
        config.turn_weight,
    )


def _of_preferences(config: Config) -> Objective:
    row = config.preference.row()
    return PairLoss(row=row) if row.needs_pairs else Labels(row=row)


OBJECTIVES: dict[StageName, Callable[[Config], Objective]] = {
    "rl": _of_rollouts,
    "sample": _of_rollouts,
    "sft": lambda config: Supervised(),
    "pretrain": lambda config: Supervised(),
    "reward": lambda config: RewardModel(centering=config.reward.centering),
    "preference": _of_preferences,
}
