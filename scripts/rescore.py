"""Rescore: ``python scripts/rescore.py BUFFER [CONFIG.yaml] [--out FILE]``: new rewards."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("rescore", "python scripts/rescore.py", sys.argv[1:]))
