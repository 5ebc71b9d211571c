"""Replicas on a real Ray cluster: the same adapter, to the last bit, whatever their number and
whatever happens to them.

The short form is in ``make long``; the rest is by ``make faults``.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replica_runs import SECONDS, Started, adapter, quick_start, records

from conftest import is_alive, until
from faults import RUNS, Fault, write_config
from reason_llm.config import Config
from reason_llm.errors import ConfigError
from reason_llm.loop import train
from reason_llm.replicas.entry_points import replicas_of
from reason_llm.replicas.errors import ReplicaError

pytest.importorskip("ray", reason="the extra ray is not installed")
STOPPED = 128 + signal.SIGINT
LEARN = "reason_llm.train.learner:Learners.learn"
UPDATE = "reason_llm.train.learner:Learner._update"
SAMPLE_BESIDE = "reason_llm.replicas.sharded_sampler:sample_lot"
"""By which a process beside the head samples a lot."""
STARTED_AGAIN = "are left and another one is started"
ARMS_AHEAD = Fault("ahead", "arms", ("reason_llm.replicas.ahead:Ahead.sample",))
"""As the samplers are first asked for a later step."""


@pytest.fixture(autouse=True)
def _(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cluster at a time, however the tests are dealt."""
    with (tmp_path_factory.getbasetemp().parent / "replicas.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


WITHOUT_RAY = """
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "ray":
            raise ImportError("nothing may import it")

sys.meta_path.insert(0, Blocker())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


LATE = """
import runpy, sys
from reason_llm.replicas import cluster
cluster.BEAT_SECONDS = 10_000.0
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_to_its_end(config: Path, *arguments: str) -> str:
    run = Started(config, *arguments)
    assert run.end() == 0, run.printed
    return run.printed


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quick start in 8 shards by one process, in which nothing can import Ray."""
    folder = tmp_path_factory.mktemp("alone")
    blocked = folder / "without_ray.py"
    blocked.write_text(WITHOUT_RAY)
    run = Started(quick_start(folder), "--run.shards", "8", before=[str(blocked)])
    assert run.end() == 0, run.printed
    return folder


@pytest.mark.long
def test_two_replicas_one_of_which_is_killed(tmp_path: Path, alone: Path) -> None:
    """The same adapter and the same metrics; one line says what happened; nothing is left."""
    fault = Fault("learning", "SIGKILL", (LEARN,), 2)
    run = Started(quick_start(tmp_path), "--run.replicas", "2", in_replicas=fault)
    assert run.end() == 0, run.printed
    told = [line for line in run.printed.splitlines() if "replica 1 (" in line]
    assert len(told) == 1, run.printed
    assert "died" in told[0]
    assert "1 of 2 replicas are left and another one is started" in told[0]
    assert adapter(tmp_path) == adapter(alone)
    assert records(tmp_path) == records(alone)
    assert run.left() == []
    assert run.replicas() == []


AS_ANOTHER_USER = """
ls "$1"; cat "$1"/ray/session_latest/logs/*; cat "$1"/peers-*; mv "$1/ray" "$1/gone"
mv "$1"/ray/session_latest/sockets/plasma_store "$1/gone"; touch "$1/planted" "$1/ray/planted"
mv "$1" "$1-gone"
"""


@pytest.mark.faults
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_can_read_write_and_move_nothing_of_a_cluster(tmp_path: Path) -> None:
    fault = Fault("learning", "waits", (LEARN,), 2)
    run = Started(quick_start(tmp_path), "--run.replicas", "2", fault=fault)
    run.wait_at_place()
    (folder,) = run.left()
    listing = sorted(path.name for path in folder.iterdir())
    assert listing[-1] == "ray" and listing[0].startswith("peers-")
    shown = subprocess.run(
        ["sh", "-c", AS_ANOTHER_USER, "sh", str(folder)],
        user=65534, group=65534, extra_groups=[], capture_output=True, text=True,
    )  # fmt: skip
    assert (shown.stdout, shown.stderr.count("\n")) == ("", 8), shown.stderr
    assert sorted(path.name for path in folder.iterdir()) == listing
    run.go_on()
    assert run.end() == 0, run.printed


@pytest.mark.faults
def test_sigterm_to_the_whole_group_saves_and_goes_on(tmp_path: Path, alone: Path) -> None:
    """What timeout, Slurm and systemd send."""
    config = quick_start(tmp_path)
    run = Started(config, "--run.replicas", "2", fault=Fault("learning", "waits", (LEARN,)))
    run.wait_at_place()
    os.killpg(run.process.pid, signal.SIGTERM)
    run.go_on()
    assert run.end() == 128 + signal.SIGTERM, run.printed
    assert run.printed.count("stopped; the same command resumes it") == 1, run.printed
    assert "Traceback" not in run.printed and "died" not in run.printed, run.printed
    run_to_its_end(config, "--run.replicas", "2")
    assert adapter(tmp_path) == adapter(alone)
    assert records(tmp_path) == records(alone)


@pytest.mark.faults
def test_a_sampler_is_killed_while_it_samples_ahead(tmp_path: Path) -> None:
    """The same adapter and the same metrics as of one process at the same staleness."""
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for each in (alone, killed):
        each.mkdir()
    stale = ("--run.max_staleness", "1")
    run_to_its_end(quick_start(alone, steps=3), "--run.shards", "8", *stale)
    run = Started(
        quick_start(killed, steps=3), "--run.samplers", "1", *stale,
        fault=ARMS_AHEAD, in_replicas=Fault("ahead", "SIGKILL", (SAMPLE_BESIDE,)),
    )  # fmt: skip
    assert run.end() == 0, run.printed
    told = [line for line in run.printed.splitlines() if "sampler 1 (" in line]
    assert len(told) == 1, run.printed
    assert "1 of 2 processes are left and another one is started" in told[0]
    assert " ahead " in run.printed
    assert adapter(killed) == adapter(alone)
    assert records(killed) == records(alone)
    assert run.replicas() == []


def test_without_the_extra_a_line_says_how_to_install_it(
    small_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ReplicaError) as refused:
        train(small_run(run__replicas=2))
    assert str(refused.value) == (
        "run.replicas=2 with run.samplers=0 needs Ray, which is not installed; install it with: "
        "pip install -e '.[ray]', or set them to 1 and 0"
    )
    assert not (tmp_path / "runs").exists()
    with pytest.raises(ReplicaError, match=r"run\.samplers=1 needs Ray.* set them to 1 and 0$"):
        replicas_of(small_run(**SAMPLER))


def test_a_cluster_without_a_token_is_refused(
    small_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ReplicaError, match="RAY_AUTH_MODE=disabled lets anyone"):
        train(small_run(run__replicas=2))
    assert not (tmp_path / "runs").exists()


REFUSED = "contradicts the 3 GPUs of this machine"
SAMPLER = {"run__samplers": 1, "run__max_staleness": 1}
JOINED = {"run__ray": "h:1"}


@pytest.mark.parametrize(
    ("replicas", "options", "gpus", "found"),
    [
        ("auto", {}, 0, 1), ("auto", {}, 3, 2), ("auto", {}, 4, 4), ("auto", {}, 20, 8),
        ("auto", SAMPLER, 0, 1), ("auto", SAMPLER, 1, "contradicts the 1 GPU of"),
        ("auto", SAMPLER, 2, 1), ("auto", SAMPLER, 3, 2), ("auto", JOINED, 0, 0),
        (1, {}, 3, 1), (2, SAMPLER, 3, 2), (4, {}, 3, REFUSED), (4, {}, 0, 4),
        (4, JOINED, 3, 4), (2, SAMPLER | {"run__samplers": 2}, 3, REFUSED),
    ],
)  # fmt: skip
def test_how_many_replicas(
    replicas: int | str, options: dict[str, Any], gpus: int, found: int | str,
    small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    config = small_run(run__replicas=replicas, **options)
    assert config.run.shards == (1 if replicas == 1 else 8)
    if isinstance(found, int):
        assert replicas_of(config) == found
    else:
        with pytest.raises(ConfigError, match=found):
            replicas_of(config)


# --- by make faults ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def start_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter to begin from."""
    folder = tmp_path_factory.mktemp("start") / "sft"
    run_to_its_end(write_config(folder, "sft"))
    return folder / "runs" / "run" / "adapter"


@pytest.mark.faults
def test_replicas_meet_before_their_first_heartbeat(tmp_path: Path) -> None:
    """Which tells addresses in a cluster of several machines alone."""
    late = tmp_path / "late.py"
    late.write_text(LATE)
    run = Started(quick_start(tmp_path), "--run.replicas", "2", before=[str(late)])
    assert run.end() == 0, run.printed
    assert "lost each other" not in run.printed
    written = (tmp_path / "runs" / "run" / "metrics.jsonl").read_text()
    assert written.count('"replicas/count":2.0') == 2


@pytest.mark.faults
@pytest.mark.parametrize("name", [name for name in RUNS if name not in ("strict", "full")])
def test_every_kind_of_run(name: str, tmp_path: Path, start_adapter: Path) -> None:
    """Every stage, ppo with its critic, opd with its teacher, dynamic sampling, 8-bit Adam."""
    if "{shared}/start/adapter" in str(RUNS[name].options):
        shutil.copytree(start_adapter, tmp_path / "start" / "adapter")
    digests = []
    for replicas in ("1", "2"):
        folder = tmp_path / replicas
        config = write_config(folder, name)
        run_to_its_end(config, "--run.shards", "4", "--run.replicas", replicas)
        digests.append(adapter(folder))
    assert digests[0] == digests[1]


STRUCK = [
    Fault("sampling", "SIGKILL", (SAMPLE_BESIDE,)),  # before training
    Fault("sampling", "SIGKILL", (f"after {SAMPLE_BESIDE}",), 4),
    Fault("learning", "SIGKILL", (LEARN,)),
    Fault("learning", "SIGKILL", (UPDATE,), 2),
    Fault("learning", "SIGKILL", (f"after {UPDATE}",), 2),
    Fault("learning", "SIGKILL", (f"after {LEARN}",), 3),
    Fault("sampling", "SIGSTOP", (SAMPLE_BESIDE,), 4),
    Fault("learning", "SIGSTOP", (UPDATE,), 2),
    Fault("sampling", "SIGTERM", (SAMPLE_BESIDE,), 4),
    Fault("learning", "SIGSEGV", (UPDATE,), 2),
]


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("four")
    run_to_its_end(quick_start(folder, steps=4), "--run.shards", "8")
    return folder


@pytest.mark.faults
@pytest.mark.parametrize("fault", STRUCK, ids=lambda fault: fault.name)
@pytest.mark.parametrize("replicas", ["2", "4"])
def test_a_replica_is_struck(replicas: str, fault: Fault, tmp_path: Path, four_steps: Path) -> None:
    config = quick_start(tmp_path, steps=4)
    run = Started(config, "--run.replicas", replicas, in_replicas=fault)
    assert run.end() == 0, run.printed
    assert run.printed.count(STARTED_AGAIN) == 1, run.printed
    assert adapter(tmp_path) == adapter(four_steps)
    assert records(tmp_path) == records(four_steps)


@pytest.mark.faults
def test_an_idle_replica_is_killed(tmp_path: Path, four_steps: Path) -> None:
    fault = Fault("evaluation", "waits", ("reason_llm.run.held_out:evaluate",))
    run = Started(quick_start(tmp_path, steps=4), "--run.replicas", "2", fault=fault)
    run.wait_at_place()
    (replica,) = run.replicas()
    os.kill(replica, signal.SIGKILL)
    run.go_on()
    assert run.end() == 0, run.printed
    assert run.printed.count(STARTED_AGAIN) == 1, run.printed
    assert adapter(tmp_path) == adapter(four_steps)
    assert records(tmp_path) == records(four_steps)


@pytest.fixture(scope="module")
def four_stale_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stale")
    run_to_its_end(quick_start(folder, steps=4), "--run.shards", "8", *STALE)
    return folder


STALE = ("--run.max_staleness", "1")
AHEAD = ("--run.replicas", "2", "--run.samplers", "1", *STALE)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "call", "head"),
    [(LEARN, 1, None), (f"after {UPDATE}", 2, None),
     (SAMPLE_BESIDE, 1, ARMS_AHEAD), (f"after {SAMPLE_BESIDE}", 1, ARMS_AHEAD)],
    ids=["learns", "has learned", "samples", "has sampled"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["SIGKILL", "SIGSTOP"])
def test_a_replica_or_a_sampler_is_struck_while_both_work(
    kind: str, place: str, call: int, head: Fault | None, tmp_path: Path, four_stale_steps: Path
) -> None:
    config, fault = quick_start(tmp_path, steps=4), Fault("", kind, (place,), call)
    run = Started(config, *AHEAD, fault=head, in_replicas=fault)
    assert run.end() == 0, run.printed
    assert run.printed.count(STARTED_AGAIN) == 1, run.printed
    assert adapter(tmp_path) == adapter(four_stale_steps)
    assert records(tmp_path) == records(four_stale_steps)


HEAD_FAULTS = [
    Fault("learning", "SIGKILL", ("reason_llm.train.learner:Learner._update",), 2),
    Fault("learning", "SIGKILL", ("after reason_llm.train.learner:Learner._update",), 3),
    Fault("ahead", "SIGKILL", ("open */ahead/.step-*.json.writing",), 2),
    Fault("ahead", "SIGKILL", ("rename */ahead/step-*.json",), 3),
    Fault("ahead", "torn write", ("rename */ahead/step-*.json",), 4),
    Fault("ahead", "ENOSPC", ("open */ahead/.step-*.json.writing",), 3, exits=(0,)),
    Fault("buffer", "ENOSPC", ("rename */buffer.json",), 4, exits=(2,)),
    Fault("checkpoint", "ENOSPC", ("open */state.json",), 2, exits=(2,)),
    Fault("checkpoint", "SIGKILL", ("rename */step-0000000?",), 2),
    Fault("checkpoint", "EROFS", ("reason_llm.run.store.checkpoint:save_file",), 3, exits=(2,)),
]


@pytest.mark.faults
@pytest.mark.parametrize("fault", HEAD_FAULTS, ids=lambda fault: fault.name)
def test_the_head_is_struck_at_a_place(
    fault: Fault, tmp_path: Path, four_stale_steps: Path
) -> None:
    """A full disk is one line or is got over; one process goes on to the same bits."""
    config = quick_start(tmp_path, steps=4)
    run = Started(config, *AHEAD, fault=fault)
    assert run.end() in (fault.exits or (-signal.SIGKILL,)), run.printed
    if 2 in fault.exits:
        last = run.printed.splitlines()[-1]
        assert "No space left" in last or "Read-only" in last, run.printed
    run_to_its_end(config, "--run.shards", "8", *STALE)
    assert adapter(tmp_path) == adapter(four_stale_steps)


ANOTHER_ADAPTER = """
import faulty_train, torch
calls = []

def move_by_a_hair(learner, *arguments):
    calls.append(1)
    if len(calls) == 2:
        with torch.no_grad():
            learner.parameters[0].view(-1)[0] += 1e-6

faulty_train.wrap("reason_llm.train.learner:Learner._update", faulty_train.nothing, move_by_a_hair)
"""


@pytest.mark.faults
def test_a_replica_with_another_adapter_ends_the_run(tmp_path: Path, four_steps: Path) -> None:
    config = quick_start(tmp_path, steps=4)
    run = Started(config, "--run.replicas", "2", in_replicas=ANOTHER_ADAPTER)
    assert run.end() == 2, run.printed
    last = run.printed.splitlines()[-1]
    assert "step 1: the replicas learned different adapters (0: " in last, run.printed
    run_to_its_end(config, "--run.replicas", "2")
    assert adapter(tmp_path) == adapter(four_steps)


@pytest.mark.faults
def test_a_cluster_is_joined_with_its_token_alone(tmp_path: Path, four_steps: Path) -> None:
    """With another token, or none, one line says what is missing; nothing is written."""
    token = "0123456789abcdef" * 4
    environment = os.environ | {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    started = Path(tempfile.mkdtemp(prefix="ray-")) / "ray_current_cluster"
    start = [
        sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", "0",
        "--num-cpus", "1", "--include-dashboard", "false", "--temp-dir", str(started.parent),
    ]  # fmt: skip
    daemon = subprocess.Popen(
        start, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert until(
            lambda: (started.exists() and started.read_text()) or daemon.poll() is not None
        )
        assert daemon.poll() is None
        address = f"127.0.0.1:{started.read_text().rpartition(':')[2]}"
        options = ("--run.replicas", "2", "--run.ray", address)
        for number, wrong in enumerate(({"RAY_AUTH_TOKEN": "f" * 64}, {"HOME": str(tmp_path)})):
            folder = tmp_path / f"refused-{number}"
            folder.mkdir()
            run = Started(quick_start(folder, steps=4), *options, environment=wrong)
            assert run.end() == 2, run.printed
            last = run.printed.splitlines()[-1]
            assert f"run.ray={address} cannot be joined" in last, run.printed
            assert "RAY_AUTH_TOKEN" in last
            assert not (folder / "runs" / "run" / "metrics.jsonl").exists()
        joined = Started(
            quick_start(tmp_path, steps=4), *options, environment={"RAY_AUTH_TOKEN": token}
        )
        assert joined.end() == 0, joined.printed
        assert adapter(tmp_path) == adapter(four_steps)
    finally:
        daemon.terminate()
        daemon.wait(SECONDS)


@pytest.mark.faults
@pytest.mark.parametrize(
    ("place", "call"),
    [("reason_llm.replicas.sharded_sampler:sample_lot", 2), (LEARN, 2), (UPDATE, 2),
     ("rename */step-0000000?", 3)],
    ids=["sampling", "learning", "optimizer step", "checkpoint"],
)  # fmt: skip
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_head_is_struck(
    number: signal.Signals, place: str, call: int, tmp_path: Path, four_steps: Path
) -> None:
    """The same command goes on; nothing is left running meanwhile."""
    config = quick_start(tmp_path, steps=4)
    run = Started(config, "--run.replicas", "2", fault=Fault("", "waits", (place,), call))
    run.wait_at_place()
    others = run.replicas()
    os.kill(run.process.pid, number)
    run.go_on()
    assert run.end() in (-signal.SIGKILL, STOPPED)
    assert until(lambda: not any(map(is_alive, others)))
    assert number == signal.SIGKILL or until(lambda: run.left() == [])
    run_to_its_end(config, "--run.shards", "8")  # by one process alone
    assert adapter(tmp_path) == adapter(four_steps)
