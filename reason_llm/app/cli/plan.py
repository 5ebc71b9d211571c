"""Plan: ``reason-llm plan [CONFIG.yaml] [--section.key value ...]``, like ``train --plan``."""

from collections.abc import Sequence

from reason_llm.app.cli.train import train

DESCRIPTION = """\
Print the memory plan of a training run, from the model's config; no weights are read.
With --memory.budget_gib, print the plan for a GPU of that size on any machine."""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    train(program, DESCRIPTION, arguments, {}, {"plan"})
