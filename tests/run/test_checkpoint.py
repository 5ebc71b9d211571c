"""Checkpoints: checksummed, written by a thread from a snapshot, damaged ones passed over."""

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file

from reason_llm.config import Config, TrainSection
from reason_llm.errors import CheckpointError
from reason_llm.files import MANIFEST, read_object, sealed
from reason_llm.model.base import Model
from reason_llm.run.store import checkpoint
from reason_llm.run.store.best import Best
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.train import optim

CONFIG = Config.model_validate({"data": {"train": "x"}}).model_dump(mode="json")


@pytest.fixture
def save(model: Model, tmp_path: Path) -> Callable[..., RunState]:
    """Save a step of one run, after an optimizer step."""
    parameters = [p for p in model.policy.parameters() if p.requires_grad]
    optimizer = optim.make_optimizer(parameters, TrainSection())
    state = checkpoint.fresh("small", CONFIG)

    def save(step: int, keep: int = 9, extra: dict[str, Any] | None = None) -> RunState:
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01 * step)
        optimizer.step()
        now = RunState(
            state.run, step, None, drawn=7 * step, micro_batch_tokens=step or None,
            best=Best(step, "eval/loss", 0.5 * step, "set", "mine", 2),
            metrics_sha256=f"{step}",
        )  # fmt: skip
        with BackgroundWriter() as writer:
            optimizers = {"policy": optimizer}
            return checkpoint.save(tmp_path, now, model, optimizers, keep, writer, extra or {})

    return save


def find(tmp_path: Path) -> RunState:
    return checkpoint.find(tmp_path, "small", CONFIG)


def test_the_newest_is_found_as_it_was(save: Callable[..., RunState], tmp_path: Path) -> None:
    saved = [save(step, keep=2) for step in range(3)]
    assert find(tmp_path) == saved[2]
    assert [folder.name for folder in checkpoint.listing(tmp_path)] == [
        "step-00000001", "step-00000002",
    ]  # fmt: skip
    names = {file.suffix for file in (saved[2].folder or tmp_path).iterdir()}
    assert names == {".json", ".safetensors"}


def test_rollouts_since_the_checkpoint_before_the_newest_are_needed(
    save: Callable[..., RunState], tmp_path: Path
) -> None:
    needed = [checkpoint.needed_from(tmp_path)]
    for step in (2, 5, 9):
        save(step)
        needed.append(checkpoint.needed_from(tmp_path))
    assert needed == [0, 2, 2, 5]


def test_what_a_user_put_beside_them_is_left_alone(
    save: Callable[..., RunState], tmp_path: Path
) -> None:
    saved = save(0)
    folder = saved.folder or tmp_path
    copies = [folder.with_name(f"{folder.name}{end}") for end in (".bak", "-good")]
    for copy in copies:
        shutil.copytree(folder, copy)
    packed = folder.with_name(f"{folder.name}.tar")
    packed.touch()
    assert find(tmp_path) == saved
    newest = save(1, keep=1)
    assert checkpoint.listing(tmp_path) == [newest.folder]
    assert all(path.exists() for path in (*copies, packed))


@pytest.mark.parametrize(
    "file",
    ["adapter_model.safetensors", "adapter_config.json", "optimizer.safetensors", "state.json"],
)
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "vast"])
def test_a_damaged_one_is_named_and_passed_over(
    file: str,
    damage: str,
    save: Callable[..., RunState],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = save(1), save(2)
    assert second.folder is not None
    path = second.folder / file
    content = bytearray(path.read_bytes())
    if damage == "gone":
        path.unlink()
    elif damage == "vast":  # a hole, which would be read for an hour
        os.truncate(path, 1 << 42)
    else:
        content[len(content) // 2] ^= 1
        path.write_bytes(content if damage == "flipped" else content[:-1])
    assert find(tmp_path) == first
    assert str(second.folder) in caplog.text
    save(2)
    assert find(tmp_path).step == 2


def test_none_that_is_whole_is_an_error(save: Callable[..., RunState], tmp_path: Path) -> None:
    folder = save(1).folder or tmp_path
    (folder / "state.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        find(tmp_path)


def test_a_finished_run_whose_checkpoints_are_gone_is_not_begun_anew(tmp_path: Path) -> None:
    assert find(tmp_path).step == 0
    (tmp_path / "summary.json").touch()
    with pytest.raises(CheckpointError, match="holds a finished run without its checkpoints"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: rewrite(folder, format=1), "format 1, this version reads 2"),
        (lambda folder: rewrite(folder, step=-1), "step: "),
        (lambda folder: note(folder, "state.json"), "state.json is missing"),
        (lambda folder: note(folder, "optimizer.safetensors"), "optimizer.safetensors is missing"),
        (lambda folder: note(folder, "adapter_model.safetensors"), "adapter_model.safetensors is"),
        (lambda folder: folder.rename(folder.with_name("x")) and folder.symlink_to("x"), "a link"),
    ],
)
def test_one_that_is_whole_and_lacks_something_is_passed_over(
    spoil: Callable[[Path], object], told: str, save: Callable[..., RunState], tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    first, folder = save(1), save(2).folder or tmp_path
    spoil(folder)
    assert find(tmp_path) == first
    assert told in caplog.text


def rewrite(folder: Path, **values: Any) -> None:
    """The checkpoint with another state, and the digest of that."""
    content = orjson.dumps(read_object(folder / "state.json") | values)
    (folder / "state.json").write_bytes(content)
    note(folder, "state.json", {"bytes": len(content), "sha256": sha256(content).hexdigest()})


def note(folder: Path, name: str, entry: dict[str, Any] | None = None) -> None:
    """Its list of digests with another entry, or without it."""
    files = read_object(folder / MANIFEST)["files"]
    files |= {name: entry}
    files = {name: entry for name, entry in files.items() if entry}
    (folder / MANIFEST).write_bytes(sealed(orjson.dumps({"files": files})))


def test_halves_of_a_killed_write_go_with_the_next(
    save: Callable[..., RunState], tmp_path: Path
) -> None:
    (half := tmp_path / "checkpoints" / ".step-00000001.writing").mkdir(parents=True)
    (other := tmp_path / "checkpoints" / ".mine").mkdir()
    save(2)
    assert (half.exists(), other.exists()) == (False, True)


def test_a_checkpoint_without_a_role_of_the_run_is_told(
    save: Callable[..., RunState], model: Model
) -> None:
    both: Any = {"policy": None, "critic": None}
    with pytest.raises(CheckpointError, match=r"has no critic: it is of a run without one; name"):
        checkpoint.restore(save(1), model, both)


def test_a_file_outside_the_checkpoint_is_not_looked_at(
    save: Callable[..., RunState], tmp_path: Path
) -> None:
    first = save(1)
    folder = save(2).folder or tmp_path
    value = read_object(folder / MANIFEST)
    value["files"]["../../secret"] = {"bytes": 0, "sha256": ""}
    (folder / MANIFEST).write_bytes(sealed(orjson.dumps(value)))
    assert find(tmp_path) == first


def test_what_is_written_is_what_was_when_it_was_asked_for(model: Model, tmp_path: Path) -> None:
    parameters = [p for p in model.policy.parameters() if p.requires_grad]
    optimizer = optim.make_optimizer(parameters, TrainSection())
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before = [p.detach().clone() for p in parameters]
    state = checkpoint.fresh("small", CONFIG)
    with BackgroundWriter() as writer:
        asked = threading.Event()
        writer.submit(asked.wait)
        writer.submit(optimizer.step)  # moves the parameters before the checkpoint's turn comes
        saved = checkpoint.save(tmp_path, state, model, {"policy": optimizer}, 2, writer)
        asked.set()
    assert not torch.equal(before[0], parameters[0])
    written = load_file(str((saved.folder or tmp_path) / "adapter_model.safetensors"))
    assert any(torch.equal(before[0], tensor) for tensor in written.values())
    moments = load_file(str((saved.folder or tmp_path) / "optimizer.safetensors"))
    assert float(moments["0.step"]) == 1


def test_a_new_run_begins_from_a_checkpoint(save: Callable[..., RunState], tmp_path: Path) -> None:
    source = save(3)
    assert source.folder is not None
    config = CONFIG | {"algorithm": CONFIG["algorithm"] | {"name": "dapo"}}
    begun = checkpoint.begin_from(source.folder, "other", config)
    assert begun == RunState(begun.run, 3, source.folder, drawn=21)
    assert (begun.run.name, begun.run.config) == ("other", config)
    assert begun.run.id != source.run.id
    assert checkpoint.begin_from(tmp_path, "other", config) == begun  # the run's folder will do
    assert checkpoint.begin_from(tmp_path, "third", config).run.id != begun.run.id
    save(4)
    assert checkpoint.begin_from(tmp_path, "other", config).run.id != begun.run.id
    other = CONFIG | {"model": CONFIG["model"] | {"path": "else"}}
    with pytest.raises(CheckpointError, match=r"model\.path: 'model/tiny' -> 'else'"):
        checkpoint.begin_from(tmp_path, "other", other)
    short = CONFIG | {"run": CONFIG["run"] | {"steps": 3}}
    with pytest.raises(CheckpointError, match=r"none is left; raise run\.steps"):
        checkpoint.begin_from(tmp_path, "other", short)
    with pytest.raises(CheckpointError, match="neither auto nor never"):
        checkpoint.begin_from(tmp_path / "nothing", "other", config)


@pytest.mark.parametrize(
    ("section", "change", "told"),
    [
        ("train", {"optimizer_steps": 3}, None), ("train", {"learning_rate": 0.5}, None),
        ("train", {"optimizer": "sgd"}, "train.optimizer"),
        ("model", {"train": "full"}, "model.train"),
        ("model", {"weights_sha256": "x"}, "model.weights_sha256"),
        ("model", {"adapter": {"rank": 3}}, "model.adapter."), ("run", {"seed": 5}, None),
        ("run", {"steps": 4}, None), ("run", {"steps": 3}, "none is left"),
    ],
)  # fmt: skip
def test_a_new_run_s_adapter_and_optimizer_are_of_the_checkpoint_s_kind(
    section: str, change: dict[str, Any], told: str | None, save: Callable[..., RunState],
    tmp_path: Path,
) -> None:  # fmt: skip
    save(3)
    config = CONFIG | {section: CONFIG[section] | change}
    with nullcontext() if told is None else pytest.raises(CheckpointError, match=told):
        assert checkpoint.begin_from(tmp_path, "other", config).step == 3


def test_an_earlier_checkpoint_s_file_is_one_file_of_both(
    save: Callable[..., RunState], tmp_path: Path
) -> None:
    """And stays where the earlier checkpoint is removed."""
    name = "best.adapter_model.safetensors"
    first = save(1, extra={name: {"a": torch.ones(2)}}).folder
    assert first is not None
    file = first / name
    number, noted = file.stat().st_ino, read_object(first / MANIFEST)["files"][name]
    second = save(2, keep=1, extra={name: file}).folder
    assert second is not None and not first.exists()
    assert (second / name).stat().st_ino == number
    assert read_object(second / MANIFEST)["files"][name] == noted
    assert checkpoint.read(second).step == 2  # it is compared with its digest
    (second / name).write_bytes(b"x")
    with pytest.raises(CheckpointError, match=f"{name} is not what was written"):
        checkpoint.read(second)


def test_the_one_that_is_written_and_a_user_s_link_are_kept(
    save: Callable[..., RunState], tmp_path: Path
) -> None:
    """A run that went on from an older checkpoint, as the later ones were damaged."""
    save(5)
    (tmp_path / "checkpoints" / "step-00000001").symlink_to(tmp_path)
    save(2, keep=1)
    assert [folder.name[-1] for folder in checkpoint.listing(tmp_path)] == ["1", "2", "5"]


def test_changes_are_told_where_none_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    warned = CONFIG | {"train": CONFIG["train"] | {"learning_rate": 0.5}}
    checkpoint.warn_of_changes(CONFIG, warned)
    assert len(caplog.messages) == 1 and "train.learning_rate" in caplog.text
    caplog.clear()
    refused = warned | {"run": CONFIG["run"] | {"seed": 5}}
    checkpoint.warn_of_changes(CONFIG, refused)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("step", "most", "versions"),
    [(5, 2, [3, 4]), (5, 0, []), (2, 3, [0, 1]), (9, 2, []), (7, 3, [4, 6]), (0, 2, [])],
)
def test_the_adapters_of_so_many_steps_before_it(
    step: int, most: int, versions: list[int], tmp_path: Path
) -> None:
    """Those that are there: of 0 to 4, and of 6."""
    assert checkpoint.version_file(12) == "version-00000012.safetensors"
    for version in (0, 1, 2, 3, 4, 6):
        tensors = {"x": torch.tensor([float(version)])}
        save_file(tensors, tmp_path / checkpoint.version_file(version))
    state = RunState(checkpoint.fresh("small", CONFIG).run, step, tmp_path)
    found = checkpoint.earlier_adapters(state, most)
    assert {version: each["x"].item() for version, each in found.items()} == {
        version: float(version) for version in versions
    }
    assert checkpoint.earlier_adapters(replace(state, folder=None), most) == {}
