"""Export of a trained adapter, alone or merged into its base."""

from reason_llm.app.export.export import Request, dtype_name, export, shard_bytes

__all__ = [
    "Request",
    "dtype_name",
    "export",
    "shard_bytes",
]
