"""A trained adapter as a model for others."""

from reason_llm.app.export.export import Request, dtype_name, export, shard_bytes

__all__ = [
    "Request",
    "dtype_name",
    "export",
    "shard_bytes",
]
