"""The command line: ``--section.key value`` for any option of the config, and a script's own
options; ``--help`` lists all."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from pydantic.fields import FieldInfo

from reason_llm.config import yaml_text
from reason_llm.config.file import docstring, leaves, load, shown_type, unknown_key
from reason_llm.config.quick_start import CHECKOUT, QUICK_START, load_quick_start
from reason_llm.config.sections import Config
from reason_llm.errors import ConfigError, one_line

SHORTER = {"run.from_buffer": ("--from-buffer",)}
"""Other names of options."""


CONSOLE_SCRIPT = "reason-llm"


def command(name: str) -> str:
    """How to call a command here: ``python scripts/train.py`` in a checkout, else
    ``reason-llm train``."""
    script = Path("scripts", f"{name}.py")
    is_console_script = Path(sys.argv[0]).name == CONSOLE_SCRIPT
    if is_console_script or not (CHECKOUT / script).is_file():
        return f"{CONSOLE_SCRIPT} {name}"
    return f"python {script}"


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, printed by the caller."""

    def error(self, message: str) -> NoReturn:
        """Raise a usage error."""
        raise ConfigError(f"{message}; see --help")


@dataclass(frozen=True, slots=True)
class Value:
    """An option of a script, beside those of the config."""

    metavar: str
    text: str
    """Its help."""
    many: bool = False
    """It takes one value or more."""
    if_bare: str | None = None
    """What it is when given without a value; None: it needs one."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """A command line, read and not yet checked."""

    what: str | None
    """The positional argument."""
    overrides: dict[str, Any]
    """Options of the config by their dotted names, read as YAML."""
    given: set[str]
    """The switches."""
    values: dict[str, list[str]]
    """What was given to each ``Value``; those not given are left out."""

    def one(self, name: str) -> str | None:
        """The only value of an option; None if it was not given."""
        return self.values[name][0] if name in self.values else None


def parse_command_line(
    program: str,
    description: str,
    arguments: Sequence[str],
    switches: Mapping[str, str],
) -> tuple[Config, set[str]]:
    """A positional config path (default: the quick start), then ``--section.key value`` for any
    option; ``--help`` lists them all.

    Values are read as YAML, as they would be in the file.

    Args:
        switches: what else may be asked for, with its help: ``{"plan": "print and stop"}``.

    Returns:
        The config, and the switches that were given.
    """
    line = read_command_line(
        program,
        description,
        ("CONFIG.yaml", f"YAML file (default: {QUICK_START})"),
        arguments,
        switches,
    )
    if line.what is None:
        return load_quick_start(line.overrides), line.given
    return load(Path(line.what), line.overrides), line.given


def read_command_line(
    program: str,
    description: str,
    what: tuple[str, str],
    arguments: Sequence[str],
    switches: Mapping[str, str],
    values: Mapping[str, Value] | None = None,
    with_config: bool = True,
) -> CommandLine:
    """The parts of a command line.

    Args:
        what: name and help of the positional argument, which may be left out.
        with_config: whether options of the config are taken.

    Raises:
        ConfigError: unknown arguments, or none where one is needed.
    """
    options = " [--section.key value ...]" if with_config else ""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"%(prog)s [{what[0]}] [--option value ...]{options}"
        if values
        else f"%(prog)s [{what[0]}]{options}",
        description=description,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 30, 110),
    )
    parser.add_argument("what", nargs="?", metavar=what[0], help=what[1])
    for name, value in (values or {}).items():
        parser.add_argument(
            f"--{name}",
            dest=f"={name}",
            metavar=value.metavar,
            default=argparse.SUPPRESS,
            help=value.text.replace("%", "%%"),
            const=value.if_bare,
            nargs="+" if value.many else None if value.if_bare is None else "?",
        )
    for name, text in switches.items():
        parser.add_argument(f"--{name}", dest=name, action="store_true", help=text)
    for section, of_section in _by_section() if with_config else ():
        group = parser.add_argument_group(section, Config.model_fields[section].description)
        for key, option in of_section:
            text = f"{docstring(option)} (default: {_shown_default(option)})".replace("%", "%%")
            group.add_argument(
                f"--{key}",
                *SHORTER.get(key, ()),
                help=text,
                metavar=shown_type(option),
                default=argparse.SUPPRESS,
            )
    try:
        known, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see --help") from error
    if unknown:
        problem = f"unknown argument {unknown[0]!r}"
        if not with_config:
            raise ConfigError(f"{problem}; see --help for all options")
        key = unknown[0].lstrip("-").split("=")[0]
        raise ConfigError(unknown_key(key, problem, "--", [*switches, *(values or {})]))
    found = vars(known)
    first = found.pop("what")
    given = {name for name in switches if found.pop(name)}
    own = {
        name: value if isinstance(value, list) else [value]
        for name in values or {}
        if (value := found.pop(f"={name}", None)) is not None
    }
    overrides = {key: _value(key, text) for key, text in found.items()}
    return CommandLine(first, overrides, given, own)


def _value(key: str, text: str) -> Any:
    try:
        return yaml_text.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"--{key}: its value is not valid YAML: {one_line(error)}; quote it"
        ) from error


def _by_section() -> Iterator[tuple[str, list[tuple[str, FieldInfo]]]]:
    options = list(leaves(Config))
    for section in Config.model_fields:
        yield section, [each for each in options if each[0].partition(".")[0] == section]


def _shown_default(option: FieldInfo) -> str:
    if option.is_required():
        return "none, it must be given"
    if isinstance(option.default, list):
        return ", ".join(f"{item.name} * {item.weight:g}" for item in option.default) or "none"
    return "null" if option.default is None else str(option.default)
