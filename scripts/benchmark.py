"""``python scripts/benchmark.py cpu``; ``... replicas``; ``... gpu --out docs/gpu_table.md``."""

import argparse
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import orjson
import torch
from benchmarks import worker
from benchmarks.models import SHAPES, make

if TYPE_CHECKING:
    from benchmarks.gpu import Settings

EXTRAS = ("trl_small", "trl_chunked", "trl_bfloat16", "trl_best", "ours_bfloat16")
"""Settings of the sides of ``cpu`` beside the main ones."""
CAPABILITIES = ("8.0", "8.9", "9.0", "12.0")
"""Compute capabilities of an A100, an RTX 4090, an H100 and an RTX 5090."""
WORKLOADS = """\
a: short answers; b: mixed lengths; c: learning alone; d: long prompts; e: long answers; t0, t1, t2:
short answers until most held-out ones are right, by seed (--repeats 59 for its 60 steps); sft, dpo
and dpo_known: the stages (default: a b c)"""
DESCRIPTION = """\
This project beside bare vLLM, TRL and Unsloth on one GPU, at the same work: seconds of a phase
switch, planned and measured memory, tokens a second, and the longest context under a cap.
The model's weights are random; nothing is downloaded."""


def main() -> int:
    """Read the command line and run what it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    _add_gpu(
        parts.add_parser(
            "gpu", help="beside vLLM, TRL and Unsloth, on a GPU", description=DESCRIPTION
        )
    )
    checked = parts.add_parser(
        "gpu-check", help="what this card can do, a verdict a line, in three minutes"
    )
    checked.add_argument("--quantize", choices=["none", "nf4"], default="none")
    checked.add_argument("--model-folder", type=Path, help="keep the random model there")
    looked_up = parts.add_parser(
        "symbols", help="names of vLLM, bitsandbytes, Unsloth and TRL that are touched"
    )
    looked_up.add_argument(
        "site",
        type=Path,
        nargs="?",
        default=Path(torch.__file__).parents[1],
        help="a folder of unpacked wheels (default: what is installed)",
    )
    for name, what in {
        "config": "vLLM's config as it resolves on CUDA, without a device",
        "kernels": "vLLM's Triton kernels compiled for CUDA, without a device",
    }.items():
        emulated = parts.add_parser(name, help=what)
        emulated.add_argument(
            "--capability",
            nargs="+",
            choices=CAPABILITIES,
            default=list(CAPABILITIES),
            help="compute capabilities (default: all)",
        )
    _add_cpu(parts.add_parser("cpu", help="beside TRL's GRPOTrainer, in turn, on a CPU"))
    several = parts.add_parser(
        "replicas", help="replicas beside one process, and sampling ahead beside in turn, on a CPU"
    )
    several.add_argument("--repeats", type=int, default=3, help="pairs of runs (default: 3)")
    several.add_argument("--steps", type=int, default=5, help="of a run that count (default: 5)")
    several.add_argument("--replicas", type=int, default=2)
    several.add_argument("--small", action="store_true", help="tiny sizes, to see that it works")
    several.add_argument("--out", type=Path, help="write the numbers there, as JSON")
    one = parts.add_parser("worker", description="One system at one piece of work; used by gpu.")
    one.add_argument("system", choices=worker.SYSTEMS)
    one.add_argument("work", type=Path)
    one.add_argument("outcome", type=Path)
    made = parts.add_parser("model", description="A random model of a shape; used by gpu.")
    made.add_argument("shape", choices=SHAPES)
    made.add_argument("folder", type=Path)
    given = parser.parse_args()
    if given.part == "model":
        make(given.shape, given.folder)
        return 0
    if given.part == "worker":
        worker.run(given.system, given.work, given.outcome)
        return 0
    parts_by_name = {
        "cpu": _cpu,
        "replicas": _replicas,
        "gpu": _gpu,
        "gpu-check": _gpu_check,
        "symbols": _symbols,
        "config": _emulated,
        "kernels": _emulated,
    }
    return parts_by_name[given.part](given)


def _replicas(given: argparse.Namespace) -> int:
    from benchmarks import replicas

    found = replicas.run(given.repeats, given.steps, given.replicas, given.small)
    print("\n".join(replicas.lines(found)))
    if given.out is not None:
        given.out.write_bytes(orjson.dumps(found, option=orjson.OPT_INDENT_2))
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


def _add_cpu(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    names = ["a", "b", "c", "d", "e", "t0", "t1", "t2", "sft", "dpo", "dpo_known"]
    add("--workload", nargs="+", choices=names, default=["a", "b", "c"], help=WORKLOADS)
    add("--repeats", type=int, default=5, help="optimizer steps that count (default: 5)")
    add("--small", action="store_true", help="the smallest form, as a test")
    add("--threads", type=int, default=1, help="of each process (default: 1)")
    add("--trl-rows", type=int, help="rows of TRL's passes (default: the best found)")
    add("--no-extras", action="store_true", help="only the main setting of TRL")
    add("--extras", nargs="+", choices=EXTRAS, help="other settings (default: all that there are)")
    add("--out", type=Path, help="write the table there, and all numbers beside it as .json")


def _cpu(given: argparse.Namespace) -> int:
    from benchmarks import cpu

    extras = given.extras or (() if given.small or given.no_extras else EXTRAS)
    found = cpu.run(
        given.workload, given.repeats, given.small, given.threads, given.trl_rows, extras
    )
    print(cpu.table(found))
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(cpu.table(found) + "\n", encoding="utf-8")
        numbers = orjson.dumps(found, option=orjson.OPT_INDENT_2)
        given.out.with_suffix(".json").write_bytes(numbers)
    return 0


def _add_gpu(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model-shape", choices=SHAPES, default="qwen2.5-7b")
    add("--model-folder", type=Path, help="keep the random model there (default: a temporary one)")
    add("--out", type=Path, help="write the table there, and all numbers beside it as .json")
    add("--systems", nargs="+", choices=worker.SYSTEMS, help="default: all")
    add("--kinds", nargs="+", choices=["nf4", "bf16"], help="default: both")
    add("--rounds", type=int, default=2, help="each measures every system once (default: 2)")
    add("--repeats", type=int, default=3, help="measured steps in a round (default: 3)")
    add("--prompts", type=int, default=16, help="in a step (default: 16)")
    add("--completions", type=int, default=8, help="of a prompt (default: 8)")
    add("--prompt-tokens", type=int, default=256)
    add("--completion-tokens", type=int, default=768)
    add("--rank", type=int, default=32, help="of the adapter (default: 32)")
    add("--caps", nargs="*", type=float, help="in GiB (default: 24 48 80); none: no contexts")
    add("--contexts", nargs="+", type=int, help="tried under the caps, rising, in tokens")
    add("--group", type=int, default=4, help="completions in such a trial (default: 4)")
    add("--most-seconds", type=float, default=1800, help="for one system at one piece of work")
    add(
        "--dry-run", action="store_true", help="a tiny model and little work: anywhere, in a minute"
    )


def _gpu(given: argparse.Namespace) -> int:
    from benchmarks import device, table
    from benchmarks.gpu import Results, make_model, run

    if given.rounds < 1 or given.repeats < 1:
        least = "--rounds" if given.rounds < 1 else "--repeats"
        value = min(given.rounds, given.repeats)
        print(f"{least} {value}: nothing would be measured; give 1 or more", file=sys.stderr)
        return 2
    with TemporaryDirectory() as temporary:
        shape = "tiny" if given.dry_run else given.model_shape
        model = make_model(shape, given.model_folder or Path(temporary) / shape)
        settings = _settings(given, model)
        machine = device.describe()

        def keep(results: Results) -> None:
            if given.out is not None:
                table.save(settings, results, machine, given.out)

        results = run(settings, lambda line: print(line, file=sys.stderr, flush=True), keep)
    print(table.markdown(settings, results, machine))
    return 0


def _settings(given: argparse.Namespace, model: str) -> "Settings":
    from benchmarks.gpu import LADDER, Settings
    from benchmarks.work import Work

    dry = given.dry_run
    work = Work(
        model=model,
        kind="bf16",
        prompts=2 if dry else given.prompts,
        completions=2 if dry else given.completions,
        prompt_tokens=24 if dry else given.prompt_tokens,
        completion_tokens=24 if dry else given.completion_tokens,
        rank=8 if dry else given.rank,
        repeats=1 if dry else given.repeats,
        warmup=True,
    )
    few = ("reason_llm", "vllm", "trl")
    return Settings(
        systems=tuple(given.systems or (few if dry else worker.SYSTEMS)),
        kinds=tuple(given.kinds or (("bf16",) if dry else ("nf4", "bf16"))),
        work=work,
        rounds=1 if dry else given.rounds,
        caps_gib=tuple(given.caps if given.caps is not None else (8,) if dry else (24, 48, 80)),
        ladder=tuple(given.contexts or ((64,) if dry else LADDER)),
        group=2 if dry else given.group,
        most_seconds=given.most_seconds,
    )


if __name__ == "__main__":
    sys.exit(main())
