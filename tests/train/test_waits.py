"""What the host waits for, and what it copies, while micro-batches are learned."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learners import groups, learner
from reason_llm.config.algorithms import ALGORITHMS
from reason_llm.config.preferences import PREFERENCES
from reason_llm.model import Datum, MicroBatch, Model, to_data
from reason_llm.train import learning, with_advantages
from reason_llm.train.stages import Labels

WAITS = {
    *("_local_scalar_dense", "nonzero", "masked_select", "unique_consecutive", "_unique2"),
    *("bincount", "repeat_interleave", "equal", "is_nonzero"),
}
"""Operators whose results' values or shapes the host reads from the card."""


class Seen(TorchDispatchMode):
    """The operators that wait, by name, and all copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = Counter[str]()
        self.copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name in ("index", "index_put", "index_put_") else ()
        is_masked = any(each is not None and each.dtype == torch.bool for each in indices)
        if name in WAITS or is_masked:
            self.waits[name] += 1
        self.copies += name == "_to_copy" and (kwargs or {}).get("device") is not None
        return func(*args, **(kwargs or {}))


MEASURED = replace(
    ALGORITHMS["dapo"], kl="k3", kl_coefficient=0.1, correction="token_truncate",
    entropy_coefficient=0.01, off_policy_threshold=0.5,
)  # fmt: skip
"""Every term that a policy gradient has."""


@pytest.mark.parametrize("packing", ["padded", "varlen"])
@pytest.mark.parametrize("name", ["dapo", "kto"])
def test_no_micro_batch_waits_for_the_card(model: Model, name: str, packing: Any) -> None:
    made = learner(model, MEASURED, budget=60, packing=packing)
    data = to_data(with_advantages(groups(), MEASURED))
    if name == "kto":
        made.settings = replace(made.settings, objective=Labels(row=PREFERENCES["kto"]))
        data = [replace(each, reward=1.0 if i % 2 else -1.0) for i, each in enumerate(data)]
    seen, waits = Seen(), list[Counter[str]]()

    def progress(rows: int) -> None:
        if rows > 0:  # a micro-batch has ended
            waits.append(Counter(seen.waits))
        seen.waits.clear()

    with learning(made):
        prepared = made.prepared(data)
        with seen:
            made.update(0, prepared, progress)
    assert len(waits) > 1
    # Of padded rows Transformers looks once a pass whether their positions are packed.
    of_mask = Counter(_local_scalar_dense=1) if packing == "padded" else Counter[str]()
    assert waits == [of_mask] * len(waits)
    assert seen.waits  # the sums are read behind the last one


def test_a_layout_goes_to_its_device_in_one_copy() -> None:
    rows = [Datum.of((1, 2, 3), (4,) * n, columns={"advantages": [0.5] * n}) for n in (2, 5, 1)]
    made = MicroBatch.of(rows, torch.device("cpu"), is_packed=True)
    with Seen() as seen:
        moved = MicroBatch.of(rows, torch.device("meta"), is_packed=True)
    assert seen.copies == 1

    def shapes(batch: MicroBatch) -> list[Any]:
        layout = batch.layout
        assert layout is not None and layout.segments.index_M is not None
        tensors = [batch.ids_BT, batch.mask_BT, batch.places_M, *batch.columns.values()]
        tensors += [layout.ids_1N, layout.ends_B, layout.segments.key_ends, layout.segments.index_M]
        return [(each.dtype, each.shape) for each in tensors]

    assert shapes(moved) == shapes(made)
