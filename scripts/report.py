"""Report: ``python scripts/report.py RUN [RUN2 ...]`` writes one HTML file."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("report", "python scripts/report.py", sys.argv[1:]))
