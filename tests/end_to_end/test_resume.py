"""kill -9, run the same command, and the final adapter is the uninterrupted run's.

The same bit by bit, and so are the optimizer, the metrics and the rollouts. Each time a process of
its own, as a user starts it; every other place and kind is in ``test_faults``.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.files import read_object
from reason_llm.run.store import metrics

DIE_AT = Path(__file__).parents[1] / "fixtures" / "die_at.py"

SAMPLING = "reason_llm.sample.transformers_sampler:_DecodingBatch.extend"
LEARNING = "reason_llm.train.learner:Learner._update"
FINISHING = "reason_llm.app.report.curves:draw_curves"


def write_config(folder: Path) -> Path:
    """Two steps of four waves, two optimizer steps each, with dropout, a KL and an evaluation."""
    data = ROOT / "data"
    tree = {
        "run": {"directory": str(folder / "runs"), "buffer": str(folder / "buffer.json"),
                "steps": 2, "name": "run", "seed": 3},
        "model": {"path": str(TINY), "dtype": "float32", "adapter": {"rank": 8, "dropout": 0.1}},
        "data": {"train": str(data / "arithmetic_train.jsonl"), "system_prompt": "none",
                 "eval": str(data / "arithmetic_test.jsonl")},
        "sample": {"prompts_per_step": 4, "completions_per_prompt": 4, "max_new_tokens": 32},
        "score": {"rewards": [{"name": "think_answer_tags"}, {"name": "tag_count", "weight": 0.1}]},
        "algorithm": {"name": "grpo"},
        "train": {"learning_rate": 1e-3, "optimizer_steps": 2, "micro_batch_tokens": 128,
                  "gradient_checkpointing": False},
        "eval": {"every": 1, "limit": 8},
        "log": {"console": "plain"},
    }  # fmt: skip
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def call(
    config: Path, *arguments: str, at: tuple[str, int], signal: str = "SIGKILL"
) -> subprocess.CompletedProcess[str]:
    """Train one prompt a wave, and be ended by the signal at a call of a place."""
    return subprocess.run(
        [sys.executable, str(DIE_AT), at[0], str(at[1]), str(config), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PROMPTS_AT_ONCE": "1", "DIE_OF": signal},
    )


def train(config: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(config, *arguments, at=(LEARNING, 0))


def die(config: Path, place: str, count: int) -> None:
    ended = call(config, at=(place, count))
    assert ended.returncode == -9, f"{place} #{count} was not reached: {ended.stderr}"


def outcome(folder: Path) -> dict[str, object]:
    """Everything that must not depend on interruptions."""
    run = folder / "runs" / "run"
    newest = sorted((run / "checkpoints").iterdir())[-1]
    records = metrics.read(run)
    timeless = [
        {
            k: v
            for k, v in record.items()
            if not k.startswith(("time/", "memory/", "sample/tokens_"))
        }
        for record in records
    ]
    return {
        "adapter": (run / "adapter" / "adapter_model.safetensors").read_bytes(),
        "optimizer": (newest / "optimizer.safetensors").read_bytes(),
        "metrics": timeless,
        "curves": (run / "curves.png").read_bytes()[:8],
        "summary": {
            k: v
            for k, v in read_object(run / "summary.json").items()
            if not k.endswith(("_seconds", "_mib", "_gib", "adapter"))
        },
        "finished": orjson.loads((folder / "buffer.json").read_bytes())["trained"],
        "rollouts": orjson.loads((folder / "buffer.json").read_bytes())["groups"],
    }


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    done = train(write_config(folder))
    assert done.returncode == 0, done.stderr
    result = outcome(folder)
    assert [record["step"] for record in result["metrics"]] == [0, 1, 2]
    assert result["finished"]
    assert result["summary"]["steps"] == 2
    return result


@pytest.mark.long
def test_a_signal_while_learning(tmp_path: Path, uninterrupted: dict[str, object]) -> None:
    """The step is learned to its end and saved; on resuming nothing is learned twice."""
    config = write_config(tmp_path)
    ended = call(config, at=(LEARNING, 1), signal="SIGTERM")
    assert (ended.returncode, "stopped; the same" in ended.stderr) == (143, True)
    run = tmp_path / "runs" / "run"
    for command in (f"report.py {run}, ", f"chat.py {run}, ", f"export.py {run} --out FOLDER"):
        assert f" python scripts/{command}" in ended.stdout
    names = sorted(p.name for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir())
    assert names == ["step-00000000", "step-00000001"]
    resumed = call(config, at=(LEARNING, 3))
    assert resumed.returncode == 0, resumed.stderr  # a third update would have ended it
    assert outcome(tmp_path) == uninterrupted


@pytest.mark.long
def test_a_finished_run_is_left_alone_and_can_be_prolonged(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    assert train(config, "--run.steps", "1").returncode == 0
    run = tmp_path / "runs" / "run"
    before = (run / "adapter" / "adapter_model.safetensors").read_bytes()
    again = train(config, "--run.steps", "1")
    assert again.returncode == 0
    assert "finished at step 1" in again.stdout
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() == before
    die(config, FINISHING, 1)  # the old summary must not pass for the new one
    done = train(config)
    assert done.returncode == 0
    assert "stretches" not in done.stdout  # a constant rate
    assert orjson.loads((run / "summary.json").read_bytes())["steps"] == 2
    assert (run / "adapter" / "adapter_model.safetensors").read_bytes() != before


@pytest.mark.parametrize(
    ("place", "count"),
    [
        pytest.param(SAMPLING, 80, marks=pytest.mark.faults),
        pytest.param(LEARNING, 1, marks=pytest.mark.long),
    ],
)
def test_the_buffer_of_the_first_step_is_enough_to_go_on(
    place: str, count: int, tmp_path: Path, uninterrupted: dict[str, object]
) -> None:
    config = write_config(tmp_path)
    die(config, place, count)
    shutil.rmtree(tmp_path / "runs")
    resumed = train(config)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes from the rollouts in" in resumed.stdout
    assert ("sampled before" in resumed.stdout) == (place == LEARNING)
    assert outcome(tmp_path) == uninterrupted


@pytest.mark.faults
def test_the_buffer_of_a_later_step_needs_its_checkpoint(
    tmp_path: Path, uninterrupted: dict[str, object]
) -> None:
    """Without it, one line whose options work; with a copy of it, the run goes on."""
    config = write_config(tmp_path)
    die(config, LEARNING, 3)
    kept = (tmp_path / "buffer.json").read_bytes()
    (tmp_path / "runs" / "run").rename(tmp_path / "kept")
    refused = train(config)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    named = orjson.loads(kept)["checkpoint"]
    assert named == str(tmp_path / "runs" / "run" / "checkpoints" / "step-00000001")
    assert f"its checkpoint is missing: {named} is not there; restore it" in refused.stderr
    told = refused.stderr.strip().partition("these rollouts alone: the same command with ")[2]
    assert told == f"--run.name run_replay --from-buffer {tmp_path / 'buffer.json'}"
    replayed = train(config, *told.split())
    assert replayed.returncode == 0, replayed.stderr
    assert (tmp_path / "buffer.json").read_bytes() == kept
    copy = ("--run.resume", str(tmp_path / "kept" / "checkpoints" / "step-00000001"))
    again = train(config, *copy)
    assert again.returncode == 0, again.stderr
    assert "sampled before" in again.stdout
    found = outcome(tmp_path)
    whole = uninterrupted | {"metrics": uninterrupted["metrics"][1:]}  # type: ignore[index]
    assert found["metrics"][1:] == whole["metrics"][1:]  # type: ignore[index]
    for name in ("adapter", "optimizer", "rollouts", "finished"):
        assert found[name] == uninterrupted[name], name
    done = train(config, *copy)
    assert (done.returncode, "is finished at step 2" in done.stdout) == (0, True), done.stderr


@pytest.mark.faults
def test_a_buffer_of_part_of_a_later_step_can_still_be_learned_from(tmp_path: Path) -> None:
    """The rollouts get their rewards first."""
    config = write_config(tmp_path)
    die(config, SAMPLING, 180)
    value = orjson.loads((tmp_path / "buffer.json").read_bytes())
    assert (value["step"], value["complete"]) == (1, False)
    shutil.rmtree(tmp_path / "runs")
    refused = train(config)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    rescore, _, options = refused.stderr.strip().partition(", then the same command with ")
    _, script, buffer, *_ = rescore.partition("these rollouts alone: ")[2].split()
    scored = [sys.executable, str(ROOT / script), buffer, str(config)]
    done = subprocess.run(scored, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert train(config, *options.split()).returncode == 0


@pytest.mark.faults
def test_the_checkpoint_that_the_buffer_names_is_found_from_another_folder_of_runs(
    tmp_path: Path, uninterrupted: dict[str, object]
) -> None:
    config = write_config(tmp_path)
    die(config, LEARNING, 3)
    elsewhere = ("--run.directory", str(tmp_path / "others"))
    refused = train(config, *elsewhere, "--run.seed", "4")
    assert (refused.returncode, "run.seed: 3 -> 4" in refused.stderr) == (2, True)
    assert refused.stderr.count("\n") == 1
    resumed = train(config, *elsewhere)
    assert resumed.returncode == 0, resumed.stderr
    adapter = tmp_path / "others" / "run" / "adapter" / "adapter_model.safetensors"
    assert adapter.read_bytes() == uninterrupted["adapter"]
