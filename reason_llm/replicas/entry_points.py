"""The answers of this package to the core: the processes that a config asks for, with their memory
and their part in the buffer; and their start. Imported without torch.
"""

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from reason_llm.config import Config, installation
from reason_llm.errors import ConfigError
from reason_llm.model.plan import GIB, TeamSizes
from reason_llm.replicas.ahead_buffer import AheadBuffer
from reason_llm.replicas.errors import ReplicaError
from reason_llm.run.start.processes import Processes
from reason_llm.run.store.buffer import RolloutBuffer

AHEAD = "ahead"
"""Folder in the run's with the rollouts of steps that are sampled ahead."""
NCCL_BYTES = int(0.5 * GIB)
"""Buffers of NCCL on each GPU of several that learn together. Read, not measured."""


@dataclass(frozen=True)
class Several(Processes):
    """Several processes, or one that works in shards or samples with an earlier policy."""

    count: int
    """Number of replicas; 0: as many as the joined cluster has GPUs for."""
    max_staleness: int

    is_alone = False

    def buffer_class(self, folder: Path) -> Callable[..., RolloutBuffer]:
        """See ``Processes``."""
        if not self.max_staleness:
            return super().buffer_class(folder)
        return partial(AheadBuffer, folder=folder / AHEAD)


def processes_of(config: Config) -> Processes:
    """The processes of the run.

    Raises:
        ConfigError: there are fewer GPUs.
        ReplicaError: Ray is missing, or its cluster is open to everybody.
    """
    run, count = config.run, replicas_of(config)
    if count == 1 and run.shards == 1 and not run.samplers and not run.max_staleness:
        return Processes()  # run.replicas=auto found one GPU
    return Several(count, run.max_staleness)


def team_sizes(config: Config) -> TeamSizes:
    """The memory of each process. Without a GPU it is planned for as many replicas as there may be,
    so that the plan does not depend on their number."""
    run = config.run
    learn_together = run.replicas != 1
    return TeamSizes(
        cards=1 if run.replicas == "auto" else run.replicas,
        samplers=run.samplers,
        samples_ahead=run.samplers > 0 and run.max_staleness > 0,
        host_parts=run.shards,
        gpu_bytes={"NCCL": NCCL_BYTES} if learn_together else {},
        gradients=run.shards.bit_length(),  # the sums that wait in the shards' tree
        earlier_adapters=run.max_staleness,
        host_adapters=1 + run.max_staleness if run.max_staleness else 0,
        host_states=int(learn_together),  # the state before a step, to learn it again
    )


def replicas_of(config: Config) -> int:
    """Number of replicas of the run; 0 with ``auto`` and a cluster to join, which decides.

    Raises:
        ConfigError: there are fewer GPUs.
        ReplicaError: Ray is missing, or its cluster is open to everybody.
    """
    run, replicas = config.run, config.run.replicas
    if replicas == 1 and not run.samplers:
        return 1
    import torch

    gpus = torch.cuda.device_count()
    if replicas == "auto" and run.ray is None:
        replicas = power_of_two(min(max(1, gpus - run.samplers), run.shards))
    if replicas == 1 and not run.samplers:  # auto has found one GPU, which needs no Ray
        return 1
    if importlib.util.find_spec("ray") is None:
        raise ReplicaError(
            f"run.replicas={run.replicas} with run.samplers={run.samplers} needs Ray, which is not "
            f"installed; install it with: {installation.install('ray')}, or set them to 1 and 0"
        )
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        raise ReplicaError(
            f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']:.40} lets anyone who reaches the cluster "
            "run programs in it; unset it, and start the cluster with its token"
        )
    if replicas == "auto":
        return 0
    if run.ray is None and gpus and replicas + run.samplers > gpus:
        raise ConfigError(
            f"run.replicas={replicas} with run.samplers={run.samplers} contradicts the "
            f"{gpus} GPU{'s' if gpus > 1 else ''} of this machine: each needs its own; lower them, "
            "set run.replicas to auto, or name a cluster as run.ray"
        )
    return replicas


def power_of_two(limit: int) -> int:
    """The largest power of two up to ``limit``."""
    return 1 << (limit.bit_length() - 1)


def start(job: Any, watch: Any) -> AbstractContextManager[Any]:
    """See ``many.start``, which is imported here, with torch."""
    many = import_module("reason_llm.replicas.many")
    team: AbstractContextManager[Any] = many.start(job, watch)
    return team
