"""PPO's step: the critic learns the returns of the step's rollouts, then the policy learns from the
advantages that the critic's values gave.

The two share the base and nothing else, so their order changes nothing, and only one of them has
gradients at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from reason_llm.model import Datum, Role
from reason_llm.train import optim, values
from reason_llm.train.learner import Learner, Progress
from reason_llm.train.objectives import (
    AllRows,
    Batch,
    Beside,
    Counts,
    Loss,
    Output,
    PolicyGradient,
)
from reason_llm.train.shards import Shards


@dataclass(frozen=True, slots=True, kw_only=True)
class Values(AllRows):
    """The critic's objective: the clipped squared error of its values."""

    clip: float = 0.2
    leaves_out_truncated: bool = False
    output: Output = "values"

    def counted(self, data: Sequence[Datum]) -> list[int]:
        """All, or those that the token limit did not cut off."""
        return [i for i, d in enumerate(data) if not (self.leaves_out_truncated and d.is_truncated)]

    def trained(self, data: Sequence[Datum]) -> list[int]:
        """Likewise."""
        return self.counted(data)

    def count(self, data: Sequence[Datum], beside: Sequence[Beside] = ()) -> Counts:
        """All trained tokens."""
        tokens = max(1, sum(datum.num_trained for datum in data))
        return Counts(float(tokens), tokens)

    def loss(self, batch: Batch, counts: Counts) -> Loss:
        """The error of each token's value."""
        loss_BT, clipped_BT = values.value_loss(
            batch.logprobs_BT, batch.columns["old_values"], batch.columns["returns"], self.clip
        )
        loss_BT = loss_BT * batch.mask_BT
        return Loss(loss_BT.sum(), {"clip_fraction": clipped_BT, "value": batch.logprobs_BT})


class Learners:
    """The learner of the policy and, where the algorithm has one, that of the critic.

    Args:
        warmup_steps: in the first so many steps only the critic learns.
    """

    def __init__(
        self, policy: Learner, critic: Learner | None = None, warmup_steps: int = 0
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.warmup_steps = warmup_steps
        if critic is not None:
            critic.park()

    @property
    def optimizers(self) -> dict[Role, torch.optim.Optimizer]:
        """By the role whose adapter they move."""
        return {role: each.optimizer for role, each in self._by_role.items()}

    @property
    def _by_role(self) -> dict[Role, Learner]:
        return {each.settings.role: each for each in self._all}

    @property
    def _all(self) -> list[Learner]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    @property
    def moved_in_step(self) -> bool:
        """Whether an optimizer step has been taken since the step began."""
        return any(each.updates_in_step > 0 for each in self._all)

    def state(self) -> dict[str, Tensor]:
        """Copies in host memory of all that learning moves: adapters, heads, moments."""
        found = {}
        for role, learner in self._by_role.items():
            for number, parameter in enumerate(learner.parameters):
                found[f"{role}/{number}"] = _copy(parameter)
            for name, value in optim.state_tensors(learner.optimizer).items():
                found[f"{role}/{name}"] = _copy(value)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Take over what ``state`` returned."""
        for role, learner in self._by_role.items():
            own = {
                key.removeprefix(f"{role}/"): value.clone()
                for key, value in state.items()
                if key.startswith(f"{role}/")
            }
            for number, parameter in enumerate(learner.parameters):
                parameter.data.copy_(own.pop(str(number)))
            optim.load_state_tensors(learner.optimizer, own)
            learner.updates_in_step = 0
        if self.critic is not None:
            self.critic.park()

    def deal(self, shards: Shards) -> None:
        """Deal rows in these shards from here on."""
        for each in self._all:
            each.shards = shards

    def set_kl_coefficient(self, coefficient: float) -> None:
        """Have the policy learn with this weight of the KL."""
        policy = self.policy
        if isinstance(policy.settings.objective, PolicyGradient):
            objective = policy.settings.objective.with_kl_coefficient(coefficient)
            policy.settings = replace(policy.settings, objective=objective)

    def learn(self, step: int, data: Sequence[Datum], progress: Progress) -> dict[str, float]:
        """Learn a step and return its metrics.

        Args:
            progress: is told of the policy's rows.

        Raises:
            TrainingError, OutOfMemory: as ``Learner.learn``.
        """
        policy, critic = self.policy, self.critic
        for each in self._all:
            each.updates_in_step = 0
        if critic is None:
            return policy.learn(step, data, progress)
        old, _ = critic.measure(data, critic.settings.role, shards=critic.shards)
        rows = policy.prepared(
            [row.with_trained("old_values", value) for row, value in zip(data, old, strict=True)],
            policy.shards,
        )
        policy.park()
        critic.fetch()
        found = critic.update(step, rows, lambda count: None, prefix="critic")
        critic.park()
        policy.fetch()
        counted = [rows[i] for i in critic.settings.objective.counted(rows) if rows[i].has_reward]
        found["critic/explained_variance"] = _explained_variance(counted)
        if step >= self.warmup_steps:
            return found | policy.update(step, rows, progress)
        progress(len(rows))
        policy.pass_over(rows)
        return found | policy.settings.objective.describe(rows, range(len(rows)))


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _explained_variance(rows: Sequence[Datum]) -> float:
    """Of the whole returns by the values before the step, whatever lambda is; 0 where all returns
    are equal."""
    old_N = torch.cat([torch.empty(0), *(row.on_trained("old_values").cpu() for row in rows)])
    returns_N = torch.cat(
        [torch.empty(0), *(row.on_trained("whole_returns").cpu() for row in rows)]
    )
    found = values.explained_variance(old_N, returns_N, torch.ones_like(old_N, dtype=torch.bool))
    return found if found == found else 0.0
