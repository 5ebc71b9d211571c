"""Evaluate: ``python scripts/evaluate.py RUN|CONFIG.yaml|MODEL [--sets ...] [--k N] [--compare
base]``; the same command resumes."""

import sys

from reason_llm.app.cli.evaluate import main

if __name__ == "__main__":
    sys.exit(main("python scripts/evaluate.py", sys.argv[1:]))
