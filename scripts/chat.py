"""Chat: ``python scripts/chat.py RUN|CONFIG.yaml|ADAPTER|MODEL [--adapter FOLDER]``, in a terminal
or a pipe."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import replace
from pathlib import Path

DESCRIPTION = """\
Talk to a run's adapter and to its base, asked as the run asks them; /help tells the commands.
With something piped in, that is the message, and one answer is printed:
  echo "What is 1 + 2?" | python scripts/chat.py runs/quickstart"""


def main() -> int:
    """Read the command line, talk, and turn a user's mistake into one line and exit code 2."""
    from reason_llm.app.console import Console
    from reason_llm.errors import ConfigError, ReasonError, shown
    from reason_llm.files import CLOSED_OUTPUT, discard_output, write_for_oneself

    Console("quiet")  # warnings, and nothing else of the libraries
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    write_for_oneself()
    try:
        arguments = _parser().parse_args()
        from reason_llm.app.chat import Chat, find_subject, options_of

        subject = find_subject(arguments.target, arguments.adapter)
        if arguments.template is not None:
            subject = replace(subject, template=arguments.template)
        if arguments.system_prompt is not None:
            subject = replace(subject, system_prompt=arguments.system_prompt)
        options = options_of(subject, vars(arguments))
        interactive = sys.stdin.isatty()
        message = "" if interactive else sys.stdin.read().strip()
        if not interactive and not message:
            raise ConfigError("standard input is empty; pipe a message in, or use a terminal")
        from reason_llm.app.chat_terminal import ChatTerminal

        chat = Chat(subject, options)
        chat.uses_adapter = chat.uses_adapter and not arguments.base
        terminal = ChatTerminal(chat)
        if interactive:
            terminal.talk()
        else:
            terminal.answer_once(message)
    except ReasonError as error:
        print(f"error: {shown(error)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        discard_output()
        return CLOSED_OUTPUT
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> ArgumentParser:
    from reason_llm.config import Parser

    parser = Parser(
        prog="python scripts/chat.py",
        description=DESCRIPTION,
        allow_abbrev=False,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", help="folder of a run, an adapter or a model; a config file; or a Hub id"
    )
    parser.add_argument("--adapter", type=Path, metavar="FOLDER", help="in the run's own's place")
    parser.add_argument("--base", action="store_true", help="begin with the base, not the adapter")
    for name in ("system_prompt", "template"):
        parser.add_argument(
            f"--data.{name}", dest=name, metavar="TEXT", help="as in a config; default: the run's"
        )
    for name in ("temperature", "top-p", "top-k", "min-p", "max-new-tokens", "seed"):
        parser.add_argument(f"--{name}", metavar="N", help="default: as the run samples")
    return parser


if __name__ == "__main__":
    sys.exit(main())
