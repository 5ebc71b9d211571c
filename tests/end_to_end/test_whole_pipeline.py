"""The whole pipeline as a user starts it, in processes of its own: SFT, rollouts, rejection
sampling, a reward model, PPO; killed and started again; one stage alone; what is wrong with a later
stage is told before the first one learns."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.app.cli import main

TRAIN = ROOT / "scripts" / "train.py"
DIE_AT = ROOT / "tests" / "fixtures" / "die_at.py"
LEARNING = "reason_llm.train.learner:Learner._update"
DATA = ROOT / "data"
NAMES = ["sft", "drawn", "again", "rm", "ppo"]


def tree(folder: Path) -> dict[str, Any]:
    return {
        "run": {"directory": str(folder / "runs"), "steps": 2},
        "model": {"path": str(TINY), "dtype": "float32", "adapter": {"rank": 4, "alpha": 8}},
        "data": {"system_prompt": "none"},
        "sample": {"prompts_per_step": 4, "completions_per_prompt": 2, "max_new_tokens": 32},
        "score": {"rewards": [{"name": "think_answer_tags"}]},
        "train": {"rows_per_step": 8, "learning_rate": 1e-3, "gradient_checkpointing": False},
        "log": {"console": "plain"},
        "stages": {
            "sft": {
                "stage": "sft",
                "data": {"train": str(DATA / "arithmetic_demonstrations.jsonl")},
            },
            "drawn": {
                "stage": "sample",
                "from": "sft",
                "run": {"steps": 1},
                "data": {"train": str(DATA / "arithmetic_train.jsonl")},
                "sample": {"prompts_per_step": 24},
            },
            "again": {
                "stage": "sft",
                "from": "sft",
                "data": {"train": {"pairs_of": "drawn", "per_prompt": 1}},
            },
            "rm": {
                "stage": "reward",
                "from": "sft",
                "data": {"train": str(DATA / "arithmetic_preferences.jsonl")},
                "eval": {"rows": str(DATA / "arithmetic_preferences_test.jsonl"), "limit": 8},
            },
            "ppo": {
                "from": "again",
                "data": {"train": str(DATA / "arithmetic_train.jsonl")},
                "score": {
                    "rewards": [
                        {"name": "think_answer_tags", "weight": 0},
                        {"name": "reward_model", "options": {"path": {"stage": "rm"}}},
                    ]
                },
                "algorithm": {"name": "ppo"},
                "critic": {"start": {"stage": "rm"}, "warmup_steps": 1},
            },
        },
    }


def write(folder: Path, content: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def call(*words: str | Path, ends: int = 0) -> str:
    """What the program printed."""
    ended = subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert ended.returncode == ends, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def here(capsys: pytest.CaptureFixture[str], *words: str | Path, ends: int = 0) -> str:
    """What the program printed, in this process."""
    code = main(["train", *map(str, words)])
    told = capsys.readouterr()
    assert code == ends, told.out + told.err
    return told.out + told.err


def made(folder: Path) -> dict[str, bytes]:
    """The weights of every stage, and the rows that were written."""
    home = folder / "runs" / "mine"
    found = {str(p.relative_to(home)): p.read_bytes() for p in home.glob("*/adapter/*.safetensors")}
    return found | {"again.jsonl": (home / "again.jsonl").read_bytes()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, call(TRAIN, write(folder, tree(folder)))


@pytest.mark.long
def test_every_stage_begins_from_an_earlier_one(whole: tuple[Path, str]) -> None:
    folder, told = whole
    home = folder / "runs" / "mine"
    assert [line.split()[1] for line in told.splitlines() if line.startswith("stage ")] == NAMES
    for name in NAMES:
        assert orjson.loads((home / name / "summary.json").read_bytes())["steps"] > 0
        assert (home / name / "report.html").is_file()
        assert f'"report":"{name}/report.html"' in (home / "report.html").read_text()
    assert f"report in {home / 'report.html'}, sft: " in told
    found = made(folder)
    weights = "adapter/adapter_model.safetensors"
    assert found[f"drawn/{weights}"] == found[f"sft/{weights}"]  # it learns nothing
    assert (home / "ppo" / "start" / "adapter_model.safetensors").read_bytes() == found[
        f"again/{weights}"
    ]
    assert len({found[f"{name}/{weights}"] for name in ("sft", "again", "rm", "ppo")}) == 4
    assert "rm/adapter/score.safetensors" in found
    rows = [orjson.loads(line) for line in found["again.jsonl"].splitlines()]
    assert rows and all(row["score"] == 1.0 and row["completion_ids"] for row in rows)
    assert (
        f"{len(rows)} demonstrations of {len(rows)} prompts, from 48 rollouts in 1 buffers" in told
    )


@pytest.mark.long
def test_finished_stages_are_passed_over(
    whole: tuple[Path, str], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = whole
    before = made(folder)
    told = here(capsys, folder / "mine.yaml")
    assert told.count("is finished at step") == len(NAMES)
    assert "step 1/" not in told
    assert made(folder) == before
    alone = here(capsys, folder / "mine.yaml", "--stage", "rm")
    assert alone.count("is finished at step") == 1


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(2, marks=pytest.mark.faults, id="in sft"),
        pytest.param(3, marks=pytest.mark.faults, id="in again"),
        pytest.param(7, marks=pytest.mark.faults, id="in ppo"),
    ],
)
def test_killed_it_goes_on_to_the_same_bits(
    count: int, whole: tuple[Path, str], tmp_path: Path
) -> None:
    config = write(tmp_path, tree(tmp_path))
    call(DIE_AT, LEARNING, str(count), config, ends=-9)
    assert not (tmp_path / "runs" / "mine" / "ppo" / "summary.json").exists()
    call(TRAIN, config)
    assert made(tmp_path) == made(whole[0])


def test_a_later_stage_s_mistake_is_told_before_anything_is_learned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = tree(tmp_path)
    content["stages"]["rm"]["data"]["train"] = str(DATA / "arithmetic_demonstrations.jsonl")
    told = here(capsys, write(tmp_path, content), ends=2)
    assert "error: stage rm: " in told
    assert "it is no row of data.form=preferences; set stage=sft" in told
    content = tree(tmp_path)
    content["memory"] = {"budget_gib": 0.1}
    assert "error: " in here(capsys, write(tmp_path, content), ends=2)
    assert not (tmp_path / "runs").exists()


def test_a_stage_alone_needs_those_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, tree(tmp_path))
    told = here(capsys, config, "--stage", "again", ends=2)
    assert "error: stage again needs sft, which has not ended in" in told
    assert told.count("\n") <= 3


def test_plan_and_data_check_of_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, tree(tmp_path))
    told = here(capsys, config, "--plan")
    assert told.count("base weights") == len(NAMES)
    assert "adapter of the role critic" in told
    assert "adapter of the role reward:reward_model" in told
    told = here(capsys, config, "--data-check")
    assert told.count("no errors") == len(NAMES) - 1
    assert "its rows are written from the rollouts of drawn, which come first" in told
