"""``scripts/benchmark.py``: all of it runs in its smallest form, and all sides do the same work; on
a GPU's benchmark a peer that cannot is a cell with the reason.

1. The dry run, from the shell.       2. Beside TRL on a CPU.
3. A process that ends early keeps the steps that it measured, and says all of its error.
4. The check of a card, on a CPU to its end.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import ROOT

SCRIPT = ROOT / "scripts" / "benchmark.py"


@pytest.fixture(autouse=True)
def _(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")


def table_of(out: Path, *arguments: str) -> tuple[dict[str, list[str]], list[dict[str, Any]]]:
    """What the script gives: the rows of its table, and its blocks of numbers."""
    command = [sys.executable, str(SCRIPT), *arguments, "--out", str(out)]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=out.parent.parent)
    assert shown.returncode == 0, shown.stderr[-2000:]
    assert out.read_text() == shown.stdout
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in shown.stdout.splitlines()
        if len(cells := line.split("|")) > 3
    }
    return rows, json.loads(out.with_suffix(".json").read_text())["blocks"]


@pytest.mark.long
def test_the_dry_run_of_every_call(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    out = tmp_path / "tables" / "gpu.md"
    rows, (speed, peers, *_, backend) = table_of(out, "gpu", "--dry-run")
    assert rows[""] == ["reason_llm", "vLLM alone", "vLLM alone, LoRA", "TRL", "Unsloth",
                        "reason_llm, NF4", "reason_llm, NF4, 24 GiB", "reason_llm, folded",
                        "reason_llm over Unsloth"]  # fmt: skip
    speeds = rows["speed: sampling, tokens/s"]
    assert all(float(cell.replace(",", "")) > 0 for cell in speeds[:3])
    assert float(rows["speed: sampling, of vLLM alone"][0]) > 0.01
    assert float(rows["speed: phase switch in all, s"][0]) < 3
    assert float(rows["speed: learning planned, GiB"][0]) > 0
    assert float(rows["speed: a step, s"][0]) > 0
    assert "sampling_tokens_per_second" in speed["sides"]["reason_llm"]["steps"][0]
    assert float(rows["nf4: a step, s"][0]) > 0
    assert float(rows["nf4: a step, s"][5]) > 0
    assert float(rows["fold: a step, s"][7]) > 0
    assert float(rows["memory: sampling measured, GiB"][6]) > 0
    assert rows["memory: longest rows planned, tokens"][6] == "512"
    assert rows["memory: longest rows learned, tokens"][6] == "512"
    # What needs a GPU is a cell with the reason.
    assert rows["peers: a step, s"][3:5] == ["failed (1)", "failed (1)"]
    assert peers["sides"]["trl"]["error"] == peers["sides"]["unsloth"]["error"]
    assert "needs a CUDA GPU, and this machine has none" in out.read_text()
    assert "Unsloth cannot be imported" in backend["sides"]["reason_llm_unsloth"]["error"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "tokens"), [("answers", 2 * 48), ("learning", None)])
def test_both_sides_do_the_same_given_work(name: str, tokens: int | None, tmp_path: Path) -> None:
    """Other settings too."""
    variants = ["trl_best"] if name == "answers" else []
    command = ["cpu", "--repeats", "1", "--workload", name, "--small", "--extras", *variants]
    rows, (block,) = table_of(tmp_path / "tables" / "cpu.md", *command)
    assert list(block["sides"]) == ["reason_llm", "trl", *variants]
    steps = [side["steps"][0] for side in block["sides"].values()]
    (common,) = {step["tokens"] for step in steps}
    assert common == tokens if tokens else common > 0
    assert rows[f"{name}: a step, times the first one's"][0] == "1.00"
    for side in block["sides"].values():
        assert 0 < side["before_gib"] < side["largest_gib"]
        assert 0 < side["steps"][0]["learning_seconds"] <= side["steps"][0]["step_seconds"]


@pytest.mark.long
def test_nothing_to_measure_is_one_line() -> None:
    for benchmark in ("gpu", "cpu"):
        command = [sys.executable, str(SCRIPT), benchmark, "--repeats", "0"]
        shown = subprocess.run(command, capture_output=True, text=True)
        assert shown.returncode == 2
        assert "--repeats: 0: nothing would be measured; give 1 or more" in shown.stderr


def early_end(system: str, work: Any, connection: Any, log: Path) -> None:
    """A system that sleeps or ends after its first step, by the name of its model."""
    log.write_text("first line of the error\nlast line\n")
    connection.send({})  # loaded
    memory = {"largest_gib": 1.0, "before_gib": 0.5}
    connection.send({"step_seconds": 2.5, "memory": memory})
    if work.model == "sleeps":
        time.sleep(600)
    sys.exit(7)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param("sleeps", "took more than 60 s", marks=pytest.mark.long),
        pytest.param("ends", "ended with 7: last line", marks=pytest.mark.long),
    ],
)
def test_what_was_measured_before_an_end_is_kept(
    model: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import measure, sides, table
    from benchmarks.work import Work

    monkeypatch.setattr(sides, "run", early_end)
    work = Work(model, 1, 1, 8, 8, repeats=3, warmup=False)
    limit = 60 if model == "sleeps" else 600
    told: list[str] = []
    kept: list[str] = []

    def keep(blocks: Any) -> None:
        table.save(blocks, "a machine", tmp_path / "table.md")
        kept.append((tmp_path / "table.md").read_text())

    (block,) = measure.gpu(["speed"], ("vllm", "vllm_lora"), work, 64, limit, told.append, keep)
    outcome = block.sides["vllm"]
    assert outcome.error == said
    assert outcome.values("step_seconds") == [2.5]
    assert "| speed: a step, s | 2.50 | - |" in kept[1]  # after the first turn
    assert "| speed: a step, s | 2.50, then failed (1) | 2.50 |" in kept[3]
    if "7" in said:
        assert any("first line of the error" in line for line in told)
    whole = json.loads((tmp_path / "table.json").read_text())
    assert whole["blocks"][0]["sides"]["vllm_lora"]["steps"] == [{"step_seconds": 2.5}]


@pytest.mark.long
def test_the_check_of_a_card_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    """Without a compiler, which nothing needs there; vLLM itself calls lscpu. With weights that are
    not quantised ``test_multimodal_under_vllm`` runs it."""
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    (tmp_path / "lscpu").symlink_to(shutil.which("lscpu") or "lscpu")
    command = [sys.executable, str(SCRIPT), "gpu-check", "--quantize", "nf4"]
    no_compiler = {k: v for k, v in os.environ.items() if k != "CC"} | {"PATH": str(tmp_path)}
    shown = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=no_compiler)
    assert shown.returncode == 0, shown.stdout + shown.stderr[-2000:]
    lines = shown.stdout.splitlines()
    skipped = [line for line in lines if " skipped  " in line]
    assert lines[-1] == f"10 ok, {len(skipped)} skipped, 0 FAILS"
    if not torch.cuda.is_available():
        assert all(line.endswith("needs CUDA") for line in skipped)
        assert len(skipped) == 9


@pytest.mark.parametrize("has_gpu", [False, True])
def test_a_card_without_a_compiler_fails_its_check_first(
    has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks import device, gpu_check

    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(device, "describe", lambda: "a machine")
    lines: list[str] = []
    gpu_check.run("none", "no such shape", tmp_path, lines.append)
    verdict = lines[1]
    assert "a C compiler and Python's headers, which Triton needs" in verdict
    assert ("FAILS" if has_gpu else "skipped") in verdict
    assert ("neither gcc nor clang is there; apt install gcc" in verdict) == has_gpu
    assert "fla is " in lines[3]


def test_a_check_that_fails_is_told_whole_and_ends_no_other() -> None:
    from benchmarks.gpu_check import Report

    told: list[str] = []
    report = Report(told.append)

    def broken() -> None:
        raise RuntimeError("no kernel image is available")

    assert not report.check("a kernel", broken)
    assert report.check("another", lambda: "fine")
    assert report.end() == 1
    assert "FAILS    a kernel: Traceback" in told[0]
    assert "RuntimeError: no kernel image is available" in told[0]
    assert re.search(r"ok       another: \d+\.\d s; fine", told[1])
    assert told[2] == "1 ok, 0 skipped, 1 FAILS"
