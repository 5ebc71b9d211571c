"""Chat: ``reason-llm chat RUN|CONFIG.yaml|ADAPTER|MODEL [--adapter FOLDER]``."""

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from reason_llm.app.chat import ChatSubject

DESCRIPTION = """\
Talk to a run's adapter or to its base, with the run's prompts.
With a message piped in, which may have several lines, one answer is printed:
  echo "What is 1 + 2?" | {program} runs/quickstart"""


def run(program: str, arguments: Sequence[str]) -> None:
    """Run the command."""
    from reason_llm.app.console import Console
    from reason_llm.data import player_of
    from reason_llm.errors import ConfigError

    Console("quiet")  # libraries show warnings only
    parser = subject_parser(program, DESCRIPTION)
    parser.add_argument("--base", action="store_true", help="talk to the base, not the adapter")
    for name in ("temperature", "top-p", "top-k", "min-p", "max-new-tokens", "seed"):
        parser.add_argument(f"--{name}", metavar="N", help="sampling option (default: the run's)")
    args = parser.parse_args(arguments)
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    from reason_llm.app import chat as chats  # heavy: after --help

    subject = subject_of(args)
    config, options = subject.config, chats.options_of(subject, vars(args))
    interactive = sys.stdin.isatty()
    message = "" if interactive else sys.stdin.read().strip()
    if not interactive and not message:
        raise ConfigError("standard input is empty; pipe a message in, or use a terminal")
    if count := message.count("\n"):
        notice = f"{count + 1} lines on standard input are one message; call again for another one"
        print(notice, file=sys.stderr)
    chat = chats.ChatSession(subject._replace(adapter=None) if args.base else subject, options)
    if config.samples and (player := player_of(config)) is not None:
        print(player.chat_note, file=sys.stderr)
    if interactive:
        chats.talk(chat)
    else:
        chats.print_answer(chat, message)


def subject_parser(program: str, description: str) -> ArgumentParser:
    """The parser of what ``subject_of`` reads."""
    from reason_llm.config import Parser
    from reason_llm.run.store import folder as run_folder

    parser = Parser(program, description.format(program=program))
    parser.add_argument(
        "target", help="folder of a run, an adapter or a model; a config file; a Hub id"
    )
    parser.add_argument(
        "--adapter", type=Path, metavar="FOLDER", help="adapter that replaces the run's own"
    )
    parser.add_argument("--which", metavar=run_folder.WHICH, help=run_folder.WHICH_HELP)
    for name in ("system_prompt", "template"):
        parser.add_argument(
            f"--data.{name}",
            dest=name,
            metavar="TEXT",
            help="option of the config (default: the run's)",
        )
    return parser


def subject_of(args: Namespace) -> "ChatSubject":
    """The config and the adapter that a command line names, with its options."""
    from reason_llm.app import chat as chats
    from reason_llm.run.store import folder as run_folder

    subject = chats.find_subject(args.target, args.adapter, run_folder.which_adapter(args.which))
    overrides = {f"data.{name}": getattr(args, name) for name in ("system_prompt", "template")}
    overrides = {name: text for name, text in overrides.items() if text is not None}
    return subject._replace(config=subject.config.with_options(overrides))
