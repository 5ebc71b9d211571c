"""Peers over torch.distributed: gloo between CPUs, NCCL between GPUs. The groups are never torch's
default group, which vLLM takes for itself, and nothing in them is unpickled."""

import hmac
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from reason_llm.errors import one_line
from reason_llm.replicas.errors import PeersLost

CHUNK_BYTES = 16 << 20
"""Bytes of a gradient that are sent at once, and buffered."""
MEET_SECONDS = 300.0
"""Seconds that the processes of a group may take to connect."""
LONGEST_SECONDS = 30 * 24 * 3600.0
"""Time limit of a call. Dead peers are detected from outside."""
POLL_SECONDS = 0.001


def listen(address: str) -> tuple[dist.Store, int]:
    """A store on a free port of ``address``, where peers find each other, and the port."""
    server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    server.bind((address, 0))
    server.listen(128)
    port = int(server.getsockname()[1])
    store = dist.TCPStore(
        address,
        port,
        None,
        True,
        timedelta(seconds=MEET_SECONDS),
        wait_for_workers=False,
        master_listen_fd=server.detach(),
    )
    return store, port


@dataclass(frozen=True, slots=True)
class Seat:
    """One process's membership in a group that learns together."""

    name: str
    """Name of the group; each new group has another name."""
    rank: int
    size: int
    head: tuple[str, int] | Path
    """Address and port of the head's store, or, on one machine, the folder of the stores, which no
    other user can enter."""
    secret: str = field(repr=False)
    """Secret that all members have, because gloo accepts whoever connects first."""
    address: str
    """Address of the process's machine for the others."""

    def store(self) -> dist.Store:
        """The store in which the group meets."""
        patience = timedelta(seconds=MEET_SECONDS)
        if isinstance(self.head, Path):
            store = dist.FileStore(str(self.head / f"peers-{self.name}"))
            store.set_timeout(patience)
            return store
        return dist.TCPStore(*self.head, None, False, patience, wait_for_workers=False)


class GroupPeers:
    """The ``train.Peers`` of one process.

    Args:
        is_off: whether one of the others will not come. Who gives up tells the others.

    Raises:
        PeersLost: the others did not come, or one has another secret; so does every call once one
            of them is gone.
    """

    def __init__(
        self,
        seat: Seat,
        device: torch.device,
        is_off: Callable[[], bool] = lambda: False,
    ) -> None:
        self.rank, self.size = seat.rank, seat.size
        self.sent_bytes = 0
        self.waited_seconds = 0.0
        """Seconds spent in all calls, waiting for the others and for the network."""
        self._lost = threading.Event()
        self._device = device
        try:
            store, off = seat.store(), f"{seat.name}/off"
            try:
                self._wait_in_thread(
                    lambda: self._meet(seat), lambda: is_off() or store.check([off])
                )
            except BaseException:
                store.set(off, "")  # or the others would wait for this process
                raise
        except (RuntimeError, ValueError) as error:
            raise PeersLost(f"the replicas did not meet ({one_line(error):.200})") from error
        proofs = [
            hmac.digest(seat.secret.encode(), f"{seat.name}/{number}".encode(), "sha256")
            for number in range(self.size)
        ]
        if self.gather(proofs[self.rank]) != proofs:
            self.close()
            raise PeersLost("somebody connected to the replicas who does not have their secret")
        self.sent_bytes = 0  # from here on

    def _meet(self, seat: Seat) -> None:
        store = seat.store()
        gloo: Any = dist.ProcessGroupGloo  # its type stubs are incomplete
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=seat.address)]
        options._timeout = timedelta(seconds=MEET_SECONDS)
        place = dist.PrefixStore(f"{seat.name}/gloo", store)
        self._gloo: Any = gloo(place, self.rank, self.size, options)
        self._gloo._set_default_timeout(timedelta(seconds=LONGEST_SECONDS))
        self._tensors: Any = self._gloo
        if self._device.type == "cuda":
            place = dist.PrefixStore(f"{seat.name}/nccl", store)
            # Or its watchdog ends this process when a peer is gone.
            os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
            nccl = dist.ProcessGroupNCCL
            self._tensors = nccl(place, self.rank, self.size, nccl.Options())
            self._tensors._set_default_timeout(timedelta(seconds=LONGEST_SECONDS))

    def lose(self) -> None:
        """End every call under way in this group, and refuse further ones; from any thread."""
        self._lost.set()

    def close(self) -> None:
        """Leave the group; processes that wait for this one stop at once."""
        self._lost.set()
        self._tensors = self._gloo = None  # their sockets close

    def add(self, total: Tensor) -> None:
        """See ``train.Peers.add``. Of two ranks the lower one sends first."""
        numbers = CHUNK_BYTES // total.element_size()
        theirs = total.new_empty(min(numbers, len(total)))
        for level in range(self.size.bit_length() - 1):
            peer = self.rank ^ (1 << level)
            for part in total.split(numbers):
                received = theirs[: len(part)]
                acts = [("send", part), ("recv", received)]
                for act, tensor in acts if self.rank < peer else acts[::-1]:
                    self._pass(act, tensor, peer)
                self.sent_bytes += part.numel() * part.element_size()
                part.add_(received)

    def _pass(self, act: str, tensor: Tensor, peer: int) -> None:
        self._finish(lambda: getattr(self._tensors, act)([tensor], peer, 0))

    def gather(self, content: bytes) -> list[bytes]:
        """See ``train.Peers.gather``."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        own = torch.tensor([len(content)])
        self._finish(lambda: self._gloo.allgather([sizes], [own]))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        if content:
            padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        contents = [torch.zeros_like(padded) for _ in range(self.size)]
        self._finish(lambda: self._gloo.allgather([contents], [padded]))
        self.sent_bytes += (self.size - 1) * len(padded)
        return [
            padded[: int(size)].numpy().tobytes()
            for padded, size in zip(contents, sizes, strict=True)
        ]

    def _finish(self, begin: Callable[[], dist.Work]) -> None:
        if self._lost.is_set():
            raise PeersLost("a replica was lost")
        started = time.perf_counter()
        try:
            if self._device.type == "cuda" and self._tensors is not self._gloo:
                self._poll(begin())
            else:
                self._wait_in_thread(lambda: begin().wait())
        except RuntimeError as error:
            raise PeersLost(f"a replica was lost ({one_line(error):.200})") from error
        self.waited_seconds += time.perf_counter() - started

    def _poll(self, work: dist.Work) -> None:
        while not work.is_completed():
            if self._lost.is_set():
                self._tensors.abort()
                raise PeersLost("a replica was lost")
            time.sleep(POLL_SECONDS)
        if not work.is_success():
            self._tensors.abort()
            raise PeersLost("a replica was lost (NCCL ended its work with an error)")
        work.wait()

    def _wait_in_thread(
        self, act: Callable[[], object], is_off: Callable[[], bool] = lambda: False
    ) -> None:
        """Make the call in a thread, which is abandoned if gloo waits for a lost peer: gloo's calls
        cannot be cancelled."""
        ended = threading.Event()
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                act()
            except (RuntimeError, ValueError) as error:
                errors.append(error)
            ended.set()

        threading.Thread(target=wait, name="gloo", daemon=True).start()
        while not ended.wait(0.2):
            if self._lost.is_set() or is_off():
                raise PeersLost("a replica was lost")
        if errors:
            raise errors[0]
