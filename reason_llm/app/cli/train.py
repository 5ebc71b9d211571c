"""Train: ``reason-llm train [CONFIG.yaml] [--section.key value ...]``; the same command resumes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reason_llm.errors import ReasonError, raise_all

if TYPE_CHECKING:
    from reason_llm.config import Config

DESCRIPTION = """\
Fine-tune a language model by reinforcement learning on one GPU, or on a CPU.
Without arguments: the quick start. The same command resumes a run that was stopped."""
SWITCHES = {
    "plan": "print the memory plan, from the model's config only, and exit; with "
    "--memory.budget_gib, the plan for a GPU of that size on any machine",
    "data-check": "read all data, print counts, lengths in tokens, three rendered prompts and the "
    "errors, and exit, with code 2 if there are errors",
    "quiet": "print only warnings and errors, like --log.console quiet",
}

PLANNED_ROWS = "data/arithmetic_train.jsonl"
"""Rows of a plan that names a model and no rows: it reads none."""


def run(program: str, arguments: Sequence[str]) -> int:
    """Run the command and return its exit code."""
    return train(program, DESCRIPTION, arguments, SWITCHES, set())


def train(
    program: str,
    description: str,
    arguments: Sequence[str],
    switches: Mapping[str, str],
    asked: set[str],
) -> int:
    """Train, with a description for the help and switches that are already set."""
    from reason_llm.app.console import Console
    from reason_llm.config import WITHOUT_CONFIG, read_command_line
    from reason_llm.run import check_unused

    mistakes: list[ReasonError] = []
    what = ("CONFIG.yaml", WITHOUT_CONFIG)
    line = read_command_line(program, description, what, arguments, switches)
    switches_on = line.given | asked
    if "plan" in switches_on and line.what is None and "model.path" in line.overrides:
        line.overrides.setdefault("data.train", PLANNED_ROWS)
    config = line.config(mistakes)
    checks = switches_on & {"plan", "data-check"}
    if not checks:
        raise_all(mistakes)
    # The console sets up logging, too.
    console = Console("quiet" if "quiet" in switches_on else config.log.console)
    if checks:
        return print_check(config, mistakes, is_plan="plan" in switches_on)
    check_unused(config)
    console.line(f"run {config.run.name}: loading PyTorch and Transformers")
    from reason_llm.app.training import run_training  # heavy: after the config is checked

    run_training(config, console)
    return 0


def print_check(config: "Config", mistakes: list[ReasonError], is_plan: bool) -> int:
    """Print the plan or the data check and raise all mistakes; return 2 if the data have errors."""
    from reason_llm.app.option_check import check_options

    num_errors = 0
    if is_plan:
        lines = check_options(config, mistakes, is_plan=True)[2]
    else:
        from reason_llm.app.data_check import check_data  # imports Transformers

        report = check_data(config, mistakes)
        lines, num_errors = report.lines, report.num_errors
    for line in lines:
        print(line, flush=True)
    raise_all(mistakes)
    return 2 if num_errors else 0
