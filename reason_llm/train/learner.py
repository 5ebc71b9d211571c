"""The learning phase: gradient steps of the policy's adapter, or of all its weights, and of a
critic's. One step of the loop may hold several optimizer steps, each divided once, by the
count of its whole optimizer batch. All randomness is a function of the seed and the step.

Not here: losses (``objectives``), a step that several processes learn together (``replicas``).

Shapes: B rows of a micro-batch, T tokens, N rows.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu

from reason_llm.config import TrainSection
from reason_llm.errors import TrainingError
from reason_llm.model import (
    Datum,
    MicroBatch,
    Model,
    Role,
    in_rows,
    placed,
    policy_logprobs,
    prove_packing,
    recompute,
    routing,
    row_scores,
    token_values,
)
from reason_llm.model.vllm import on_default_stream
from reason_llm.train import advantages, optim
from reason_llm.train.micro_batches import MicroBatches, ending_out_of_memory
from reason_llm.train.objectives import ROWS, Batch, Counts, Objective, Output
from reason_llm.train.role_reader import BASE, RoleReader
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
    """Temperature of sampling: the policy is ``softmax(logits / temperature)``."""
    micro_batch_tokens: int
    seed: int
    total_optimizer_steps: int
    chunk_tokens: int | None = None
    """Tokens whose logits exist at once; None as for ``logprobs``."""
    skip_every: int = 0
    """With checkpointing, of so many layers one keeps no input; 0: all keep theirs."""
    first_step: int = 0
    """Step of the run in which the role begins to learn; the schedule begins there."""
    role: Role = "policy"
    readers: tuple[RoleReader, ...] = (BASE,)
    """Other roles of the base that give columns."""

    @property
    def reference(self) -> Role:
        """Role whose log-probs are the column ref_logprobs."""
        (role,) = (reader.role for reader in self.readers if reader.column == "ref_logprobs")
        return role


class Part(NamedTuple):
    """An optimizer batch, or a part of it: the rows of ``data`` that are passed."""

    step: int
    data: Sequence[Datum]
    passed: Sequence[int]
    counts: Counts
    progress: Progress


class Learned(NamedTuple):
    """A micro-batch after its backward pass; its tensors are on the model's device."""

    rows: Sequence[int]
    loss: Tensor
    largest_log_ratio: Tensor


class Learner:
    """Optimizer of one role's adapter, and the learning of one step."""

    def __init__(self, model: Model, settings: LearningSettings) -> None:
        self.model = model
        self.settings = settings
        self.is_packed = settings.train.packing == "varlen"
        self.micro_batches = MicroBatches(settings.micro_batch_tokens, self.is_packed)
        if self.is_packed:
            with on_default_stream():
                prove_packing(model)
        is_routed = settings.train.router_aux_loss_coef > 0
        self._routing = routing.Routing(model.policy) if is_routed else None
        self._batch_tokens = 0
        """Tokens of the rows that the optimizer batch passes."""
        self.updates_in_step = 0
        """Optimizer steps taken since the step began."""
        self.parameters = model.parameters_of(settings.role)
        self._carriers = optim.carriers(self.parameters, settings.train.optimizer)
        self.optimizer = optim.make_optimizer(
            [carrier.moved for carrier in self._carriers], settings.train
        )
        with ending_out_of_memory("making the optimizer's moments"):
            optim.allocate_state(self.optimizer)
        self.offloads = settings.train.gradient_checkpointing == "offload"
        if settings.train.gradient_checkpointing:
            model.policy.gradient_checkpointing_enable({"use_reentrant": False})
            if not model.is_unsloth:
                # Transformers 5 has the embeddings require a gradient, for reentrant checkpoints;
                # the first layer's input, and its gradient, would stay to the end of the pass.
                model.policy.disable_input_require_grads()
                recompute.keep_inputs(model.decoder, settings.skip_every)

    def prepared(self, data: Sequence[Datum]) -> list[Datum]:
        """A step's rows with the columns that stay constant over the step."""
        rows = list(data)
        for reader in self.settings.readers:
            wanted = self.lacking(rows, reader.column)
            if not wanted:
                continue
            read = [reader.transform(rows[i]) if reader.transform else rows[i] for i in wanted]
            values, _ = self.measure_step(read, reader.role, reader.output)
            for i, value in zip(wanted, values, strict=True):
                rows[i] = rows[i].with_trained(reader.column, value)
        if own := self.lacking(rows, "old_logprobs"):
            measured = self.measure_step([rows[i] for i in own], self.settings.role)
            for i, logprobs, entropies in zip(own, *measured, strict=True):
                row = rows[i].with_trained("old_logprobs", logprobs)
                rows[i] = row.with_trained("entropies", entropies)
        return self.settings.objective.prepared(rows)

    def lacking(self, data: Sequence[Datum], column: str) -> list[int]:
        """The rows without a column that the objective wants of them before the first update."""
        train = self.settings.train
        updates = train.epochs * train.optimizer_steps
        wanted, names = self.settings.objective.measured(data, updates)
        return [i for i in wanted if column in names and column not in data[i].columns]

    def update(
        self, step: int, data: Sequence[Datum], progress: Progress, prefix: str = "train"
    ) -> dict[str, float]:
        """Take all epochs and optimizer steps over prepared rows; the metrics by ``prefix/name``.

        Raises:
            TrainingError: a loss or gradient is not finite; OutOfMemory: one row alone is too much,
                or the gradient. The adapter is as before that optimizer step.
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
        with ending_out_of_memory("making the gradients"):  # a batch without signal: of zeros
            self._make_gradients()
        with self.model.using(settings.role), self._seen_routers():
            for update in range(updates):
                epoch, part = divmod(update, train.optimizer_steps)
                seed = f"{settings.seed}/{step}/{epoch}"
                parts = split(len(data) // size, train.optimizer_steps, seed)
                batch = {i * size + side for i in parts[part] for side in range(size)}
                counts = self._count([data[i] for i in counted if i in batch])
                passed = [i for i in counted if i in batch and i in trained]
                self._batch_tokens = sum(data[i].num_tokens for i in passed)
                progress(len(batch) - len(passed))
                tallies.append(self._accumulate(Part(step, data, passed, counts, progress)))
                names = [data[i].name for i in passed]
                before = (step - settings.first_step) * updates
                moved.append(self._update(step, before + update, tallies[-1], names))
        tallies, replays = self._of_all(step, tallies)
        tally = Tally()
        for of_update, (norm, rate) in zip(tallies, moved, strict=True):
            for part_tally in of_update:
                tally.merge(part_tally)
            tally.add_update(norm, rate)
        metrics = tally.metrics() | {
            "train/trained_fraction": len(trained) / len(data),
            "train/counted_fraction": len(counted) / len(data),
            **objective.describe(data, counted),
            "train/micro_batch_tokens": float(self.micro_batches.tokens),
            "train/out_of_memory": float(replays),
        }
        return {f"{prefix}{name.removeprefix('train')}": value for name, value in metrics.items()}

    def drop_gradients(self) -> None:
        """Free the gradients' memory."""
        for parameter in self.parameters:
            parameter.grad = None

    def park(self) -> None:
        """Drop the gradients and move the moments to host memory, while another learner learns."""
        self.drop_gradients()
        optim.move_state(self.optimizer, torch.device("cpu"))
        torch.cuda.empty_cache()

    @torch.no_grad()
    def judge(self, data: Sequence[Datum]) -> dict[str, float]:
        """The objective's metrics over rows that are not learned from, by name alone."""
        objective = self.settings.objective
        rows = self.prepared(data)
        counts = self._count(rows)

        def read(batches: list[list[int]]) -> Tally:
            tally = Tally()
            for indices in batches:
                batch, places_M, tokens = self._passed([rows[i] for i in indices])
                loss = objective.loss(batch, counts)
                tally.add_micro_batch(
                    loss.total / counts.denominator,
                    batch.mask_BT,
                    tokens,
                    0,
                    loss.values,
                    None,
                    None,
                    loss.of_units,
                    places_M,
                )
            return tally

        self.model.policy.eval()  # dropout would add noise to the metrics
        with self.model.using(self.settings.role):
            tally = self.micro_batches.run(rows, read, ROWS[objective.unit])
        return tally.of_rows()

    def scores(self, data: Sequence[Datum], role: Role) -> list[float]:
        """Score of each row by the role's head, without dropout."""
        return [float(score.sum()) for score in self.measure(data, role, "scores")[0]]

    @torch.no_grad()
    def measure(
        self, data: Sequence[Datum], role: Role, output: Output | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The objective's output, or this one, for each row's trained tokens in this role, and
        entropies, without dropout, in host memory."""

        def read(batches: list[list[int]]) -> list[list[Tensor]]:
            measured = list[list[Tensor]]()
            for indices in batches:
                rows = [data[i] for i in indices]
                batch, places_M, _ = self._passed(rows, role=role, output=output)
                both_BT = batch.logprobs_BT, batch.entropies_BT
                measured.append([output_BT.flatten()[places_M] for output_BT in both_BT])
            order = [i for indices in batches for i in indices]
            return [in_rows(data, order, [pair[i] for pair in measured]) for i in (0, 1)]

        self.model.policy.eval()
        with self.model.using(role), self._seen_routers():
            outputs, entropies = self.micro_batches.run(data, read)
        self.model.policy.train()
        return outputs, entropies

    def measure_step(
        self, data: Sequence[Datum], role: Role, output: Output | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """``measure`` for rows of the current step, shared by all processes that learn it."""
        return self.measure(data, role, output)

    def _make_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)

    def _accumulate(self, part: Part) -> list[Tally]:
        """Set the gradients to those of an optimizer batch; return the tallies of its parts."""
        return [self._accumulate_rows(part)]

    def _of_all(self, step: int, tallies: list[list[Tally]]) -> tuple[list[list[Tally]], int]:
        """Tallies of each optimizer step, and the number of restarts after running out of memory,
        of all processes that learn."""
        return tallies, self.micro_batches.take_replays()

    def _count(self, rows: Sequence[Datum]) -> Counts:
        """The objective's counts over an optimizer batch."""
        settings = self.settings
        if not (extra := settings.objective.extra_rows(rows)):
            return settings.objective.count(rows)
        ours, _ = self.measure_step(extra, settings.role)
        theirs, _ = self.measure_step(extra, settings.reference)
        return settings.objective.count(rows, list(zip(ours, theirs, strict=True)))

    def _seen_routers(self) -> AbstractContextManager[None]:
        return nullcontext() if self._routing is None else self._routing.hooked()

    def _passed(
        self,
        data: Sequence[Datum],
        entropy_gradient: bool = False,
        role: Role | None = None,
        output: Output | None = None,
    ) -> tuple[Batch, Tensor, int]:
        """A micro-batch after its forward pass, the places of its trained tokens, and its number of
        tokens; role and output default to the learner's."""
        model, settings = self.model, self.settings
        output = output or settings.objective.output
        rows = MicroBatch.of(data, model.device, self.is_packed)
        ids_BT, mask_BT, places_M, layout = rows.ids_BT, rows.mask_BT, rows.places_M, rows.layout
        passed = ids_BT if layout is None else layout.ids_1N
        if self._routing is not None:
            self._routing.begin(data, layout, ids_BT)
        with model.attached(placed(data, layout), passed.shape[1]):
            if output == "logprobs":
                output_BT, entropies_BT = policy_logprobs(
                    model,
                    ids_BT,
                    mask_BT,
                    settings.temperature,
                    entropy_gradient,
                    layout,
                    settings.chunk_tokens,
                    places_M,
                )
            else:
                read = {"values": token_values, "scores": row_scores}[output]
                where = places_M if output == "values" else mask_BT
                output_BT = read(model, role or settings.role, ids_BT, where, layout)
                entropies_BT = torch.zeros_like(output_BT)  # there is no distribution
        rewards = [datum.reward for datum in data]
        batch = Batch(mask_BT, output_BT, entropies_BT, rows.columns, rows.rewards_B, rewards)
        return batch, places_M, passed.numel()

    def _accumulate_rows(self, part: Part) -> Tally:
        """Set the gradients to those of these rows; start over after running out of memory."""
        step, data, passed, counts, progress = part
        states = torch.get_rng_state(), torch.cuda.get_rng_state_all()
        done, objective = 0, self.settings.objective

        def learn(batches: list[list[int]]) -> tuple[Tally, list[Learned]]:
            nonlocal done
            for parameter in self.parameters:
                parameter.grad.zero_()  # type: ignore[union-attr]
            torch.set_rng_state(states[0])  # dropout masks are drawn again
            torch.cuda.set_rng_state_all(states[1])
            progress(-done)
            tally, done, learned = Tally(), 0, list[Learned]()
            for indices in batches:  # here nothing waits for the card
                rows = [passed[i] for i in indices]
                learned.append(self._backward(data, rows, counts, tally))
                progress(len(rows))
                done += len(rows)
            tally.to_host()
            return tally, learned

        own = [data[i] for i in passed]
        tally, learned = self.micro_batches.run(own, learn, ROWS[objective.unit])
        for micro_batch in learned:
            if not torch.isfinite(micro_batch.loss):
                names = ", ".join(data[i].name for i in micro_batch.rows)
                what = f"step {step}: the loss is {micro_batch.loss.item()} on {names}"
                raise _diverged(what, float(micro_batch.largest_log_ratio))
        return tally

    def _backward(
        self, data: Sequence[Datum], indices: list[int], counts: Counts, tally: Tally
    ) -> Learned:
        """Add the gradient of one micro-batch of an optimizer batch."""
        objective, rows = self.settings.objective, [data[i] for i in indices]
        is_on_gpu = self.model.device.type == "cuda"
        with save_on_cpu(pin_memory=is_on_gpu) if self.offloads else nullcontext():
            batch, places_M, tokens = self._passed(rows, objective.entropy_gradient)
        mask_BT, logprobs_BT = batch.mask_BT, batch.logprobs_BT
        gives_logprobs = objective.output == "logprobs"
        is_sampled = gives_logprobs and "sampler_logprobs" in batch.columns
        result = objective.loss(batch, counts)
        loss = result.total / counts.denominator
        if self._routing is not None:
            # Each micro-batch by its part of the tokens. Its expert loads are its own, as in
            # Transformers, and the only thing that depends on how rows are split.
            share = sum(row.num_tokens for row in rows) / self._batch_tokens
            balance = share * self._routing.balance()
            loss = loss + self.settings.train.router_aux_loss_coef * balance
            tally.add("router_aux_loss", balance.detach())
        log_ratio_BT = (logprobs_BT.detach() - batch.old_BT) * mask_BT
        loss.backward()
        mismatch_BT = None
        if self.updates_in_step == 0 and is_sampled:
            mismatch_BT = logprobs_BT - batch.columns["sampler_logprobs"]
        padding = 0 if self.is_packed else tokens - sum(row.num_tokens for row in rows)
        tally.add_micro_batch(
            loss,
            mask_BT,
            tokens,
            padding,
            result.values,
            log_ratio_BT if is_sampled else None,
            mismatch_BT,
            result.of_units,
            places_M,
        )
        tally.left_out += result.masked_out
        return Learned(indices, loss.detach(), log_ratio_BT.abs().max())

    def _update(
        self, step: int, optimizer_step: int, tallies: Sequence[Tally], names: Sequence[str]
    ) -> tuple[float, float]:
        """Take an optimizer step, and return the gradient's norm and the learning rate."""
        settings = self.settings
        with ending_out_of_memory("clipping the gradient"):
            max_norm = settings.train.max_grad_norm
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, max_norm))
        if not math.isfinite(norm):
            raise _diverged(
                f"step {step}: the gradient's norm is {norm} over "
                f"{', '.join(names[:4])} and {max(0, len(names) - 4)} more",
                max(tally.largest_log_ratio for tally in tallies),
            )
        rate = optim.learning_rate(settings.train, optimizer_step, settings.total_optimizer_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.updates_in_step += 1  # before, as a step that fails may have moved some parameters
        with ending_out_of_memory("taking the optimizer's step"):
            seed = f"{settings.seed}/rounding/{optimizer_step}"
            optim.step(self.optimizer, self._carriers, seed)
        return norm, rate


def _diverged(what: str, largest_log_ratio: float) -> TrainingError:
    return TrainingError(
        f"{what} (largest log ratio {largest_log_ratio:.3g}); start again with --run.resume never "
        "and a lower train.learning_rate"
    )


def split(count: int, parts: int, seed: str) -> list[list[int]]:
    """``0 .. count``, shuffled and cut into ``parts`` of nearly equal size."""
    indices = list(range(count))
    if parts > 1:
        random.Random(seed).shuffle(indices)
    return [indices[count * part // parts : count * (part + 1) // parts] for part in range(parts)]


class Learners:
    """The learner of the policy and, where the algorithm has one, that of the critic, which learns
    alone in the first ``warmup_steps``. Only one of them has gradients at a time.
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
    def by_role(self) -> dict[Role, Learner]:
        """Learners by the role whose adapter they train."""
        learners = [self.policy] if self.critic is None else [self.policy, self.critic]
        return {learner.settings.role: learner for learner in learners}

    @property
    def optimizers(self) -> dict[Role, torch.optim.Optimizer]:
        """Optimizers by the role whose adapter they train."""
        return {role: learner.optimizer for role, learner in self.by_role.items()}

    def state(self) -> dict[str, Tensor]:
        """Copies in host memory of all that learning moves: adapters, heads, moments."""
        tensors = {}
        for role, learner in self.by_role.items():
            for number, parameter in enumerate(learner.parameters):
                tensors[f"{role}/{number}"] = parameter.detach().to("cpu", copy=True)
            for name, value in optim.state_tensors(learner.optimizer).items():
                tensors[f"{role}/{name}"] = value.detach().to("cpu", copy=True)
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Load the state that ``state`` returned."""
        for role, learner in self.by_role.items():
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

    def learn(self, step: int, data: Sequence[Datum], progress: Progress) -> dict[str, float]:
        """Learn a step and return its metrics; ``progress`` counts the policy's rows. A critic
        learns the returns of the step's rollouts first; the advantages are from its values of
        before. Raises as ``Learner.update``."""
        policy, critic = self.policy, self.critic
        for learner in self.by_role.values():
            learner.updates_in_step = 0
        rows = policy.prepared(data)
        if critic is None:
            return policy.update(step, rows, progress)
        policy.park()  # the device has room for one learner's gradients and moments
        optim.move_state(critic.optimizer, critic.model.device)
        metrics = critic.update(step, rows, lambda count: None, prefix="critic")
        critic.park()
        optim.move_state(policy.optimizer, policy.model.device)
        counted = [rows[i] for i in critic.settings.objective.counted(rows) if rows[i].has_reward]
        values_N, returns_N = (
            torch.cat([torch.empty(0), *(row.on_trained(name) for row in counted)])
            for name in ("old_values", "whole_returns")
        )
        metrics["critic/explained_variance"] = advantages.explained_variance(values_N, returns_N)
        if step >= self.warmup_steps:
            return metrics | policy.update(step, rows, progress)
        progress(len(rows))
        return metrics | policy.settings.objective.describe(rows, range(len(rows)))


@contextmanager
def learning(learner: Learner) -> Iterator[Learner]:
    """Context of learning: the policy is in training mode and the GPU belongs to the learner."""
    model = learner.model
    if model.engine is not None:
        model.engine.release()
    model.policy.train()
    try:
        is_tiled = learner.settings.train.gradient_checkpointing and not model.is_unsloth
        tiled = recompute.tiled(model.decoder) if is_tiled else nullcontext()
        with on_default_stream(), model.fused_adapters(), tiled, model.repeatable():
            yield learner
    finally:
        model.policy.eval()
        learner.drop_gradients()
        torch.cuda.empty_cache()
