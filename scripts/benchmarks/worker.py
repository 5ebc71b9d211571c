"""One system at one piece of work, in a process of its own: what it came to lies in a file, whether
it went well or not."""

import os
import traceback
from pathlib import Path

from benchmarks import device
from benchmarks.work import Keep, Outcome, Work, read_outcome, read_work, write

SYSTEMS = {
    "reason_llm": "reason_llm",
    "reason_llm_unsloth": "reason_llm over Unsloth",
    "vllm": "vLLM alone",
    "vllm_lora": "vLLM alone, LoRA",
    "trl": "TRL",
    "unsloth": "Unsloth",
}
"""What can be measured, and its name in the table."""
LEARNERS = ("reason_llm", "reason_llm_unsloth", "trl", "unsloth")
"""Those that learn, too."""
PEERS = ("trl", "unsloth")
"""Not ours, and of no use without a GPU."""


def run(system: str, work_file: Path, outcome_file: Path) -> None:
    """Measure and write, after every step; an exception becomes the outcome's error."""
    work = read_work(work_file)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, as ours is
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        if system in PEERS and not device.has_gpu():
            raise RuntimeError("needs a CUDA GPU, and this machine has none")
        if system == "unsloth":
            _import_unsloth(work_file.parent)
        device.keep_under(work.budget_gib)
        with device.watch() as watched:

            def keep(so_far: Outcome) -> None:
                so_far.values["largest_gib"] = [watched.gib]
                write(so_far, outcome_file)

            keep(_measure(system, work, keep))
    except Exception as error:  # noqa: BLE001 - a system that fails is a row of the table
        said = " ".join(str(error).split())[:300]
        outcome = read_outcome(outcome_file) if outcome_file.exists() else Outcome()
        outcome.error, outcome.trace = f"{type(error).__name__}: {said}", traceback.format_exc()
        write(outcome, outcome_file)


def _import_unsloth(folder: Path) -> None:
    """Before all that it patches, and before CUDA begins; the environment is read at import."""
    os.environ["UNSLOTH_VLLM_STANDBY"] = "1"
    os.environ["UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE"] = "1"  # it would take the whole card
    os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
    os.environ["UNSLOTH_COMPILE_LOCATION"] = str(folder / "compiled")
    import unsloth  # noqa: F401


def _measure(system: str, work: Work, keep: Keep) -> Outcome:
    from benchmarks import bare, ours, peers  # heavy

    match system:
        case "reason_llm":
            return ours.measure(work, keep)
        case "reason_llm_unsloth":
            return ours.measure(work, keep, backend="unsloth")
        case "vllm":
            return bare.measure(work, keep, lora=False)
        case "vllm_lora":
            return bare.measure(work, keep, lora=True)
        case "trl":
            return peers.measure_trl(work, keep)
        case _:
            return peers.measure_unsloth(work, keep)
