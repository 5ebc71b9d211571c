"""Out of memory while learning: again in smaller micro-batches, with the very same result.

The fault stands in the allocator's place: torch itself refuses tensors above a size.
"""

import logging
from typing import Any

import pytest
import torch
from test_phase import groups, learner
from torch.utils._python_dispatch import TorchDispatchMode

from reason_llm.errors import OutOfMemory
from reason_llm.model.base import Model
from reason_llm.train.packing import Rollout
from reason_llm.train.phase import learning
from reason_llm.train.replay import MicroBatches


class SmallMemory(TorchDispatchMode):
    """An allocator that has no more than ``limit`` bytes for any one tensor of activations."""

    def __init__(self, limit: int, error: type[Exception]) -> None:
        super().__init__()
        self.limit = limit
        self.error = error
        self.refused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else [result]:
            if isinstance(item, torch.Tensor) and item.dim() > 2 and item.nbytes > self.limit:
                self.refused += 1
                raise self.error("DefaultCPUAllocator: can't allocate memory: you tried too much")
        return result


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError, MemoryError])
@pytest.mark.parametrize("epochs", [1, 2])
def test_the_step_is_replayed_with_the_same_result(
    model: Model, error: type[Exception], epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = [p for p in model.policy.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in parameters]
    made = learner(model, epochs=epochs)
    limit = 25 * 384 * 4  # about 25 tokens of the widest layer
    with learning(made), SmallMemory(limit, error) as memory, caplog.at_level(logging.WARNING):
        metrics = made.learn(0, groups(), lambda items: None)
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
    with learning(small):
        plain = small.learn(0, groups(), lambda items: None)
    assert all(torch.equal(a, b) for a, b in zip(replayed, parameters, strict=True))
    changed = {"train/out_of_memory"}
    assert {k: v for k, v in metrics.items() if k not in changed} == {
        k: v for k, v in plain.items() if k not in changed
    }


def test_a_rollout_that_fits_no_budget_ends_with_the_adapter_untouched(model: Model) -> None:
    made = learner(model)
    before = [p.detach().clone() for p in made.parameters]
    with (
        pytest.raises(OutOfMemory, match=r"one rollout of \d+ tokens.*lower sample.max_new_tokens"),
        learning(made),
        SmallMemory(2000, torch.OutOfMemoryError),
    ):
        made.learn(0, groups(), lambda items: None)
    assert made.updates_in_step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, made.parameters, strict=True))


def test_another_error_is_no_lack_of_memory(model: Model) -> None:
    class Other(SmallMemory):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            raise RuntimeError("something else")

    made = learner(model)
    with pytest.raises(RuntimeError, match="something else"), learning(made), Other(0, OSError):
        made.learn(0, groups(), lambda items: None)


def test_memory_errors_without_a_word_are_a_lack_of_memory_too() -> None:
    """Python's own says nothing, and micro-batches never go below the longest rollout."""
    rollouts = [Rollout(str(i), (1,), (2,) * n, (-1.0,) * n, 1.0) for i, n in enumerate((9, 4, 4))]
    batches, done = MicroBatches(15, torch.device("cpu")), []

    def work(indices: list[int]) -> None:
        if batches.tokens > 10:
            raise MemoryError
        done.append(indices)

    batches.run(rollouts, work, done.clear)
    assert done == [[0], [1, 2]]
    assert (batches.tokens, batches.replays) == (10, 1)
