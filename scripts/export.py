"""Export: ``python scripts/export.py RUN|ADAPTER --out FOLDER``: a model to take home."""

import sys

from reason_llm.app.cli.export import main

if __name__ == "__main__":
    sys.exit(main("python scripts/export.py", sys.argv[1:]))
