"""Export of a trained adapter, alone or merged into its base."""

from reason_llm.app.export.export import ExportRequest, export

__all__ = ["ExportRequest", "export"]
