"""Train: ``python scripts/train.py [CONFIG.yaml] [--section.key value ...]``, also to resume."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("train", "python scripts/train.py", sys.argv[1:]))
