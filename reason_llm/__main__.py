"""``python -m reason_llm COMMAND ...``, the same as ``reason-llm COMMAND ...``."""

from reason_llm.app.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
