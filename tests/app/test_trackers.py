"""Trackers: what they hold is what metrics.jsonl holds, once; whatever they do, the run goes on."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from trackio.sqlite_storage import SQLiteStorage

from conftest import ROOT
from reason_llm.app import trackers, training
from reason_llm.app.console import Console
from reason_llm.app.trackers import Trackers
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from reason_llm.errors import ConfigError
from reason_llm.run import Begun, Record

SECRET = "0123456789abcdef0123456789abcdef01234567"
RUN_ID = "abc123def456"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and nothing outside of the test's own folder."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    # A service that somebody started before keeps the run of a killed process.
    monkeypatch.delenv("WANDB_SERVICE", raising=False)
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
    """A run's folder, without records: a tracker gets them from the run."""
    folder = tmp_path / "runs" / "small"
    folder.mkdir(parents=True)
    (folder / "resolved_config.yaml").write_text(
        to_yaml(small_run(data__system_prompt=f"Words. {SECRET} and more."))
    )
    return folder


def record(step: int) -> Record:
    return {"step": step, "score/reward": step / 8, "time/total_seconds": 2.0}


def begun(folder: Path, steps: int = 0) -> Begun:
    return Begun(folder, RUN_ID, folder.name, steps, 9, [record(step) for step in range(steps)])


def tensorboard(folder: Path) -> list[tuple[int, float]]:
    return [
        (event.step, value.tensor.float_val[0])
        for file in sorted((folder / "tensorboard").glob("events*"))
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
        if value.tag == "score/reward"
    ]


def wandb(folder: Path) -> list[tuple[int, float]]:
    """From the newest file, which ``wandb sync`` reads, by a reader of the test's own."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb"))[-1:]:
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


FOLLOWS = """
import sys, time
from pathlib import Path
from reason_llm.app import trackers as module
from reason_llm.app.trackers import Trackers
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run import Begun
folder, names, before, last = Path(sys.argv[1]), sys.argv[2].split(), *map(int, sys.argv[3:5])
module.LIMIT_SECONDS = 600.0  # on a loaded machine the service of wandb takes its time
def record(step):
    return {"step": step, "score/reward": step / 8, "time/total_seconds": 2.0}
group = Group(
    Prompt("row:1", "What is 1 + 2?", (1,), "3", {}),
    (Completion((1, 2), "It is 3.", (-0.5, -0.5), "stop", reward=1.0, advantage=0.25),),
)
begun = Begun(folder, "RUN_ID", folder.name, before, 9, [record(step) for step in range(before)])
with Trackers(names) as trackers:
    trackers.start(begun)
    for step in range(before, last):
        trackers.write(record(step), group)
        trackers.alert(step, "No signal", "All rewards are equal.")
    if len(sys.argv) > 5:
        time.sleep(1000)
""".replace("RUN_ID", RUN_ID)


@pytest.mark.long
def test_each_holds_each_step_once_also_after_a_kill(folder: Path) -> None:
    """A run that is killed, and goes on from an earlier checkpoint."""
    command = [sys.executable, "-c", FOLLOWS, str(folder), " ".join(READERS)]
    first = subprocess.Popen([*command, "0", "4", "and waits"])
    until(lambda: len(tensorboard(folder)) == len(trackio(folder)) == 4, first)
    first.kill()
    first.wait()
    ended(service_of(first))
    again = subprocess.run([*command, "3", "6"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert "stopped" not in again.stderr, again.stderr
    expected = [(step, step / 8) for step in range(6)]
    for name, read in READERS.items():
        assert read(folder) == expected, name
    name = f"{folder.name}-{RUN_ID}"
    rollout = {"prompt": "What is 1 + 2?", "completion": "It is 3.", "reward": 1, "advantage": 0.25}
    logs = SQLiteStorage.get_logs("reason_llm", name)
    assert logs[-1]["rollouts"]["_value"] == [{"step": 5, **rollout}]
    alarms = SQLiteStorage.get_alerts("reason_llm", name)  # a kill loses those in its queue
    assert {each["step"] for each in alarms if each["title"] == "No signal"} >= {3, 4, 5}
    events = b"".join(file.read_bytes() for file in (folder / "tensorboard").glob("events*"))
    assert b"It is 3." in events and b"All rewards are equal." in events
    *_, table = folder.glob(f"wandb/offline-run-*-{RUN_ID}/files/media/table/rollouts_5_*")
    assert orjson.loads(table.read_bytes())["data"] == [[5, *rollout.values()]]
    config = orjson.dumps(SQLiteStorage.get_run_config("reason_llm", f"{folder.name}-{RUN_ID}"))
    for part in (b"prompts_per_step", b"think_answer_tags"):
        assert part in config
    for file in folder.parent.parent.rglob("*"):
        if file.is_file() and file.name != "resolved_config.yaml":
            assert SECRET.encode() not in file.read_bytes(), file


@pytest.mark.long
def test_wandb_without_a_key_ends_the_command_before_the_model_is_loaded(tmp_path: Path) -> None:
    """It finds a key where wandb does, and needs none offline."""
    host = f"machine api.wandb.ai\n  login user\n  password {SECRET}\n"
    (tmp_path / "netrc").write_text(host)
    check = "from reason_llm.app.trackers import check_login; check_login(['tensorboard', 'wandb'])"
    train = [str(ROOT / "scripts" / "train.py"), "--log.trackers", "wandb"]
    without = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    missing = "log.trackers=wandb: No API key configured. Use `wandb login` to log in; run wandb"
    for arguments, given, problem in (
        (train, {}, missing),
        (["-c", check], {"WANDB_API_KEY": "short"}, "API key must have 40+ characters"),
        (["-c", check], {"WANDB_API_KEY": SECRET}, ""),
        (["-c", check], {"NETRC": str(tmp_path / "netrc")}, ""),
        (["-c", check], {"WANDB_MODE": "offline"}, ""),
    ):
        command, env = [sys.executable, *arguments], {**without, **given}
        run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert (run.returncode == 0) == (not problem), run.stderr
        assert problem in run.stderr and "starts" not in run.stderr + run.stdout


def service_of(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """wandb's own process beside a run's, which ends by itself when the run's is gone."""
    return [
        each
        for each in psutil.process_iter(["cmdline"])
        if f"--pid {process.pid}" in " ".join(each.info["cmdline"] or ())
    ]


def ended(processes: list[psutil.Process]) -> None:
    assert not psutil.wait_procs(processes, timeout=600)[1]


def until(holds: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    for _ in range(6000):
        if holds():
            return
        assert process.poll() is None
        time.sleep(0.1)
    process.kill()
    raise AssertionError("it did not come to be within ten minutes")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            RuntimeError(f"no\nway \x1b[2J {SECRET}"),
            r"RuntimeError: no way \x1b[2J <WANDB_API_KEY>",
        ),
        (SystemExit("enough"), "SystemExit: enough"),
    ],
)
def test_a_tracker_that_fails_is_one_warning(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: BaseException,
    problem: str,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("trackio.Run.log", fail)
    with Trackers(["trackio", "tensorboard"]) as followers:
        followers.start(begun(folder, 3))
        for step in range(3, 6):
            followers.write(record(step))
    assert tensorboard(folder) == [(step, step / 8) for step in range(6)]
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith(f"the tracker trackio stopped ({problem}); the run continues")


@pytest.mark.long
def test_a_tracker_that_hangs_is_dropped(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    released = threading.Event()
    scalar = "torch.utils.tensorboard.SummaryWriter.add_scalar"
    monkeypatch.setattr(scalar, lambda *_: released.wait())
    monkeypatch.setattr(trackers, "LIMIT_SECONDS", 5.0)
    with Trackers(["tensorboard"]) as followers:
        followers.start(begun(folder, 0))
        for step in range(3):
            followers.write(record(step))
    released.set()
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith(
        "the tracker tensorboard stopped (TimeoutError: a call took longer than 5 s)"
    )


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


@pytest.mark.parametrize("value", ["mlflow", [1]])
def test_wrong_names_are_refused(small_run: Callable[..., Config], value: Any) -> None:
    with pytest.raises(ValueError, match=r"log\.trackers"):
        small_run(log__trackers=value)


def test_tensorboard_holds_each_step_once(folder: Path) -> None:
    """Nothing is left of an earlier start."""
    for steps in (3, 2):
        with Trackers(["tensorboard"]) as followers:
            followers.start(begun(folder, steps))
            for step in range(steps, 4):
                followers.write(record(step))
        assert tensorboard(folder) == [(step, step / 8) for step in range(4)]
    (file,) = (folder / "tensorboard").glob("events*")
    found = [event for event in EventFileLoader(str(file)).Load() if event.summary.value]
    assert not [event for event in found if SECRET.encode() in event.SerializeToString()]
