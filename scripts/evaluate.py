"""Evaluate: ``python scripts/evaluate.py RUN|CONFIG.yaml|MODEL [--sets ...] [--k N]``."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("evaluate", "python scripts/evaluate.py", sys.argv[1:]))
