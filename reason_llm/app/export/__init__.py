"""Export of a trained adapter, alone or merged into its base."""

from reason_llm.app.export.export import ExportRequest, export, shard_bytes

__all__ = ["ExportRequest", "export", "shard_bytes"]
