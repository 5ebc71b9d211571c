"""Pairs: ``reason-llm pairs BUFFERS --out FILE``: training rows from saved rollouts."""

from argparse import SUPPRESS
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Write training rows from saved rollouts: preferences (for stage
preference or reward), labels (for preference.name kto), demonstrations (for stage sft, which is
rejection sampling) or conditioned demonstrations (for stage sft), whose prompts name their score.
The rows include the sampled token ids. Running the same command again changes nothing."""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from pydantic import ValidationError

    from reason_llm.config import PAIR_FORMS, PairsSection, Parser, docstring, wrong, yaml_text
    from reason_llm.errors import ConfigError

    usage = "BUFFERS [BUFFERS ...] --out FILE.jsonl [--as FORM] [--option value ...]"
    parser = Parser(program, DESCRIPTION, usage)
    buffers_help = "folder such as runs/x/buffers, or a saved buffer"
    parser.add_argument("buffers", nargs="+", type=Path, metavar="BUFFERS", help=buffers_help)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl", help="new file")
    parser.add_argument(
        "--as",
        dest="form",
        choices=PAIR_FORMS,
        default=PAIR_FORMS[0],
        help="form of the rows (default: preferences)",
    )
    parser.add_argument(
        "--model", help="folder or Hub id of the sampling model (default: as in the buffers)"
    )
    for name, option in PairsSection.model_fields.items():
        text = f"{docstring(option)} (default: {option.default})".replace("%", "%%")
        flag, dest = f"--{name.replace('_', '-')}", f"={name}"
        parser.add_argument(flag, dest=dest, metavar="VALUE", default=SUPPRESS, help=text)
    args = parser.parse_args(arguments)
    texts = {k.removeprefix("="): v for k, v in vars(args).items() if k.startswith("=")}
    try:
        section = PairsSection.model_validate({k: yaml_text.parse(v) for k, v in texts.items()})
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise ConfigError(
            f"--{name.replace('_', '-')} {texts[name]:.100} {wrong(first)}; see --help"
        ) from error
    except ValueError as error:
        raise ConfigError(f"a value is not valid YAML ({error}); quote it") from error
    from reason_llm.app.console import Console

    console = Console("plain")
    from reason_llm.app.pairs import write_pairs  # heavy: a tokenizer

    console.line(write_pairs(args.buffers, args.out, args.form, section, args.model).line)
