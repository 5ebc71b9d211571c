"""Plan: ``reason-llm plan [CONFIG.yaml] [--section.key value ...]``, as ``train --plan`` does."""

from collections.abc import Sequence

from reason_llm.app.cli.train import train

DESCRIPTION = """\
Print the memory plan of a training run, from the model's config alone; no weights are read.
With --memory.budget_gib it is for a GPU of that size, wherever it is called."""


def run(program: str, arguments: Sequence[str]) -> None:
    """Do what ``arguments`` ask."""
    train(program, DESCRIPTION, arguments, {}, {"plan"})
