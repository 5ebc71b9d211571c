"""Memory to plan for: this machine's or an imagined GPU's."""

import ctypes
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from reason_llm.config import Config
from reason_llm.model.plan.team_sizes import team_sizes

GIB = 2**30
CONTEXT_BYTES = int(0.65 * GIB)
"""Memory of CUDA's context in an idle process, 0.61 GiB on an H100; the plan counts it itself."""
OTHERS_STEP_BYTES = GIB // 4
"""Other programs' use is rounded to these steps, so that small changes leave the plan the same."""


def may_have_gpu() -> bool:
    """Whether a driver of GPUs can be loaded, without which PyTorch has none."""
    for name in ("libcuda.so.1", "libamdhip64.so"):
        with suppress(OSError):
            ctypes.CDLL(name)
            return True
    return False


def _cuda() -> Any:
    import torch

    return torch.cuda


def others_bytes(device: str) -> int:
    """Bytes of the GPU held by other programs, such as a desktop, rounded up; 0 without a GPU.

    All that the driver calls in use, without what this process has taken by now.
    """
    if device != "cuda":
        return 0
    free, total = _cuda().mem_get_info(device)
    own: int = CONTEXT_BYTES + _cuda().memory_reserved(device)
    return math.ceil(max(0, int(total) - int(free) - own) / OTHERS_STEP_BYTES) * OTHERS_STEP_BYTES


@dataclass(frozen=True, slots=True)
class Machine:
    """Device and memory to plan for."""

    kind: Literal["cuda", "cpu"]
    budget_bytes: int
    host_bytes: int
    card: str | None = None
    """Name of this machine's GPU; None for an imagined one."""
    is_host_known: bool = True
    """False: the GPU is in another machine, whose host memory is not named."""

    @classmethod
    def here(cls, config: Config, device: str) -> "Machine":
        """This machine, cuda or cpu, within the config's limits. ``budget_gib: auto`` is all that
        other programs leave of the GPU; without one, the part of the host that a process may have.
        """
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        card = None
        if device == "cuda":
            kind: Literal["cuda", "cpu"] = "cuda"
            properties = _cuda().get_device_properties(device)
            total, card = properties.total_memory, properties.name
            left = total - others_bytes(device)
        else:
            kind, total, left = "cpu", host, host // team_sizes(config).host_parts
        asked, asked_host = config.memory.budget_gib, config.memory.host_gib
        return cls(
            kind,
            left if asked == "auto" else min(total, int(asked * GIB)),
            host if asked_host == "auto" else min(host, int(asked_host * GIB)),
            card,
        )

    @classmethod
    def imagined(cls, config: Config, device: str) -> "Machine":
        """A GPU with ``memory.budget_gib`` and ``memory.host_gib`` of host memory, on any machine;
        this machine if the former is auto."""
        here, memory = cls.here(config, device), config.memory
        if memory.budget_gib == "auto":
            return here
        is_known = memory.host_gib != "auto"
        host = int(memory.host_gib * GIB) if memory.host_gib != "auto" else here.host_bytes
        budget = int(memory.budget_gib * GIB)
        return cls("cuda", budget, host, is_host_known=is_known)
