"""A run on disk: its buffer, archive, checkpoints, records and adapters."""
