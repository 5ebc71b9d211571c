"""``python scripts/benchmark.py gpu --out docs/gpu_table.md``; ``... cpu``; ``... gpu-check``."""

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks import device, sides
from benchmarks.models import MULTIMODAL, SHAPES, make
from benchmarks.work import VARIANTS, WORKLOADS

from reason_llm.errors import ReasonError

CALLS = ("speed", "peers", "nf4", "memory", "fold", "backend")
MAX_TOKENS = 131072
"""Tokens of the longest rows that are tried."""
ON_CPU = {name: title for name, (title, work) in WORKLOADS.items() if work.engine == "transformers"}
GPU = """\
This project, bare vLLM, TRL and Unsloth on one GPU at the same work: seconds of a phase switch,
planned and measured memory, tokens per second, and the longest rows under 24 GiB.
The model's weights are random; nothing is downloaded."""
CPU = """\
This project and TRL's trainers on a CPU, a step each in turn; the first one is a warm-up. A step
is what an optimizer step needs: sampling, rewards, (here) the buffer on disk, learning; TRL's
loading of data and logging between steps are left out. Peak memory is the process's largest
resident memory from start to end. vLLM is hidden from both: neither uses it here."""


def main() -> int:
    """Read the command line and run what it names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    out = argparse.ArgumentParser(add_help=False)
    out.add_argument("--out", type=Path, help="write the table there, and all numbers as .json")
    add = parts.add_parser("gpu", help="compare on a GPU", description=GPU, parents=[out])
    add.add_argument("--calls", nargs="*", choices=CALLS, default=CALLS, help="default: all")
    add.add_argument("--systems", nargs="+", choices=sides.SYSTEMS, default=[*sides.SYSTEMS])
    add.add_argument("--model-shape", choices=SHAPES, default=WORKLOADS["gpu"][1].model)
    add.add_argument("--model-folder", type=Path, help="keep the random model there")
    add.add_argument("--repeats", type=_one_or_more, default=2, help="steps of a call (default 2)")
    add.add_argument("--most-seconds", type=float, default=1800, help="of a system in a call")
    add.add_argument("--dry-run", action="store_true", help="a tiny model, anywhere, in a minute")
    add = parts.add_parser("cpu", help="compare with TRL on a CPU", description=CPU, parents=[out])
    names = "; ".join(f"{name}: {title}" for name, title in ON_CPU.items())
    add.add_argument("--workload", nargs="+", choices=ON_CPU, default=[*ON_CPU], help=names)
    add.add_argument("--repeats", type=_one_or_more, default=5, help="counted steps (default: 5)")
    add.add_argument("--small", action="store_true", help="the smallest form, as a test")
    add.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    add.add_argument("--trl-rows", type=int, help="rows of TRL's passes (default: the best found)")
    add.add_argument("--extras", nargs="*", choices=VARIANTS, help="other settings (default: all)")
    add = parts.add_parser("gpu-check", help="what this card can do, in three minutes")
    add.add_argument("--quantize", choices=["none", "nf4"], default="none")
    add.add_argument("--shape", choices=[*SHAPES, *MULTIMODAL],
                     default="qwen2.5-0.5b" if device.has_gpu() else "tiny")  # fmt: skip
    add.add_argument("--model-folder", type=Path, help="keep the random model there")
    args = parser.parse_args()
    parts_by_name: dict[str, Callable[[argparse.Namespace], int | None]] = {
        "gpu": _gpu,
        "cpu": _cpu,
        "gpu-check": _gpu_check,
    }
    try:
        return int(parts_by_name[args.part](args) or 0)
    except ReasonError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _one_or_more(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: nothing would be measured; give 1 or more")
    return int(text)


def _gpu(args: argparse.Namespace) -> int:
    from benchmarks import table
    from benchmarks.measure import Block, gpu

    dry, work = args.dry_run, WORKLOADS["gpu"][1]
    with TemporaryDirectory() as temporary:
        shape = "tiny" if dry else args.model_shape
        folder = args.model_folder or Path(temporary) / shape
        # In another process, so that nothing of it stays on the GPU.
        with sides.SPAWN.Pool(1) as pool:
            pool.apply(make, (shape, folder))
        work = replace(work.smallest() if dry else work, model=str(folder))
        work = replace(work, repeats=1 if dry else args.repeats)
        heading = (
            f"{device.describe()}. Medians of {work.repeats} steps in turn. Sampling of TRL and "
            "Unsloth holds their waking, syncing and going to sleep."
        )

        def keep(blocks: list[Block]) -> None:
            table.save(blocks, heading, args.out)

        say = partial(print, file=sys.stderr, flush=True)
        max_tokens = 768 if dry else MAX_TOKENS
        blocks = gpu(args.calls, args.systems, work, max_tokens, args.most_seconds, say, keep)
    table.show(blocks, heading, args.out)
    return 0


def _cpu(args: argparse.Namespace) -> int:
    from benchmarks import table
    from benchmarks.measure import cpu

    extras = (() if args.small else VARIANTS) if args.extras is None else args.extras
    with TemporaryDirectory() as folder:
        counts = (args.threads, args.trl_rows)
        blocks = cpu(args.workload, args.repeats, args.small, *counts, extras, Path(folder))
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    heading = (
        f"{device.describe()}. Medians of {args.repeats} steps in turn, {args.threads} thread(s) "
        f"each, load average {load}."
    )
    table.show(blocks, heading, args.out)
    return 0


def _gpu_check(args: argparse.Namespace) -> int:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
    from benchmarks import gpu_check

    with TemporaryDirectory() as temporary:
        folder = args.model_folder or Path(temporary) / "model"
        failed = gpu_check.run(args.quantize, args.shape, folder, partial(print, flush=True))
        return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
