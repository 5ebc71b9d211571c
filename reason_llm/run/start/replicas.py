"""Number of replicas of a run."""

import importlib.util
import os

from reason_llm.config import Config, installation
from reason_llm.errors import ConfigError, ReplicaError


def replicas_of(config: Config) -> int:
    """Number of replicas of the run; 0 with ``auto`` and a cluster to join, which decides.

    Raises:
        ConfigError: there are fewer GPUs.
        ReplicaError: Ray is missing, or its cluster is open to everybody.
    """
    run, replicas = config.run, config.run.replicas
    if replicas == 1 and not run.samplers:
        return 1
    gpus = _count_gpus()
    if replicas == "auto" and run.ray is None:
        replicas = power_of_two(min(max(1, gpus - run.samplers), run.shards))
    if replicas == 1 and not run.samplers:
        return 1
    if importlib.util.find_spec("ray") is None:
        asks, without = f"run.replicas={run.replicas}", "run.replicas to 1"
        if run.samplers:
            asks, without = f"run.samplers={run.samplers}", "run.samplers to 0"
        raise ReplicaError(
            f"{asks} needs Ray, which is not installed; install it with: "
            f"{installation.install('ray')}, or set {without}"
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


def works_alone(config: Config, replicas: int) -> bool:
    """Whether one process does all work of the run, one thing after the other, in one shard."""
    run = config.run
    return replicas == 1 and run.shards == 1 and not run.samplers and not run.max_staleness


def power_of_two(most: int) -> int:
    """The largest power of two up to ``most``."""
    return 1 << (most.bit_length() - 1)


def _count_gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.cuda.device_count()
