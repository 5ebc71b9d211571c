"""Trackers: what they hold is what metrics.jsonl holds, once; whatever they do, the run goes on."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import orjson
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from trackio.sqlite_storage import SQLiteStorage

from conftest import ROOT
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.tracker_process import Tail
from reason_llm.app.trackers import Trackers
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from reason_llm.errors import ConfigError
from reason_llm.run import metrics

SECRET = "0123456789abcdef0123456789abcdef01234567"
RUN_ID = "abc123def456"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and nothing outside of the test's own folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{path}")


@pytest.fixture
def folder(small_run: Callable[..., Config], tmp_path: Path) -> Path:
    """A run's folder with the records of steps 0 to 2."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(
        to_yaml(small_run(data__system_prompt=f"Words. {SECRET} and more."))
    )
    for step in range(3):
        add(folder, step)
    return folder


def add(folder: Path, step: int) -> None:
    record = {
        "step": step, "score/reward": step / 8, "time/total_seconds": 2.0,
    }  # fmt: skip
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(orjson.dumps(record) + b"\n")


def tensorboard(folder: Path) -> list[tuple[int, float]]:
    return [
        (event.step, value.tensor.float_val[0])
        for file in sorted((folder / "tensorboard").glob("events*"))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "score/reward"
    ]


def wandb(folder: Path) -> list[tuple[int, float]]:
    """From the files that ``wandb sync`` would read, by a reader of the test's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        content, at = file.read_bytes(), 7
        assert len(content) < 32768  # one block: no record is split
        while at < len(content):
            length = int.from_bytes(content[at + 4 : at + 6], "little")
            record = Record.FromString(content[at + 7 : at + 7 + length])
            at += 7 + length
            if record.HasField("history"):
                values = {
                    item.key or "/".join(item.nested_key): item.value_json
                    for item in record.history.item
                }
                found.append((int(values["_step"]), float(values["score/reward"])))
    return found


def trackio(folder: Path) -> list[tuple[int, float]]:
    logs = SQLiteStorage.get_logs("reason_llm", f"{folder.name}-{RUN_ID}")
    return [(log["step"], log["score/reward"]) for log in logs]


READERS = {"tensorboard": tensorboard, "wandb": wandb, "trackio": trackio}


def test_each_holds_each_step_once_also_after_a_kill(folder: Path) -> None:
    """Followed, killed with its processes in the middle, and gone on from an earlier checkpoint."""
    code = (
        "import sys, time, pathlib; from reason_llm.app.trackers import Trackers\n"
        f"trackers = Trackers({list(READERS)!r})\n"
        f"trackers.start(pathlib.Path({str(folder)!r}), {RUN_ID!r})\n"
        "print(*(process.pid for process in trackers._processes.values()), flush=True)\n"
        "time.sleep(60)"
    )
    first = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    pids = [int(pid) for pid in first.stdout.readline().split()]
    until(lambda: len(tensorboard(folder)) == len(trackio(folder)) == 3, first)
    add(folder, 3)
    first.kill()  # they see it by themselves and write step 3
    first.wait()
    first.stdout.close()
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), first)
    assert all(len(read(folder)) == 4 for read in READERS.values())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join(lines[:3]))
    others = folder / "wandb" / "offline-run-20260101_000000-fedcba654321"
    others.mkdir()
    with Trackers(list(READERS)) as trackers:
        trackers.start(folder, RUN_ID)
        for step in (3, 4, 5):
            add(folder, step)
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
    assert others.is_dir()
    expected = [(step, step / 8) for step in range(6)]
    for name, read in READERS.items():
        assert read(folder) == expected, name
    config = orjson.dumps(SQLiteStorage.get_run_config("reason_llm", f"{folder.name}-{RUN_ID}"))
    for part in (b"prompts_per_step", b"think_answer_tags"):
        assert part in config
    for file in folder.parent.parent.rglob("*"):
        if file.is_file() and file.name != "resolved_config.yaml":
            assert SECRET.encode() not in file.read_bytes(), file


def until(holds: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    for _ in range(300):
        if holds():
            return
        time.sleep(0.1)
    if process is not None:
        process.kill()
    raise AssertionError("it did not come to be within 30 s")


def replaced(name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of that name which does something else, for the processes to come."""
    (tmp_path / "fake" / name).mkdir(parents=True)
    (tmp_path / "fake" / name / "__init__.py").write_text(code)
    path = os.environ["PYTHONPATH"]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'fake'}{os.pathsep}{path}")


NEVER_SECONDS = 1000
"""What a tracker that hangs takes."""
BROKEN = {
    "raises": ("import os\nraise RuntimeError('no\\nway \\x1b[2J ' + os.environ['WANDB_API_KEY'])",
               r"RuntimeError: no way \x1b[2J <WANDB_API_KEY>"),
    "is killed": ("import os\nos.kill(os.getpid(), 9)", "its process ended with code -9"),
    "hangs": (f"import time\ntime.sleep({NEVER_SECONDS})", "it was not done 2 s after the run"),
}  # fmt: skip


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]


@pytest.mark.parametrize("fault", BROKEN)
def test_a_tracker_that_fails_is_one_warning(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    code, problem = BROKEN[fault]
    replaced("trackio", code, tmp_path, monkeypatch)
    monkeypatch.setattr(Trackers, "GRACE_SECONDS", 2.0)
    with Trackers(["trackio", "tensorboard"]) as trackers:
        started = time.monotonic()
        trackers.start(folder, RUN_ID)
        assert time.monotonic() - started < NEVER_SECONDS / 10  # nothing waits for them
        until(lambda: len(tensorboard(folder)) == 3)
        add(folder, 3)
        until(lambda: len(tensorboard(folder)) == 4)  # the other one is not held up
        if fault != "hangs":
            until(lambda: bool(warnings(caplog)))
        ending = time.monotonic()
    assert time.monotonic() - ending < NEVER_SECONDS / 10
    (warning,) = warnings(caplog)
    assert warning.startswith(f"the tracker trackio stopped ({problem}")


def test_a_run_with_a_tracker_that_hangs_is_the_same_run(
    small_run: Callable[..., Config],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from reason_llm.app import training

    replaced("trackio", "import time\ntime.sleep(1000)", tmp_path, monkeypatch)
    monkeypatch.setattr(Trackers, "GRACE_SECONDS", 5.0)
    config = small_run(run__steps=2, log__trackers=["trackio", "tensorboard"])
    training.run_training(config, Console("quiet"))
    folder = config.run.directory / "small"
    records = metrics.read(folder / "metrics.jsonl")
    assert tensorboard(folder) == [
        (record["step"], pytest.approx(record["score/reward"])) for record in records[1:]
    ]
    (warning,) = (warning for warning in caplog.messages if "tracker" in warning)
    assert "trackio" in warning


def test_the_process_ends_by_itself_when_the_run_is_gone(folder: Path) -> None:
    """Also one that hangs, and its lock goes with it: it is not here when the run goes on."""
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "reason_llm.app.tracker_process",
            "tensorboard",
            str(folder),
            RUN_ID,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    told = f"open: tensorboard --logdir {folder}/tensorboard\n"
    assert process.communicate(b"", timeout=15) == (told.encode(), None)
    assert process.returncode == 0


def test_a_full_file_and_its_successor_are_one_series(folder: Path) -> None:
    with closing(Tail(folder)) as tail:
        steps = [record["step"] for record in tail.read()]
        add(folder, 3)
        newer, older = metrics.files(folder)
        newer.rename(older)  # as MetricsLog does when a file is full
        steps += [record["step"] for record in tail.read()]  # there is no successor yet
        add(folder, 4)
        steps += [record["step"] for record in tail.read()]
        assert steps == [0, 1, 2, 3, 4]
        newer.unlink()  # the folder is another run's
        add(folder, 0)
        assert list(tail.read()) == []
    add(folder, 5)
    with closing(Tail(folder)) as tail:
        assert [record["step"] for record in tail.read()] == [0, 1, 2, 3, 0, 5]


def test_one_that_is_not_installed_is_refused(
    small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = small_run(log__trackers="wandb")
    with pytest.raises(
        ConfigError, match=r"wandb is not installed; pip install -e '.\[trackers\]'"
    ):
        training.run_training(config, Console("quiet"))
    assert not config.run.directory.exists()


@pytest.mark.parametrize("value", ["mlflow", ["wandb", "wandb"], [1]])
def test_wrong_names_are_refused(small_run: Callable[..., Config], value: Any) -> None:
    with pytest.raises(ValueError, match=r"log\.trackers|twice"):
        small_run(log__trackers=value)


def test_the_console_says_how_each_tracker_is_opened(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "reason_llm.app.trackers")
    with Trackers(list(READERS)) as trackers:
        trackers.start(folder, RUN_ID)
        until(lambda: len(caplog.messages) == 3)
    told = dict(message.split(": ", 1) for message in caplog.messages)
    assert told["tensorboard"] == f"tensorboard --logdir {folder}/tensorboard"
    assert told["trackio"] == "trackio show --project reason_llm"
    assert told["wandb"].startswith(f"wandb sync {folder}/wandb/offline-run-")
