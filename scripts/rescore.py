"""``python scripts/rescore.py BUFFER [CONFIG.yaml] [--out FILE] [--section.key value ...]``: saved
rollouts get the rewards and advantages of a config. With ``--accept-edited``, a buffer that was
edited on purpose gets a new digest."""

import sys
from argparse import RawDescriptionHelpFormatter
from pathlib import Path

DESCRIPTION = """\
Give the rollouts of a saved buffer the rewards and the advantages of a config, in a new file.
Learn from it with: python scripts/train.py CONFIG.yaml --from-buffer FILE"""


def main() -> int:
    """Read the command line, rescore, and turn a user's mistake into one line and exit code 2."""
    from reason_llm.app.console import Console
    from reason_llm.config import Parser, parse_command_line
    from reason_llm.errors import ReasonError, shown
    from reason_llm.files import write_for_oneself

    parser = Parser(
        prog="python scripts/rescore.py",
        description=DESCRIPTION,
        usage="%(prog)s BUFFER [CONFIG.yaml] [--out FILE] [--accept-edited] "
        "[--section.key value ...]",
        epilog="All options of scripts/train.py can be given too; score and algorithm count.",
        formatter_class=RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("buffer", type=Path, help="data/buffer.json, or one of <run>/buffers/")
    parser.add_argument(
        "--out", type=Path, help="the new file (default: BUFFER with .rescored in its name)"
    )
    parser.add_argument(
        "--accept-edited",
        action="store_true",
        help="BUFFER was edited on purpose: write the new SHA-256 of its content into it; it is "
        "rescored only if a config, an option or --out is given, too",
    )
    write_for_oneself()
    try:
        own, rest = parser.parse_known_args()
        default = Path("configs/quickstart.yaml")
        config, _ = parse_command_line(
            "python scripts/rescore.py BUFFER", DESCRIPTION, default, rest, {}
        )
        from reason_llm.app import rescore as rescoring  # heavy: torch
        from reason_llm.run import default_target

        console = Console(config.log.console)
        if own.accept_edited:
            is_new = rescoring.accept_edited(own.buffer)
            told = "has a new SHA-256, of its content as edited" if is_new else "is as written"
            console.line(f"{own.buffer} {told}")
            if not rest and own.out is None:
                return 0
        target = own.out or default_target(own.buffer)
        document = rescoring.rescore_file(own.buffer, target, config)
        completions = [c for group in document.groups for c in group.completions]
        mean = sum(c.reward or 0.0 for c in completions) / len(completions)
        console.line(f"{len(completions)} rollouts, mean reward {mean:.3f}, in {target}")
    except ReasonError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
