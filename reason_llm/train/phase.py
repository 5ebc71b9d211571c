"""The learning phase: the buffer's rollouts become gradient steps of the policy adapter.

Owns the optimizer and the order of things; the maths is in ``advantages``, ``losses`` and
``logprobs``. One step of the loop may hold several optimizer steps. Each divides once, by the count
of its whole optimizer batch.

Not here: recovery from out-of-memory, importance weights for a sampler that is not the policy (the
mismatch is only measured).

Shapes: B rows of a micro-batch, T tokens, N rollouts.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reason_llm.config import TrainSection
from reason_llm.errors import TrainingError
from reason_llm.model import adapters
from reason_llm.model.base import Model
from reason_llm.model.engine import on_default_stream
from reason_llm.rollout import Group
from reason_llm.train import losses, optim, packing
from reason_llm.train.advantages import group_advantages
from reason_llm.train.algorithms import Algorithm
from reason_llm.train.logprobs import token_logprobs
from reason_llm.train.packing import Rollout


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """What the learner needs to know beyond its rollouts."""

    algorithm: Algorithm
    train: TrainSection
    temperature: float
    """Of the sampler: the policy is ``softmax(logits / temperature)`` in both phases."""
    max_new_tokens: int
    micro_batch_tokens: int
    seed: int
    total_optimizer_steps: int


class Learner:
    """The policy adapter's optimizer, and what one step of the loop does with it."""

    def __init__(self, model: Model, settings: LearningSettings) -> None:
        self.model = model
        self.settings = settings
        self.parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self.optimizer = optim.make_optimizer(self.parameters, settings.train)
        if settings.train.gradient_checkpointing:  # takes effect in training mode only
            model.policy.gradient_checkpointing_enable({"use_reentrant": False})

    def learn(
        self, step: int, groups: Sequence[Group], progress: Callable[[int], None]
    ) -> dict[str, float]:
        """All epochs and optimizer steps over these groups; the step's metrics.

        Args:
            progress: told how many rollouts were passed, or could be left out, as it happens.

        Raises:
            TrainingError: a loss or gradient is not finite; the adapter is as before that optimizer
            step.
        """
        settings, train = self.settings, self.settings.train
        torch.manual_seed(random.Random(f"{settings.seed}/dropout/{step}").getrandbits(63))
        rollouts = to_rollouts(groups)
        lengths = [len(rollout.completion_ids) for rollout in rollouts]
        # With no KL a zero advantage gives a zero gradient: such rollouts count in the mean and
        # need no pass.
        chosen = [
            i for i, r in enumerate(rollouts) if r.advantage != 0 or settings.algorithm.kl != "none"
        ]
        fixed = self._fixed_logprobs(rollouts, chosen)
        tally = _Tally()
        for parameter in self.parameters:  # so that a batch without signal is a step of zeros
            parameter.grad = torch.zeros_like(parameter)
        steps_before = step * train.epochs * train.optimizer_steps
        for pass_ in range(train.epochs * train.optimizer_steps):
            epoch, part = divmod(pass_, train.optimizer_steps)
            rows = _split(len(rollouts), train.optimizer_steps, f"{settings.seed}/{step}/{epoch}")[
                part
            ]
            trained = sorted(set(rows) & set(chosen))
            count = losses.denominator(
                [lengths[i] for i in rows], settings.algorithm.aggregation, settings.max_new_tokens
            )
            self.optimizer.zero_grad(set_to_none=False)
            progress(len(rows) - len(trained))
            for batch in packing.micro_batches(
                [rollouts[i].num_tokens for i in trained], settings.micro_batch_tokens
            ):
                indices = [trained[i] for i in batch]
                self._backward(
                    step, [rollouts[i] for i in indices], [fixed[i] for i in indices], count, tally
                )
                progress(len(indices))
            self._update(step, steps_before + pass_, tally, [rollouts[i].name for i in trained])
        return tally.metrics() | {"train/trained_fraction": len(chosen) / len(rollouts)}

    def _fixed_logprobs(
        self, rollouts: Sequence[Rollout], chosen: Sequence[int]
    ) -> dict[int, "_Fixed"]:
        """Log-probs that do not change while learning: of the policy before it, and of the
        reference."""
        settings = self.settings
        moves = settings.train.epochs * settings.train.optimizer_steps > 1
        picked = [rollouts[i] for i in chosen]
        old = self._logprobs_of(picked) if moves else [None] * len(picked)
        if settings.algorithm.kl == "none":
            ref: Sequence[Tensor | None] = [None] * len(picked)
        else:
            with adapters.reference(self.model.policy):
                ref = self._logprobs_of(picked)
        return {i: _Fixed(old[row], ref[row]) for row, i in enumerate(chosen)}

    @torch.no_grad()
    def _logprobs_of(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """The log-probs (T,) of each rollout's completion, without dropout."""
        result: list[Tensor] = [torch.empty(0)] * len(rollouts)
        self.model.policy.eval()
        for batch in packing.micro_batches(
            [r.num_tokens for r in rollouts], self.settings.micro_batch_tokens
        ):
            ids_BT, mask_BT = packing.collate([rollouts[i] for i in batch], self.model.device)
            logprobs_BT, _ = policy_logprobs(self.model, ids_BT, mask_BT, self.settings.temperature)
            for row, index in enumerate(batch):
                result[index] = logprobs_BT[row][mask_BT[row]]
        self.model.policy.train()
        return result

    def _backward(
        self,
        step: int,
        rollouts: Sequence[Rollout],
        fixed: Sequence["_Fixed"],
        count: float,
        tally: "_Tally",
    ) -> None:
        """Add the gradient of one micro-batch of an optimizer batch with this denominator."""
        algorithm, device = self.settings.algorithm, self.model.device
        ids_BT, mask_BT = packing.collate(rollouts, device)
        logprobs_BT, entropy_BT = policy_logprobs(
            self.model, ids_BT, mask_BT, self.settings.temperature
        )
        old_BT = _spread([f.old for f in fixed], mask_BT, otherwise=logprobs_BT.detach())
        advantages_B = torch.tensor(
            [r.advantage for r in rollouts], dtype=torch.float32, device=device
        )
        loss_BT, clipped_BT = losses.clipped_surrogate(
            logprobs_BT, old_BT, advantages_B, algorithm.clip_low, algorithm.clip_high
        )
        kl_BT = torch.zeros_like(loss_BT)
        if algorithm.kl != "none":
            ref_BT = _spread([f.ref for f in fixed], mask_BT, otherwise=logprobs_BT)
            kl_BT = losses.kl_penalty(logprobs_BT, ref_BT, algorithm.kl)
            loss_BT = loss_BT + algorithm.kl_coefficient * kl_BT
        loss = losses.masked_sum(loss_BT, mask_BT, algorithm.aggregation) / count
        if not torch.isfinite(loss):
            raise TrainingError(
                f"step {step}: the loss is {loss.item()} on {', '.join(r.name for r in rollouts)} "
                f"(largest log ratio {float((logprobs_BT.detach() - old_BT).abs().max()):.3g}); "
                "start again with --run.resume never and a lower train.learning_rate"
            )
        loss.backward()
        sampler_BT = _spread(
            [torch.tensor(r.sampler_logprobs, device=device) for r in rollouts],
            mask_BT,
            logprobs_BT,
        )
        tally.add_micro_batch(
            loss, mask_BT, clipped_BT, entropy_BT, kl_BT, logprobs_BT.detach() - sampler_BT
        )

    def _update(
        self, step: int, optimizer_step: int, tally: "_Tally", names: Sequence[str]
    ) -> None:
        settings = self.settings
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, settings.train.max_grad_norm))
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {step}: the gradient's norm is {norm} over {', '.join(names[:4])} "
                f"and {max(0, len(names) - 4)} more; start again "
                "with --run.resume never and a lower train.learning_rate"
            )
        rate = optim.learning_rate(settings.train, optimizer_step, settings.total_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        tally.add_update(norm, rate)


@contextmanager
def learning(learner: Learner) -> Iterator[Learner]:
    """The learning phase: within it the policy is in training mode and the GPU is the learner's."""
    model = learner.model
    if model.engine is not None:
        model.engine.release()
    model.policy.train()
    try:
        with on_default_stream():
            yield learner
    finally:
        model.policy.eval()
        learner.optimizer.zero_grad(set_to_none=True)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()


def with_advantages(groups: Sequence[Group], algorithm: Algorithm) -> list[Group]:
    """The scored groups with an advantage on every completion."""
    size = len(groups[0].completions)
    rewards_N = torch.tensor(
        [c.reward for group in groups for c in group.completions], dtype=torch.float64
    )
    advantages = iter(group_advantages(rewards_N, size, algorithm.scale).tolist())
    return [
        replace(
            group,
            completions=tuple(replace(c, advantage=next(advantages)) for c in group.completions),
        )
        for group in groups
    ]


def to_rollouts(groups: Sequence[Group]) -> list[Rollout]:
    """The buffer's groups as the learner's rows, in order."""
    return [
        Rollout(
            f"{g.prompt.id}#{i}",
            g.prompt.token_ids,
            c.token_ids,
            c.logprobs,
            float(c.advantage or 0.0),
        )
        for g in groups
        for i, c in enumerate(g.completions)
    ]


def policy_logprobs(
    model: Model, ids_BT: Tensor, mask_BT: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies (B, T) of the masked tokens under the model as it is now."""
    hidden_BTD = model.hidden_states(ids_BT)
    return token_logprobs(
        hidden_BTD,
        ids_BT,
        mask_BT,
        model.head.weight,
        model.head.bias,
        temperature,
        softcap=model.softcap,
    )


@dataclass(frozen=True, slots=True)
class _Fixed:
    old: Tensor | None
    ref: Tensor | None


@dataclass(slots=True)
class _Tally:
    """Sums over the micro-batches of a step, kept as tensors until asked for."""

    tokens: int = 0
    updates: int = 0
    sums: dict[str, Tensor | float] = field(default_factory=dict)
    mismatch_max: float = 0.0
    rate: float = 0.0

    def add_micro_batch(
        self,
        loss: Tensor,
        mask_BT: Tensor,
        clipped_BT: Tensor,
        entropy_BT: Tensor,
        kl_BT: Tensor,
        mismatch_BT: Tensor,
    ) -> None:
        """Count a micro-batch in; ``mismatch_BT`` is the learner's log-probs less the sampler's."""
        self._add("loss", loss.detach())
        self.tokens += int(mask_BT.sum())
        self._add("clip_fraction", (clipped_BT & mask_BT).sum())
        self._add("entropy", entropy_BT.sum())
        self._add("kl", (kl_BT.detach() * mask_BT).sum())
        if (
            self.updates == 0
        ):  # later the policy has moved, and the difference is no longer the sampler's
            self.mismatch_max = max(self.mismatch_max, float((mismatch_BT * mask_BT).abs().max()))

    def add_update(self, norm: float, rate: float) -> None:
        """Count an optimizer step in."""
        self._add("grad_norm", norm)
        self.updates += 1
        self.rate = rate

    def metrics(self) -> dict[str, float]:
        """Means: over tokens for what tokens have, over optimizer steps for loss and gradient
        norm."""
        tokens, updates = max(1, self.tokens), max(1, self.updates)
        per = {
            "loss": updates,
            "grad_norm": updates,
            "clip_fraction": tokens,
            "entropy": tokens,
            "kl": tokens,
        }
        means = {
            f"train/{name}": float(self.sums.get(name, 0.0)) / count for name, count in per.items()
        }
        return means | {
            "train/sampler_mismatch_max": self.mismatch_max,
            "train/learning_rate": self.rate,
            "train/tokens": float(self.tokens),
        }

    def _add(self, name: str, value: Tensor | float) -> None:
        self.sums[name] = self.sums.get(name, 0.0) + value


def _split(count: int, parts: int, seed: str) -> list[list[int]]:
    """``0 .. count`` shuffled and cut into ``parts`` of nearly equal size."""
    indices = list(range(count))
    if parts > 1:
        random.Random(seed).shuffle(indices)
    return [indices[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


def _spread(rows: Sequence[Tensor | None], mask_BT: Tensor, otherwise: Tensor) -> Tensor:
    """Rows of completion log-probs laid out as (B, T) where the mask is True, 0 elsewhere;
    ``otherwise`` if none."""
    known = [row for row in rows if row is not None]
    if len(known) < len(rows):
        return otherwise
    values = torch.cat(known).float()
    return torch.zeros(mask_BT.shape, dtype=values.dtype, device=mask_BT.device).masked_scatter(
        mask_BT, values
    )
