"""Replicas of the model in processes of their own, by Ray, and sampling ahead of learning.

``RunSection.several`` imports this package where a run asks for more than one process or shard. The
names here are all that the core asks of it; they load neither torch nor Ray.
"""

from reason_llm.replicas.entry_points import lines, processes_of, start, team_sizes

__all__ = ["lines", "processes_of", "start", "team_sizes"]
