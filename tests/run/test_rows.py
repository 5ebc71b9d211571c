"""Rows of a run that trains on a set of them, in the run's order, and what the reference reads."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.data import order
from reason_llm.loop import train
from reason_llm.model import Datum
from reason_llm.run import SILENT
from reason_llm.run.opening import open_run
from reason_llm.run.start.prepare import prepare
from reason_llm.train import Learner

Make = Callable[..., Config]


@pytest.fixture
def preferences(tmp_path: Path, small_run: Make) -> Make:
    """A run of pairs of unequal lengths: two passes over ten of them, and three held out."""
    rows = [
        {"prompt": f"What is {n} + {n}?", "chosen": f"<answer>{2 * n}</answer>" * (1 + n % 3),
         "rejected": "no " * (1 + n % 4)}
        for n in range(13)
    ]  # fmt: skip
    for name, part in (("train", rows[:10]), ("held", rows[10:])):
        text = "".join(json.dumps(row) + "\n" for row in part)
        (tmp_path / f"{name}.jsonl").write_text(text)

    def make(**more: Any) -> Config:
        return small_run(
            stage="preference", algorithm={}, sample={},
            data__train=str(tmp_path / "train.jsonl"), eval__rows=str(tmp_path / "held.jsonl"),
            train__rows_per_step=5, **{"preference__name": "dpo", "run__steps": 4} | more,
        )  # fmt: skip

    return make


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """(role, rows) of every measurement."""
    calls: list[tuple[str, int]] = []
    original = Learner.measure

    def measure(self: Learner, data: list[Datum], role: str, *output: Any) -> Any:
        if data:
            calls.append((role, len(data)))
        return original(self, data, role, *output)

    monkeypatch.setattr(Learner, "measure", measure)
    return calls


def test_rows_are_drawn_in_the_run_s_order(preferences: Make) -> None:
    job = prepare(preferences(run__seed=3), SILENT)
    (data_set,) = job.data.training
    drawn = [data_set.rows[2 * i + side] for i in order([10], [1.0], 3, 4, 5) for side in (0, 1)]
    with open_run(job, SILENT) as run:
        run.state = replace(run.state, drawn=4)
        assert [(tuple(d.ids), d.group) for d in run.batch(0)] == [
            (row.ids, n // 2) for n, row in enumerate(drawn)
        ]


def test_the_reference_reads_the_rows_of_each_step_and_evaluation(
    preferences: Make, measured: list[tuple[str, int]]
) -> None:
    """Five of ten pairs in each of two steps, and three held out, which are judged twice."""
    train(preferences(run__steps=2, eval__every=0))
    assert measured == [("reference", rows) for rows in (6, 10, 10, 6)]


def test_losses_without_a_reference_measure_none(
    preferences: Make, measured: list[tuple[str, int]]
) -> None:
    train(preferences(run__steps=1, preference__name="orpo"))
    assert not measured
