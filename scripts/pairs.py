"""Pairs: ``python scripts/pairs.py BUFFERS --out FILE``: training rows from saved rollouts."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("pairs", "python scripts/pairs.py", sys.argv[1:]))
