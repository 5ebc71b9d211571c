"""Past buffers: kept compressed, within their bound; a damaged one is passed over."""

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from reason_llm.config import Config
from reason_llm.errors import RolloutBufferError
from reason_llm.rollout import Completion, Group, Prompt, shortest_decimals
from reason_llm.run.start import saved_rollouts
from reason_llm.run.start.saved_rollouts import default_target
from reason_llm.run.store.archive import Archive
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.document import (
    Document,
    RunIdentity,
    read_document,
    to_bytes,
    unfinished_run,
)

RUN = RunIdentity(
    "a", "small", Config.model_validate({"data": {"train": "x"}}).model_dump(mode="json")
)


def document(step: int, tokens: int = 3) -> Document:
    rng = np.random.default_rng(step)
    ids = tuple(rng.integers(0, 99, tokens).tolist())
    logprobs = tuple(shortest_decimals(-rng.random(tokens)))
    completion = Completion(ids, "text", logprobs, "stop", {"boxed": 1.0}, 1.0, 0.5)
    groups = [Group(Prompt("p", "q", (1, 2), "3"), (completion, completion))]
    return Document(RUN, step, True, False, 1, groups)


def steps(folder: Path) -> list[int]:
    return [read_document(file).step for file in sorted(folder.glob("step-????????.json.gz"))]


def test_what_is_kept_is_read_back_equal(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 1 << 30)
    archive.add(document(0))
    archive.add(document(1))
    file = archive.folder / "step-00000001.json.gz"
    assert read_document(file) == document(1)
    assert archive.read(1, RUN) == document(1)
    assert archive.read(2, RUN) is None
    assert not [p for p in archive.folder.iterdir() if p.name.startswith(".")]


def test_only_the_same_run_and_config_gets_it_back(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 1 << 30)
    archive.add(document(0))
    assert archive.read(0, replace(RUN, id="b")) is None
    changed = Config.model_validate({"data": {"train": "x"}, "train": {"learning_rate": 0.5}})
    assert archive.read(0, replace(RUN, config=changed.model_dump(mode="json"))) is None
    free = Config.model_validate({"data": {"train": "x"}, "run": {"steps": 5}})
    assert archive.read(0, replace(RUN, config=free.model_dump(mode="json"))) == document(0)


def test_the_oldest_go_first_and_the_newest_stays(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 1 << 30)
    archive.add(document(0, 200))
    size = (archive.folder / "step-00000000.json.gz").stat().st_size
    small = Archive(tmp_path, int(2.5 * size))
    for step in range(1, 5):
        small.add(document(step, 200))
    assert steps(archive.folder) == [3, 4]
    assert sorted(p.name for p in archive.folder.glob("step-*")) == [
        "step-00000003.json.gz", "step-00000004.json.gz",
    ]  # fmt: skip
    Archive(tmp_path, 1).add(document(5, 200), needed_from=4)
    assert steps(archive.folder) == [4, 5]  # a checkpoint may need them, whatever the bound
    Archive(tmp_path, 1).add(document(6, 200))
    assert steps(archive.folder) == [6]


def test_a_step_that_is_learned_again_takes_its_own_place(tmp_path: Path) -> None:
    archive = Archive(tmp_path, 1 << 30)
    for step in (0, 1, 2, 1):
        archive.add(document(step, 9 if step == 1 else 3))
    assert steps(archive.folder) == [0, 1, 2]


def test_a_rescored_file_beside_an_archived_one_is_the_user_s(tmp_path: Path) -> None:
    """It is of the same step: it would be learned a second time, or be deleted in the other's
    place."""
    archive = Archive(tmp_path, 1 << 30)
    for step in range(2):
        archive.add(document(step))
    theirs = default_target(archive.folder / "step-00000000.json.gz")
    theirs.write_bytes(to_bytes(document(0, 200), compressed=True))
    names = [file.name for file in saved_rollouts.files(tmp_path)]
    assert names == ["step-00000000.json.gz", "step-00000001.json.gz"]
    Archive(tmp_path, 1).add(document(2))
    assert steps(archive.folder) == [2]
    assert sorted(p.name for p in archive.folder.glob("step-*")) == [
        theirs.name, "step-00000002.json.gz",
    ]  # fmt: skip


def test_a_file_of_another_step_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = Archive(tmp_path, 1 << 30)
    for step in range(3):
        archive.add(document(step))
    (archive.folder / "step-00000002.json.gz").replace(archive.folder / "step-00000001.json.gz")
    assert archive.read(1, RUN) is None
    assert "step-00000001.json.gz holds step 2; it is skipped" in caplog.text


def kept(steps: list[int], folder: Path) -> None:
    """An archive of these steps."""
    for step in steps:
        Archive(folder, 1 << 30).add(document(step))


@pytest.mark.parametrize("steps", [[0, 1, 2], [4, 5]], ids=str)  # of the second the oldest went
def test_an_archive_without_a_gap_is_learned_from_in_order(
    steps: list[int], tmp_path: Path
) -> None:
    kept(steps, tmp_path)
    names = [file.name for file in saved_rollouts.files(tmp_path)]
    assert names == [f"step-{step:08d}.json.gz" for step in steps]


@pytest.mark.parametrize(
    ("steps", "missing"), [([0, 2], 1), ([0, 1, 2, 4], 3), ([0, 3], 2)], ids=str
)
def test_a_gap_in_an_archive_is_told(steps: list[int], missing: int, tmp_path: Path) -> None:
    kept(steps, tmp_path)
    with pytest.raises(RolloutBufferError, match=f"lacks step-0000{missing:04d}.json.gz") as caught:
        saved_rollouts.files(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_damaged_file_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    archive = Archive(tmp_path, 1 << 30)
    archive.add(document(3))
    damaged = archive.folder / "step-00000003.json.gz"
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert archive.read(3, RUN) is None
    assert "step-00000003.json.gz cannot be read" in caplog.text


def test_whose_unfinished_rollouts_a_file_holds(tmp_path: Path) -> None:
    kept = document(3)
    assert unfinished_run(tmp_path / "none.json") is None
    held = {"x": to_bytes(kept), "y": to_bytes(replace(kept, trained=True)), "z": b"{"}
    for name, content in held.items():
        (tmp_path / name).write_bytes(content)
        assert unfinished_run(tmp_path / name) == ("small" if name == "x" else None)


def test_a_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reason_llm.run.store.document.MAX_BYTES", 1 << 20)
    path = tmp_path / "x.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 21)))
    with pytest.raises(RolloutBufferError, match=r"\(it is larger than 1 MiB\)"):
        read_document(path)


@pytest.mark.long
def test_512_rollouts_of_2000_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    words = ["therefore", " the", " of", " = ", "12", "\n"]

    def completion() -> Completion:
        ids = rng.integers(0, 150_000, 2000).tolist()
        logprobs = tuple(shortest_decimals(-rng.exponential(0.5, 2000)))
        text = "".join(words[i % 6] for i in ids)
        return Completion(tuple(ids), text, logprobs, "stop", {"boxed": 1.0}, 1.0, 0.5)

    prompt = Prompt("data.jsonl:1", "q" * 400, tuple(range(100)), "42")
    groups = [Group(prompt, tuple(completion() for _ in range(8))) for _ in range(64)]
    path = tmp_path / "buffer.json"
    with RolloutBuffer(path, RUN) as buffer:
        buffer.write(0, groups, whole=True)
        assert read_document(path).groups == groups
    assert path.stat().st_size <= 30e6


def test_a_missing_last_step_is_told_by_the_summary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    archive = Archive(run, 1 << 30)
    for step in range(3):
        archive.add(document(step))
    (run / "resolved_config.yaml").write_text("run: {}")
    (run / "summary.json").write_text('{"steps": 3}')
    for source in (run, run / "buffers"):
        found = saved_rollouts.files(source)
        assert saved_rollouts.missing_steps(source, found) == (0, 3)
    (run / "buffers" / "step-00000002.json.gz").unlink()
    for source in (run, run / "buffers"):
        found = saved_rollouts.buffer_files(source)
        assert saved_rollouts.missing_steps(source, found) == (1, 2)
        with pytest.raises(
            RolloutBufferError, match=r"lacks step-00000002.*after step 1 comes the end at 3"
        ):
            saved_rollouts.files(source)
