"""A pipeline that is called again: anew, with other options for its rows, killed, with stages that
ended by epochs or patience or were prolonged."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.app.cli import main

DATA = ROOT / "data"
DIE_AT = ROOT / "tests" / "fixtures" / "die_at.py"
ANEW = ("--run.resume", "never", "--run.seed", "1")
Capture = pytest.CaptureFixture[str]

SHARED: dict[str, Any] = {
    "run": {"steps": 2},
    "model": {"path": str(TINY), "dtype": "float32", "adapter": {"rank": 2, "alpha": 4}},
    "data": {"system_prompt": "none"},
    "sample": {"prompts_per_step": 24, "completions_per_prompt": 4, "max_new_tokens": 32},
    "score": {"rewards": [{"name": "think_answer_tags"}]},
    "train": {"rows_per_step": 4, "learning_rate": 1e-3, "gradient_checkpointing": False},
    "log": {"console": "plain"},
}
DRAWN = {
    "drawn": {
        "stage": "sample",
        "run": {"steps": 1},
        "data": {"train": str(DATA / "arithmetic_train.jsonl")},
    },
    "learned": {"stage": "sft", "data": {"train": {"pairs_of": "drawn"}}},
}
DEMONSTRATIONS = {"train": str(DATA / "arithmetic_demonstrations.jsonl"), "limit": 12}


class WithoutAliases(yaml.SafeDumper):
    """Writes what stands in two places twice."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def write(folder: Path, stages: dict[str, Any], **shared: Any) -> Path:
    """The config of a pipeline ``mine`` in ``folder``/mine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "mine.yaml"
    tree = SHARED | shared | {"stages": stages}
    tree["run"] = tree["run"] | {"directory": str(folder)}
    path.write_text(yaml.dump(tree, Dumper=WithoutAliases, sort_keys=False))
    return path


def train(capsys: Capture, config: Path, *words: str, ends: int = 0) -> str:
    """What the command printed."""
    code = main(["train", str(config), *words])
    told = capsys.readouterr()
    assert code == ends, told.out + told.err
    return told.out + told.err


def made(folder: Path) -> list[bytes]:
    """The rows, and the adapter that learned from them."""
    home = folder / "mine"
    files = [home / "learned.jsonl", home / "learned" / "adapter" / "adapter_model.safetensors"]
    return [file.read_bytes() for file in files]


def steps(folder: Path, stage: str) -> int:
    """Learned steps of a stage that has ended."""
    found = orjson.loads((folder / "mine" / stage / "summary.json").read_bytes())["steps"]
    assert isinstance(found, int)
    return found


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a finished pipeline, whose own place is beside it."""
    folder = tmp_path_factory.mktemp("pipeline")
    assert main(["train", str(write(folder / "now", DRAWN))]) == 0
    shutil.copytree(folder / "now" / "mine", folder / "finished" / "mine")
    return folder / "finished"


@pytest.fixture(scope="module")
def other_seed(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """What a pipeline makes that never ran with another seed."""
    folder = tmp_path_factory.mktemp("other_seed")
    assert main(["train", str(write(folder, DRAWN)), "--run.seed", "1"]) == 0
    return made(folder)


@pytest.fixture
def now(finished: Path) -> Path:
    """Folder of the pipeline as it was when it had just ended."""
    folder = finished.parent / "now"
    shutil.rmtree(folder)
    shutil.copytree(finished, folder)
    return folder


@pytest.mark.long
def test_anew_it_learns_from_the_new_rollouts(
    now: Path, finished: Path, other_seed: list[bytes], capsys: Capture
) -> None:
    told = train(capsys, write(now, DRAWN), *ANEW)
    assert made(now) == other_seed
    assert made(now)[0] != made(finished)[0]
    assert "began" not in told
    assert "nothing was held out" not in told  # as of a stage that is passed over
    assert "is finished at step" in train(capsys, write(now, DRAWN), "--run.seed", "1")
    assert made(now) == other_seed


@pytest.mark.faults
def test_killed_anew_it_goes_on_to_the_same_bits(
    now: Path, other_seed: list[bytes], capsys: Capture
) -> None:
    place = "reason_llm.train.learner:Learner._update"
    command = [sys.executable, DIE_AT, place, "2", write(now, DRAWN), *ANEW]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    killed = subprocess.run(list(map(str, command)), capture_output=True, env=environment, cwd=ROOT)
    assert killed.returncode == -9, killed.stderr.decode()
    assert not (now / "mine" / "learned" / "summary.json").exists()
    train(capsys, write(now, DRAWN), "--run.seed", "1")
    assert made(now) == other_seed


@pytest.mark.long
def test_a_source_that_ran_again_gives_other_rows(now: Path, capsys: Capture) -> None:
    """Of the same rollouts the same, which the stage goes on with."""
    before = made(now)
    train(capsys, write(now, DRAWN), "--stage", "drawn", "--run.resume", "never")
    told = train(capsys, write(now, DRAWN))
    assert "demonstrations of" in told
    assert "began with other rows" not in told
    assert made(now) == before
    train(capsys, write(now, DRAWN), "--stage", "drawn", *ANEW)
    config = write(now, DRAWN | {"drawn": DRAWN["drawn"] | {"run": {"steps": 1, "seed": 1}}})
    told = train(capsys, config, ends=2)
    assert "stage learned began with other rows: the rollouts of drawn or" in told
    assert "prompts_sha256" in told
    assert "--stage learned --run.resume never" in told


@pytest.mark.long
def test_other_options_give_other_rows(now: Path, capsys: Capture) -> None:
    before = made(now)[0].splitlines()
    rows = {"train": {"pairs_of": "drawn", "per_prompt": 1}}
    config = write(now, DRAWN | {"learned": {"stage": "sft", "data": rows}})
    told = train(capsys, config, ends=2)
    assert "the options of pairs_of were others" in told
    told = train(capsys, config, "--stage", "learned", "--run.resume", "never")
    assert 0 < len(made(now)[0].splitlines()) < len(before)
    assert steps(now, "learned") == 2


@pytest.mark.long
def test_rows_without_their_rollouts_stay(now: Path, finished: Path, capsys: Capture) -> None:
    """An archive may be deleted once its stage has ended."""
    shutil.rmtree(now / "mine" / "drawn" / "buffers")
    told = train(capsys, write(now, DRAWN))
    assert told.count("is finished at step") == 2
    assert made(now) == made(finished)
    told = train(capsys, write(now, DRAWN), "--stage", "learned", "--run.resume", "never", ends=2)
    assert "buffers does not exist" in told


@pytest.mark.long
def test_rows_that_were_changed_are_written_anew(
    now: Path, finished: Path, capsys: Capture
) -> None:
    rows = now / "mine" / "learned.jsonl"
    rows.write_bytes(rows.read_bytes()[:-100])
    train(capsys, write(now, DRAWN))
    assert made(now) == made(finished)


@pytest.mark.long
def test_anew_a_later_stage_s_mistake_is_told_first(
    now: Path, finished: Path, capsys: Capture
) -> None:
    wrong = {"stage": "sft", "data": {"train": str(DATA / "arithmetic_preferences.jsonl")}}
    told = train(capsys, write(now, DRAWN | {"learned": wrong}), *ANEW, ends=2)
    assert "error: stage learned: " in told
    assert not list((now / "mine").glob("*.old-*"))


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({"run": {"epochs": 1}}, 3),
        (
            {
                "run": {"steps": 9},
                "train": {"learning_rate": 1e-30},
                "eval": {"rows": DEMONSTRATIONS["train"], "limit": 4, "every": 1, "patience": 1},
            },
            1,
        ),
    ],
    ids=["epochs", "patience"],
)
def test_a_stage_ends_where_its_run_does(
    options: dict[str, Any], learned: int, tmp_path: Path, capsys: Capture
) -> None:
    stages = {
        "first": {"stage": "sft", "data": DEMONSTRATIONS, **options},
        "second": {"stage": "sft", "from": "first", "data": DEMONSTRATIONS, "run": {"steps": 1}},
    }
    config = write(tmp_path, stages)
    train(capsys, config)
    assert (steps(tmp_path, "first"), steps(tmp_path, "second")) == (learned, 1)
    assert "is finished" in train(capsys, config, "--stage", "second")


@pytest.mark.long
def test_a_prolonged_stage_has_ended_until_more_is_asked(tmp_path: Path, capsys: Capture) -> None:
    stages: dict[str, Any] = {
        "first": {"stage": "sft", "data": DEMONSTRATIONS, "run": {"steps": 1}},
        "second": {"stage": "sft", "from": "first", "data": DEMONSTRATIONS, "run": {"steps": 1}},
    }
    config = write(tmp_path, stages)
    train(capsys, config, "--stage", "first", "--run.steps", "2")
    train(capsys, config)
    assert (steps(tmp_path, "first"), steps(tmp_path, "second")) == (2, 1)
    stages["first"]["run"]["steps"] = 3
    told = train(capsys, write(tmp_path, stages), "--stage", "second", ends=2)
    assert "stage second needs first, which has not ended" in told
    train(capsys, config)
    assert steps(tmp_path, "first") == 3
    # Planned anew, the second begins from an adapter to come, not from the one that is there.
    anew = ["--run.resume", "never", "--model.adapter.rank", "8", "--plan"]
    assert train(capsys, config, *anew).count("base weights") == 2
