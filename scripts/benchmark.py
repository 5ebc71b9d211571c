"""``python scripts/benchmark.py gpu --out docs/gpu_table.md``; ``... cpu``; ``... replicas``."""

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import orjson
import torch
from benchmarks import device, sides
from benchmarks.models import SHAPES, make
from benchmarks.work import VARIANTS, WORKLOADS, Work

from reason_llm.errors import ReasonError
from reason_llm.files import read_object

CAPABILITIES = ("8.0", "8.9", "9.0", "12.0")
"""Compute capabilities of an A100, an RTX 4090, an H100 and an RTX 5090."""
GPU = """\
This project beside bare vLLM, TRL and Unsloth on one GPU, at the same work: seconds of a phase
switch, planned and measured memory, tokens a second, and the longest context under a cap.
The model's weights are random; nothing is downloaded."""
CPU = """\
This project beside TRL's trainers on a CPU, a step each in turn; the first one is a warm-up. A step
is what an optimizer step needs: sampling, rewards, (here) the buffer on disk, learning; TRL's
loading of data and logging between steps are left out. Peak memory is the process's largest
resident memory from start to end. vLLM is hidden from both: neither uses it here."""


def main() -> int:
    """Read the command line and run what it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    add = parts.add_parser(
        "gpu", help="beside vLLM, TRL and Unsloth, on a GPU", description=GPU
    ).add_argument
    add("--model-shape", choices=SHAPES, default="qwen2.5-7b")
    add("--model-folder", type=Path, help="keep the random model there (default: a temporary one)")
    add("--out", type=Path, help="write the table there, and all numbers beside it as .json")
    add("--systems", nargs="+", choices=sides.SYSTEMS, help="default: all")
    add("--kinds", nargs="+", choices=["nf4", "bf16"], help="default: both")
    add("--rounds", type=_one_or_more, default=2, help="each measures every system (default: 2)")
    add("--repeats", type=_one_or_more, default=3, help="measured steps in a round (default: 3)")
    add("--prompts", type=int, default=16, help="in a step (default: 16)")
    add("--completions", type=int, default=8, help="of a prompt (default: 8)")
    add("--prompt-tokens", type=int, default=256)
    add("--completion-tokens", type=int, default=768)
    add("--rank", type=int, default=32, help="of the adapter (default: 32)")
    add("--caps", nargs="*", type=float, help="in GiB (default: 24 48 80); none: no contexts")
    add("--contexts", nargs="+", type=int, help="tried under the caps, rising, in tokens")
    add("--group", type=int, default=4, help="completions in such a trial (default: 4)")
    add("--most-seconds", type=float, default=1800, help="for one system at one piece of work")
    add("--dry-run", action="store_true", help="a tiny model, little work: anywhere, in a minute")
    add = parts.add_parser(
        "cpu", help="beside TRL's trainers, on a CPU", description=CPU
    ).add_argument
    told = "; ".join(f"{name}: {title}" for name, (title, _) in WORKLOADS.items())
    add("--workload", nargs="+", choices=WORKLOADS, default=["a", "b", "c"],
        help=f"{told} (default: a b c)")  # fmt: skip
    add("--repeats", type=_one_or_more, default=5, help="optimizer steps that count (default: 5)")
    add("--small", action="store_true", help="the smallest form, as a test")
    add("--threads", type=int, default=1, help="of each process (default: 1)")
    add("--trl-rows", type=int, help="rows of TRL's passes (default: the best found)")
    add("--extras", nargs="*", choices=VARIANTS, help="other settings (default: all; small: none)")
    add("--out", type=Path, help="write the table there, and all numbers beside it as .json")
    add = parts.add_parser(
        "replicas", help="replicas beside one process, and sampling ahead beside in turn, on a CPU"
    ).add_argument
    add("--repeats", type=int, default=3, help="pairs of runs (default: 3)")
    add("--steps", type=int, default=5, help="of a run that count (default: 5)")
    add("--replicas", type=int, default=2)
    add("--small", action="store_true", help="tiny sizes, to see that it works")
    add("--out", type=Path, help="write the table there, and all numbers beside it as .json")
    add = parts.add_parser("gpu-check", help="what this card can do, in three minutes").add_argument
    add("--quantize", choices=["none", "nf4"], default="none")
    add("--model-folder", type=Path, help="keep the random model there")
    add = parts.add_parser(
        "symbols", help="names of vLLM, bitsandbytes, Unsloth and TRL that are touched"
    ).add_argument
    add("site", type=Path, nargs="?", default=Path(torch.__file__).parents[1],
        help="a folder of unpacked wheels (default: what is installed)")  # fmt: skip
    add = parts.add_parser(
        "count", help="what a step of learning asks of a card, counted without one"
    ).add_argument
    add("config", type=Path, nargs="+", help="configs for a card")
    for name, what in {
        "config": "vLLM's config as it resolves on CUDA, without a device",
        "kernels": "vLLM's Triton kernels compiled for CUDA, without a device",
    }.items():
        add = parts.add_parser(name, help=what).add_argument
        add("--capability", nargs="+", choices=CAPABILITIES, default=list(CAPABILITIES),
            help="compute capabilities (default: all)")  # fmt: skip
    add = parts.add_parser("worker", description="One system at one piece of work.").add_argument
    add("system", choices=sides.SYSTEMS)
    add("work", type=Path, help="a file of JSON")
    add("outcome", type=Path, help="is written after every step")
    add = parts.add_parser(
        "side", description="A system's process; used by the others"
    ).add_argument
    add("system", choices=sides.SYSTEMS)
    add("work", type=Path)
    add = parts.add_parser("model", description="A random model of a shape.").add_argument
    add("shape", choices=SHAPES)
    add("folder", type=Path)
    given = parser.parse_args()
    part = {
        "gpu": _gpu, "cpu": _cpu, "replicas": _replicas, "gpu-check": _gpu_check,
        "symbols": _symbols, "config": _emulated, "kernels": _emulated,
        "count": _count, "worker": _worker, "side": _side, "model": _model,
    }[given.part]  # fmt: skip
    try:
        return part(given)
    except ReasonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _one_or_more(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: nothing would be measured; give 1 or more")
    return int(text)


def _gpu(given: argparse.Namespace) -> int:
    from benchmarks import table
    from benchmarks.measure import LADDER, Block, Settings, gpu

    dry = given.dry_run
    with TemporaryDirectory() as temporary:
        shape = "tiny" if dry else given.model_shape
        folder = given.model_folder or Path(temporary) / shape
        # In a process of its own, so that nothing of it stays on the GPU.
        subprocess.run([sys.executable, __file__, "model", shape, str(folder)], check=True)
        work = Work(
            model=str(folder),
            prompts=2 if dry else given.prompts,
            completions=2 if dry else given.completions,
            prompt_tokens=24 if dry else given.prompt_tokens,
            completion_tokens=24 if dry else given.completion_tokens,
            rank=8 if dry else given.rank,
            repeats=1 if dry else given.repeats,
        )
        systems = ("reason_llm", "vllm", "trl") if dry else tuple(sides.SYSTEMS)
        settings = Settings(
            systems=tuple(given.systems or systems),
            kinds=tuple(given.kinds or (("bf16",) if dry else ("nf4", "bf16"))),
            work=work,
            rounds=1 if dry else given.rounds,
            caps_gib=tuple(given.caps if given.caps is not None else (8,) if dry else (24, 48, 80)),
            ladder=tuple(given.contexts or ((64,) if dry else LADDER)),
            group=2 if dry else given.group,
            most_seconds=given.most_seconds,
        )
        said = (
            f"{device.describe()}. Medians of {settings.rounds} rounds of {work.repeats} steps. "
            "Sampling of TRL and Unsloth holds their waking, syncing and going to sleep. A context "
            f"is tried with one group of {settings.group}."
        )

        def keep(blocks: list[Block]) -> None:
            table.save(blocks, said, given.out)

        blocks = gpu(settings, lambda line: print(line, file=sys.stderr, flush=True), keep)
    table.show(blocks, said, given.out)
    return 0


def _cpu(given: argparse.Namespace) -> int:
    from benchmarks import table
    from benchmarks.measure import cpu

    extras = (() if given.small else VARIANTS) if given.extras is None else given.extras
    with TemporaryDirectory() as folder:
        blocks = cpu(given.workload, given.repeats, given.small, given.threads, given.trl_rows,
                     extras, Path(folder))  # fmt: skip
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    said = (
        f"{device.describe()}. Medians of {given.repeats} steps in turn, {given.threads} thread(s) "
        f"each, load average {load}."
    )
    table.show(blocks, said, given.out)
    return 0


def _replicas(given: argparse.Namespace) -> int:
    from benchmarks import replicas, table

    with TemporaryDirectory() as folder:
        blocks = replicas.run(given.repeats, given.steps, given.replicas, given.small, Path(folder))
    said = f"{device.describe()}. Medians of {given.repeats} runs of {given.steps} steps each."
    table.show(blocks, said, given.out)
    return 0


def _gpu_check(given: argparse.Namespace) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
    from benchmarks import gpu_check

    with TemporaryDirectory() as temporary:
        folder = given.model_folder or Path(temporary) / "model"
        return int(gpu_check.run(given.quantize, folder, lambda line: print(line, flush=True)) > 0)


def _symbols(given: argparse.Namespace) -> int:
    from benchmarks import symbols

    return int(symbols.run(given.site, Path(__file__).resolve().parents[1], print) > 0)


def _count(given: argparse.Namespace) -> int:
    from benchmarks.count import table

    from reason_llm.config.file import load

    for path in given.config:
        print(f"\n{path.name}\n")
        table(load(path), print)
    return 0


def _emulated(given: argparse.Namespace) -> int:
    """One capability a process: vLLM keeps what it was once told about the card."""
    if given.part == "kernels" and find_spec("triton") is None:
        print(
            "kernels: Triton is not installed, and the builds for CPU bring none; install the "
            "version that torch for CUDA names (3.7.1 for 2.13) without its dependencies",
            file=sys.stderr,
        )
        return 2
    if len(given.capability) > 1:
        commands = ([sys.executable, __file__, given.part, "--capability", each]
                    for each in given.capability)  # fmt: skip
        return max([subprocess.run(command).returncode for command in commands])
    from benchmarks import kernels

    run = {"config": kernels.run_config, "kernels": kernels.run_kernels}[given.part]
    with TemporaryDirectory() as folder:
        failed = run(given.capability[0], Path(folder), lambda line: print(line, flush=True))
    return int(failed > 0)


def _worker(given: argparse.Namespace) -> int:
    def write(outcomes: dict[str, sides.Outcome]) -> None:
        outcome = outcomes[given.system]
        measures = {measure for step in outcome.steps for measure in step}
        values = {measure: outcome.values(measure) for measure in sorted(measures)}
        values["largest_gib"] = [outcome.largest_gib]
        given.outcome.write_bytes(orjson.dumps({"error": outcome.error, "values": values}))
        print(outcome.trace, file=sys.stderr)

    work = Work(**read_object(given.work))
    sides.take_turns({given.system: (given.system, work)}, 24 * 3600.0, write)
    return 0


def _side(given: argparse.Namespace) -> int:
    sides.run(given.system, given.work)
    return 0


def _model(given: argparse.Namespace) -> int:
    make(given.shape, given.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
