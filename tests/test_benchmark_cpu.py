"""The CPU benchmark in its smallest form: all of it runs, and both sides do the same work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reason_llm.rollout import Prompt

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
def test_the_smallest_form_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "cpu", "--repeats", "1"]
    out = tmp_path / "tables" / "cpu.md"
    done = subprocess.run(
        [*command, "--workload", "a", "--small", "--out", str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert out.read_text() == done.stdout
    (workload,) = json.loads(out.with_suffix(".json").read_text())["workloads"]
    ours, theirs = workload["sides"]
    for side in (ours, theirs):
        assert 32 * 4 < side["tokens"] <= 32 * 32
        assert 0 < side["sampling_seconds"] < side["step_seconds"]
        assert 0 < side["learning_seconds"] < side["step_seconds"]
        assert 0 < side["own_mib"] < side["peak_mib"]
    assert abs(ours["tokens"] - theirs["tokens"]) < 0.3 * theirs["tokens"]
    assert ours["speed_ratio"] == ours["peak_ratio"] == 1


@pytest.mark.long
def test_other_settings_and_the_distance_from_the_limit(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "cpu", "--repeats", "1"]
    out = tmp_path / "e.md"
    done = subprocess.run(
        [*command, "--workload", "e", "--small", "--extras", "trl_best", "ours_bfloat16",
         "--out", str(out)],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(out.with_suffix(".json").read_text())
    (workload,) = found["workloads"]
    sides = [side["side"] for side in workload["sides"]]
    best = "TRL, chunked log-probs, bfloat16"
    assert sides == ["reason_llm", "TRL", best, "reason_llm, bfloat16"]
    assert {side["tokens"] for side in workload["sides"]} == {4 * 64}
    assert all(side["speed_ratio"] > 0 for side in workload["sides"])
    assert all(0 < share < 1 for share in workload["limit"].values())
    assert "of matmul's peak" in out.read_text()


@pytest.mark.long
def test_time_to_an_accuracy(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "benchmark.py"), "cpu", "--repeats", "5"]
    out = tmp_path / "t.md"
    done = subprocess.run(
        [*command, "--workload", "t1", "--small", "--out", str(out)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (workload,) = json.loads(out.with_suffix(".json").read_text())["workloads"]
    for side in workload["sides"]:
        judged = [step.get("accuracy") for step in side["steps"]]
        assert [value is None for value in judged] == [False, True, False, True, False]
        assert all(0.1 < value < 0.8 for value in judged if value is not None)
    assert "To 80%: reason_llm did not come there; TRL did not come there." in out.read_text()


def test_the_target_is_reached_by_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks import cpu

    seen = [0.9, None, 0.6, None, 0.7, None, 0.8, None, 0.95, None]
    steps = [{"total": 2.0} | ({} if a is None else {"accuracy": a}) for a in seen]
    result = cpu.Result("ours", None, steps, 5.0, 0, 0)
    assert result.to_target == (5.0 + 2.0 * 9, 10)
    assert cpu.Result("ours", None, steps[:8], 5.0, 0, 0).to_target is None
    sides = [
        {"side": "reason_llm", "to_target": (10.0, 5)},
        {"side": "TRL", "to_target": (25.0, 5)},
    ]
    assert (
        cpu._to_target(sides)
        == "reason_llm 10.0 s in 5 steps; TRL 25.0 s in 5 steps, 2.50 times ours"
    )


def test_useful_work_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt of 2 tokens with answers of 1 and 3, one layer: queries 128, keys 64 wide."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from benchmarks import cpu_limit, cpu_workloads

    shape = {"hidden": 128, "layers": 1, "intermediate": 256}
    cpu_workloads.make_model(tmp_path, 1000, **shape)
    workload = cpu_workloads.Workload(
        title="", model=str(tmp_path), steps=((Prompt("p", "ab", (1, 2), ""),),),
        completions_per_prompt=2, max_new_tokens=3, lengths=(1, 3), learner_only=False,
        reward=None, learning_rate=0.0, trl_rows=2, trl_rows_small=None, rank=4,
    )  # fmt: skip
    weights = 128 * (128 + 64 + 64 + 128) + 3 * 128 * 256
    adapter = 4 * (256 + 192 + 192 + 256 + 3 * 384)
    pairs = 2 * 2 / 2 + (2 * 1 + 1 / 2) + (2 * 3 + 9 / 2)
    attention = 4 * 128 * pairs
    found = cpu_limit.useful(workload)
    assert found.sampling == 2 * (weights + adapter) * 6 + 2 * 128_000 * 4 + attention
    assert found.learning == (4 * weights + 6 * adapter) * 6 + 4 * 128_000 * 4 + 3 * attention
