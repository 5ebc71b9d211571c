"""Prompts drawn by how much their groups' rewards varied (data.order=informative).

1. In proportion to the deviations; each set keeps its turns; nothing twice in a step.
2. The run itself draws by it: its archived rollouts are of these prompts, and of no other order's.
3. A run that goes on has the same bits; what dynamic sampling dropped counts as 0.
4. What it cannot act on is one line.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import pstdev
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.data import informative_order, order
from reason_llm.loop import train
from reason_llm.rollout import Completion, Group
from reason_llm.run import SILENT
from reason_llm.run.collect import Step
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import checkpoint
from reason_llm.run.store.document import Document, RunIdentity, read_document

Small = Callable[..., Config]


def test_in_proportion_to_the_deviations() -> None:
    deviations = {"0": 0.5, "1": 0.25, "2": 0.0, "3": 0.0}  # 4 is unseen: as the largest
    draws = Counter(informative_order([5], [1.0], 0, n, 1, deviations)[0] for n in range(4000))
    wanted = {0: 0.55, 1: 0.30, 2: 0.05, 3: 0.05, 4: 0.55}
    for index, weight in wanted.items():
        assert draws[index] / 4000 == pytest.approx(weight / 1.5, abs=0.025)


def test_each_set_keeps_its_turns_and_nothing_comes_twice() -> None:
    sizes, weights = [6, 4], [3.0, 1.0]
    drawn = informative_order(sizes, weights, 1, 8, 8, {"7": 1.0})
    shuffled = order(sizes, weights, 1, 8, 8)
    assert [i < 6 for i in drawn] == [i < 6 for i in shuffled]
    assert len(set(drawn)) == 8
    assert drawn[:5] == informative_order(sizes, weights, 1, 8, 5, {"7": 1.0})
    assert drawn != informative_order(sizes, weights, 2, 8, 8, {"7": 1.0})
    assert sorted(informative_order([3], [1.0], 0, 0, 6, {})) == [0, 0, 1, 1, 2, 2]
    equal = Counter(
        informative_order([2], [1.0], 0, n, 1, {"0": 0.0, "1": 0.0})[0] for n in range(400)
    )
    assert min(equal.values()) > 150


INFORMATIVE: dict[str, Any] = {
    "data__order": "informative", "data__limit": 9, "sample__max_new_tokens": 24,
    "sample__prompts_per_step": 4, "run__steps": 3,
}  # fmt: skip


def documents(folder: Path) -> list[Document]:
    return [read_document(path) for path in sorted((folder / "buffers").glob("*.json.gz"))]


@pytest.mark.parametrize("sampling", [1, pytest.param(2, marks=pytest.mark.long)])
def test_the_run_itself_draws_by_it_and_goes_on_with_it(
    sampling: int, small_run: Small, tmp_path: Path
) -> None:
    options = INFORMATIVE | {"algorithm__dynamic_sampling": sampling}
    config = small_run(**options, run__name="whole")
    prompts = prepare(config, SILENT).data.prompts
    train(config)
    seen: dict[str, float] = {}
    start, differs = 0, 0
    for document in documents(tmp_path / "runs" / "whole"):
        count = document.drawn
        drawn = [prompts[i].id for i in informative_order([9], [1.0], 0, start, count, seen)]
        kept = {g.prompt.id: [float(c.reward or 0) for c in g.completions] for g in document.groups}
        assert [name for name in drawn if name in kept] == list(kept)
        if sampling == 1:
            assert drawn == list(kept)
        for index, prompt in enumerate(prompts):
            if prompt.id in drawn:
                seen[str(index)] = pstdev(kept[prompt.id]) if prompt.id in kept else 0.0
        differs += drawn != [prompts[i].id for i in order([9], [1.0], 0, start, count)]
        start += count
    assert differs
    assert {bool(value) for value in seen.values()} == {True, False}
    state = checkpoint.read(checkpoint.listing(tmp_path / "runs" / "whole")[-1])
    assert state.deviations == pytest.approx(seen)
    train(small_run(**options | {"run__steps": 2}, run__name="parts"))
    train(small_run(**options, run__name="parts"))
    adapters = [
        (tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors").read_bytes()
        for name in ("whole", "parts")
    ]
    assert adapters[0] == adapters[1]
    first, second = (documents(tmp_path / "runs" / name) for name in ("whole", "parts"))
    assert [each.groups for each in first] == [each.groups for each in second]


def test_the_prompts_of_dropped_groups_count_as_no_deviation(small_run: Small) -> None:
    """Of four prompts that were drawn two groups are left."""
    job = prepare(small_run(**INFORMATIVE), SILENT)
    nothing: Any = None
    step = Step(1, 2, {"8": 0.75}, 1, None, job, nothing, nothing, SILENT, {})
    indices = informative_order([9], [1.0], job.config.run.seed, 2, 4, {"8": 0.75})
    assert [prompt.id for prompt in step.prompts(4)] == [job.data.prompts[i].id for i in indices]
    _, second, third, _ = indices
    groups = [
        Group(job.data.prompts[index], tuple(
            Completion((1,), "", (0.0,), "stop", rewards={"boxed": r}, reward=r) for r in rewards
        ))
        for index, rewards in ((second, (0.0, 1.0)), (third, (1.0, 1.0)))
    ]  # fmt: skip
    found = step.deviations_after(Document(RunIdentity("x", "x", {}), 1, True, False, 4, groups))
    assert found == {"8": 0.75} | dict.fromkeys(map(str, indices), 0.0) | {str(second): 0.5}


@pytest.mark.parametrize(
    "given",
    [{"sample__completions_per_prompt": 1}, {"run__max_staleness": 1}, {"stage": "sample"}],
)
def test_what_it_cannot_act_on_is_one_line(given: dict[str, Any], small_run: Small) -> None:
    with pytest.raises(ValueError, match=r"data\.order=informative contradicts"):
        small_run(**INFORMATIVE | {"algorithm__name": "pg"} | given)
