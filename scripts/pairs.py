"""Pairs: ``python scripts/pairs.py BUFFERS --out FILE``: rows to learn from, out of saved
rollouts."""

import sys

from reason_llm.app.cli.pairs import main

if __name__ == "__main__":
    sys.exit(main("python scripts/pairs.py", sys.argv[1:]))
