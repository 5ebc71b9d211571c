"""Export: ``python scripts/export.py RUN|ADAPTER --out FOLDER``: a model for use elsewhere."""

import sys

from reason_llm.app.cli import call

if __name__ == "__main__":
    sys.exit(call("export", "python scripts/export.py", sys.argv[1:]))
