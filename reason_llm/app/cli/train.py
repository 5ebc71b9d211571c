"""Train: ``reason-llm train [CONFIG.yaml] [--section.key value ...]``; the same command resumes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reason_llm.errors import ReasonError, raise_all

if TYPE_CHECKING:
    from reason_llm.app.console import Console
    from reason_llm.config import Config, Pipeline

DESCRIPTION = """\
Fine-tune a language model by reinforcement learning on one GPU, or on a CPU.
Without arguments: the quick start. Started again, a run goes on where it stopped. Of a config with
several stages, --stage NAME runs one, and the other options are for all of them."""
SWITCHES = {
    "plan": "print the memory plan, from the model's config alone, and stop; with "
    "--memory.budget_gib it is for a GPU of that size, wherever it is called",
    "data-check": "read all data, print counts, lengths in tokens, three rendered prompts and the "
    "errors, and stop; exit code 2 if there are errors",
    "quiet": "show warnings and errors only, as --log.console quiet does",
}


def run(program: str, arguments: Sequence[str]) -> int:
    """Do what ``arguments`` ask.

    Returns:
        The exit code.
    """
    from reason_llm.config import Pipeline, parse_training_line

    mistakes: list[ReasonError] = []
    config, given = parse_training_line(program, DESCRIPTION, arguments, SWITCHES, mistakes)
    if not given & {"plan", "data-check"}:
        raise_all(mistakes)
    console = begun_console(config, is_quiet="quiet" in given)
    if "plan" in given:
        print_plan(config, mistakes)
        return 0
    if "data-check" in given:
        return print_data_check(config, mistakes)
    what = f"pipeline {config.path}" if isinstance(config, Pipeline) else f"run {config.run.name}"
    console.line(f"{what}: loading PyTorch and Transformers")
    if isinstance(config, Pipeline):
        from reason_llm.app.pipeline import run_pipeline

        run_pipeline(config, console)
        return 0
    from reason_llm.app.training import run_training  # heavy: after the config is checked

    run_training(config, console)
    return 0


def begun_console(config: "Config | Pipeline", is_quiet: bool = False) -> "Console":
    """The console of a run, or of a pipeline's first selected stage; it also sets up logging."""
    from reason_llm.app.console import Console
    from reason_llm.config import Config

    log = config.log if isinstance(config, Config) else config.selected[0].config.log
    return Console("quiet" if is_quiet else log.console)


def print_plan(config: "Config | Pipeline", mistakes: list[ReasonError]) -> None:
    """Print the memory plan of a run, or of each stage, and raise all that is wrong with options,
    ``mistakes`` among them."""
    from reason_llm.app.option_check import check_options
    from reason_llm.app.pipeline import plan_pipeline
    from reason_llm.config import Config

    for line in (
        check_options(config, mistakes)[2]
        if isinstance(config, Config)
        else plan_pipeline(config, mistakes)
    ):
        print(line, flush=True)
    raise_all(mistakes)


def print_data_check(config: "Config | Pipeline", mistakes: list[ReasonError]) -> int:
    """Print what is to be said of all data, and raise all that is wrong with options, ``mistakes``
    among them; 2 if there are errors in the data, else 0."""
    from reason_llm.app.data_check import check_data
    from reason_llm.app.pipeline import check_pipeline
    from reason_llm.config import Config

    if isinstance(config, Config):
        report = check_data(config, mistakes)
        told, num_errors = report.lines, report.num_errors
    else:
        told, num_errors = check_pipeline(config, mistakes)
    for line in told:
        print(line, flush=True)
    raise_all(mistakes)
    return 2 if num_errors else 0
