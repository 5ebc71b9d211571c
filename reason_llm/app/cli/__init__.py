"""``reason-llm COMMAND ...``: the commands by name. Each is a module with a ``run``, which
``scripts/`` call, too.

Nothing heavy is imported before the command is known.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence

from reason_llm import __version__
from reason_llm.app.cli.command import run_command
from reason_llm.errors import ConfigError

COMMANDS = {
    "train": "fine-tune a model; without a config, the quick start",
    "plan": "print the memory plan of a training run",
    "evaluate": "measure the accuracy of runs and models",
    "chat": "talk to a run's adapter or to a model",
    "export": "merge a run's adapter into its base, for others",
    "report": "write the HTML report of one or more runs",
    "rescore": "give saved rollouts the rewards of a config",
    "pairs": "write rows to learn from, out of saved rollouts",
}
"""Help of each command."""
WHEN_STOPPED = {
    "train": "stopped; the same command goes on from here",
    "evaluate": "stopped; the same command goes on from here",
    "export": "stopped; nothing was exported",
}
"""Last line of a command that was interrupted."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code of the command that ``arguments`` (None: the command line's) name first."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    name, rest = (given[0], given[1:]) if given else (None, [])
    if name in COMMANDS:
        return call(name, f"reason-llm {name}", rest)
    return run_command(lambda: _without_command(name))


def call(name: str, program: str, arguments: Sequence[str]) -> int:
    """Exit code of a command, whose help calls it ``program``."""
    module = importlib.import_module(f"reason_llm.app.cli.{name}")
    return run_command(lambda: module.run(program, arguments), WHEN_STOPPED.get(name))


def _without_command(name: str | None) -> None:
    """Print the help or the version.

    Raises:
        ConfigError: there is no such command, or none was named.
    """
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(f"reason-llm {__version__}")
    else:
        names = ", ".join(COMMANDS)
        if name is None:
            raise ConfigError(f"no command; name one of {names}, or see reason-llm --help")
        near = difflib.get_close_matches(name[:100], COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"name one of {names}"
        raise ConfigError(f"unknown command {name[:100]!r}; {hint}")


def _help() -> str:
    lines = [f"  {name:<10}{text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: reason-llm COMMAND ...",
            "",
            "Fine-tune language models by reinforcement learning on one GPU, or on a CPU.",
            "",
            *lines,
            "",
            "reason-llm COMMAND --help tells the options of a command.",
        ]
    )
