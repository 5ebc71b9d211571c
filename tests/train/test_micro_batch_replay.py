"""Out of memory while learning: again in smaller micro-batches, with the very same result.

The fault stands in the allocator's place: torch itself refuses tensors above a size.
"""

import gc
import logging
import weakref
from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from allocations import peak_allocated
from learners import groups, learn, learner
from marks import most_are_long
from reason_llm.errors import OutOfMemory
from reason_llm.model.base import Model
from reason_llm.model.datum import Datum
from reason_llm.train import optim
from reason_llm.train.micro_batches import MicroBatches
from small_memory import SmallMemory


@pytest.mark.parametrize(
    ("epochs", "error"),
    most_are_long(
        list(product((1, 2), (torch.OutOfMemoryError, RuntimeError, MemoryError))),
        [(1, RuntimeError), (1, MemoryError), (2, torch.OutOfMemoryError)],
    ),
)
def test_the_step_is_replayed_with_the_same_result(
    model: Model, error: type[Exception], epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = [p for p in model.policy.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    made = learner(model, epochs=epochs)
    limit = 25 * 384 * 4  # about 25 tokens of the widest layer
    with SmallMemory(limit, error) as memory, caplog.at_level(logging.WARNING):
        metrics = learn(made)
    replayed = [p.detach().clone() for p in parameters]
    assert metrics["train/out_of_memory"] == memory.refused > 1
    assert "again with micro-batches of" in caplog.text
    assert metrics["train/tokens"] == epochs * sum(
        len(c.token_ids) for g in groups() for c in g.completions if c.advantage
    )
    for parameter, value in zip(parameters, start, strict=True):
        parameter.data.copy_(value)
    small = learner(model, epochs=epochs)
    small.micro_batches.tokens = made.micro_batches.tokens  # halved for good
    plain = learn(small)
    assert all(torch.equal(a, b) for a, b in zip(replayed, parameters, strict=True))
    assert metrics == plain | {"train/out_of_memory": memory.refused}


def test_a_rollout_that_fits_no_budget_ends_with_the_adapter_untouched(model: Model) -> None:
    made = learner(model)
    before = [p.detach().clone() for p in made.parameters]
    with (
        pytest.raises(OutOfMemory, match=r"one row of \d+ tokens.*lower sample.max_new_tokens"),
        SmallMemory(2000, torch.OutOfMemoryError),
    ):
        learn(made)
    assert made.updates_in_step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))


class Refusing(TorchDispatchMode):
    """An allocator that has nothing more for operators of a name."""

    def __init__(self, name: str, least_bytes: int = 0) -> None:
        super().__init__()
        self.name, self.least_bytes = name, least_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.name in str(func):
            sizes = [x.nbytes for x in args if isinstance(x, torch.Tensor)]
            if not sizes or max(sizes) >= self.least_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to\nallocate 2.00 GiB")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "paged_adamw_8bit"])
@pytest.mark.filterwarnings("default")  # bitsandbytes warns of its own
def test_the_moments_are_made_before_anything_is_learned(model: Model, name: str) -> None:
    said = (
        r"making the optimizer's moments \(CUDA out of memory\. Tried to allocate 2\.00 GiB\); set"
    )
    with pytest.raises(OutOfMemory, match=said), Refusing("zeros"):
        learner(model, optimizer=name)
    made = learner(model, optimizer=name)
    state = optim.state_tensors(made.optimizer)
    assert len({key.partition(".")[0] for key in state}) == len(made.parameters)
    for parameter in made.parameters:
        parameter.grad = torch.ones_like(parameter)
    largest = max(p.nbytes for p in made.parameters)
    needed = peak_allocated(made.optimizer.step)
    assert name != "adamw" or needed < largest / 4  # bitsandbytes computes on copies on a CPU
    after = optim.state_tensors(made.optimizer)
    assert {k: (v.shape, v.dtype) for k, v in after.items()} == {
        k: (v.shape, v.dtype) for k, v in state.items()
    }


def test_moments_made_early_are_those_of_the_first_step(model: Model) -> None:
    made = learner(model)
    ours = [p.detach().clone().requires_grad_() for p in made.parameters]
    plain = optim.make_optimizer(ours, made.settings.train)  # type: ignore[arg-type]
    for _ in range(3):
        for mine, other in zip(made.parameters, ours, strict=True):
            mine.grad = mine.detach() ** 3
            other.grad = other.detach() ** 3
        made.optimizer.step()
        plain.step()
    assert all(torch.equal(a, b) for a, b in zip(made.parameters, ours, strict=True))
    theirs = optim.state_tensors(plain)
    assert {k: (v.shape, v.dtype) for k, v in optim.state_tensors(made.optimizer).items()} == {
        k: (v.shape, v.dtype) for k, v in theirs.items()
    }


@pytest.mark.parametrize(("operator", "doing", "updates"), [
    ("zeros_like", "making the gradients", 0),
    ("norm", "clipping the gradient", 0),
    ("_fused_adamw", "taking the optimizer's step", 1),
])  # fmt: skip
def test_memory_that_ends_outside_the_micro_batches_ends_with_one_line(
    model: Model, operator: str, doing: str, updates: int
) -> None:
    """``updates_in_step`` tells the loop whether the adapter may be saved as the last step's."""
    made = learner(model)
    before = [p.detach().clone() for p in made.parameters]
    least = max(p.nbytes for p in made.parameters) if operator == "zeros_like" else 0
    said = f"out of memory while {doing}"
    with pytest.raises(OutOfMemory, match=said), Refusing(operator, least):
        learn(made)
    assert made.updates_in_step == updates
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))


def test_another_error_is_no_lack_of_memory(model: Model) -> None:
    class Other(SmallMemory):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"), Other(0, OSError):
        learn(learner(model))


def test_memory_errors_without_a_word_are_a_lack_of_memory_too() -> None:
    """Python's own says nothing, and micro-batches never go below the longest rollout."""
    rollouts = [Datum.of((1,), (2,) * n) for i, n in enumerate((9, 4, 4))]
    micro_batches = MicroBatches(15)

    def work(batches: list[list[int]]) -> list[list[int]]:
        if micro_batches.tokens > 10:
            raise MemoryError
        return batches

    assert micro_batches.run(rollouts, work) == [[0], [1, 2]]
    assert (micro_batches.tokens, micro_batches.take_replays()) == (10, 1)


@pytest.mark.parametrize(("size", "largest", "what"), [(1, 9, "row"), (2, 17, "pair")])
def test_the_tokens_are_halved_down_to_the_largest_unit(size: int, largest: int, what: str) -> None:
    rows = [Datum.of((1,), (2,) * n) for n in (8, 7, 4, 6)]
    micro_batches, tried = MicroBatches(80), []

    def work(batches: list[list[int]]) -> None:
        tried.append(micro_batches.tokens)
        raise MemoryError

    with pytest.raises(OutOfMemory, match=f"one {what} of {largest} tokens in a micro-batch"):
        micro_batches.run(rows, work, size)
    assert tried == [n for n in (80, 40, 20, 10) if n > largest] + [largest]
    assert [micro_batches.take_replays() for _ in range(2)] == [len(tried) - 1, 0]


def test_what_ran_out_of_memory_is_let_go_before_the_next_attempt() -> None:
    """The error's traceback holds the tensors; without the collector of circles, too."""
    held: list[weakref.ref[torch.Tensor]] = []

    micro_batches = MicroBatches(15)

    def work(batches: list[list[int]]) -> None:
        assert [each() for each in held] == [None] * len(held)
        taken = torch.empty(micro_batches.tokens)
        held.append(weakref.ref(taken))
        if micro_batches.tokens > 10:
            raise MemoryError

    gc.disable()
    try:
        micro_batches.run([Datum.of((1,), (2,) * 4)] * 3, work)
    finally:
        gc.enable()
    assert len(held) > 1
