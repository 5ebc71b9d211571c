"""The recipes as a user starts them: to the end, called again, killed at any moment and called
again; runs that would begin from an adapter that is not finished or not the same are refused."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.app.cli import main

RUNS = ["rlhf_sft_tiny", "rlhf_rm_tiny", "rlhf_ppo_tiny"]
SHORTER = [
    (r"\n  steps: \d+", "\n  steps: 3"), (r"prompts_per_step: \d+", "prompts_per_step: 8"),
    (r"rows_per_step: \d+", "rows_per_step: 8"), (r"every: \d+", "every: 2\n  limit: 4"),
    (r"warmup_steps: \d+", "warmup_steps: 1"), (r"learning_rate: 2.0e-3", "learning_rate: 1.0e-3"),
    (r"(data:\n  train: data/arithmetic_mixed.jsonl\n.*\n)", r"eval:\n  limit: 4\n\1"),
]  # fmt: skip


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return project_in(tmp_path)


def project_in(folder: Path) -> Path:
    """A checkout with shorter runs."""
    for name in ("configs", "data", "recipes", "scripts", "model/tiny"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for run in RUNS:
        path = folder / "configs" / f"{run}.yaml"
        text = path.read_text()
        for pattern, shorter in SHORTER:
            text = re.sub(pattern, shorter, text)
        path.write_text(text)
    return folder


def start(project: Path, *options: str, recipe: str = "rlhf_tiny") -> subprocess.Popen[str]:
    """The recipe with its processes in a group of their own."""
    paths = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.Popen(
        [project / "recipes" / f"{recipe}.sh", "--log.console", "plain", *options],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PATH": paths, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def to_the_end(project: Path, *options: str, recipe: str = "rlhf_tiny") -> str:
    started = start(project, *options, recipe=recipe)
    printed, _ = started.communicate()
    assert started.returncode == 0, printed
    return printed


def weights(project: Path) -> dict[str, bytes]:
    """The weights of every run, its critic's and its reward model's head too."""
    runs = project / "runs"
    files = [*runs.glob("*/adapter*/*.safetensors"), *runs.glob("*/start/*.safetensors")]
    files += runs.glob("*/checkpoints/step-00000003/*.safetensors")
    return {str(file.relative_to(runs)): file.read_bytes() for file in files}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """The recipe run to its end, and the number of lines that it prints."""
    folder = project_in(tmp_path_factory.mktemp("whole"))
    return folder, len(to_the_end(folder).splitlines())


@pytest.mark.long
def test_a_recipe_called_again_answers_at_once_and_changes_nothing(
    whole: tuple[Path, int],
) -> None:
    folder, _ = whole
    before = weights(folder)
    assert {name.split("/")[0] for name in before} == set(RUNS)
    assert "rlhf_rm_tiny/adapter/score.safetensors" in before
    name = "adapter_model.safetensors"
    assert before[f"rlhf_ppo_tiny/start/{name}"] == before[f"rlhf_sft_tiny/adapter/{name}"]
    times = {path: path.stat().st_mtime_ns for path in (folder / "runs").rglob("*.safetensors")}
    printed = to_the_end(folder)
    assert printed.count("is finished at step 3") == len(RUNS)
    assert "step 1/" not in printed
    assert weights(folder) == before
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.parametrize(
    "moments",
    [pytest.param(2, marks=pytest.mark.long), pytest.param(10, marks=pytest.mark.faults)],
)
def test_killed_at_random_moments_it_makes_the_same_bits(
    moments: int, whole: tuple[Path, int], project: Path
) -> None:
    """A while after a line, one after the other; the last ones may strike one that has ended."""
    drawn, num_killed = random.Random(moments), 0
    for _ in range(moments):
        started, last = start(project), int(drawn.uniform(0.1, 0.7) * whole[1])
        assert started.stdout is not None
        if any(number == last for number, _ in enumerate(started.stdout, start=1)):
            time.sleep(drawn.uniform(0, 0.5))
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
        num_killed += started.returncode == -signal.SIGKILL
        assert started.returncode in (0, -signal.SIGKILL)
    assert num_killed
    to_the_end(project)
    assert weights(project) == weights(whole[0])


@pytest.mark.faults
def test_ctrl_c_ends_the_recipe_and_not_only_its_run(
    whole: tuple[Path, int], project: Path
) -> None:
    """Sent to the group, as a terminal does; the second run never begins."""
    started = start(project)
    assert started.stdout is not None
    for line in started.stdout:
        if "step 1/3" in line:
            os.killpg(started.pid, signal.SIGINT)
            break
    printed, _ = started.communicate()
    assert started.returncode == 130, printed
    assert not (project / "runs" / "rlhf_rm_tiny").exists()
    to_the_end(project)
    assert weights(project) == weights(whole[0])


@pytest.mark.long
def test_rejection_sampling_learns_from_the_rows_of_the_round(
    project: Path,
    script: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the end; and its command ``pairs`` again, as every command is called after a kill."""
    for name in ("sample", "sft"):
        path = project / "configs" / f"{name}_tiny.yaml"
        text = path.read_text().replace("prompts_per_step: 500", "prompts_per_step: 16")
        path.write_text(text.replace("  eval: data/arithmetic_test.jsonl\n", ""))
    path = project / "recipes" / "rejection_tiny.sh"
    path.write_text(path.read_text().replace("--run.steps 20", "--run.steps 1"))
    for recipe in (project / "recipes").glob("*.sh"):
        subprocess.run(["bash", "-n", recipe], check=True)
    printed = to_the_end(project, recipe="rejection_tiny")
    runs, name = project / "runs", "adapter_model.safetensors"
    first, second = ((runs / f"rejection_sample_{n}" / "right.jsonl").read_bytes() for n in (1, 2))
    assert first and second and first != second
    began = (runs / "rejection_sft_2" / "start" / name).read_bytes()
    assert began == (runs / "rejection_sft_1" / "adapter" / name).read_bytes()
    assert printed.count(" demonstrations of ") == 2
    monkeypatch.chdir(project)
    for sampled in ("runs/rejection_sample_1", "runs/rejection_sample_2"):
        rows = ("--out", f"{sampled}/right.jsonl", "--as", "demonstrations")
        code, said, error = script("pairs.py", f"{sampled}/buffers", *rows)
        assert (code, "holds these rows already" in said + error) == (0, True), error


def config(folder: Path, name: str, **options: Any) -> str:
    tree: dict[str, Any] = {
        "stage": "sft",
        "run": {"directory": str(folder / "runs"), "steps": 1},
        "model": {"path": str(TINY), "dtype": "float32"},
        "data": {"train": str(ROOT / "data" / "arithmetic_demonstrations.jsonl"), "limit": 4,
                 "system_prompt": "none"},
        "train": {"rows_per_step": 2, "gradient_checkpointing": False},
        "log": {"console": "plain"},
    }  # fmt: skip
    for section, values in options.items():
        tree[section] = tree[section] | values
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return str(path)


def test_an_adapter_that_is_not_finished_or_not_the_same_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = tmp_path / "runs" / "first" / "adapter"
    first = config(tmp_path, "first", model={"adapter": {"rank": 2}})
    second = config(tmp_path, "second", model={"start": str(adapter)})

    def call(*words: str) -> str:
        code = main(["train", *words])
        lines = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
        assert (code, len(lines)) == ((2, 1) if lines else (0, 0))
        return "".join(lines)

    assert call(first) == ""
    (summary := adapter.parent / "summary.json").rename(tmp_path / "summary.json")
    line = call(second)  # as while the first one is prolonged
    assert f"model.start={adapter} belongs to a run that has not ended; finish it with its" in line
    (tmp_path / "summary.json").rename(summary)
    assert call(second) == ""
    assert call(second) == ""
    assert call(first, "--run.resume", "never", "--run.seed", "1") == ""
    line = call(second)
    assert "model.start_sha256" in line and "--run.resume never" in line
    assert call(second, "--run.resume", "never") == ""
