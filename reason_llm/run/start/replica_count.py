"""How many replicas and samplers a run is to have, checked before anything is started."""

import importlib.util
import os

import torch

from reason_llm.config import Config
from reason_llm.errors import ConfigError, ReplicaError


def count_of(config: Config) -> int:
    """How many replicas the run is to have; with ``auto`` and a cluster to join, 0: it says.

    Raises:
        ConfigError: there are fewer GPUs.
        ReplicaError: Ray is not installed.
    """
    run, gpus = config.run, torch.cuda.device_count()
    found = run.replicas
    if found == "auto" and run.ray is None:
        found = power_of_two(min(max(1, gpus - run.samplers), run.shards))
    if found == 1 and not run.samplers:
        return 1
    if importlib.util.find_spec("ray") is None:
        asks, without = f"run.replicas={run.replicas}", "run.replicas to 1"
        if run.samplers:
            asks, without = f"run.samplers={run.samplers}", "run.samplers to 0"
        raise ReplicaError(
            f"{asks} needs Ray, which is not installed; install it with: "
            f"pip install 'reason_llm[ray]', or set {without}"
        )
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        raise ReplicaError(
            f"RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']:.40} lets anyone who reaches the cluster "
            "run programs in it; unset it, and start the cluster with its token"
        )
    if found == "auto":
        return 0
    if run.ray is None and gpus and found + run.samplers > gpus:
        has = f"the {gpus} GPU{'s' if gpus > 1 else ''} of this machine"
        if run.samplers:
            raise ConfigError(
                f"run.replicas={found} and run.samplers={run.samplers} contradict {has}: each has "
                "one of its own; lower them, or name a cluster as run.ray"
            )
        raise ConfigError(
            f"run.replicas={found} contradicts {has}: a replica has one of its own; set it to "
            f"{power_of_two(gpus)} or auto, or name a cluster as run.ray"
        )
    return found


def power_of_two(most: int) -> int:
    """The largest one that is not above ``most``."""
    return 1 << (most.bit_length() - 1)
