"""Rescore: ``reason-llm rescore BUFFER [CONFIG.yaml] [--out FILE] [--section.key value ...]``."""

from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Compute a config's rewards and advantages for the rollouts of a saved buffer, and write a new file.
Train on it with: {train} CONFIG.yaml --from-buffer FILE"""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from reason_llm.app.console import Console
    from reason_llm.config import WITHOUT_CONFIG, Parser, read_command_line

    train = program.replace("rescore", "train")  # called as this command is
    usage = "BUFFER [CONFIG.yaml] [--out FILE] [--accept-edited] [--section.key value ...]"
    parser = Parser(program, DESCRIPTION.format(train=train), usage)
    parser.epilog = f"All options of {train} are accepted; score and algorithm are used."
    parser.add_argument("buffer", type=Path, help="data/buffer.json, or one of <run>/buffers/")
    parser.add_argument(
        "--out", type=Path, help="new file (default: BUFFER with .rescored in its name)"
    )
    parser.add_argument(
        "--accept-edited",
        action="store_true",
        help="accept an edited BUFFER and update its SHA-256; it is rescored only if a config, an "
        "option or --out is also given",
    )
    args, config_arguments = parser.parse_known_args(arguments)
    what = ("CONFIG.yaml", WITHOUT_CONFIG)
    config = read_command_line(f"{program} BUFFER", "", what, config_arguments, {}).config()
    from reason_llm.app import rescore as rescoring  # heavy: torch
    from reason_llm.run import default_target

    console = Console(config.log.console)
    if args.accept_edited:
        is_new = rescoring.accept_edited(args.buffer)
        state = "now has the SHA-256 of its edited content" if is_new else "is as written"
        console.line(f"{args.buffer} {state}")
        if not config_arguments and args.out is None:
            return
    target = args.out or default_target(args.buffer)
    document = rescoring.rescore_file(args.buffer, target, config)
    completions = [c for group in document.groups for c in group.completions]
    mean = sum(c.reward or 0.0 for c in completions) / len(completions)
    console.line(f"{len(completions)} rollouts, mean reward {mean:.3f}, in {target}")
