"""Serve: ``python scripts/serve.py RUN|CONFIG.yaml|ADAPTER|MODEL [--port N]``."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("serve", "python scripts/serve.py", sys.argv[1:]))
