"""Evaluate: ``reason-llm evaluate RUN|CONFIG.yaml|MODEL [--sets ...] [--k N] [--compare base]``."""

from collections.abc import Sequence

DESCRIPTION = """\
Let models answer the problems of a set, score the answers with the first reward, and print the
scores with 95 % confidence intervals. The same command resumes a stopped evaluation.

  {program} runs/quickstart --compare base                  a run's adapter and its base
  {program} runs/quickstart --sets gsm8k math500 --k 8      mean@8, pass@2, 4 and 8, maj@8 too
  {program} MODEL_FOLDER --sets mine=problems.jsonl         any model, such as an exported one

Template, system prompt, reward, temperature and sandbox come from the run or the config; all of its
options can be overridden."""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from reason_llm.config import Value, read_command_line
    from reason_llm.run.store import folder as run_folder

    values = {
        "sets": Value(
            "SET",
            "sets to evaluate: gsm8k, math500, aime2024, aime2025, humaneval+, mbpp+ (from the "
            "Hub, or a copy of it by NAME=FOLDER), held_out or another set of the config by name, "
            "a file, or NAME=FILE (default: the config's sets)",
            nargs="+",
        ),
        "k": Value("N", "also sample N answers per problem at sample.temperature (default: 0)"),
        "model": Value(
            "WHICH",
            "base, adapter (the last one), best, or a folder or Hub id: another run, an adapter, "
            "a model (default: the run's adapter; of a config, the base)",
        ),
        "compare": Value(
            "WHICH", "second model, compared with the first on each problem; values as in --model"
        ),
        "which": Value(run_folder.WHICH, run_folder.WHICH_HELP),
        "out": Value(
            "FOLDER",
            "folder of the results (default: runs/NAME/evaluation; another finished evaluation "
            "there is renamed)",
        ),
    }
    what = ("RUN|CONFIG|MODEL", "a run's folder, a config.yaml, or a model's folder or Hub id")
    description = DESCRIPTION.format(program=program)
    line = read_command_line(program, description, what, arguments, {}, values)
    from reason_llm.app.console import Console

    Console("plain")  # sets up logging before libraries are imported
    from reason_llm.evaluate import make_request, run_evaluation

    request = make_request(line)
    run_evaluation(request, Console(request.config.log.console))
