"""Train: ``reason-llm train [CONFIG.yaml] [--section.key value ...]``; the same command resumes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reason_llm.app.cli.command import GOES_ON, run_command

if TYPE_CHECKING:
    from reason_llm.config import Config

DESCRIPTION = """\
Fine-tune a language model by reinforcement learning on one GPU, or on a CPU.
Without arguments: the quick start. Started again, a run goes on where it stopped."""
SWITCHES = {
    "plan": "print the memory plan, from the model's config alone, and stop; with "
    "--memory.budget_gib it is for a GPU of that size, wherever it is called",
    "data-check": "read all data, print counts, lengths in tokens, three rendered prompts and the "
    "first errors, and stop; exit code 2 if there are errors",
    "quiet": "show warnings and errors only, as --log.console quiet does",
}


def main(program: str, arguments: Sequence[str]) -> int:
    """Exit code of ``program``, called with ``arguments``."""
    return run_command(lambda: _train(program, arguments), GOES_ON)


def _train(program: str, arguments: Sequence[str]) -> int:
    from reason_llm.config import parse_command_line

    config, given = parse_command_line(program, DESCRIPTION, arguments, SWITCHES)
    from reason_llm.app.console import Console

    console = Console("quiet" if "quiet" in given else config.log.console)
    if "plan" in given:
        print_plan(config)
        return 0
    if "data-check" in given:
        from reason_llm.app.data_check import check_data

        report = check_data(config)
        print("\n".join(report.lines), flush=True)
        return 2 if report.num_errors else 0
    from reason_llm.app.training import run_training  # heavy: after a config that holds

    run_training(config, console)
    return 0


def print_plan(config: "Config") -> None:
    """Print the memory plan of a run."""
    from reason_llm.model.plan import plan_only

    print("\n".join(plan_only(config).table()), flush=True)
