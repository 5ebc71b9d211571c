"""Ray: finds machines, starts a process for each replica, and says when one is dead or silent.

A local cluster listens on the loopback address alone; every cluster has token authentication, and a
dashboard is never started. Read against Ray 2.60: ray/_private/worker.py, ray/_private/services.py.
"""

import functools
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from reason_llm.config import Config
from reason_llm.errors import ReasonError, one_line
from reason_llm.replicas.entry_points import power_of_two
from reason_llm.replicas.errors import PeersLost, ReplicaError

LOOPBACK = "127.0.0.1"
GPU_REPLICA = {"GPU": 1.0, "CPU": 4.0}
CPU_REPLICA = {"CPU": 1.0}
BEAT_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""Without a heartbeat a replica counts as dead."""
PLACE_SECONDS = 60.0
"""Time limit for a cluster to find a place for the replicas."""
START_SECONDS = 300.0
"""Time limit for the first heartbeat of a new process, and for the start of a local cluster."""
POLL_SECONDS = 0.1
MAX_TEMPORARY_BYTES = 19
"""Longest name of the temporary folder: paths of sockets are 88 bytes longer, and may have 107."""
OBJECT_STORE_BYTES = 1 << 30
"""Ray's object store of a local cluster, for an adapter's state and a step's rows."""


class Host:
    """A replica's process as Ray knows it."""

    def beat(self) -> tuple[str, str, int]:
        """Name and address of its machine, and its process."""
        import ray

        return socket.gethostname(), ray.util.get_node_ip_address(), os.getpid()

    def do(self, method: str, *arguments: Any) -> Any:
        """Call a method of the ``Replica``, which ``open`` makes; ``warm`` only imports it, which
        takes long."""
        from reason_llm.replicas.replica import Replica

        if method == "open":
            self._replica = Replica(*arguments)
        elif method != "warm":
            return getattr(self._replica, method)(*arguments)
        return None


@dataclass(slots=True, eq=False)
class Member:
    """A replica in another process."""

    number: int
    """From 1; this process is replica 0."""
    handle: Any
    """Ray's handle of the process."""
    where: str = "not started"
    """The machine and the process id."""
    address: str = ""
    """Its address for the others; on several machines its first heartbeat tells it."""
    only_samples: bool = False
    version: int | None = None
    """Learned steps of its adapter; None: untrained, or unknown."""
    held: int | None = None
    """Learned steps of the adapter that it samples by; None: it was given none."""
    lost: str = ""
    """The reason why it was lost; empty while it lives."""
    opened: "Call | None" = None
    heard: float = field(default_factory=time.monotonic)
    beat: Any = None
    has_beaten: bool = False

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"{'sampler' if self.only_samples else 'replica'} {self.number} ({self.where})"


class Call:
    """A running call of a replica's method."""

    def __init__(self, member: Member, ref: Any) -> None:
        self.member = member
        self._ref = ref

    def is_done(self, seconds: float = 0.0) -> bool:
        """Whether there is a result or an error, or the replica is lost, within these seconds."""
        import ray

        ready, _ = ray.wait([self._ref], timeout=seconds)
        return bool(ready) or bool(self.member.lost)

    def result(self) -> Any:
        """Wait for the method's result.

        Raises:
            PeersLost: the replica is dead, silent or failed, or it lost another one.
            ReasonError: raised by the method.
        """
        import ray

        member = self.member
        while not self.is_done(1.0):
            pass  # wakes each second, as the heartbeat may say that the replica is lost
        ready, _ = ray.wait([self._ref], timeout=0)
        if not ready:
            raise PeersLost(f"{member.name} {member.lost}")
        try:
            return ray.get(self._ref)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, PeersLost):
                raise PeersLost(str(cause)) from None
            if isinstance(cause, ReasonError):
                raise type(cause)(f"{member.name}: {cause}") from None
            member.lost = f"failed ({type(cause).__name__}: {one_line(cause):.300})"
        except ray.exceptions.RayError as error:
            member.lost = member.lost or f"died ({_cause(error)})"
        raise PeersLost(f"{member.name} {member.lost}")


class Cluster:
    """Connection to a Ray cluster, and the replicas in it.

    Args:
        count: replicas with this process; 0: as many as the cluster has GPUs for.

    Raises (on entry):
        ReplicaError: the cluster cannot be started or joined, or has no place for the replicas.
    """

    def __init__(self, config: Config, count: int) -> None:
        self._config = config
        self.count = count
        self.samplers = config.run.samplers
        """Further processes, which only sample."""
        self.on_loss: Callable[[], None] = lambda: None
        """Called from another thread when a replica is found dead or silent."""
        self.members: list[Member] = []
        self.address = LOOPBACK
        """Address of this machine for the replicas."""
        self.folder: Path | None = None
        """Temporary folder of a local cluster; no other user can enter it or Ray's own in it."""
        self._daemons: list[subprocess.Popen[bytes]] = []
        """Ray's, of a local cluster; each is the first of a session."""
        self._group: Any = None
        self._holder: Any = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._own_gpu = torch.cuda.device_count() > 0
        self._share = GPU_REPLICA if self._own_gpu else CPU_REPLICA
        """The resources of the cluster that one replica takes."""

    @property
    def total(self) -> int:
        """Replicas, this process among them, and samplers."""
        return self.count + self.samplers

    def __enter__(self) -> Self:
        with _own_sigterm():
            try:
                self._connect()
                self._reserve()
            except BaseException:
                self._close()
                raise
        for number in range(1, self.total):
            self.members.append(self._start(number))
        self._thread = threading.Thread(target=self._watch, name="replicas", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        with _own_sigterm():
            self._close()

    def start_again(self, member: Member) -> Member:
        """Start a new process for a lost replica, without waiting for it."""
        member = self._start(member.number)
        self.members[member.number - 1] = member
        return member

    def call(self, member: Member, method: str, *arguments: Any) -> Call:
        """Call ``Host.do``, after the calls before it."""
        return Call(member, member.handle.do.remote(method, *arguments))

    def shared(self, value: Any) -> Any:
        """The value as an argument of several calls, sent once."""
        import ray

        return ray.put(value)

    def end(self, member: Member) -> None:
        """End a replica's process."""
        import ray

        ray.kill(member.handle)

    def _connect(self) -> None:
        address = self._config.run.ray
        environment = {"RAY_USAGE_STATS_ENABLED": "0"}  # no usage reports
        if address is not None:
            # Without it Ray does not send the token that the environment names.
            with _environment(environment | {"RAY_AUTH_MODE": "token"}):
                self._join(address)
            return
        is_short = len(os.fsencode(tempfile.gettempdir())) <= MAX_TEMPORARY_BYTES
        folder = tempfile.mkdtemp(prefix="reason_llm-", dir=None if is_short else "/tmp")
        self.folder = Path(folder)
        gpus = _visible_gpus()[1:]  # the first is this process's
        environment |= {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": _token(),
            # Ray's own switch for a cluster of one machine, on which it takes the loopback address.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            # How long its daemons wait for each other: 30 to 60 s otherwise.
            "RAY_gcs_server_port_wait_time_s": f"{START_SECONDS:.0f}",
            "RAY_agent_register_timeout_ms": f"{1000 * START_SECONDS:.0f}",
            "RAY_worker_register_timeout_seconds": f"{START_SECONDS:.0f}",
        }
        if self._own_gpu:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        with _environment(environment):
            self._start_local(self.folder / "ray", len(gpus))

    def _join(self, address: str) -> None:
        import ray

        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # noqa: BLE001  (Ray has no class for all of them)
            raise ReplicaError(
                f"run.ray={address} cannot be joined ({one_line(error):.300}); start the cluster "
                "with: ray start --head, and give this process its token (RAY_AUTH_TOKEN, or "
                "RAY_AUTH_TOKEN_PATH)"
            ) from None
        self.address = ray.util.get_node_ip_address()
        _silence_ray()

    def _start_local(self, folder: Path, gpus: int) -> None:
        import ray  # here, as it reads the environment when it is imported

        try:
            with _own_start(self._daemons):
                ray.init(
                    num_cpus=int(self._share["CPU"])
                    * (self.total - 1),  # Ray's workers, made ahead
                    num_gpus=gpus,
                    object_store_memory=OBJECT_STORE_BYTES,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    _temp_dir=str(folder),
                )
        except Exception as error:  # noqa: BLE001
            raise ReplicaError(
                f"Ray cannot start on this machine ({one_line(error):.300}); set run.replicas to 1 "
                "to do without it"
            ) from None
        _silence_ray()

    def _reserve(self) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        resources = ray.cluster_resources()
        # Nobody else in a joined cluster may get the GPU of this process, which Ray did not start.
        if self._config.run.ray is not None and self._own_gpu:
            this_node = NodeAffinitySchedulingStrategy(
                ray.get_runtime_context().get_node_id(), soft=False
            )
            held = ray.remote(num_gpus=1, num_cpus=4, scheduling_strategy=this_node)(_Holder)
            self._holder = held.remote()
            self._check_gpu(self._holder)
        if self.count == 0:
            gpus = int(resources.get("GPU", 0))
            self.count = power_of_two(min(max(1, gpus - self.samplers), self._config.run.shards))
        if self.total == 1:
            return
        share = self._share
        self._group = ray.util.placement_group([share] * (self.total - 1), strategy="PACK")
        if not self._group.wait(PLACE_SECONDS):
            has = ", ".join(f"{resources.get(name, 0):g} {name}" for name in share)
            needs = ", ".join(f"{amount:g} {name}" for name, amount in share.items())
            raise ReplicaError(
                f"run.replicas={self.count} with run.samplers={self.samplers} finds no place in "
                f"the cluster: beside this process it needs {self.total - 1} times {needs}, and in "
                f"all there are {has}; lower them, or end what else runs there"
            )

    def _check_gpu(self, holder: Any) -> None:
        import ray

        ready, _ = ray.wait([ref := holder.gpu.remote()], timeout=START_SECONDS)
        own = _visible_gpus()[0]
        if not ready:
            raise ReplicaError(
                f"the cluster at run.ray={self._config.run.ray} has no free GPU on this machine, "
                "and this process is a replica, too; start it on a machine with one"
            )
        if (gpu := str(ray.get(ref))) != own:
            raise ReplicaError(
                f"the cluster gives this process GPU {gpu} and it uses GPU {own}; call it again "
                f"with CUDA_VISIBLE_DEVICES={gpu}"
            )

    def _start(self, number: int) -> Member:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        share = self._share
        place = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=number - 1
        )
        kind = ray.remote(
            num_cpus=share["CPU"],
            num_gpus=share.get("GPU", 0),
            scheduling_strategy=place,
            concurrency_groups={"heart": 1},
            max_restarts=0,
        )(Host)
        return Member(
            number,
            kind.remote(),
            address="" if self.folder is None else self.address,
            only_samples=number >= self.count,
        )

    def _watch(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            for member in list(self.members):
                if not member.lost:
                    self._listen(member)

    def _listen(self, member: Member) -> None:
        import ray

        if member.beat is None:
            member.beat = member.handle.beat.options(concurrency_group="heart").remote()
        ready, _ = ray.wait([member.beat], timeout=0)
        try:
            if ready:
                host, member.address, process = ray.get(member.beat)
                member.where = f"{host}, process {process}"
                member.heard, member.beat, member.has_beaten = time.monotonic(), None, True
        except ray.exceptions.RayError as error:
            self._lose(member, f"died ({_cause(error)})")
            return
        silent = time.monotonic() - member.heard
        if silent > (SILENT_SECONDS if member.has_beaten else START_SECONDS):
            self._lose(member, f"was silent for {silent:.0f} s")
            ray.kill(member.handle)

    def _lose(self, member: Member, why: str) -> None:
        member.lost = member.lost or why
        self.on_loss()

    def _close(self) -> None:
        import ray

        if ray.is_initialized():
            for member in self.members:
                ray.kill(member.handle)
            if self._holder is not None:
                ray.kill(self._holder)
            if self._group is not None:
                ray.util.remove_placement_group(self._group)
            ray.shutdown()
        for daemon in self._daemons:  # and their agents, which otherwise live on for half a minute
            with suppress(ProcessLookupError):
                os.killpg(daemon.pid, signal.SIGKILL)
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


@functools.cache
def _token() -> str:
    """Token of the clusters that this process starts; Ray reads it once."""
    return secrets.token_hex(32)


class _Holder:
    """Takes the place of this process's GPU in a cluster that others use, too."""

    def gpu(self) -> str:
        """The GPU that Ray assigned."""
        import ray

        return str(ray.get_gpu_ids()[0])


def _visible_gpus() -> list[str]:
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [gpu.strip() for gpu in named.split(",") if gpu.strip()]
    return [str(number) for number in range(torch.cuda.device_count())]


def _cause(error: BaseException) -> str:
    return one_line(error).partition(". ")[0][:200]


def _silence_ray() -> None:
    """Stop Ray from printing its daemons' messages about dead workers: the run prints one line. Ray
    prints them whatever ``log_to_driver`` is (2.60, worker.listen_error_messages)."""
    from ray._private import worker

    worker.print_to_stdstream = lambda *arguments, **options: None


@contextmanager
def _own_start(daemons: "list[subprocess.Popen[bytes]]") -> Iterator[None]:
    """Start Ray's daemons, which are added to the list, in sessions of their own: SIGTERM to this
    process's group is for the run, which still needs them to save. They may take ``START_SECONDS``,
    as long as none has ended, and not 30 s, which a loaded machine misses (2.60,
    services.start_ray_process, node.Node). The autoscaler's monitor is left out, as by ``ray start
    --no-monitor``: it shows its metrics on a port to every user of the machine.
    """
    from ray._private import node, services

    popen, get_node = services.ConsolePopen, services.get_node
    start_monitor = node.Node.start_monitor

    def start(*arguments: Any, **options: Any) -> "subprocess.Popen[bytes]":
        daemons.append(popen(*arguments, start_new_session=True, **options))
        return daemons[-1]

    def wait_for_node(*arguments: Any) -> Any:
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                return get_node(*arguments)
            except RuntimeError:  # it is not there yet
                if time.monotonic() > until or any(daemon.poll() is not None for daemon in daemons):
                    raise
            time.sleep(POLL_SECONDS)

    services.ConsolePopen, services.get_node = start, wait_for_node
    node.Node.start_monitor = lambda self: None
    try:
        yield
    finally:
        services.ConsolePopen, services.get_node = popen, get_node
        node.Node.start_monitor = start_monitor


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name in values:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep this process's handler of SIGTERM, in place of Ray's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def alive(members: Sequence[Member]) -> list[Member]:
    """The members that are open, have an address and are not lost."""
    opened = (m for m in members if not m.lost and m.opened is not None and m.opened.is_done())
    return [member for member in opened if member.address]
