"""Whether a run has ended where its config asks, from its files alone."""

import shutil
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.config import Config
from reason_llm.errors import CheckpointError, ConfigError
from reason_llm.run.store import folder
from reason_llm.run.store.best import Best

BEST = asdict(Best(3, "eval/accuracy", 0.5, "digest", "accuracy", evaluations_since=2))


def make(run: Path, resolved: int, newest: int, **summary: Any) -> Path:
    checkpoint = run / "checkpoints" / f"step-{newest:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / folder.ADAPTER_CONFIG).write_text("{}")
    (run / folder.CONFIG).write_text(f"run:\n  steps: {resolved}\n")
    if summary:
        (run / "summary.json").write_bytes(orjson.dumps(summary))
    return run


@pytest.mark.parametrize(
    ("run", "asked", "patience", "expected"),
    [
        ({"resolved": 5, "newest": 5, "steps": 5}, 5, 0, True),
        ({"resolved": 5, "newest": 5, "steps": 5}, 6, 0, False),
        ({"resolved": 9, "newest": 9, "steps": 9}, 5, 0, True),  # prolonged
        ({"resolved": 9, "newest": 7, "steps": 5}, 5, 0, False),  # prolonged and killed
        ({"resolved": 9, "newest": 5, "steps": 5}, 5, 0, True),  # killed before it took a step
        ({"resolved": 5, "newest": 5}, 5, 0, False),
        ({"resolved": 7, "newest": 7, "steps": 7}, None, 0, True),
        ({"resolved": 9, "newest": 7, "steps": 7}, None, 0, False),  # of more epochs
        ({"resolved": 9, "newest": 5, "steps": 5, "best": BEST}, 9, 2, True),
        ({"resolved": 9, "newest": 5, "steps": 5, "best": BEST}, 9, 3, False),
        ({"resolved": 9, "newest": 5, "steps": 5, "best": BEST}, 9, 0, False),
        ({"resolved": 9, "newest": 5, "steps": 5, "best": {"step": "?"}}, 9, 2, False),
    ],
    ids=str,
)
def test_a_run_ends_where_its_config_asks(
    run: dict[str, Any], asked: int | None, patience: int, expected: bool, tmp_path: Path
) -> None:
    assert folder.has_ended(make(tmp_path / "run", **run), asked, patience) is expected


def test_a_damaged_config_is_told(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5, 5, steps=5)
    (run / folder.CONFIG).write_text("run: [")
    assert folder.has_ended(run, 5, 0)
    with pytest.raises(ConfigError, match=r"resolved_config\.yaml is not valid YAML"):
        folder.has_ended(run, None, 0)
    whole = folder.config_to_bytes(Config.model_validate({"data": {"train": "x"}}))
    (run / folder.CONFIG).write_bytes(whole)
    assert folder.read_config(run, {"run.steps": 7}).run.steps == 7
    (run / folder.CONFIG).write_bytes(whole.replace(b"seed: 0", b"seed: 1", 1))
    for read in (folder.read_config, lambda run: folder.has_ended(run, None, 0)):
        with pytest.raises(ConfigError, match=r"resolved_config\.yaml is damaged \(it is not what"):
            read(run)


def test_a_reward_model_s_adapter_is_no_policy(tmp_path: Path) -> None:
    folder.refuse_reward_model(tmp_path)
    (tmp_path / folder.SCORE_HEAD).touch()
    with pytest.raises(ConfigError, match="is a reward model's adapter, which scores completions"):
        folder.refuse_reward_model(tmp_path)
    (tmp_path / folder.CONFIG).touch()  # a run's folder says so by its config
    folder.refuse_reward_model(tmp_path)


@pytest.mark.parametrize(
    ("steps", "checkpoints", "found", "learned"),
    [
        (5, [4, 5], "adapter", 5),
        (5, [5, 7], "checkpoints/step-00000007", 7),  # it goes on
        (5, [3], "adapter", 5),
        (5, [], "adapter", 5),
        (None, [2, 3], "checkpoints/step-00000003", 3),  # it has not ended, or was damaged
    ],
)
@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_the_latest_adapter_of_a_run(
    steps: int | None, checkpoints: list[int], found: str, learned: int, kind: str, tmp_path: Path
) -> None:
    file = folder.ADAPTER_CONFIG if kind == "adapter" else folder.MODEL
    for name in (kind, *(f"checkpoints/step-{step:08d}" for step in checkpoints)):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / file).write_text("{}")
    (tmp_path / "checkpoints" / "step-00000009.bak").mkdir(parents=True)
    if steps is not None:
        (tmp_path / "summary.json").write_text(f'{{"steps": {steps}}}')
    adapter = folder.find_adapter(tmp_path)
    assert adapter == tmp_path / (kind if found == "adapter" else found)
    assert folder.learned_steps(tmp_path, adapter) == learned
    assert folder.finished_steps(tmp_path) == steps
    shutil.rmtree(tmp_path / kind)
    with nullcontext() if checkpoints else pytest.raises(CheckpointError, match="holds neither"):
        assert folder.find_adapter(tmp_path) == folder.listing(tmp_path)[-1]
