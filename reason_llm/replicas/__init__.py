"""Replicas of the model in processes of their own, by Ray, and sampling ahead of learning. Imported
where a run has more than one process or shard."""
