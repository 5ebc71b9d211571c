"""The live screen: its numbers by hand, its width, and that nothing a model says changes it."""

import time
from typing import Any

import pytest
from rich.cells import cell_len

from hostile import HOSTILE
from reason_llm.app.screen import Curve, Phase, Screen, cut, shown_seconds, sparkline
from reason_llm.rollout import Completion


def record(step: int, **more: float) -> dict[str, Any]:
    return {
        "step": step, "score/reward": step / 10, "time/total_seconds": 2.0 + step,
        "sample/tokens": 500, "time/learning_seconds": 0.5, "sample/tokens_per_second": 1234.5,
        "memory/sampling_peak_gib": 0.5, "memory/sampling_planned_gib": 0.9,
        "memory/learning_peak_gib": 1.5, "memory/learning_planned_gib": 0.8, **more,
    }  # fmt: skip


def completion(text: str) -> Completion:
    return Completion((1,), text, (0.0,), "stop", reward=0.25)


@pytest.fixture
def screen() -> Screen:
    screen = Screen("my run", last_step=10, step=0)
    screen.take({"step": 0, "eval/accuracy": 0.25, "time/total_seconds": 99.0})
    for step in (1, 2, 3):
        screen.end_step(record(step), completion("<answer>42</answer>"))
    screen.end_step(record(4, **{"eval/accuracy": 0.5}), completion("<answer>42</answer>"))
    screen.begin_phase("sampling", 64)
    return screen


def test_what_it_shows(screen: Screen) -> None:
    screen.phase.started = screen.step_started = 1000.0
    screen.phase.items, screen.phase.tokens = 16, 400
    text = screen.lines(80, now=1002.0).plain
    assert [len(line) for line in text.split("\n")[:2]] == [80, 80]
    assert [" ".join(line.replace("━", "").split()) for line in text.split("\n")] == [
        "sampling 16/64 200 tokens/s 0:06 left",
        # Steps took 3, 4, 5 and 6 s; six are left, 2 s of the first are over.
        "step my run 4/10 0:25 left",
        "reward ▁▃▆█ 0.400",
        "accuracy ▁█ 50.0%",
        "speed sampling 1,234 tokens/s, learning 1,000 tokens/s",
        "memory sampling 0.50 of 0.90 GiB planned, learning 1.50 of 0.80 GiB planned",
        "rollout reward 0.25: <answer>42</answer>",
    ]
    filled = text.split("\n")[1].count("━")
    assert screen.lines(80, 1002.0, plain=True).plain.split("\n")[1].count("━") == round(
        0.4 * filled
    )


def test_a_stage_without_rollouts_shows_its_losses_and_pairs() -> None:
    screen = Screen("pairs", last_step=4, step=0)
    screen.take({"step": 0, "eval/loss": 0.7, "time/total_seconds": 1.0})
    for step in (1, 2):
        values = {
            "train/loss": 0.6 / step, "train/pair_accuracy": 0.5 * step, "train/margin": 1.5,
            "train/tokens": 300.0, "data/epoch": 0.25 * step, "time/learning_seconds": 0.5,
            "time/total_seconds": 2.0,
        }  # fmt: skip
        screen.end_step({"step": step, **values}, None)
    shown = screen.lines(80, time.perf_counter()).plain.split("\n")
    assert [" ".join(line.split()) for line in shown[2:]] == [
        "loss █▁ 0.3",
        "held out ▅ 0.7",
        "pairs ▁█ 100.0%",
        "learning margin 1.5, epoch 0.50",
        "speed learning 600 tokens/s",
    ]


def test_the_loss_of_reinforcement_learning_is_not_drawn(screen: Screen) -> None:
    screen.end_step(record(5, **{"train/loss": 0.001}), None)
    assert "loss" not in screen.lines(80, 0.0).plain


def test_a_name_of_wide_characters_leaves_room_for_what_follows(screen: Screen) -> None:
    screen.name, screen.step_started = "\u6570\u5b66" * 6, 1000.0
    line = screen.lines(80, now=1002.0).plain.split("\n")[1]
    assert line.endswith("4/10  0:25 left")
    assert cell_len(line) == 80


def test_time_left_of_a_phase_is_by_its_earlier_times(screen: Screen) -> None:
    for took in (4.0, 8.0):
        screen.begin_phase("sampling", 64)
        screen.phase.started = time.perf_counter() - took
        screen.end_phase()
    screen.begin_phase("sampling", 64)
    assert screen.phase_seconds_left(screen.phase.started + 1.5) == pytest.approx(4.5, abs=0.01)
    assert screen.phase_seconds_left(screen.phase.started + 60) == 0
    screen.begin_phase("learning", 10)  # the first time: by what is done
    assert screen.phase_seconds_left(screen.phase.started + 3) is None
    screen.phase.items = 3
    assert screen.phase_seconds_left(screen.phase.started + 3) == pytest.approx(7)


@pytest.mark.parametrize("width", [1, 2, 11, 20, 40, 79, 200])
@pytest.mark.parametrize("ascii_only", [False, True])
def test_it_fits_any_width(screen: Screen, width: int, ascii_only: bool) -> None:
    screen.rollout = completion("日本語 😀 " * 100)
    text = screen.lines(width, time.perf_counter(), ascii_only=ascii_only).plain
    assert text.count("\n") <= 10
    assert all(cell_len(line) <= width for line in text.split("\n"))
    screen.rollout = completion("x")
    assert screen.lines(width, 0.0, ascii_only=ascii_only).plain.isascii() or not ascii_only


def cpu_seconds(screen: Screen) -> float:
    started = time.thread_time()
    screen.lines(80, 1.0)
    return time.thread_time() - started


@pytest.mark.parametrize("text", [HOSTILE, HOSTILE * 10_000, "\u0301" * 10**6, "[red]x[/red]", ""])
def test_a_hostile_rollout_changes_nothing(screen: Screen, text: str) -> None:
    screen.phase = Phase("learning", 0, 0.0)
    before = screen.lines(80, 1.0).plain.split("\n")
    plain = min(cpu_seconds(screen) for _ in range(3))
    screen.rollout = completion(text)
    after = screen.lines(80, 1.0)
    assert min(cpu_seconds(screen) for _ in range(3)) < 50 * plain
    lines = after.plain.split("\n")
    assert lines[: len(before) - 1] == before[:-1]
    assert all(line.isprintable() and cell_len(line) <= 80 for line in lines)
    assert len(lines) <= len(before) + 2
    assert len(after.plain) < 5000
    styles = {str(span.style) for span in after.spans}
    assert styles <= {"bold", "green", "bright_black", "cyan", "dim", "red"}


def test_a_long_text_keeps_both_ends() -> None:
    assert cut("begin" + "x" * 10**6 + "end", limit=8) == "beginxxx ... xxxxxend"
    assert cut(" a\n\n\tb\u202e ") == "a b\\u202e"


def test_sparkline_by_hand() -> None:
    assert sparkline([0, 1, 2, 7], 10) == "▁▂▃█"
    assert sparkline([0, 0, 3, 3, 7, 7], 3) == "▁▄█"
    assert sparkline([5, 5], 10) == "▅▅"
    assert sparkline([1, 2], 0) == sparkline([], 5) == ""


def test_a_curve_of_any_length_stays_small_and_true() -> None:
    curve = Curve()
    for value in range(100_000):
        curve.add(float(value))
        assert len(curve.values) < Curve.MOST
    width = curve.values[1] - curve.values[0]
    assert [b - a for a, b in zip(curve.values, curve.values[1:], strict=False)] == pytest.approx(
        [width] * (len(curve.values) - 1)
    )
    assert curve.values[0] == (width - 1) / 2


def test_seconds() -> None:
    assert [shown_seconds(s) for s in (0.4, 59.6, 754, 90_062)] == [
        "0:00", "1:00", "12:34", "25:01:02",
    ]  # fmt: skip
