"""Report: ``python scripts/report.py RUN [RUN2 ...]`` writes one HTML file; ``--serve`` follows a
running run."""

import sys
from pathlib import Path

DESCRIPTION = """\
Write the report of one or more runs: one HTML file that loads nothing from anywhere."""


def main() -> int:
    """Read the command line, and turn a user's mistake into one line and exit code 2."""
    from reason_llm.app.report import serve, write_report
    from reason_llm.config import Parser
    from reason_llm.errors import ConfigError, ReasonError, shown
    from reason_llm.files import CLOSED_OUTPUT, discard_output, write_for_oneself

    parser = Parser(prog="python scripts/report.py", description=DESCRIPTION)
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a folder such as runs/quickstart"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="where to (default: RUN/report.html)"
    )
    parser.add_argument(
        "--serve", action="store_true", help="serve it on 127.0.0.1 and follow the runs"
    )
    parser.add_argument("--port", type=int, default=0, help="with --serve (default: a free one)")
    write_for_oneself()
    try:
        given = parser.parse_args()
        if given.serve:
            if given.out:
                raise ConfigError("--serve writes no file; leave out --out, or --serve")
            serve(given.runs, given.port, lambda url: print(f"following on {url}", flush=True))
            return 0
        if given.port:
            raise ConfigError(f"--port {given.port} is for --serve; give both, or none")
        out = given.out or given.runs[0] / "report.html"
        alarms = write_report(given.runs, out)
        print(f"report in {out} ({out.stat().st_size / 2**20:.1f} MiB)")
        for title in alarms:
            print(f"alarm: {title}")
        sys.stdout.flush()
    except ReasonError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        discard_output()
        return CLOSED_OUTPUT
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
