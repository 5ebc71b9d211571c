"""What the report and the end of a run say of pairs and memory."""

import io
from typing import Any

import matplotlib.figure
import pytest
import torch

from reason_llm.app.lines import of_summary
from reason_llm.app.report.curves import draw_curves
from reason_llm.train.rewards import in_order, length_bias


def test_a_tie_counts_one_half() -> None:
    assert in_order(torch.tensor([2.0, 0.0, -1.0])).tolist() == [1.0, 0.5, 0.0]
    untrained = length_bias([0.0] * 4, [0.0] * 4, [3, 4, 5, 6], [4, 3, 5, 7])
    assert untrained["accuracy_chosen_longer"] == untrained["accuracy_chosen_not_longer"] == 0.5


def test_the_line_of_chance_is_drawn_for_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[float]] = []

    def keep(figure: matplotlib.figure.Figure, file: io.BytesIO, **_: Any) -> None:
        lines = [line for axes in figure.axes for line in axes.lines]
        drawn.append([float(line.get_ydata()[0]) for line in lines])

    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", keep)
    draw_curves([{"step": 0, "eval/pair_accuracy": 0.9}], "pairs", "accuracy")
    draw_curves([{"step": 1, "score/reward": 0.2}], "rl", "accuracy")
    assert drawn == [[0.9, 0.5], [0.2]]


def test_memory_of_a_phase_that_was_not_is_not_told() -> None:
    summary: dict[str, Any] = dict.fromkeys(
        ("accuracy_before", "held_out_loss", "held_out_pair_accuracy"), None
    ) | {
        "accuracy_of_sets": {}, "steps": 3, "total_seconds": 4.0, "buffer_seconds": 0.0,
        "saving_seconds": 0.1, "adapter": "runs/a/adapter", "sampling_peak_gib": 0.0,
        "sampling_planned_gib": 0.4, "learning_peak_gib": 0.5, "learning_planned_gib": 0.6,
        "sampling_seconds": 0.0, "learning_seconds": 3.0, "evaluation_seconds": 0.0,
    }  # fmt: skip
    assert "memory: learning 0.50 GiB (0.60 planned)" in of_summary(summary)
