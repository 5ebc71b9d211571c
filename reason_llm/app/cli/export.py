"""Export: ``reason-llm export RUN|ADAPTER --out FOLDER``: a model to take home."""

from collections.abc import Sequence

DESCRIPTION = """\
Merge a run's adapter into its unquantised base, or take the adapter alone, and check by the
log-probs of rollouts that nothing was lost. The folder appears whole or not at all.

  {program} runs/quickstart --out exported/sums                    bfloat16 safetensors and a card
  {program} runs/quickstart --out exported/adapter --adapter-only  PEFT's form
  {program} runs/quickstart --out exported/sums --push me/sums     to the Hub, private

An adapter that was trained over NF4 is merged into the base as it was before, never into NF4."""
SWITCHES = {"adapter-only": "the adapter in PEFT's form, not merged"}


def run(program: str, arguments: Sequence[str]) -> None:
    """Do what ``arguments`` ask."""
    from reason_llm.config import Value, read_command_line
    from reason_llm.errors import ConfigError
    from reason_llm.run.store import folder as run_folder

    values = {
        "out": Value("FOLDER", "where to; a new folder"),
        "which": Value(run_folder.WHICH, run_folder.WHICH_HELP),
        "base": Value("MODEL", "unquantised base, a folder or Hub id (default: the run's own)"),
        "dtype": Value("TYPE", "bfloat16 or float32 (default: bfloat16)"),
        "max-shard-gib": Value("GIB", "largest weights file (default: 5)"),
        "rollouts": Value("FILE", "rollouts for the parity check (default: those of the run)"),
        "push": Value("REPO", "upload to this repository of the Hub, too"),
        "gguf": Value(
            "CONVERTER",
            "convert to GGUF, too, with llama.cpp's convert_hf_to_gguf.py on PATH or at this path",
            nargs="?",
            const="convert_hf_to_gguf.py",
        ),
    }
    what = ("RUN|ADAPTER", "a run's folder, or an adapter's")
    description = DESCRIPTION.format(program=program)
    line = read_command_line(
        program, description, what, arguments, SWITCHES, values, with_config=False
    )
    out = line.one("out")
    if line.what is None or out is None:
        raise ConfigError(
            "there is nothing to export; give a run's folder and --out FOLDER, as in "
            f"{program} runs/quickstart --out exported/sums"
        )
    adapter_only = "adapter-only" in line.given
    for name in ("dtype", "max-shard-gib", "rollouts"):
        if adapter_only and name in line.values:
            raise ConfigError(
                f"--{name} contradicts --adapter-only: nothing is merged; leave one of them out"
            )
    from reason_llm.app import api

    given = {name.replace("-", "_"): line.one(name) for name in line.values if name != "out"}
    api.export(line.what, out, adapter_only=adapter_only, **given)  # type: ignore[arg-type]
