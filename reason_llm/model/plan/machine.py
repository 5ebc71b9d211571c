"""What memory there is to plan for: this machine's, or an imagined GPU's."""

import os
from dataclasses import dataclass, replace
from typing import Literal

import torch

from reason_llm.config import Config

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Machine:
    """What there is to plan for."""

    kind: Literal["cuda", "cpu"]
    budget_bytes: int
    host_bytes: int

    @classmethod
    def here(cls, config: Config, device: torch.device) -> "Machine":
        """This machine, within what the config allows."""
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if device.type == "cuda":
            kind: Literal["cuda", "cpu"] = "cuda"
            total = torch.cuda.get_device_properties(device).total_memory
        else:
            kind, total = "cpu", host
        asked, asked_host = config.memory.budget_gib, config.memory.host_gib
        return cls(
            kind,
            total if asked == "auto" else min(total, int(asked * GIB)),
            host if asked_host == "auto" else min(host, int(asked_host * GIB)),
        )

    @classmethod
    def imagined(cls, config: Config, device: torch.device) -> "Machine":
        """A GPU with ``memory.budget_gib``, wherever this is called; this machine if that is
        auto."""
        here = cls.here(config, device)
        if config.memory.budget_gib == "auto":
            return here
        return replace(here, kind="cuda", budget_bytes=int(config.memory.budget_gib * GIB))
