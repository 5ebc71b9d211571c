"""What the report and the end of a run say of pairs and memory."""

import io
from typing import Any

import matplotlib.figure
import pytest
import torch

from reason_llm.app import lines
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
        "accuracy_of_sets": {}, "steps": 3, "total_seconds": 8.0, "buffer_seconds": 0.0,
        "saving_seconds": 0.1, "adapter": "runs/a/adapter", "sampling_peak_gib": 0.0,
        "sampling_planned_gib": 0.4, "learning_peak_gib": 0.5, "learning_planned_gib": 0.6,
        "sampling_seconds": 0.0, "learning_seconds": 3.0, "evaluation_seconds": 0.0,
        "scoring_seconds": 1.0,
    }  # fmt: skip
    assert "memory: learning 0.50 GiB (0.60 planned)" in of_summary(summary)
    parts = "3 steps in 8 s: 1 s scoring, 3 s learning, 0.1 s saving, 4 s other; "
    assert of_summary(summary)[-1].startswith(parts)


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.4, "about 1 s left"), (89.0, "about 89 s left"), (90.0, "about 2 min left"),
     (3600.0, "about 1 h 0 min left"), (3690.0, "about 1 h 2 min left")],
)  # fmt: skip
def test_the_time_left_is_told_in_seconds_minutes_and_hours(seconds: float, told: str) -> None:
    records = [{"step": step, "time/total_seconds": seconds} for step in (0, 1, 2)]
    assert lines.left(records, 3) == told
    assert lines.left(records, 2) == lines.left(records[:2], 9) == ""


def test_the_time_left_is_of_the_last_twenty_steps() -> None:
    records = [{"step": s, "time/total_seconds": 9.0 if s < 21 else 2.0} for s in range(1, 31)]
    assert lines.left(records, 35) == "about 28 s left"  # 5 * 5.5
    records += [{"step": 31, "time/total_seconds": 2.0}]
    assert lines.left(records, 35) == "about 8 s left"


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"score/reward": 0.2384, "sample/tokens_per_second": 17933.4,
          "time/sampling_seconds": 0.34, "time/learning_seconds": 0.44},
         "reward 0.238  sampling 0.3 s (17,933 tokens/s)  learning 0.4 s"),
        ({"score/reward": 0.2, "sample/tokens_per_second": 1.0, "time/sampling_seconds": 1.0,
          "time/ahead_sampling_seconds": 2.5}, "reward 0.200  sampling 3.5 s ahead (1 tokens/s)"),
        ({"score/reward": 0.2}, "reward 0.200  sampled before"),
        ({"train/loss": -3.9e-16}, "loss 0"),  # what rounding leaves of zero
        ({"train/loss": 1.23456, "train/pair_accuracy": 0.5, "data/epoch": 0.019,
          "eval/accuracy": 0.25, "eval/loss": 1.5, "eval/pair_accuracy": 0.75},
         "loss 1.235  pairs 50.0%  held-out accuracy 25.0%  held-out loss 1.5  held-out pairs 75.0%"
         "  epoch 0.02"),
        ({"score/reward": 0.0, "critic/loss": 1.0, "critic/explained_variance": 0.456,
          "eval/accuracy": 0.5, "eval/accuracy_low": 0.4, "eval/accuracy_high": 0.6,
          "eval/samples": 4.0, "eval/pass_at_k": 0.9, "eval/hard/accuracy": 0.1},
         "reward 0.000  held-out accuracy 50.0% (40.0% to 60.0%, mean of 4 samples; pass@4 90.0%; "
         "hard 10.0%)  explained variance 0.46  the critic alone learns  sampled before"),
    ],
)  # fmt: skip
def test_a_step_s_line_has_each_number_in_its_place(record: dict[str, float], told: str) -> None:
    assert lines.of_step({"step": 3, **record}, 60, "accuracy") == f"step 3/60  {told}"


def test_a_mean_is_greedy_of_one_sample_or_of_several() -> None:
    assert [lines.mean_of(n) for n in (0, 1, 2)] == ["greedy", "one sample", "mean of 2 samples"]
    assert lines.pairs(0.95, 140.0) == "95.0% (90.0% to 97.6%)"
    assert (lines.mean_score(0.9137, "accuracy"), lines.mean_score(0.9137, "mine")) == (
        "91.4%", "0.914",
    )  # fmt: skip
