"""Replicas of the model in processes of their own, by Ray, and sampling ahead of learning.

``RunSection.several`` imports this package where a run asks for more than one process or shard; the
names here, which load neither torch nor Ray, are all that it is asked for.
"""

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

from reason_llm.replicas.options import processes_of, team_sizes


def start(job: Any, watch: Any) -> AbstractContextManager[Any]:
    """See ``many.start``."""
    started: AbstractContextManager[Any] = import_module("reason_llm.replicas.many").start(
        job, watch
    )
    return started


__all__ = ["processes_of", "start", "team_sizes"]
