"""The learning phase: gradient steps of one role's adapter on rows.

Owns the optimizer and the order of things; what makes a loss is in ``objectives``, the maths in
``advantages``, ``losses`` and ``model.logprobs``. One step of the loop may hold several optimizer
steps. Each divides once, by the count of its whole optimizer batch.

All randomness is a function of the seed and the step: the same step from the same adapter,
optimizer and rows gives the same bits, so nothing inside a step is ever saved. With several shards
(``shards``) it is one of the shard, too, and the step may be shared between processes.

Shapes: B rows of a micro-batch, T tokens, N rows.
"""

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from reason_llm.config import TrainSection
from reason_llm.errors import TrainingError
from reason_llm.model import (
    Datum,
    Model,
    Role,
    collate,
    collate_columns,
    lay_out,
    policy_logprobs,
    prove_packing,
    row_scores,
    token_values,
)
from reason_llm.model.vllm import on_default_stream
from reason_llm.train import micro_batches, optim
from reason_llm.train.micro_batches import MicroBatches, ending_out_of_memory
from reason_llm.train.objectives import ROWS, Batch, Beside, Counts, Objective, Output
from reason_llm.train.shards import GradientSum, Shards, shard_seed
from reason_llm.train.step_metrics import Tally, floats_from_text, floats_to_text

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
    first_step: int = 0
    """Step of the run in which the role begins to learn; the schedule begins there."""
    role: Role = "policy"
    """Whose adapter is trained."""
    reference: Role = "reference"
    """Whose log-probs are the column ref_logprobs."""
    teacher: Role = "teacher"
    """Whose log-probs are the column teacher_logprobs."""

    def for_critic(self, objective: Objective, train: TrainSection, total: int) -> Self:
        """Settings of the critic beside this policy.

        Args:
            total: its optimizer steps.
        """
        return replace(
            self, objective=objective, train=train, total_optimizer_steps=total, first_step=0,
            role="critic",
        )  # fmt: skip

    def with_teacher(self, role: Role) -> Self:
        """With another role as the teacher."""
        return replace(self, teacher=role)


class Learner:
    """Optimizer of one role's adapter, and the learning of one step."""

    def __init__(self, model: Model, settings: LearningSettings) -> None:
        self.model = model
        self.settings = settings
        self.is_packed = settings.train.packing == "varlen"
        self.micro_batches = MicroBatches(settings.micro_batch_tokens, model.device, self.is_packed)
        if self.is_packed:
            with on_default_stream():
                prove_packing(model)
        self.teacher_prompts: Mapping[tuple[int, ...], tuple[int, ...]] = {}
        """What the teacher is asked in the place of each prompt, as token ids; empty where it is
        asked what the policy is asked."""
        self.shards = Shards()
        """In which a step's rows are dealt, and with whom it is learned."""
        self.updates_in_step = 0
        """Optimizer steps taken since the step began."""
        self.logprobs_at_start: list[Tensor | None] = []
        """Of the step that was learned last, the policy's log-probs of each row's trained tokens
        before the first update; None for rows that were not passed through the model by then."""
        self._replays = 0
        self.parameters = model.parameters_of(settings.role)
        self.optimizer = optim.make_optimizer(self.parameters, settings.train)
        with ending_out_of_memory("making the optimizer's moments"):
            optim.allocate_state(self.optimizer)
            if self.keeps_average:
                optim.allocate_average(self.optimizer)
        self.offloads = settings.train.gradient_checkpointing == "offload"
        if settings.train.gradient_checkpointing:  # takes effect in training mode only
            # Only the reentrant kind keeps a layer's input where hooks can take it away.
            model.policy.gradient_checkpointing_enable({"use_reentrant": self.offloads})
            if self.offloads:
                model.policy.enable_input_require_grads()  # or it would see nothing to train

    @property
    def keeps_average(self) -> bool:
        """Whether an average of the adapter is kept: of the policy's, with ``train.ema``."""
        return self.settings.role == "policy" and self.settings.train.ema is not None

    def learn(self, step: int, data: Sequence[Datum], progress: Progress) -> dict[str, float]:
        """Take all epochs and optimizer steps over these rows and return the step's metrics.

        Raises:
            TrainingError: a loss or gradient is not finite; the adapter is as before that optimizer
                step.
            OutOfMemory: one row alone is too much, or the gradient; likewise.
        """
        return self.update(step, self.prepared(data, self.shards), progress)

    def prepared(self, data: Sequence[Datum], shards: Shards | None = None) -> list[Datum]:
        """Rows with the columns that stay constant over the step.

        Args:
            shards: as in ``measure``.
        """
        settings, objective, data = self.settings, self.settings.objective, list(data)
        updates = settings.train.epochs * settings.train.optimizer_steps
        chosen, names = objective.measured(data, updates)
        chosen = [i for i in chosen if not all(name in data[i].columns for name in names)]
        found: dict[str, list[Tensor]] = {}
        rows = [data[i] for i in chosen]
        if "old_logprobs" in names:
            found["old_logprobs"], found["entropies"] = self.measure(
                rows, settings.role, shards=shards
            )
        if "ref_logprobs" in names:
            found["ref_logprobs"], _ = self.measure(rows, settings.reference, shards=shards)
        if "teacher_logprobs" in names:
            found["teacher_logprobs"], _ = self.measure(
                [self._as_told_to_the_teacher(row) for row in rows], settings.teacher, shards=shards
            )
        for name, values in found.items():
            for i, value in zip(chosen, values, strict=True):
                data[i] = data[i].with_trained(name, value)
        return objective.prepared(data)

    def update(
        self, step: int, data: Sequence[Datum], progress: Progress, prefix: str = "train"
    ) -> dict[str, float]:
        """``learn`` on prepared rows.

        Args:
            prefix: of the metrics' names.
        """
        settings, train, objective = self.settings, self.settings.train, self.settings.objective
        size = ROWS[objective.unit]
        torch.manual_seed(random.Random(f"{settings.seed}/dropout/{step}").getrandbits(63))
        self.updates_in_step = 0
        updates = train.epochs * train.optimizer_steps
        tallies: list[list[Tally]] = []
        moved: list[tuple[float, float]] = []
        counted = objective.counted(data)
        trained = set(objective.trained(data))
        self.logprobs_at_start = [
            datum.on_trained("old_logprobs").float().cpu()
            if i in counted and "old_logprobs" in datum.columns
            else None
            for i, datum in enumerate(data)
        ]
        with ending_out_of_memory("making the gradients"):  # a batch without signal: of zeros
            gradient = GradientSum(self.parameters, self.shards)
        with self.model.using(settings.role):
            for update in range(updates):
                epoch, part = divmod(update, train.optimizer_steps)
                seed = f"{settings.seed}/{step}/{epoch}"
                parts = split(len(data) // size, train.optimizer_steps, seed)
                batch = {i * size + side for i in parts[part] for side in range(size)}
                rows = [data[i] for i in counted if i in batch]
                counts = objective.count(rows, self._beside(rows, self.shards))
                passed = [i for i in counted if i in batch and i in trained]
                progress(len(batch) - len(passed))
                tallies.append(self._accumulate(step, data, passed, counts, gradient, progress))
                names = [data[i].name for i in passed]
                before = (step - settings.first_step) * updates
                moved.append(self._update(step, before + update, tallies[-1], names))
        tally = self._together(step, tallies, moved)
        found = tally.metrics() | {
            "train/trained_fraction": len(trained) / len(data),
            "train/counted_fraction": len(counted) / len(data),
            **objective.describe(data, counted),
            "train/micro_batch_tokens": float(self.micro_batches.tokens),
            "train/out_of_memory": float(self._replays),
        }
        return {f"{prefix}{name.removeprefix('train')}": value for name, value in found.items()}

    def park(self) -> None:
        """Drop the gradients and move the moments to host memory, while another learner learns."""
        self.optimizer.zero_grad(set_to_none=True)
        if self.model.device.type == "cuda":
            optim.move_state(self.optimizer, torch.device("cpu"))
            torch.cuda.empty_cache()

    def fetch(self) -> None:
        """Move the moments back."""
        if self.model.device.type == "cuda":
            optim.move_state(self.optimizer, self.model.device)

    @torch.no_grad()
    def judge(self, data: Sequence[Datum]) -> dict[str, float]:
        """The objective's loss and metrics over rows that are not learned from: ``loss``,
        ``pair_accuracy`` and so on."""
        objective, tally = self.settings.objective, Tally()
        rows = self.prepared(data)
        counts = objective.count(rows, self._beside(rows, None))

        def run(indices: list[int]) -> None:
            part = [rows[i] for i in indices]
            mask_BT, output_BT, entropies_BT, tokens = self._passed(part)
            found = objective.loss(_batch(part, mask_BT, output_BT, entropies_BT), counts)
            loss = found.total / counts.denominator
            tally.add_micro_batch(
                loss, mask_BT, tokens, 0, found.values, None, None, found.of_units
            )

        def restart() -> None:
            nonlocal tally
            tally = Tally()

        self.model.policy.eval()
        with self.model.using(self.settings.role):
            self.micro_batches.run(rows, run, restart, ROWS[objective.unit])
        return tally.of_rows()

    def pass_over(self, data: Sequence[Datum]) -> None:
        """Take prepared rows as those of a step in which nothing is learned."""
        self.updates_in_step = 0
        self.logprobs_at_start = [datum.on_trained("old_logprobs").float().cpu() for datum in data]

    def _as_told_to_the_teacher(self, datum: Datum) -> Datum:
        """The row with the teacher's prompt in its prompt's place, where it has one of its own."""
        if not self.teacher_prompts:
            return datum
        if (prompt := self.teacher_prompts.get(datum.prompt_ids)) is None:
            raise TrainingError(
                f"{datum.name} asks what no row of data.train asks, so teacher.prompt cannot be "
                "filled in for it; set data.train to the file that the rollouts were sampled from, "
                "or leave teacher.prompt out"
            )
        return datum.with_prompt(prompt)

    def _beside(self, rows: Sequence[Datum], shards: Shards | None) -> list[Beside]:
        """What the objective wants to know beside its batch before an update."""
        settings = self.settings
        if not (beside := settings.objective.beside(rows)):
            return []
        ours, _ = self.measure(beside, settings.role, shards=shards)
        theirs, _ = self.measure(beside, settings.reference, shards=shards)
        return [Beside(role, reference) for role, reference in zip(ours, theirs, strict=True)]

    def scores(self, data: Sequence[Datum], role: Role) -> list[float]:
        """Score of each row by the role's head, without dropout."""
        return [float(each.sum()) for each in self.measure(data, role, "scores")[0]]

    @torch.no_grad()
    def measure(
        self,
        data: Sequence[Datum],
        role: Role,
        output: Output | None = None,
        shards: Shards | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Output for each row's trained tokens in this role, and entropies, without dropout.

        Args:
            output: None: the objective's.
            shards: that the rows are dealt in; their peers are told what the others measured. None:
                this process measures all.
        """
        shards = Shards() if shards is None else shards
        logprobs: list[Tensor] = [torch.empty(0)] * len(data)
        entropies = list(logprobs)
        dealt = shards.deal(data)
        self.model.policy.eval()
        with self.model.using(role):
            for shard in shards.own:

                def run(indices: list[int], rows: list[int] = dealt[shard]) -> None:
                    mask_BT, logprobs_BT, entropies_BT, _ = self._passed(
                        [data[rows[i]] for i in indices], role=role, output=output
                    )
                    for row, i in enumerate(indices):
                        logprobs[rows[i]] = logprobs_BT[row][mask_BT[row]]
                        entropies[rows[i]] = entropies_BT[row][mask_BT[row]]

                self.micro_batches.run([data[i] for i in dealt[shard]], run, lambda: None)
        self.model.policy.train()
        if shards.peers.size > 1:
            self._exchange(data, dealt, logprobs, shards)
            self._exchange(data, dealt, entropies, shards)
        return logprobs, entropies

    def _exchange(
        self, data: Sequence[Datum], dealt: list[list[int]], values: list[Tensor], shards: Shards
    ) -> None:
        """Fill in what the peers measured of their shards' rows, to the last bit."""
        own = [values[i].float().cpu() for shard in shards.own for i in dealt[shard]]
        content = torch.cat([torch.empty(0), *own]).numpy().tobytes()
        each = shards.count // shards.peers.size
        for rank, given in enumerate(shards.peers.gather(content)):
            if rank == shards.peers.rank or not given:
                continue
            rows = [i for shard in dealt[rank * each : (rank + 1) * each] for i in shard]
            numbers = torch.frombuffer(bytearray(given), dtype=torch.float32).to(self.model.device)
            parts = numbers.split([data[i].num_trained for i in rows])
            for i, part in zip(rows, parts, strict=True):
                values[i] = part

    def _passed(
        self,
        data: Sequence[Datum],
        entropy_gradient: bool = False,
        role: Role | None = None,
        output: Output | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        """Mask, output and entropies (B, T) of a micro-batch, and its number of tokens.

        Args:
            role: whose head is read; None: that of the role that learns.
            output: None: the objective's.
        """
        model, settings = self.model, self.settings
        output = output or settings.objective.output
        ids_BT, mask_BT = collate(data, model.device)
        layout = lay_out(data, model.device) if self.is_packed else None
        tokens = (ids_BT if layout is None else layout.ids_1N).numel()
        if output == "logprobs":
            logprobs_BT, entropies_BT = policy_logprobs(
                model, ids_BT, mask_BT, settings.temperature, entropy_gradient, layout,
                settings.chunk_tokens,
            )  # fmt: skip
            return mask_BT, logprobs_BT, entropies_BT, tokens
        read = {"values": token_values, "scores": row_scores}[output]
        output_BT = read(model, role or settings.role, ids_BT, mask_BT, layout)
        return mask_BT, output_BT, torch.zeros_like(output_BT), tokens

    def _accumulate(
        self,
        step: int,
        data: Sequence[Datum],
        passed: Sequence[int],
        counts: Counts,
        gradient: GradientSum,
        progress: Progress,
    ) -> list[Tally]:
        """Accumulate the gradient of an optimizer batch, shard by shard, and return the tallies of
        this process's shards."""
        tallies, shards = [], self.shards
        dealt = shards.deal([data[i] for i in passed])
        for shard in shards.own:
            rows = [passed[i] for i in dealt[shard]]
            if shards.count > 1:
                seed = f"{self.settings.seed}/dropout/{step}/{self.updates_in_step}"
                torch.manual_seed(shard_seed(seed, shard))
            gradient.begin()
            tallies.append(self._accumulate_shard(step, data, rows, counts, progress))
            gradient.end()
        gradient.finish()
        progress(len(passed) - sum(len(dealt[shard]) for shard in shards.own))
        return tallies

    def _accumulate_shard(
        self,
        step: int,
        data: Sequence[Datum],
        passed: Sequence[int],
        counts: Counts,
        progress: Progress,
    ) -> Tally:
        """Accumulate the gradient of these rows; out of memory, from the start again."""
        states, tally, done = micro_batches.rng_states(), Tally(), 0

        def restart() -> None:
            nonlocal tally, done
            self.optimizer.zero_grad(set_to_none=False)
            micro_batches.set_rng_states(states)  # dropout masks are drawn again
            progress(-done)
            tally, done = Tally(), 0

        def run(indices: list[int]) -> None:
            nonlocal done
            self._backward(step, data, [passed[i] for i in indices], counts, tally)
            progress(len(indices))
            done += len(indices)

        size = ROWS[self.settings.objective.unit]
        self.micro_batches.run([data[i] for i in passed], run, restart, size)
        return tally

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
        batch = _batch(rows, mask_BT, logprobs_BT, entropies_BT)
        columns = batch.columns
        gives_logprobs = objective.output == "logprobs"
        is_sampled = gives_logprobs and "sampler_logprobs" in columns
        is_first = self.updates_in_step == 0
        if is_first and gives_logprobs:
            for row, i in enumerate(indices):
                if "old_logprobs" not in data[i].columns:  # which are without dropout
                    seen = logprobs_BT.detach()[row][mask_BT[row]]
                    self.logprobs_at_start[i] = seen.float().cpu()
        found = objective.loss(batch, counts)
        loss = found.total / counts.denominator
        log_ratio_BT = (logprobs_BT.detach() - batch.old_BT) * mask_BT
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
            of_units=found.of_units,
            log_ratio_BT=log_ratio_BT if is_sampled else None,
            mismatch_BT=logprobs_BT - columns["sampler_logprobs"]
            if is_first and is_sampled
            else None,
        )
        tally.left_out += found.masked_out

    def _update(
        self, step: int, optimizer_step: int, tallies: Sequence[Tally], names: Sequence[str]
    ) -> tuple[float, float]:
        """Take an optimizer step, and return the gradient's norm and the learning rate."""
        settings = self.settings
        with ending_out_of_memory("clipping the gradient"):
            most = settings.train.max_grad_norm
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, most))
        if not math.isfinite(norm):
            largest = max(tally.largest_log_ratio for tally in tallies)
            raise TrainingError(
                f"step {step}: the gradient's norm is {norm} over {', '.join(names[:4])} "
                f"and {max(0, len(names) - 4)} more (largest log ratio {largest:.3g}); start again "
                "with --run.resume never and a lower train.learning_rate"
            )
        rate = optim.learning_rate(settings.train, optimizer_step, settings.total_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.updates_in_step += 1  # before, as a step that fails may have moved some parameters
        with ending_out_of_memory("taking the optimizer's step"):
            self.optimizer.step()
        if settings.train.ema is not None and self.keeps_average:
            optim.update_average(self.optimizer, settings.train.ema)
        return norm, rate

    def _together(
        self, step: int, parts: list[list[Tally]], moved: list[tuple[float, float]]
    ) -> Tally:
        """Tally of a step: of each optimizer step all shards in order, whoever learned from them.

        The peers compare their adapters here, and tell what only one of them has seen.

        Raises:
            TrainingError: a peer has another adapter.
        """
        shards, self._replays = self.shards, self.micro_batches.take_replays()
        if shards.count > 1:
            told = self._told_by_all(step, parts)
            parts = [
                [Tally.from_json(tally) for each in told for tally in each["updates"][update]]
                for update in range(len(moved))
            ]
            # What memory left to one of them goes for all, and into the checkpoint.
            self.micro_batches.tokens = min(each["micro_batch_tokens"] for each in told)
            self._replays = sum(each["replays"] for each in told)
            for each in told:
                for i, text in each["logprobs_at_start"].items():
                    self.logprobs_at_start[int(i)] = floats_from_text(text)
        tally = Tally()
        for tallies, (norm, rate) in zip(parts, moved, strict=True):
            for each_tally in tallies:
                tally.merge(each_tally)
            tally.add_update(norm, rate)
        return tally

    def _told_by_all(self, step: int, parts: list[list[Tally]]) -> list[dict[str, Any]]:
        peers = self.shards.peers
        of_some = peers.size > 1
        content = {
            "updates": [[tally.to_json() for tally in tallies] for tallies in parts],
            "micro_batch_tokens": self.micro_batches.tokens,
            "replays": self._replays,
            "digest": self._digest() if of_some else "",
            "logprobs_at_start": {
                i: floats_to_text(values)
                for i, values in enumerate(self.logprobs_at_start)
                if of_some and values is not None
            },
        }
        told: list[dict[str, Any]] = [
            json.loads(given) for given in peers.gather(json.dumps(content).encode())
        ]
        digests = [each["digest"] for each in told]
        if len(set(digests)) > 1:
            shown = ", ".join(f"{rank}: {digest[:12]}" for rank, digest in enumerate(digests))
            raise TrainingError(
                f"step {step}: the replicas learned different adapters ({shown}); use the same "
                "kind of machine and the same packages for all of them, and call the same command "
                "again to go on from the last checkpoint"
            )
        return told

    def _digest(self) -> str:
        """SHA-256 of what this learner moves."""
        digest = hashlib.sha256()
        for parameter in self.parameters:
            digest.update(parameter.detach().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()


def _batch(
    rows: Sequence[Datum], mask_BT: Tensor, output_BT: Tensor, entropies_BT: Tensor
) -> Batch:
    rewards_B = torch.tensor([row.reward for row in rows], device=mask_BT.device)
    columns = collate_columns(rows, mask_BT.device)
    return Batch(mask_BT, output_BT, entropies_BT, columns, rewards_B)


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
        with on_default_stream(), model.fused_adapters():
            yield learner
    finally:
        model.policy.eval()
        learner.optimizer.zero_grad(set_to_none=True)
        if model.device.type == "cuda":
            torch.cuda.empty_cache()
