"""The fault matrix: whatever ends a run, the same command goes on to the very same end.

The same adapter, optimizer, metrics, curves and rollouts, bit by bit; nothing sampled twice that
had been sampled, nothing learned that was not. A dozen by ``make long``, all by ``make faults``.
"""

import os
import pkgutil
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

import fault_table
import faulty_train
from fault_table import ALL, CHAINS
from faults import (
    DAMAGES,
    EXITS,
    RUNS,
    SAVES,
    Ended,
    Fault,
    Trainer,
    differences,
    done_twice,
    make_start,
    outcome,
    remount,
    rollouts,
    small_disk,
    write_config,
)
from reason_llm.run.store import metrics
from stage_runs import STAGES


@pytest.fixture(scope="module")
def trainer() -> Iterator[Trainer]:
    with Trainer() as trainer:
        yield trainer


@pytest.fixture(scope="module")
def whole(
    trainer: Trainer, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Ended, Path]]:
    """A run that nothing interrupts, and its folder, beside which the others have theirs."""
    found: dict[str, tuple[Ended, Path]] = {}
    home = tmp_path_factory.mktemp("runs")

    def get(run: str) -> tuple[Ended, Path]:
        if run not in found:
            folder = home / f"whole-{run}"
            if run in STAGES:
                make_start(trainer, home)
            write_config(folder, run)
            # Not forked from the others' parent: nothing may hang on the hashes of a process.
            ended = trainer.run(folder, Fault("", "", is_fresh=run == "plain"))
            assert ended.status == 0, ended.printed
            steps = [record["step"] for record in metrics.read(folder / "runs" / "run")]
            assert steps == list(range(len(steps)))
            found[run] = ended, folder
        return found[run]

    return get


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name == "archive" else pytest.mark.faults)
        for name in CHAINS
    ],
)
def test_a_run_that_suffers_one_fault_after_another(
    name: str, trainer: Trainer, whole: Callable[[str], tuple[Ended, Path]]
) -> None:
    suffer(trainer, CHAINS[name], *whole(CHAINS[name][0].run))


@pytest.mark.long
def test_what_out_of_memory_left_is_lowered_further_by_the_user(
    trainer: Trainer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    write_config(folder, "plain")
    fault = Fault("learning", "torch.OutOfMemoryError", (fault_table.BACKWARD,))
    assert trainer.run(folder, fault).status == 0
    options = ("--run.steps", "3", "--train.micro_batch_tokens", "32")
    assert trainer.run(folder, None, *options).status == 0
    records = metrics.read(folder / "runs" / "run")
    tokens = [record.get("train/micro_batch_tokens") for record in records]
    assert tokens == [None, 64, 64, 32]  # of 128 that were planned


def test_every_place_is_there() -> None:
    faults = [*ALL, *(fault for chain in CHAINS.values() for fault in chain)]
    for place in {place.removeprefix("after ") for fault in faults for place in fault.places}:
        if ":" in place:
            pkgutil.resolve_name(place)


@pytest.mark.faults
@pytest.mark.parametrize("fault", ALL, ids=[fault.name for fault in ALL])
def test_fault(fault: Fault, trainer: Trainer, whole: Callable[[str], tuple[Ended, Path]]) -> None:
    suffer(trainer, [fault], *whole(fault.run))


@pytest.mark.faults
@pytest.mark.parametrize("index", range(20))
def test_killed_at_any_moment(
    index: int, trainer: Trainer, whole: Callable[[str], tuple[Ended, Path]]
) -> None:
    fault, moment = fault_table.at_random(20)[index]
    ended, folder = whole(fault.run)
    suffer(trainer, [replace(fault, after_seconds=moment * ended.seconds)], ended, folder)


def suffer(trainer: Trainer, faults: Sequence[Fault], uninterrupted: Ended, like: Path) -> None:
    """Have a run suffer the faults in turn, call it again, and compare."""
    run = RUNS[faults[0].run]
    folder = like.parent / f"victim-{len(list(like.parent.glob('victim-*')))}"
    write_config(folder, faults[0].run)
    expected, expected_rollouts = outcome(like), rollouts(like)
    expected["beside"] = [name for fault in faults for name in fault.sets_aside]
    ends = []
    with ExitStack() as disks:
        for fault in faults:
            disk = Path(next(iter(fault.environment.values()), fault.target).format(folder=folder))
            if fault.kind in ("disk full", "read-only", "full temporary folder"):
                if os.geteuid() != 0:
                    pytest.skip("only root can have a disk of its own")
                disks.enter_context(small_disk(disk, 32768))
            if fault.kind == "full temporary folder":
                faulty_train.fill(folder / "tmp")
            if fault.kind == "read-only":
                remount("ro", disk)
            ended = trainer.run(folder, fault)
            check_end(fault, ended)
            ends.append(ended)
            if fault.kind == "read-only":
                remount("rw", disk)
            kept = rollouts(folder)
            assert {k: kept[k] for k in kept.keys() & expected_rollouts} == {
                k: expected_rollouts[k] for k in kept.keys() & expected_rollouts
            }
            if fault.damage:
                DAMAGES[fault.damage](folder)
        ends.append(trainer.run(folder))
        assert ends[-1].status == 0, ends[-1].printed
        assert differences(outcome(folder), expected) == []
    twice = done_twice(ends)
    may_lose = sum(max(f.may_lose, e.may_lose) for f, e in zip(faults, ends, strict=False))
    assert len(twice) <= may_lose, f"sampled again: {twice}"
    lost = sum(end.updates for end in ends) - uninterrupted.updates
    has_rows = run.options.get("algorithm", {}) is None
    assert lost <= sum(
        # The step under way; and the one before, where its checkpoint is damaged or may be on its
        # way to the disk: sampling waits for it, a stage that learns rows has one step on its way.
        (
            0
            if f.kind in SAVES
            else 1 + (has_rows or "newest" in f.damage or f.phase in ("checkpoint", "any"))
        )
        * run.updates_per_checkpoint
        for f in faults
    )
    shutil.rmtree(folder)


def check_end(fault: Fault, ended: Ended) -> None:
    """How a run must end of a fault, and what it says."""
    if fault.places:
        assert ended.struck, f"the place was not reached: {ended.printed}"
    exits = fault.exits or EXITS.get(fault.kind, (2,))
    assert ended.status in exits, f"{ended.status}: {ended.printed}"
    assert ended.left == []
    if ended.status == 2:
        lines = [x for x in ended.printed.splitlines() if x.startswith("error: ")]
        assert len(lines) == 1, ended.printed
    if ended.status != 1:
        assert "Traceback" not in ended.printed, ended.printed
    if fault.kind in SAVES and ended.status in (130, 143):
        assert ended.printed.count("stopped; the same command resumes it") == 1
