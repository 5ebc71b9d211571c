"""Report: ``reason-llm report RUN [RUN2 ...]`` writes an HTML file or serves a live page."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

DESCRIPTION = """\
Write the report of a run or of several runs: one HTML file that works offline."""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from reason_llm.config import Parser
    from reason_llm.errors import ConfigError

    parser = Parser(program, DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    place = "RUN/report.html; for several runs comparison.html next to the first"
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help=f"file to write (default: {place})"
    )
    parser.add_argument("--serve", action="store_true", help="serve a live page on 127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="with --serve (default: a free one)")
    args = parser.parse_args(arguments)
    from reason_llm.app.report import serve, write_report  # heavy: after --help

    if args.serve:
        if args.out:
            raise ConfigError("--serve writes no file; leave out --out, or --serve")
        serve(args.runs, args.port, partial(print, flush=True))
        return
    if args.port:
        raise ConfigError(f"--port {args.port} is for --serve; give both, or none")
    first, *others = args.runs
    out = args.out or (first.parent / "comparison.html" if others else first / "report.html")
    alarms = write_report(args.runs, out)
    print(f"report in {out} ({out.stat().st_size / 2**20:.1f} MiB)")
    print(*alarms, sep="\n")
