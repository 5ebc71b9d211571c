"""Plan: ``reason-llm plan [CONFIG.yaml] [--section.key value ...]``, as ``train --plan`` does."""

from collections.abc import Sequence

from reason_llm.app.cli.train import begun_console, print_plan
from reason_llm.errors import ReasonError

DESCRIPTION = """\
Print the memory plan of a training run, from the model's config alone; no weights are read.
With --memory.budget_gib it is for a GPU of that size, wherever it is called."""


def run(program: str, arguments: Sequence[str]) -> None:
    """Do what ``arguments`` ask."""
    from reason_llm.config import parse_training_line

    mistakes: list[ReasonError] = []
    config, _ = parse_training_line(program, DESCRIPTION, arguments, {}, mistakes)
    begun_console(config)
    print_plan(config, mistakes)
