"""Report of a run's folder: a picture (``curves``) and one self-contained HTML page (``page``)."""

from reason_llm.app.report.page import write_report
from reason_llm.app.report.serve import serve

__all__ = ["serve", "write_report"]
