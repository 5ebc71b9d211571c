"""Train: ``reason-llm train [CONFIG.yaml] [--section.key value ...]``; the same command resumes."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reason_llm.errors import ReasonError, raise_all

if TYPE_CHECKING:
    from reason_llm.config import Config, Pipeline

DESCRIPTION = """\
Fine-tune a language model by reinforcement learning on one GPU, or on a CPU.
Without arguments: the quick start. Started again, a run goes on where it stopped. Of a config with
several stages, --stage NAME runs one, and the other options are for that stage alone."""
SWITCHES = {
    "plan": "print the memory plan, from the model's config alone, and stop; with "
    "--memory.budget_gib it is for a GPU of that size, wherever it is called",
    "data-check": "read all data, print counts, lengths in tokens, three rendered prompts and the "
    "errors, and stop; exit code 2 if there are errors",
    "quiet": "show warnings and errors only, as --log.console quiet does",
}


def run(program: str, arguments: Sequence[str]) -> int:
    """Do what ``arguments`` ask; the exit code."""
    return train(program, DESCRIPTION, arguments, SWITCHES, set())


def train(
    program: str,
    description: str,
    arguments: Sequence[str],
    switches: Mapping[str, str],
    asked: set[str],
) -> int:
    """The same with another description, and switches that are given already."""
    from reason_llm.app.console import Console
    from reason_llm.config import Pipeline, parse_training_line

    mistakes: list[ReasonError] = []
    config, given = parse_training_line(program, description, arguments, switches, mistakes)
    given = given | asked
    checks = given & {"plan", "data-check"}
    if not checks:
        raise_all(mistakes)
    log = config.selected[0].config.log if isinstance(config, Pipeline) else config.log
    console = Console("quiet" if "quiet" in given else log.console)  # it sets up logging, too
    if checks:
        return print_check(config, mistakes, is_plan="plan" in given)
    what = f"pipeline {config.path}" if isinstance(config, Pipeline) else f"run {config.run.name}"
    console.line(f"{what}: loading PyTorch and Transformers")
    if isinstance(config, Pipeline):
        from reason_llm.app.pipeline import run_pipeline

        run_pipeline(config, console)
    else:
        from reason_llm.app.training import run_training  # heavy: after the config is checked

        run_training(config, console)
    return 0


def print_check(config: "Config | Pipeline", mistakes: list[ReasonError], is_plan: bool) -> int:
    """Print the memory plan of a run, or of each stage, or else the check of its data, and raise
    all that is wrong with options, ``mistakes`` among them; 2 if there are errors in the data."""
    from reason_llm.app.data_check import check_data
    from reason_llm.app.option_check import check_options
    from reason_llm.app.pipeline import check_pipeline
    from reason_llm.config import Config

    num_errors = 0
    wrong = bool(mistakes)  # then the config is without what is wrong, so the plan would be another
    if not isinstance(config, Config):
        lines, num_errors = check_pipeline(config, mistakes, is_plan)
    elif is_plan:
        lines = check_options(config, mistakes)[2]
    else:
        report = check_data(config, mistakes)
        lines, num_errors = report.lines, report.num_errors
    for line in lines if not (is_plan and wrong) else ():
        print(line, flush=True)
    raise_all(mistakes)
    return 2 if num_errors else 0
