"""The CPU benchmark in its smallest form: all of it runs, and both sides do the same work."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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
