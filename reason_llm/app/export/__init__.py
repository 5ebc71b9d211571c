"""Export of a trained adapter, alone or merged into its base."""

from reason_llm.app.export.export import Request, export, shard_bytes

__all__ = ["Request", "export", "shard_bytes"]
