"""Replicas of the model in processes of their own, by Ray, and sampling ahead of learning.
``RunSection.several`` imports ``entry_points``, all that the core asks of this folder, where a run
asks for more than one process or shard."""
