"""``python -m reason_llm``: the same as the command ``reason-llm``."""

from reason_llm.app.cli import main

raise SystemExit(main())
