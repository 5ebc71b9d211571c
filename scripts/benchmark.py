"""Benchmark: ``python scripts/benchmark.py cpu`` measures this project beside TRL on this machine's
CPU."""

import argparse
import sys
from pathlib import Path

import orjson

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Read the command line, measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    cpu = commands.add_parser("cpu", help="beside TRL's GRPOTrainer, in turn, on a CPU")
    cpu.add_argument("--workload", nargs="+", choices="abc", default=["a", "b", "c"])
    cpu.add_argument("--repeats", type=int, default=5, help="optimizer steps that count")
    cpu.add_argument("--small", action="store_true", help="the smallest form, as a test")
    cpu.add_argument("--threads", type=int, default=1, help="of each process")
    cpu.add_argument("--trl-rows", type=int, help="rows of TRL's passes; default: the best found")
    cpu.add_argument("--no-extras", action="store_true", help="only the main setting of TRL")
    cpu.add_argument("--out", type=Path, help="folder for benchmark_cpu.json and benchmark_cpu.md")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))  # benchmarks/ is not installed
    from benchmarks import cpu as sides

    found = sides.run(
        args.workload,
        args.repeats,
        args.small,
        args.threads,
        args.trl_rows,
        not (args.small or args.no_extras),
    )
    text = sides.table(found)
    print(text)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "benchmark_cpu.json").write_bytes(
            orjson.dumps(found, option=orjson.OPT_INDENT_2)
        )
        (args.out / "benchmark_cpu.md").write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
