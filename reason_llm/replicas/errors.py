"""Errors of a run on several processes."""

from reason_llm.errors import ReasonError


class ReplicaError(ReasonError, ConnectionError):
    """Replicas cannot be started, or too few of them are left."""


class PeersLost(ReplicaError):
    """A process that took part in learning a step has ended or is silent."""
