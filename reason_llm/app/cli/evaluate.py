"""Evaluate: ``reason-llm evaluate RUN|CONFIG.yaml|MODEL [--sets ...] [--k N] [--compare base]``."""

from collections.abc import Sequence

DESCRIPTION = """\
Let models answer the problems of a set, judge the answers by the first reward, and print the scores
with their 95 % intervals. The same command goes on after a stop, and shows finished scores again.

  {program} runs/quickstart --compare base                  a run's adapter and its base
  {program} runs/quickstart --sets gsm8k math500 --k 8      mean@8, pass@2, 4 and 8, maj@8 too
  {program} MODEL_FOLDER --sets mine=problems.jsonl         any model, such as an exported one

How problems are asked and judged (template, system prompt, reward, temperature, sandbox) is the
run's or the config's, and every option of it can be set here."""
SWITCHES = {
    "generate-only": "write completions of prompts to completions.jsonl and judge nothing; rows "
    "need no answer",
}


def run(program: str, arguments: Sequence[str]) -> None:
    """Do what ``arguments`` ask."""
    from reason_llm.config import Value, read_command_line
    from reason_llm.run.store import folder as run_folder

    values = {
        "sets": Value(
            "SET",
            "what to ask: gsm8k, math500, aime2024, aime2025 (from the Hub), held_out or another "
            "set of the config by its name, a file, or NAME=FILE (default: the config's sets)",
            nargs="+",
        ),
        "k": Value("N", "also draw N samples of each problem, at sample.temperature (default: 0)"),
        "model": Value(
            "WHICH",
            "base, adapter (the last one), best, or a folder or Hub id: another run, an adapter, "
            "a model (default: the run's adapter; of a config, the base)",
        ),
        "compare": Value(
            "WHICH", "a second model, compared with the first problem by problem; as --model"
        ),
        "which": Value(run_folder.WHICH, run_folder.WHICH_HELP),
        "out": Value(
            "FOLDER",
            "folder of the results (default: runs/NAME/evaluation; another finished evaluation "
            "there is moved aside)",
        ),
    }
    what = ("RUN|CONFIG|MODEL", "a run's folder, a config.yaml, or a model's folder or Hub id")
    description = DESCRIPTION.format(program=program)
    line = read_command_line(program, description, what, arguments, SWITCHES, values)
    from reason_llm.app.console import Console

    Console("plain")  # sets up logging before libraries are imported
    from reason_llm.evaluate import make_request, run_evaluation

    request = make_request(line)
    run_evaluation(request, Console(request.config.log.console))
