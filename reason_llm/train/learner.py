"""The learning phase: the buffer's rollouts become gradient steps of the policy adapter.

Owns the optimizer and the order of things; the maths is in ``advantages``, ``losses`` and
``logprobs``, the rows in ``preparation``. One step of the loop may hold several optimizer steps.
Each divides once, by the count of its whole optimizer batch.

Shapes: B rows of a micro-batch, T tokens, N rollouts.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from reason_llm.config import TrainSection
from reason_llm.config.algorithms import Algorithm
from reason_llm.errors import TrainingError
from reason_llm.model import adapters, layout as packing
from reason_llm.model.base import Model
from reason_llm.model.layout import Rollout
from reason_llm.model.vllm.engine import on_default_stream
from reason_llm.rollout import Group
from reason_llm.train import losses, micro_batches as replay, optim, preparation
from reason_llm.train.micro_batches import MicroBatches, ending_out_of_memory
from reason_llm.train.policy import policy_logprobs, prove_packing, spread
from reason_llm.train.preparation import Row
from reason_llm.train.step_metrics import Tally


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """What the learner needs to know beyond its rollouts."""

    algorithm: Algorithm
    """Its correction is resolved: not ``auto``."""
    train: TrainSection
    temperature: float
    """Of the sampler: the policy is ``softmax(logits / temperature)`` in both phases."""
    max_new_tokens: int
    micro_batch_tokens: int
    seed: int
    total_optimizer_steps: int
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once; None as for ``logprobs``."""
    rounding_nats: float = 0.0
    """Log-ratios of policy and sampler up to this count as 0 in the importance weights."""


class Learner:
    """The policy adapter's optimizer, and what one step of the loop does with it."""

    def __init__(self, model: Model, settings: LearningSettings) -> None:
        self.model = model
        self.settings = settings
        self.is_packed = settings.train.packing == "varlen"
        self.micro_batches = MicroBatches(settings.micro_batch_tokens, model.device, self.is_packed)
        if self.is_packed:
            with on_default_stream():
                prove_packing(model)
        self.updates_in_step = 0
        """Optimizer steps taken since the step began."""
        self.logprobs_at_start: list[Tensor | None] = []
        """Of the step that was learned last, the policy's log-probs (T,) of each rollout before the
        first update; None for those that were not passed through the model by then."""
        self.parameters = [p for p in model.policy.parameters() if p.requires_grad]
        self.optimizer = optim.make_optimizer(self.parameters, settings.train)
        with ending_out_of_memory("making the optimizer's moments"):
            optim.allocate_state(self.optimizer)
        self.offloads = settings.train.gradient_checkpointing == "offload"
        if settings.train.gradient_checkpointing:  # takes effect in training mode only
            # Only the reentrant kind keeps a layer's input where hooks can take it away.
            model.policy.gradient_checkpointing_enable({"use_reentrant": self.offloads})
            if self.offloads:
                model.policy.enable_input_require_grads()  # or it would see nothing to train

    def learn(
        self,
        step: int,
        groups: Sequence[Group],
        progress: Callable[[int], None],
        begun: Mapping[str, Tensor] | None = None,
        between: Callable[[Callable[[], dict[str, Tensor]]], None] = lambda state: None,
    ) -> dict[str, float]:
        """All epochs and optimizer steps over these groups; the step's metrics.

        Args:
            progress: told how many rollouts were passed, or could be left out, as it happens; a
                negative number where an optimizer step begins again.
            begun: what ``between`` was given: go on from there.
            between: called after each optimizer step but the last with a function that gives what
                is needed, beside adapter and optimizer, to go on from there.

        Raises:
            TrainingError: a loss or gradient is not finite; the adapter is as before that optimizer
                step.
            OutOfMemory: one rollout alone is too much, or the gradient; likewise.
        """
        settings, train = self.settings, self.settings.train
        torch.manual_seed(random.Random(f"{settings.seed}/dropout/{step}").getrandbits(63))
        replays_before = self.micro_batches.replays
        size = len(groups[0].completions)
        rollouts = preparation.to_rollouts(groups)
        if begun is None:
            self.updates_in_step, tally = 0, Tally()
            measured = self._measure(rollouts, size)
        else:
            self.updates_in_step, replays = begun["done"].tolist()
            replays_before -= replays
            tally = Tally.of_state(begun, self.model.device)
            measured = {k: v.to(self.model.device) for k, v in begun.items() if k[0].isdecimal()}
            replay.set_rng_states([begun[f"rng.{i}"] for i in range(len(replay.rng_states()))])
        rows = self._rows(rollouts, size, measured)

        def state() -> dict[str, Tensor]:
            done = [self.updates_in_step, self.micro_batches.replays - replays_before]
            draws = {f"rng.{i}": draw for i, draw in enumerate(replay.rng_states())}
            return {"done": torch.tensor(done)} | draws | tally.state() | measured

        with ending_out_of_memory("making the gradients"):
            for parameter in self.parameters:  # so that a batch without signal is a step of zeros
                parameter.grad = torch.zeros_like(parameter)
        passes = train.epochs * train.optimizer_steps
        for pass_ in range(self.updates_in_step, passes):
            epoch, part = divmod(pass_, train.optimizer_steps)
            seed = f"{settings.seed}/{step}/{epoch}"
            batch = set(preparation.split(len(rollouts), train.optimizer_steps, seed)[part])
            self._optimizer_step(
                step, step * passes + pass_, [rows[i] for i in rows if i in batch],
                len(batch), tally, progress,
            )  # fmt: skip
            if pass_ + 1 < passes:
                between(state)
        self.logprobs_at_start = [
            rows[i].at_start if i in rows else None for i in range(len(rollouts))
        ]
        # Of the counted ones, less the KL where that belongs to the reward.
        used = [row.rollout.advantage for row in rows.values()]
        advantages = torch.tensor(used, dtype=torch.float64)
        return tally.metrics() | {
            "train/trained_fraction": sum(row.is_trained for row in rows.values()) / len(rollouts),
            "train/counted_fraction": len(rows) / len(rollouts),
            "train/advantage_std": float(advantages.std()) if len(rows) > 1 else 0.0,
            "train/micro_batch_tokens": float(self.micro_batches.tokens),
            "train/out_of_memory": float(self.micro_batches.replays - replays_before),
        }

    def _measure(self, rollouts: Sequence[Rollout], size: int) -> dict[str, Tensor]:
        """What stays as it is over the step, by rollout and name, (T,) each: ``7.old`` and
        ``7.entropies`` of the policy, ``7.ref`` of the base, ``7.advantages``, where needed."""
        settings, algorithm = self.settings, self.settings.algorithm
        shaped, picked = algorithm.kl_place != "loss", self._trained(rollouts, size)
        if shaped:
            picked = list(range(len(rollouts)))
        elif algorithm.top_entropy_fraction < 1:  # a part of all counted tokens
            picked = preparation.counted(rollouts, size, algorithm)
        chosen, found = [rollouts[i] for i in picked], {}
        moves = settings.train.epochs * settings.train.optimizer_steps > 1
        if shaped or moves or algorithm.top_entropy_fraction < 1:
            found["old"], found["entropies"] = self._logprobs_of(chosen)
        if shaped or algorithm.kl != "none":
            with adapters.reference(self.model.policy):
                found["ref"], _ = self._logprobs_of(chosen)
        if shaped:
            found["advantages"] = preparation.shaped_advantages(
                rollouts, size, algorithm, found["old"], found["ref"]
            )
        return {
            f"{i}.{name}": value
            for name, values in found.items()
            for i, value in zip(picked, values, strict=True)
        }

    def _trained(self, rollouts: Sequence[Rollout], size: int) -> list[int]:
        """The counted rollouts that have a gradient; the others need no pass."""
        algorithm = self.settings.algorithm
        always = algorithm.kl != "none" or algorithm.entropy_coefficient > 0
        counted = preparation.counted(rollouts, size, algorithm)
        return [i for i in counted if always or rollouts[i].advantage != 0]

    def _rows(
        self, rollouts: Sequence[Rollout], size: int, measured: Mapping[str, Tensor]
    ) -> dict[int, Row]:
        """The counted rollouts by index, with what was measured of them."""
        algorithm = self.settings.algorithm
        if algorithm.kl_place != "loss":  # its one advantage is then the mean of its tokens'
            rollouts = [
                replace(rollout, advantage=float(measured[f"{i}.advantages"].mean()))
                for i, rollout in enumerate(rollouts)
            ]
            trained = set(range(len(rollouts)))
        else:
            trained = set(self._trained(rollouts, size))
        names = ("old", "ref", "entropies", "advantages")
        return {
            i: Row(rollouts[i], i in trained, *(measured.get(f"{i}.{name}") for name in names))
            for i in preparation.counted(rollouts, size, algorithm)
        }

    @torch.no_grad()
    def _logprobs_of(self, rollouts: Sequence[Rollout]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and entropies (T,) of each rollout's completion, without dropout."""
        logprobs: list[Tensor] = [torch.empty(0)] * len(rollouts)
        entropies = list(logprobs)

        def run(batch: list[int]) -> None:
            mask_BT, *found, _ = self._passed([rollouts[i] for i in batch])
            for row, index in enumerate(batch):
                logprobs[index], entropies[index] = (x_BT[row][mask_BT[row]] for x_BT in found)

        self.model.policy.eval()
        self.micro_batches.run(rollouts, run, lambda: None)
        self.model.policy.train()
        return logprobs, entropies

    def _passed(
        self, rollouts: Sequence[Rollout], entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """A micro-batch through the model: mask, log-probs and entropies (B, T); tokens it took."""
        ids_BT, mask_BT = packing.collate(rollouts, self.model.device)
        layout = packing.lay_out(rollouts, self.model.device) if self.is_packed else None
        found = policy_logprobs(
            self.model, ids_BT, mask_BT, self.settings.temperature, entropy_gradient, layout,
            self.settings.chunk_tokens,
        )  # fmt: skip
        return mask_BT, *found, (ids_BT if layout is None else layout.ids_1N).numel()

    def _optimizer_step(
        self,
        step: int,
        optimizer_step: int,
        rows: Sequence[Row],
        batch_size: int,
        tally: Tally,
        progress: Callable[[int], None],
    ) -> None:
        """One update from the counted rows of an optimizer batch."""
        algorithm = self.settings.algorithm
        trained = [row for row in rows if row.is_trained]
        lengths = [len(row.rollout.completion_ids) for row in rows]
        least, tokens = preparation.least_entropy(rows, algorithm.top_entropy_fraction)
        batch = _Batch(
            step=step,
            count=losses.denominator(lengths, algorithm.aggregation, self.settings.max_new_tokens),
            tokens=max(1, tokens),
            least_entropy=least,
            is_first=self.updates_in_step == 0,
        )
        draws, here, done = replay.rng_states(), Tally(), 0

        def restart() -> None:
            nonlocal here, done
            self.optimizer.zero_grad(set_to_none=False)
            replay.set_rng_states(draws)  # dropout masks are drawn again
            progress(-done)
            here, done = Tally(), 0

        def run(indices: list[int]) -> None:
            nonlocal done
            self._backward(batch, [trained[i] for i in indices], here)
            progress(len(indices))
            done += len(indices)

        restart()
        progress(batch_size - len(trained))
        self.micro_batches.run([row.rollout for row in trained], run, restart)
        tally.merge(here)
        self._update(step, optimizer_step, tally, [row.rollout.name for row in trained])

    def _backward(self, batch: "_Batch", rows: Sequence[Row], tally: Tally) -> None:
        """Add the gradient of one micro-batch of an optimizer batch."""
        algorithm, device = self.settings.algorithm, self.model.device
        rollouts = [row.rollout for row in rows]
        with save_on_cpu(pin_memory=device.type == "cuda") if self.offloads else nullcontext():
            mask_BT, logprobs_BT, entropy_BT, passed = self._passed(
                rollouts, entropy_gradient=algorithm.entropy_coefficient > 0
            )
        if batch.is_first:
            for index, row in enumerate(rows):
                row.seen = logprobs_BT.detach()[index][mask_BT[index]].cpu()
        old_BT = spread([row.old for row in rows], mask_BT, otherwise=logprobs_BT.detach())
        advantages_B1 = torch.tensor([[r.advantage] for r in rollouts], device=device)
        advantages_BT = spread([row.advantages for row in rows], mask_BT, otherwise=advantages_B1)
        sampler = [torch.tensor(r.sampler_logprobs, device=device) for r in rollouts]
        sampler_BT = spread(sampler, mask_BT, otherwise=logprobs_BT)
        kept_BT = self._kept(logprobs_BT, old_BT, sampler_BT, advantages_BT, mask_BT)
        tally.left_out += int((mask_BT.any(1) & ~kept_BT.any(1)).sum())
        if algorithm.top_entropy_fraction < 1:
            # Those from before the step: as the policy moves, the part stays the same.
            before_BT = spread([row.entropies for row in rows], mask_BT, otherwise=entropy_BT)
            kept_BT = kept_BT & (before_BT >= batch.least_entropy)
        weights_BT = None
        if algorithm.correction not in ("auto", "none"):
            weights_BT = losses.sampler_correction(
                old_BT, sampler_BT, mask_BT, algorithm.correction,
                algorithm.correction_cap, algorithm.correction_floor, self.settings.rounding_nats,
            )  # fmt: skip
        loss_BT, clipped_BT = losses.policy_loss(
            algorithm, logprobs_BT, old_BT, advantages_BT, mask_BT, weights_BT
        )
        if weights_BT is not None and algorithm.surrogate != "vespo":
            loss_BT = loss_BT * weights_BT
        loss_BT = loss_BT * kept_BT
        values = {"clip_fraction": clipped_BT, "entropy": entropy_BT}
        if algorithm.kl != "none":
            ref_BT = spread([row.ref for row in rows], mask_BT, otherwise=logprobs_BT)
            values["kl"] = losses.kl_penalty(logprobs_BT, ref_BT, algorithm.kl)
            if algorithm.kl_place == "loss":
                loss_BT = loss_BT + algorithm.kl_coefficient * values["kl"]
        if weights_BT is not None:
            values["correction"] = weights_BT
        loss = losses.masked_sum(loss_BT, mask_BT, algorithm.aggregation) / batch.count
        if algorithm.entropy_coefficient > 0:
            bonus = (entropy_BT * kept_BT).sum() / batch.tokens
            loss = loss - algorithm.entropy_coefficient * bonus
        log_ratio_BT = logprobs_BT.detach() - old_BT
        if not torch.isfinite(loss):
            raise TrainingError(
                f"step {batch.step}: the loss is {loss.item()} on "
                f"{', '.join(r.name for r in rollouts)} (largest log ratio "
                f"{float(log_ratio_BT.abs().max()):.3g}); "
                "start again with --run.resume never and a lower train.learning_rate"
            )
        loss.backward()
        padding = 0 if self.is_packed else passed - sum(r.num_tokens for r in rollouts)
        mismatch_BT = logprobs_BT - sampler_BT if batch.is_first else None
        tally.add_micro_batch(loss, mask_BT, passed, padding, values, log_ratio_BT, mismatch_BT)

    def _kept(
        self,
        logprobs_BT: Tensor,
        old_BT: Tensor,
        sampler_BT: Tensor,
        advantages_BT: Tensor,
        mask_BT: Tensor,
    ) -> Tensor:
        """The masked tokens that are near enough to the policy; the others still count."""
        algorithm = self.settings.algorithm
        kept_BT = mask_BT
        if algorithm.off_policy_threshold:
            kept_BT = kept_BT & losses.is_near_policy(
                logprobs_BT, sampler_BT, advantages_BT, mask_BT, algorithm.off_policy_threshold
            )
        if algorithm.max_ratio:
            log_ratio_BT = (logprobs_BT.detach() - old_BT) * mask_BT
            largest_B1 = log_ratio_BT.amax(dim=1, keepdim=True)
            kept_BT = kept_BT & (largest_B1 <= math.log(algorithm.max_ratio))
        return kept_BT

    def _update(self, step: int, optimizer_step: int, tally: Tally, names: Sequence[str]) -> None:
        settings = self.settings
        with ending_out_of_memory("clipping the gradient"):
            most = settings.train.max_grad_norm
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, most))
        if not math.isfinite(norm):
            raise TrainingError(
                f"step {step}: the gradient's norm is {norm} over {', '.join(names[:4])} "
                f"and {max(0, len(names) - 4)} more (largest log ratio "
                f"{tally.largest_log_ratio:.3g}); start again with --run.resume never and a lower "
                "train.learning_rate"
            )
        rate = optim.learning_rate(settings.train, optimizer_step, settings.total_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.updates_in_step += 1  # before, as a step that fails may have moved some parameters
        with ending_out_of_memory("taking the optimizer's step"):
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


@dataclass(frozen=True, slots=True)
class _Batch:
    """What the micro-batches of an optimizer batch share."""

    step: int
    count: float
    tokens: int
    """That are trained: of the highest entropies, if only those are."""
    least_entropy: float
    is_first: bool
