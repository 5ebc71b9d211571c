"""The learning phase: gradient steps of the policy adapter on rows.

Owns the optimizer and the order of things; what makes a loss is in ``objectives``, the maths in
``advantages``, ``losses`` and ``model.logprobs``. One step of the loop may hold several optimizer
steps. Each divides once, by the count of its whole optimizer batch.

All randomness is a function of the seed and the step: the same step from the same adapter,
optimizer and rows gives the same bits, so nothing inside a step is ever saved.

Shapes: B rows of a micro-batch, T tokens, N rows.
"""

import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from reason_llm.config import TrainSection
from reason_llm.errors import TrainingError
from reason_llm.model import (
    Datum,
    Model,
    collate,
    collate_columns,
    lay_out,
    policy_logprobs,
    prove_packing,
)
from reason_llm.model.vllm import on_default_stream
from reason_llm.train import micro_batches, optim
from reason_llm.train.micro_batches import MicroBatches, ending_out_of_memory
from reason_llm.train.objectives import Batch, Counts, Objective, mean_advantage
from reason_llm.train.step_metrics import Tally

Progress = Callable[[int], None]
"""Told how many rows were passed, or needed no pass, as it happens; a negative number where an
optimizer step begins again."""


@dataclass(frozen=True, slots=True)
class LearningSettings:
    """Settings of the learner."""

    objective: Objective
    train: TrainSection
    temperature: float
    """Of the sampler: the policy is ``softmax(logits / temperature)`` in both phases."""
    micro_batch_tokens: int
    seed: int
    total_optimizer_steps: int
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once; None as for ``logprobs``."""


class Learner:
    """Optimizer of the policy adapter, and the learning of one step."""

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
        """Of the step that was learned last, the policy's log-probs of each row's trained tokens
        before the first update; None for rows that were not passed through the model by then."""
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

    def learn(self, step: int, data: Sequence[Datum], progress: Progress) -> dict[str, float]:
        """Take all epochs and optimizer steps over these rows and return the step's metrics.

        Raises:
            TrainingError: a loss or gradient is not finite; the adapter is as before that optimizer
                step.
            OutOfMemory: one row alone is too much, or the gradient; likewise.
        """
        settings, train = self.settings, self.settings.train
        torch.manual_seed(random.Random(f"{settings.seed}/dropout/{step}").getrandbits(63))
        replays_before = self.micro_batches.replays
        self.updates_in_step, tally = 0, Tally()
        updates = train.epochs * train.optimizer_steps
        data = self._prepared(data, updates)
        counted = settings.objective.counted(data)
        trained = set(settings.objective.trained(data))
        self.logprobs_at_start = [
            datum.on_trained("old_logprobs").float().cpu()
            if i in counted and "old_logprobs" in datum.columns
            else None
            for i, datum in enumerate(data)
        ]
        with ending_out_of_memory("making the gradients"):
            for parameter in self.parameters:  # so that a batch without signal is a step of zeros
                parameter.grad = torch.zeros_like(parameter)
        for update in range(updates):
            epoch, part = divmod(update, train.optimizer_steps)
            seed = f"{settings.seed}/{step}/{epoch}"
            batch = set(split(len(data), train.optimizer_steps, seed)[part])
            counts = settings.objective.count([data[i] for i in counted if i in batch])
            passed = [i for i in counted if i in batch and i in trained]
            progress(len(batch) - len(passed))
            self._accumulate(step, data, passed, counts, tally, progress)
            self._update(step, step * updates + update, tally, [data[i].name for i in passed])
        advantages = torch.tensor([mean_advantage(data[i]) for i in counted], dtype=torch.float64)
        return tally.metrics() | {
            "train/trained_fraction": len(trained) / len(data),
            "train/counted_fraction": len(counted) / len(data),
            "train/advantage_std": float(advantages.std()) if len(counted) > 1 else 0.0,
            "train/micro_batch_tokens": float(self.micro_batches.tokens),
            "train/out_of_memory": float(self.micro_batches.replays - replays_before),
        }

    def _prepared(self, data: Sequence[Datum], updates: int) -> list[Datum]:
        """Rows with the columns that stay constant over the step."""
        objective, data = self.settings.objective, list(data)
        chosen, names = objective.measured(data, updates)
        found: dict[str, list[Tensor]] = {}
        if "old_logprobs" in names:
            found["old_logprobs"], found["entropies"] = self.logprobs([data[i] for i in chosen])
        if "ref_logprobs" in names:
            with self.model.using("reference"):
                found["ref_logprobs"], _ = self.logprobs([data[i] for i in chosen])
        for name, values in found.items():
            for i, value in zip(chosen, values, strict=True):
                data[i] = data[i].with_trained(name, value)
        return objective.prepared(data)

    @torch.no_grad()
    def logprobs(self, data: Sequence[Datum]) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and entropies of each row's trained tokens, without dropout."""
        logprobs: list[Tensor] = [torch.empty(0)] * len(data)
        entropies = list(logprobs)

        def run(indices: list[int]) -> None:
            mask_BT, logprobs_BT, entropies_BT, _ = self._passed([data[i] for i in indices])
            for row, index in enumerate(indices):
                logprobs[index] = logprobs_BT[row][mask_BT[row]]
                entropies[index] = entropies_BT[row][mask_BT[row]]

        self.model.policy.eval()
        self.micro_batches.run(data, run, lambda: None)
        self.model.policy.train()
        return logprobs, entropies

    def _passed(
        self, data: Sequence[Datum], entropy_gradient: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Mask, log-probs and entropies (B, T) of a micro-batch, and its number of tokens."""
        ids_BT, mask_BT = collate(data, self.model.device)
        layout = lay_out(data, self.model.device) if self.is_packed else None
        logprobs_BT, entropies_BT = policy_logprobs(
            self.model, ids_BT, mask_BT, self.settings.temperature, entropy_gradient, layout,
            self.settings.chunk_tokens,
        )  # fmt: skip
        tokens = (ids_BT if layout is None else layout.ids_1N).numel()
        return mask_BT, logprobs_BT, entropies_BT, tokens

    def _accumulate(
        self,
        step: int,
        data: Sequence[Datum],
        passed: Sequence[int],
        counts: Counts,
        tally: Tally,
        progress: Progress,
    ) -> None:
        """Accumulate the gradient of an optimizer batch; out of memory, from the start again."""
        states, here, done = micro_batches.rng_states(), Tally(), 0

        def restart() -> None:
            nonlocal here, done
            self.optimizer.zero_grad(set_to_none=False)
            micro_batches.set_rng_states(states)  # dropout masks are drawn again
            progress(-done)
            here, done = Tally(), 0

        def run(indices: list[int]) -> None:
            nonlocal done
            self._backward(step, data, [passed[i] for i in indices], counts, here)
            progress(len(indices))
            done += len(indices)

        restart()
        self.micro_batches.run([data[i] for i in passed], run, restart)
        tally.merge(here)

    def _backward(
        self, step: int, data: Sequence[Datum], indices: list[int], counts: Counts, tally: Tally
    ) -> None:
        """Add the gradient of one micro-batch of an optimizer batch."""
        objective, rows = self.settings.objective, [data[i] for i in indices]
        is_on_gpu = self.model.device.type == "cuda"
        with save_on_cpu(pin_memory=is_on_gpu) if self.offloads else nullcontext():
            mask_BT, logprobs_BT, entropies_BT, tokens = self._passed(
                rows, objective.entropy_gradient
            )
        columns = collate_columns(rows, self.model.device)
        batch = Batch(mask_BT, logprobs_BT, entropies_BT, columns)
        is_first = self.updates_in_step == 0
        if is_first:
            for row, i in enumerate(indices):
                if "old_logprobs" not in data[i].columns:  # which are without dropout
                    seen = logprobs_BT.detach()[row][mask_BT[row]]
                    self.logprobs_at_start[i] = seen.float().cpu()
        found = objective.loss(batch, counts)
        loss = found.total / counts.denominator
        log_ratio_BT = logprobs_BT.detach() - batch.old_BT
        if not torch.isfinite(loss):
            raise TrainingError(
                f"step {step}: the loss is {loss.item()} on {', '.join(r.name for r in rows)} "
                f"(largest log ratio {float(log_ratio_BT.abs().max()):.3g}); "
                "start again with --run.resume never and a lower train.learning_rate"
            )
        loss.backward()
        tally.add_micro_batch(
            loss,
            mask_BT,
            tokens,
            padding=0 if self.is_packed else tokens - sum(row.num_tokens for row in rows),
            values=found.values,
            log_ratio_BT=log_ratio_BT,
            mismatch_BT=logprobs_BT - columns["sampler_logprobs"] if is_first else None,
        )
        tally.left_out += found.masked_out

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


def split(count: int, parts: int, seed: str) -> list[list[int]]:
    """``0 .. count``, shuffled and cut into ``parts`` of nearly equal size."""
    indices = list(range(count))
    if parts > 1:
        random.Random(seed).shuffle(indices)
    return [indices[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


@contextmanager
def learning(learner: Learner) -> Iterator[Learner]:
    """Context of the learning phase: the policy is in training mode and the GPU belongs to the
    learner."""
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
