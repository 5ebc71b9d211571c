"""Pairs: ``python scripts/pairs.py BUFFERS --out FILE``: rows to learn from, out of saved
rollouts."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("pairs", "python scripts/pairs.py", sys.argv[1:]))
