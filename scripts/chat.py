"""Chat: ``python scripts/chat.py RUN|CONFIG.yaml|ADAPTER|MODEL [--adapter FOLDER]``."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("chat", "python scripts/chat.py", sys.argv[1:]))
