"""Whether a run has ended, from its files alone."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.config import Config
from reason_llm.errors import CheckpointError, ConfigError
from reason_llm.run.store import folder


def make(run: Path, newest: int, **summary: Any) -> Path:
    checkpoint = run / "checkpoints" / f"step-{newest:08d}"
    checkpoint.mkdir(parents=True)
    (checkpoint / folder.ADAPTER_CONFIG).write_text("{}")
    config = Config.model_validate({"data": {"train": "x"}, "run": {"steps": 9}})
    (run / folder.CONFIG).write_bytes(folder.config_to_bytes(config))
    if summary:
        (run / "summary.json").write_bytes(orjson.dumps(summary))
    return run


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({"newest": 5, "steps": 5}, True),
        ({"newest": 7, "steps": 5}, False),  # prolonged and killed
        ({"newest": 5}, False),
    ],
    ids=str,
)
def test_a_run_has_ended_where_it_took_no_step_since(
    run: dict[str, Any], expected: bool, tmp_path: Path
) -> None:
    assert folder.has_ended(make(tmp_path / "run", **run)) is expected
    adapter = tmp_path / "run" / "adapter"
    with (
        nullcontext()
        if expected
        else pytest.raises(
            CheckpointError, match=r"model\.start=.* belongs to a run that has not ended; finish it"
        )
    ):
        folder.check_ended("model.start", adapter)
    folder.check_ended("model.start", tmp_path / "run" / "adapter_best")
    folder.check_ended("model.start", tmp_path / "of_another_program" / "adapter")


def test_a_damaged_config_is_told(tmp_path: Path) -> None:
    run = make(tmp_path / "run", 5, steps=5)
    whole = (run / folder.CONFIG).read_bytes()
    assert folder.read_config(run, {"run.steps": 7}).run.steps == 7
    for damaged, told in (
        (b"run: [", "is not valid YAML"),
        (whole.replace(b"seed: 0", b"seed: 1", 1), r"is damaged \(it is not what"),
    ):
        (run / folder.CONFIG).write_bytes(damaged)
        with pytest.raises(ConfigError, match=rf"resolved_config\.yaml {told}"):
            folder.read_config(run)


def test_a_reward_model_s_adapter_is_no_policy(tmp_path: Path) -> None:
    folder.check_writes(tmp_path, "chat")
    (tmp_path / folder.SCORE_HEAD).touch()
    with pytest.raises(ConfigError, match="is a reward model's adapter, which scores completions"):
        folder.check_writes(tmp_path, "chat")
    (tmp_path / folder.CONFIG).touch()  # a run's folder says so by its config
    folder.check_writes(tmp_path, "chat")


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
