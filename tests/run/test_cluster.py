"""What is asked of Ray, in whose place a module stands that notes it: who has a place, who is lost,
and what becomes of an error."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace as Named
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.errors import OutOfMemory, PeersLost, ReplicaError, Stopped
from reason_llm.run import stopping
from reason_llm.run.stopping import StopSignal
from reason_llm.run.team import cluster, reaper
from reason_llm.run.team.cluster import Call, Cluster, Member, alive

Small = Callable[..., Config]


class RayError(Exception):
    """As Ray's."""


class RayTaskError(RayError):
    """As Ray's, around another error."""

    def __init__(self, cause: BaseException) -> None:
        self.cause = cause


class Ray(ModuleType):
    """Notes what it is asked; a reference is ready if it is not None, and raised if an error."""

    def __init__(self) -> None:
        super().__init__("ray")
        self.exceptions = Named(RayError=RayError, RayTaskError=RayTaskError)
        self.util = Named(
            get_node_ip_address=lambda: "1.2.3.4",
            placement_group=lambda bundles, strategy: self.note("group", bundles, strategy),
        )
        self.there: dict[str, float] = {}
        self.has_place = True
        self.noted: list[Any] = []

    def note(self, *asked: Any) -> Any:
        self.noted.append(asked)
        return Named(wait=lambda seconds: self.has_place and seconds == 60.0)

    def wait(self, refs: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        return [ref for ref in refs if ref is not None], []

    def get(self, ref: Any) -> Any:
        if isinstance(ref, BaseException):
            raise ref
        return ref

    def kill(self, handle: Any) -> None:
        self.noted.append(("kill", handle))

    def cluster_resources(self) -> dict[str, float]:
        return self.there

    def remote(self, **options: Any) -> Any:
        options["scheduling_strategy"] = options["scheduling_strategy"].bundle
        self.noted.append(options)
        return lambda kind: Named(remote=lambda: "a process")


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    fake, strategies = Ray(), ModuleType("strategies")
    strategies.NodeAffinitySchedulingStrategy = None  # type: ignore[attr-defined]
    strategies.PlacementGroupSchedulingStrategy = (  # type: ignore[attr-defined]
        lambda group, placement_group_bundle_index: Named(bundle=placement_group_bundle_index)
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", strategies)
    return fake


@pytest.mark.parametrize(
    ("ref", "lost", "found", "left"),
    [
        ("the result", "", "the result", ""),
        ("the result", "died", "the result", "died"),
        (None, "was silent", PeersLost("replica 2 (m) was silent"), "was silent"),
        (RayTaskError(PeersLost("another")), "", PeersLost("another"), ""),
        (RayTaskError(OutOfMemory("big")), "", OutOfMemory("replica 2 (m): big"), ""),
        (RayTaskError(KeyError("x\ny")), "", PeersLost(), "failed (KeyError: 'x\\ny')"),
        (RayError("it fell. Long story"), "", PeersLost(), "died (it fell)"),
        (RayError("it fell. Long story"), "was silent", PeersLost(), "was silent"),
    ],
)
def test_what_a_call_gives(ref: Any, lost: str, found: Any, left: str, ray: Ray) -> None:
    member = Member(2, None, "m", lost=lost)
    call = Call(member, ref)
    assert call.is_done()
    if isinstance(found, str):
        assert call.result() == found
    else:
        with pytest.raises(type(found)) as raised:
            call.result()
        told = str(found) or f"replica 2 (m) {left}"
        assert (type(raised.value), str(raised.value)) == (type(found), told)
    assert member.lost == left
    assert not Call(Member(1, None), None).is_done()


@pytest.mark.parametrize(
    ("beat", "has_beaten", "after", "lost"),
    [
        (("host", "here", 7), False, 0.0, ""),
        (None, True, 60.0, ""),
        (None, True, 61.0, "was silent for 61 s"),
        (None, False, 300.0, ""),
        (None, False, 301.0, "was silent for 301 s"),
        (RayError("gone. x"), True, 0.0, "died (gone)"),
    ],
)
def test_a_heartbeat_is_listened_to(
    beat: Any, has_beaten: bool, after: float, lost: str, ray: Ray, small_run: Small,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(cluster, "time", Named(monotonic=lambda: 1000.0 + after))
    asked, told = [], []
    beats = Named(options=lambda **options: asked.append(options) or Named(remote=lambda: beat))
    member = Member(1, Named(beat=beats), heard=1000.0, has_beaten=has_beaten)
    connected = Cluster(small_run(run__replicas=2), 2)
    connected.on_loss = lambda: told.append(member.lost)
    connected._listen(member)
    assert asked == [{"concurrency_group": "heart"}]
    assert (member.lost, told) == (lost, [lost] if lost else [])
    assert ray.noted == ([("kill", member.handle)] if "silent" in lost else [])
    if isinstance(beat, tuple):
        assert (member.where, member.address, member.beat) == ("host, process 7", "here", None)
        assert (member.has_beaten, member.heard) == (True, 1000.0)
    connected._lose(member, "again")
    assert member.lost == (lost or "again")


CPU, GPU = {"CPU": 1.0}, {"GPU": 1.0, "CPU": 4.0}


@pytest.mark.parametrize(
    ("count", "samplers", "gpus", "there", "found", "bundles"),
    [
        (3, 0, 0, {}, 3, 2),
        (2, 1, 4, {}, 2, 2),
        (1, 0, 0, {}, 1, 0),
        (0, 0, 1, {"GPU": 7.0}, 4, 3),
        (0, 1, 1, {"GPU": 4.0}, 2, 2),
        (0, 0, 1, {}, 1, 0),
        (0, 0, 1, {"GPU": 64.0}, 8, 7),  # of 8 shards
    ],
)
def test_places_for_the_replicas(
    count: int, samplers: int, gpus: int, there: dict[str, float], found: int, bundles: int,
    ray: Ray, small_run: Small, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    ray.there = there
    config = small_run(run__replicas=2, run__samplers=samplers, run__max_staleness=1)
    connected = Cluster(config, count)
    connected._reserve()
    assert (connected.count, connected.total) == (found, found + samplers)
    each = GPU if gpus else CPU
    assert ray.noted == ([("group", [each] * bundles, "PACK")] if bundles else [])
    ray.noted.clear()
    if bundles:
        connected.members = [connected._start(number) for number in range(1, connected.total)]
        options = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "max_restarts": 0,
                   "concurrency_groups": {"heart": 1}}  # fmt: skip
        assert ray.noted == [options | {"scheduling_strategy": n} for n in range(bundles)]
        kinds = [(m.number, m.only_samples, m.address) for m in connected.members]
        assert kinds == [(n, n >= found, "") for n in range(1, bundles + 1)]  # its beat tells it
        connected.folder = Path("local")
        assert connected._start(1).address == "127.0.0.1"
        again = connected.start_again(connected.members[-1])
        assert (connected.members[-1], again.number) == (again, bundles)


def test_no_place_is_told_with_what_there_is(
    ray: Ray, small_run: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    ray.there, ray.has_place = {"GPU": 3.0, "CPU": 8.0}, False
    config = small_run(run__replicas=2, run__samplers=1, run__max_staleness=1)
    with pytest.raises(ReplicaError) as refused:
        Cluster(config, 4)._reserve()
    assert str(refused.value) == (
        "run.replicas=4 with run.samplers=1 finds no place in the cluster: beside this process it "
        "needs 4 times 1 GPU, 4 CPU, and in all there are 3 GPU, 8 CPU; lower it, or end what else "
        "runs there"
    )


@pytest.mark.parametrize(
    ("given", "told"),
    [("1", None), ("0", "gives this process GPU 0 and it uses GPU 1; call it again with "
                   "CUDA_VISIBLE_DEVICES=0"), (None, "has no free GPU on this machine")],
)  # fmt: skip
def test_the_head_s_gpu_is_held(
    given: str | None, told: str | None, ray: Ray, small_run: Small,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", " 1, 3,")
    assert cluster._visible_gpus() == ["1", "3"]
    connected = Cluster(small_run(run__replicas=2, run__ray="h:1"), 2)
    holder = Named(gpu=Named(remote=lambda: given))
    if told is None:
        connected._check_gpu(holder)
    else:
        with pytest.raises(ReplicaError, match=told):
            connected._check_gpu(holder)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert cluster._visible_gpus() == ["0", "1"]


def test_who_lives_and_can_be_asked() -> None:
    def member(**values: Any) -> Member:
        done = values.pop("done", True)
        return Member(
            1, None, **{"address": "here", "opened": Named(is_done=lambda: done)} | values
        )

    lives = member()
    others = [member(lost="died"), member(opened=None), member(done=False), member(address="")]
    assert alive([*others, lives]) == [lives]
    assert [member(only_samples=kind).name for kind in (True, False)] == [
        "sampler 1 (not started)", "replica 1 (not started)",
    ]  # fmt: skip


def test_the_environment_is_as_it_was_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HERE", "before")
    monkeypatch.delenv("THERE", raising=False)
    with pytest.raises(KeyError), cluster._environment({"HERE": "1", "THERE": "2"}):
        assert (os.environ["HERE"], os.environ["THERE"]) == ("1", "2")
        raise KeyError
    assert (os.environ["HERE"], "THERE" in os.environ) == ("before", False)


def test_processes_of_a_folder_but_the_head(tmp_path: Path) -> None:
    """A folder of a longer name is another one."""
    (tmp_path / "ray").mkdir()
    with (tmp_path / "ray" / "log").open("w") as log:
        child = subprocess.Popen(["sleep", "60"], stdout=log)
        try:
            own, folder = os.getpid(), str(tmp_path / "ray")
            assert reaper.users_of(folder, own) == [child.pid]
            assert reaper.users_of(folder, child.pid) == []
            assert reaper.users_of(str(tmp_path / "ra"), 0) == []
        finally:
            child.kill()
            child.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_at_once(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[int] = []
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    before = signal.getsignal(number)
    with StopSignal() as stop:
        stop.check()
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert (stop.requested, ended) == (True, [])
        with pytest.raises(Stopped) as stopped:
            stop.check()
        os.kill(os.getpid(), number)
        assert ended == [128 + number] == [stopped.value.exit_code]
        monkeypatch.setattr(sys, "ps1", "> ", raising=False)
        with pytest.raises(KeyboardInterrupt):
            stop._note(number, None)
    assert signal.getsignal(number) == before
    kept: list[Any] = []

    def elsewhere() -> None:
        with StopSignal():
            kept.append(signal.getsignal(number))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert kept == [before]
