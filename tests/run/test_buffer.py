"""The buffer: whole or not at all, held by one process, refused to another run."""

import gzip
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from reason_llm.app.rescore import accept_edited
from reason_llm.config import Config
from reason_llm.errors import BusyError, RolloutBufferError, WriteError
from reason_llm.files import sealed, write_atomically
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.store.buffer import RolloutBuffer, check
from reason_llm.run.store.document import RunIdentity, read_document


def identity(id: str = "run-a", **options: Any) -> RunIdentity:
    config = Config.model_validate({"data": {"train": "x"}, **options}).model_dump(mode="json")
    return RunIdentity(id, "small", config)


def group(name: str, reward: float = 1.0) -> Group:
    completions = tuple(
        Completion((5, i), f"text {i} ü", (-0.1, -2.5), "stop", {"boxed": reward}, reward, 0.5 - i)
        for i in range(2)
    )
    return Group(Prompt(name, "question", (1, 2, 3), "42"), completions)


def saved(path: Path, **options: Any) -> Path:
    with RolloutBuffer(path, identity()) as buffer:
        buffer.write(3, [group("a"), group("b")], whole=True, version=3)
    return path


def part(value: dict[str, Any]) -> dict[str, Any]:
    """The first completion of a document."""
    return value["groups"][0]["completions"][0]


OTHER = {"prompt_ids": [1], "token_ids": [2], "text": "", "logprobs": [-1.0],
         "spans": [{"start": 0, "end": 2}]}  # fmt: skip


def groups(buffer: RolloutBuffer, step: int) -> list[Group]:
    document = buffer.find(step)
    return [] if document is None else document.groups


def holds(buffer: RolloutBuffer, step: int) -> bool:
    document = buffer.find(step)
    return document is not None and document.complete


def test_what_is_written_is_read_back_equal(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    with RolloutBuffer(path, identity()) as buffer:
        assert holds(buffer, 3)
        assert groups(buffer, 3) == [group("a"), group("b")]
        assert buffer.find(2) is None
        assert buffer.find(4) is None


def test_a_document_is_read_plain_or_packed(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    packed = tmp_path / "step-00000003.json.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    for file in (path, packed):
        document = read_document(file)
        assert (document.run.id, document.step) == ("run-a", 3)
        assert document.groups == [group("a"), group("b")]
    packed.write_bytes(packed.read_bytes()[:-20])
    for file, reason in ((packed, "cannot be read"), (tmp_path / "no.json", "No such file")):
        with pytest.raises(RolloutBufferError, match=reason):
            read_document(file)


def test_waves_are_kept_until_the_step_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "buffer.json"
    with RolloutBuffer(path, identity()) as buffer:
        buffer.write(0, [group("a")], whole=False)
        buffer.write(0, [group("a"), group("b")], whole=False)
    with RolloutBuffer(path, identity()) as buffer:
        assert not holds(buffer, 0)
        assert groups(buffer, 0) == [group("a"), group("b")]
        buffer.write(0, [*groups(buffer, 0), group("c")], whole=True)
        buffer.write(1, [group("d")], whole=False)
        assert groups(buffer, 1) == [group("d")]


def test_it_is_one_json_document_with_version_run_and_step(tmp_path: Path) -> None:
    value = orjson.loads(saved(tmp_path / "buffer.json").read_bytes())
    assert (value["format"], value["run"]["id"], value["step"]) == (2, "run-a", 3)
    assert value["weight_version"] == 3
    completion = value["groups"][0]["completions"][0]
    assert completion["token_ids"] == [5, 0]
    assert completion["logprobs"] == [-0.1, -2.5]
    assert completion["rewards"] == {"boxed": 1.0}
    assert completion["finish_reason"] == "stop"


def test_another_run_is_refused_and_nothing_changes(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    before = path.read_bytes()
    with pytest.raises(RolloutBufferError, match=r"run-a.*run-b.*--run\.resume never"):
        RolloutBuffer(path, identity("run-b")).__enter__()
    with pytest.raises(RolloutBufferError, match=r"run\.seed: 0 -> 5"):
        RolloutBuffer(path, identity(run={"seed": 5})).__enter__()
    assert path.read_bytes() == before
    with RolloutBuffer(path, identity()) as buffer:  # the refusals let go of the lock
        assert holds(buffer, 3)


def test_a_finished_run_s_buffer_is_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    with RolloutBuffer(path, identity()) as buffer:
        buffer.finish()
    kept = path.read_bytes()
    with RolloutBuffer(path, identity("run-b")) as buffer:
        assert not holds(buffer, 3)
        assert path.read_bytes() == kept  # until there is something to write
        buffer.write(0, [group("c")], whole=False)
        assert groups(buffer, 0) == [group("c")]
    assert [file.name for file in tmp_path.glob("[!.]*")] == ["buffer.json"]


def test_a_run_that_ends_before_the_step_of_its_buffer_leaves_that_as_it_is(tmp_path: Path) -> None:
    """``run.steps`` was lowered while a step was sampled; raised again, the step goes on."""
    path, waiting = tmp_path / "buffer.json", group("b")
    waiting = replace(
        waiting,
        completions=tuple(
            replace(c, rewards={}, reward=None, advantage=None) for c in waiting.completions
        ),
    )
    with RolloutBuffer(path, identity()) as buffer:
        buffer.write(3, [group("a"), waiting], whole=False)
    with RolloutBuffer(path, identity()) as buffer:
        buffer.finish()
    with RolloutBuffer(path, identity()) as buffer:
        assert (holds(buffer, 3), groups(buffer, 3)) == (False, [group("a"), waiting])


def test_rollouts_of_a_later_step_are_moved_aside_not_overwritten(tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    kept = path.read_bytes()
    with RolloutBuffer(path, identity()) as buffer:
        buffer.write(1, [group("c")], whole=False)
    assert (tmp_path / "buffer.old-1.json").read_bytes() == kept


@pytest.mark.parametrize("keep", [0, 1, 40, -2])
def test_a_buffer_cut_short_is_named_and_left_alone(keep: int, tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    path.write_bytes(path.read_bytes()[:keep])
    before = path.read_bytes()
    with pytest.raises(RolloutBufferError, match=r"buffer\.json is cut short") as caught:
        RolloutBuffer(path, identity()).__enter__()
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "spoil",
    [
        lambda v: v.pop("groups"),
        lambda v: v.update(format=99),
        lambda v: v["run"].pop("id"),
        lambda v: v["groups"][0].pop("prompt"),
        lambda v: part(v).pop("logprobs"),
        lambda v: v["groups"][0]["completions"][0]["logprobs"].pop(),
        lambda v: part(v).update(extra=1),
        lambda v: v.update(groups=3),
        lambda v: v["groups"][0]["completions"][0]["token_ids"].__setitem__(0, "5"),
        lambda v: part(v).update(logprobs=[None, None]),
        lambda v: v["groups"][0].update(completions=[]),
        lambda v: v["groups"][0]["completions"][1].update(advantage=None),
        lambda v: v["run"].update(config=None),
        lambda v: v.update(step="three"),
        lambda v: v.update(groups=[]),
        lambda v: part(v).update(turn_advantages=[1.0, 2.0]),
        lambda v: part(v).update(others=[OTHER]),
        lambda v: part(v).update(others=[OTHER | {"spans": [], "logprobs": [-1.0, -1.0]}]),
        lambda v: part(v).update(rewards={"mine": 1.0}),
        lambda v: (v.update(complete=False), part(v).update(reward=None, advantage=None)),
    ],
)
def test_a_damaged_document_is_one_line(spoil: Any, tmp_path: Path) -> None:
    path = saved(tmp_path / "buffer.json")
    value = orjson.loads(path.read_bytes())
    del value["sha256"]
    spoil(value)
    path.write_bytes(sealed(orjson.dumps(value)))
    with pytest.raises(RolloutBufferError) as caught:
        RolloutBuffer(path, identity()).__enter__()
    assert "\n" not in str(caught.value)
    assert "is not what was written" not in str(caught.value)


EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    "a token id": lambda v: v["groups"][0]["completions"][1]["token_ids"].__setitem__(0, 6),
    "a prompt's token": lambda v: v["groups"][1]["prompt"]["token_ids"].__setitem__(2, 4),
    "an answer": lambda v: v["groups"][1]["prompt"].update(answer="43"),
    "a log-prob": lambda v: v["groups"][0]["completions"][0]["logprobs"].__setitem__(1, -2.4),
    "a reward": lambda v: part(v).update(reward=0.0),
    "an advantage": lambda v: part(v).update(advantage=-0.5),
    "drawn": lambda v: v.update(drawn=3),
    "a group less": lambda v: v["groups"].pop(),
    "a group twice": lambda v: v["groups"].append(v["groups"][0]),
    "groups in another order": lambda v: v["groups"].reverse(),
    "a seed": lambda v: v["run"]["config"]["run"].update(seed=1),
    "trained": lambda v: v.update(trained=True),
    "the digest": lambda v: v.update(sha256="0" * 64),
    "another kind of digest": lambda v: v.update(sha256=5),
    "without the digest": lambda v: v.pop("sha256"),
    "something new": lambda v: v.update(note="x"),
}


@pytest.mark.parametrize("suffix", ["json", "json.gz"])
@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_an_edited_document_is_not_what_was_written(
    edit: Callable[[dict[str, Any]], object], suffix: str, tmp_path: Path
) -> None:
    value = orjson.loads(saved(tmp_path / "whole.json").read_bytes())
    edit(value)
    content = orjson.dumps(value) + b"\n"
    path = tmp_path / f"buffer.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix == "json.gz" else content)
    before = path.read_bytes()
    with pytest.raises(RolloutBufferError, match="is not what was written") as caught:
        read_document(path)
    told = str(caught.value)
    assert "\n" not in told
    assert f"scripts/rescore.py {path} --accept-edited" in told
    with pytest.raises(RolloutBufferError, match=r"--run\.resume never"):
        check(path, identity())
    assert path.read_bytes() == before


def test_no_byte_of_a_document_can_change(tmp_path: Path) -> None:
    """Every seventh in turn: most leave valid JSON of the right form behind."""
    path = saved(tmp_path / "buffer.json")
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        others = [byte for byte in b"7 x" if byte != whole[place]]
        other = others[place % len(others)]
        path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
        with pytest.raises(RolloutBufferError):
            read_document(path)
    path.write_bytes(whole)
    assert read_document(path).groups == [group("a"), group("b")]


def test_the_digest_is_that_of_the_bytes_behind_it(tmp_path: Path) -> None:
    content = saved(tmp_path / "buffer.json").read_bytes()
    value = orjson.loads(content)
    assert list(value)[:2] == ["sha256", "format"]
    without = b"{" + content[content.index(b'"format"') :]
    assert value["sha256"] == hashlib.sha256(without).hexdigest()


def test_what_was_edited_on_purpose_is_accepted(tmp_path: Path) -> None:
    for suffix in ("json", "json.gz"):
        path = tmp_path / f"buffer.{suffix}"
        value = orjson.loads(saved(tmp_path / "whole.json").read_bytes())
        value["groups"].pop()
        content = orjson.dumps(value, option=orjson.OPT_INDENT_2)
        path.write_bytes(gzip.compress(content) if suffix == "json.gz" else content)
        assert accept_edited(path)
        assert read_document(path).groups == [group("a")]
        before = path.read_bytes()
        assert not accept_edited(path)
        assert path.read_bytes() == before
    path.write_bytes(gzip.compress(content[:-9]))
    with pytest.raises(RolloutBufferError, match="cut short or damaged"):
        accept_edited(path)
    with pytest.raises(RolloutBufferError, match="No such file"):
        accept_edited(tmp_path / "none" / "buffer.json")
    assert not (tmp_path / "none").exists()
    with RolloutBuffer(tmp_path / "buffer.json", identity()), pytest.raises(BusyError):
        accept_edited(tmp_path / "buffer.json")


def test_a_second_process_is_told_who_holds_it(tmp_path: Path) -> None:
    path = tmp_path / "buffer.json"
    code = (
        "import sys; from pathlib import Path\n"
        "from reason_llm.run.store.buffer import RolloutBuffer\n"
        "from reason_llm.run.store.document import RunIdentity\n"
        "RolloutBuffer(Path(sys.argv[1]), RunIdentity('x', 'x', {})).__enter__()\n"
    )
    with RolloutBuffer(path, identity()):
        other = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True)
        assert b"BusyError" in other.stderr
        assert f"process {os.getpid()} is using".encode() in other.stderr
    assert subprocess.run([sys.executable, "-c", code, str(path)]).returncode == 0


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match="No space left"):
        write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize("name", ["file/x", "x" * 250], ids=["in a file", "too long"])
def test_where_nothing_can_be_made_is_one_line(name: str, tmp_path: Path) -> None:
    """As on a disk that has become read-only: not even what is half done can be removed."""
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WriteError, match="cannot be written"):
        write_atomically(tmp_path / name, b"new")


def test_a_lock_in_an_unwritable_place_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(WriteError, match="cannot be written"):
        RolloutBuffer(tmp_path / "file" / "buffer.json", identity()).__enter__()
