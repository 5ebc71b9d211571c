"""``scripts/benchmark.py gpu``: its own side runs here with a tiny model; a peer that cannot is a
row with the reason.

1. The dry run, from the shell.       2. The bisection over contexts.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import ROOT

SCRIPT = ROOT / "scripts" / "benchmark.py"


def test_the_dry_run_gives_one_table_with_a_row_for_what_fails(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    out = tmp_path / "tables" / "gpu.md"
    command = [sys.executable, str(SCRIPT), "gpu", "--dry-run", "--out", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr[-2000:]
    table = out.read_text()
    assert table.strip() == shown.stdout.strip()
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in table.splitlines()
        if len(cells := line.split("|")) > 3
    }
    assert rows[""] == ["reason_llm", "vLLM alone", "TRL", "target"]
    speeds = rows["bf16: sampling, tokens/s"]
    assert all(float(cell.replace(",", "")) > 0 for cell in speeds[:2])
    ratio = float(rows["bf16: sampling, of vLLM alone"][0])
    assert ratio > 0.01
    assert float(rows["bf16: phase switch in all, s"][0]) < 3
    assert float(rows["bf16: learning planned, GiB"][0]) > 0
    assert float(rows["bf16: a step, s"][0]) > 0
    assert rows["bf16: a step, s"][2] == "failed (1)"
    assert rows["bf16: longest context under 8 GiB"][0].startswith("64 at ")
    assert "needs a CUDA GPU, and this machine has none" in table
    whole = json.loads(out.with_suffix(".json").read_text())
    systems = {entry["system"]: entry["rounds"] for entry in whole["speeds"]}
    assert systems["trl"][0]["error"]
    assert len(systems["reason_llm"][0]["values"]["sampling_tokens_per_second"]) == 1


@pytest.mark.parametrize("longest", [0, 1, 3, 5, 8, 9])
def test_the_bisection_finds_the_last_context_that_fits(
    longest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    from benchmarks.gpu import last_that_fits

    ladder, tried = list(range(1, 9)), []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= longest

    index = last_that_fits(ladder, fits)
    assert index == min(longest, 8) - 1
    assert len(tried) == len(set(tried)) <= 4
    if index + 1 < len(ladder):
        assert ladder[index + 1] in tried  # so there is a reason to give
