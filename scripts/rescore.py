"""Rescore: ``python scripts/rescore.py BUFFER [CONFIG.yaml] [--out FILE]``: saved rollouts get new
rewards."""

import sys

from reason_llm.app.cli.rescore import main

if __name__ == "__main__":
    sys.exit(main("python scripts/rescore.py", sys.argv[1:]))
