"""Export: ``reason-llm export RUN|ADAPTER --out FOLDER``: a model for use elsewhere."""

from collections.abc import Sequence

DESCRIPTION = """\
Merge a run's adapter into its unquantised base, or copy only the adapter, and check the result with
the log-probs of rollouts. The folder is written completely or not at all.

  {program} runs/quickstart --out exported/sums                    bfloat16 safetensors and a card
  {program} runs/quickstart --out exported/adapter --adapter-only  PEFT's format
  {program} runs/quickstart --out exported/sums --push me/sums     to the Hub, private

An adapter trained over NF4 is merged into the original weights, never into NF4."""
SWITCHES = {"adapter-only": "write the adapter in PEFT's format without merging"}


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from reason_llm.config import Value, read_command_line
    from reason_llm.errors import ConfigError
    from reason_llm.run.store import folder as run_folder

    values = {
        "out": Value("FOLDER", "new folder to write"),
        "which": Value(run_folder.WHICH, run_folder.WHICH_HELP),
        "base": Value(
            "MODEL", "folder or Hub id of the unquantised base (default: the run's base)"
        ),
        "dtype": Value("TYPE", "bfloat16 or float32 (default: bfloat16)"),
        "push": Value("REPO", "also upload to this Hub repository"),
        "gguf": Value(
            "CONVERTER",
            "also write GGUF (q4_k_m, too) and Ollama's Modelfile with llama.cpp's "
            "convert_hf_to_gguf.py, on PATH, in ./llama.cpp or at this path",
            nargs="?",
            const="convert_hf_to_gguf.py",
        ),
    }
    what = ("RUN|ADAPTER", "a run's folder, an adapter's, or a model in MXFP4 to unpack")
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
    if adapter_only and "dtype" in line.values:
        raise ConfigError(
            "--dtype contradicts --adapter-only: nothing is merged; leave one of them out"
        )
    from reason_llm.app import api

    options = {name.replace("-", "_"): line.one(name) for name in line.values if name != "out"}
    api.export(line.what, out, adapter_only=adapter_only, **options)  # type: ignore[arg-type]
