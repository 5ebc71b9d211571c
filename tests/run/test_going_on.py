"""Runs that are finished, ended by a signal, out of memory, or gone on with by another process."""

import os
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import orjson
import pytest

from conftest import ROOT, tree_of
from reason_llm.config import Config
from reason_llm.errors import BusyError, Stopped
from reason_llm.files import replacing_folder, sealed
from reason_llm.loop import train
from reason_llm.run.opening import open_run
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import checkpoint
from reason_llm.run.store.best import Best
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.kept_adapters import KeptAdapters
from reason_llm.run.watch import SILENT, Progress, Silent
from reward_runs import by_form, reward_config

Small = Callable[..., Config]
SHORT = {"sample__max_new_tokens": 4}
JUDGED = SHORT | {
    "data__eval": str(ROOT / "data" / "arithmetic_test.jsonl"), "eval__limit": 2, "eval__every": 1,
    "score__rewards": [{"name": "boxed"}],
}  # fmt: skip


class Lines(Silent):
    """Keeps the lines; sends SIGTERM where this phase begins for the ``count``-th time."""

    def __init__(self, phase: str = "", count: int = 0) -> None:
        self.lines: list[str] = []
        self.left = [phase] * count

    def line(self, text: str) -> None:
        self.lines.append(text)

    def phase(self, name: str, total: int) -> AbstractContextManager[Progress]:
        if name in self.left:
            self.left.pop()
            if not self.left:
                os.kill(os.getpid(), signal.SIGTERM)
        return super().phase(name, total)


def test_a_finished_run_is_told_and_what_is_damaged_is_written_again(small_run: Small) -> None:
    """No answer of 4 tokens is right: the base stays the best, and the first step is the last."""
    config = small_run(**JUDGED, eval__patience=1)
    summary = train(config)
    folder = config.run.directory / "small"
    told = Lines()
    before = tree_of(folder)
    assert train(config, told) == summary and tree_of(folder) == before
    assert told.lines[-1] == (
        f"{folder} was ended early at step 1 by eval.patience: raise it to continue, or start "
        "afresh with --run.resume never"
    )
    job = prepare(small_run(**JUDGED, run__steps=1), SILENT)
    assert job.finished(told) == summary
    assert told.lines[-1] == (
        f"{folder} is finished at step 1: raise --run.steps to continue, or start afresh with "
        "--run.resume never; these options differ from those of the run: eval.patience: 1 -> 0; "
        "to use them, give this run another --run.name"
    )
    assert prepare(small_run(**JUDGED, run__steps=2), SILENT).finished(told) is None
    weights = "adapter_model.safetensors"
    for name in ("summary.json", f"adapter/{weights}",
                 f"adapter_best/{weights}", "adapter_best/best.json"):  # fmt: skip
        path, whole = folder / name, before[name]
        path.write_bytes(whole[:-1])
        assert job.finished(told) is None, name
        path.unlink()
        assert job.finished(told) is None, name
        path.write_bytes(whole)
    other = {**orjson.loads(before["summary.json"]), "steps": 2}
    del other["sha256"]
    (folder / "summary.json").write_bytes(orjson.dumps(other))
    assert job.finished(told) is None
    (folder / "summary.json").write_bytes(before["summary.json"])
    for name in ("adapter", "adapter_best"):  # whole, and another one
        with replacing_folder(folder / name) as beside:
            for file in (weights, "best.json"):
                content = before.get(f"{name}/{file}", b"")
                (beside / file).write_bytes(content[:-1] + b"x" if file == weights else content)
        assert job.finished(told) is None
        (folder / name / weights).write_bytes(before[f"{name}/{weights}"])
        (folder / name / "digests.json").write_bytes(before[f"{name}/digests.json"])
    with replacing_folder(folder / "adapter_best") as beside:
        (beside / weights).write_bytes(before[f"adapter_best/{weights}"])
        record = before["adapter_best/best.json"]
        (beside / "best.json").write_bytes(record.replace(b'"step": 0', b'"step": 1'))
    assert job.finished(told) is None
    assert train(small_run(**JUDGED, run__steps=2))["best"]["step"] == 0
    assert (folder / "adapter_best" / "best.json").read_bytes() == record
    assert (folder / "adapter_best" / weights).read_bytes() == before[f"adapter_best/{weights}"]


def test_a_finished_run_names_the_options_that_it_was_not_run_with(
    small_run: Small, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is learned with them, so no line says that the run resumes with them."""
    config = small_run(**JUDGED, run__steps=1)
    summary, told = train(config), Lines()
    other = {"train.learning_rate": 5e-3, "eval.limit": 1}
    assert train(config.with_options(other), told) == summary
    folder = config.run.directory / "small"
    end = (
        "; these options differ from those of the run: eval.limit: 2 -> 1; train.learning_rate: "
        f"{config.train.learning_rate} -> 0.005; to use them, give this run another --run.name"
    )
    assert told.lines[-1] == (
        f"{folder} is finished at step 1: raise --run.steps to continue, or start afresh with "
        f"--run.resume never{end}"
    )
    assert not caplog.messages
    train(config.with_options({**other, "run.steps": 2}))
    assert [each for each in caplog.messages if "resumes with train.learning_rate" in each]


def test_a_best_adapter_without_its_weights_is_no_longer_the_best(
    small_run: Small, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    best = Best(3, "eval/loss", 1.0, "set", "accuracy")
    state = RunState(checkpoint.fresh("x", {}).run, 4, tmp_path, best=best)
    nothing: Any = None
    for keeps, left in ((True, None), (False, best)):
        config = small_run(run__keep_best=keeps)
        kept = KeptAdapters(config, tmp_path, ("", ""), *[nothing] * 3)
        assert kept.restore(state).best == left
    assert caplog.messages == ["adapter_best/ of step 3 was not kept: the next one is"]


@pytest.mark.parametrize(("phase", "count", "saved"), [
    ("sampling", 2, [0, 1]), ("learning", 2, [0, 2]),
])  # fmt: skip
def test_a_signal_saves_every_learned_step(
    phase: str, count: int, saved: list[int], small_run: Small
) -> None:
    config = small_run(**SHORT, run__save_every=3)
    with pytest.raises(Stopped) as stopped:
        train(config, Lines(phase, count))
    assert stopped.value.exit_code == 143
    folders = checkpoint.listing(config.run.directory / "small")
    assert [checkpoint.read(folder).step for folder in folders] == saved


class Crash(Silent):
    """Raises an error where the learning phase begins for the third time."""

    left = 3

    def phase(self, name: str, total: int) -> AbstractContextManager[Progress]:
        self.left -= name == "learning"
        if not self.left:
            raise ArithmeticError
        return super().phase(name, total)


def test_by_time_there_are_fewer_checkpoints_and_the_same_adapter(
    small_run: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a run that died two steps after its last checkpoint."""
    config = small_run(**SHORT, run__save_every=1, run__keep_checkpoints=9)
    run, weights = config.run.directory / "small", "adapter/adapter_model.safetensors"

    def steps() -> list[int]:
        return [checkpoint.read(folder).step for folder in checkpoint.listing(run)]

    train(config)
    assert steps() == [0, 1, 2, 3]
    by_steps = (run / weights).read_bytes()
    shutil.rmtree(run)
    config = config.with_options({"run.save_every": "auto"})
    monkeypatch.setattr(checkpoint, "FREE_SECONDS", 0.0)
    monkeypatch.setattr(checkpoint, "MAX_SHARE", 0.0)
    with pytest.raises(ArithmeticError):
        train(config, Crash())
    assert steps() == [0]
    train(config)
    assert steps() == [0, 1, 3]  # a resumed run does not know yet what one costs
    assert (run / weights).read_bytes() == by_steps


def test_a_run_that_another_process_went_on_with_is_called_again(small_run: Small) -> None:
    job = prepare(small_run(), SILENT)
    (job.folder / "checkpoints" / "step-00000001").mkdir(parents=True)
    with pytest.raises(BusyError, match=r"another process has just gone on with \S+small; call"):
        open_run(job, SILENT).__enter__()


@pytest.mark.long
def test_a_reward_model_that_is_another_one_is_written_again(tmp_path: Path) -> None:
    """Every file of a kept folder counts, although its digests fit."""
    config = reward_config(tmp_path, "rm", by_form, 1, keep_best=True)
    config = config.with_options({"train.rows_per_step": 4, "eval.limit": 4})
    train(config)
    run = config.run.directory / "rm"
    job, before = prepare(config, SILENT), tree_of(run)
    assert job.finished(Lines()) is not None
    pairs = {"adapter": "score.safetensors", "adapter_best": "reward.json"}
    for folder, name in pairs.items():
        shutil.copytree(run / folder, tmp_path / "kept")
        content = before[f"{folder}/{name}"]
        with replacing_folder(run / folder) as beside:
            for file in (tmp_path / "kept").glob("[!d]*"):
                shutil.copyfile(file, beside / file.name)
            if name == "reward.json":
                value = orjson.loads(content) | {"mean": 7.0}
                del value["sha256"]
                content = sealed(orjson.dumps(value))
            elif name == "adapter_config.json":
                content = content.replace(b'"lora_alpha": 16', b'"lora_alpha": 18')
            else:
                content = content[:-1] + bytes([content[-1] ^ 1])
            assert content != before[f"{folder}/{name}"]
            (beside / name).write_bytes(content)
        assert job.finished(Lines()) is None, (folder, name)
        shutil.rmtree(run / folder)
        (tmp_path / "kept").rename(run / folder)
    assert job.finished(Lines()) is not None


@pytest.mark.long
def test_the_best_reward_model_is_written_again_from_a_checkpoint(tmp_path: Path) -> None:
    """Its mean, too, while the run has not ended."""
    config = reward_config(tmp_path, "rm", by_form, 1)
    config = config.with_options({"train.rows_per_step": 4, "eval.limit": 4})
    train(config)
    best = config.run.directory / "rm" / "adapter_best"
    whole = (best / "reward.json").read_bytes()
    value = orjson.loads(whole) | {"mean": 7.0}
    del value["sha256"]
    shutil.copytree(best, tmp_path / "kept")
    with replacing_folder(best) as beside:
        for file in (tmp_path / "kept").glob("[!d]*"):
            shutil.copyfile(file, beside / file.name)
        (beside / "reward.json").write_bytes(sealed(orjson.dumps(value)))
    # Nothing is learned any more, so that the second step's evaluation is no better.
    train(config.with_options({"run.steps": 2, "eval.every": 0, "train.learning_rate": 0}))
    assert (best / "reward.json").read_bytes() == whole
