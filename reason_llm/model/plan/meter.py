"""Measured peak memory of each phase, next to the plan."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from reason_llm.files import read_text
from reason_llm.model.plan.machine import GIB, others_bytes
from reason_llm.model.plan.memory import RUNTIME_BYTES


@dataclass(slots=True)
class Peak:
    """Peak of a phase; 0 until it ends."""

    gib: float = 0.0


class Meter:
    """Measured peak memory of this process, phase by phase: the GPU's, or without one the host's.

    On a GPU, what the driver says is in use as a phase ends, without what other programs held as
    the meter was made: torch keeps a phase's peak reserved, and vLLM's pool and CUDA's own memory
    are in. Without a GPU, the peak without what earlier work of this process left resident.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._others_bytes = others_bytes(device.type)
        if device.type != "cuda":
            libraries = int(RUNTIME_BYTES["cpu"])
            self._others_bytes = max(0, (_status_bytes("VmRSS") or 0) - libraries)

    @contextmanager
    def phase(self) -> Iterator["Peak"]:
        """Context that measures the peak; it ends before anything is freed."""
        peak = Peak()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            with suppress(OSError):  # then the peak is that of the whole process
                Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again: man 5 proc
        yield peak
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
            found = total - free
        else:
            found = _status_bytes("VmHWM") or int(peak_rss_mib() * 2**20)
        peak.gib = max(0, found - self._others_bytes) / GIB


def _status_bytes(name: str) -> int | None:
    """A size of this process by the kernel: man 5 proc; None where there is none."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def peak_rss_mib() -> float:
    """The largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
