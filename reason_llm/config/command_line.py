"""Command line: ``--section.key value`` for every option of the config, and a command's own
options. ``--help`` lists the sections, ``--help SECTION`` a section's options."""

import argparse
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from reason_llm.config import yaml_text
from reason_llm.config.file import (
    COMMAND_LINE,
    QUICK_START,
    Mistakes,
    docstring,
    leaves,
    load,
    shown_type,
    unknown_key,
)
from reason_llm.config.score import RewardSpec
from reason_llm.config.sections import Config
from reason_llm.errors import ConfigError, one_line, raise_all

SHORTER = {"run.from_buffer": ("--from-buffer",)}

WITHOUT_CONFIG = (
    f"YAML file (default: {QUICK_START}; with --model.path or --data.train: no file, only the "
    "defaults)"
)

EVERYTHING = "all"
"""Word after ``--help`` that asks for the options of all sections."""


class Parser(argparse.ArgumentParser):
    """Argument parser that raises ConfigError; ``usage`` follows the program's name."""

    def __init__(self, program: str, description: str, usage: str | None = None) -> None:
        super().__init__(
            prog=program,
            usage=None if usage is None else f"%(prog)s {usage}",
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 2, 30, 110),
        )

    def error(self, message: str) -> NoReturn:
        """Raise a usage error."""
        raise ConfigError(f"{message}; see --help")


class Value(NamedTuple):
    """Option of a command that is not in the config; arguments of ``add_argument``."""

    metavar: str
    help: str
    nargs: str | None = None
    const: str | None = None
    """Value if the option is given without one, with nargs ``?``."""


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Parsed command line, not yet validated."""

    what: str | None
    overrides: dict[str, Any]
    """Options of the config by dotted name, parsed as YAML."""
    given: set[str]
    values: dict[str, list[str]]
    """Values of the command's own options that are set."""
    source: str = COMMAND_LINE
    """Source of the overrides in errors."""

    def one(self, name: str) -> str | None:
        """Return the value of an option; None if it is not set."""
        return self.values[name][0] if name in self.values else None

    def config(self, mistakes: Mistakes | None = None) -> Config:
        """Load the config that it names (default: the quick start) with its options."""
        return load(None if self.what is None else Path(self.what), self.overrides, mistakes)


def read_command_line(
    program: str,
    description: str,
    what: tuple[str, str],
    arguments: Sequence[str],
    switches: Mapping[str, str],
    values: Mapping[str, Value] | None = None,
    with_config: bool = True,
) -> CommandLine:
    """Parse a command line.

    Args:
        what: name and help of the optional positional argument.
        values: the command's own options.
        with_config: whether options of the config are accepted.

    Raises:
        ConfigError: unknown or missing arguments.
    """
    shown_sections: Sequence[str] = tuple(Config.model_fields)
    if with_config:
        arguments, asked = _without_help(arguments)
        if asked is not None:
            arguments = ["--help"]
            shown_sections = shown_sections if asked == EVERYTHING else (asked,)
    usage = f"[{what[0]}]"
    usage += " [--option value ...]" if values else ""
    usage += " [--section.key value ...]" if with_config else ""
    parser = Parser(program, description, usage)
    parser.add_argument("what", nargs="?", metavar=what[0], help=what[1])
    for name, value in (values or {}).items():
        parser.add_argument(
            f"--{name}", dest=f"={name}", default=argparse.SUPPRESS, **value._asdict()
        )
    for name, text in switches.items():
        parser.add_argument(f"--{name}", dest=name, action="store_true", help=text)
    if with_config:
        _add_options_of_config(parser, shown_sections)
        parser.epilog = _section_lines(program) if shown_sections == ("",) else None
    known, unknown = parser.parse_known_args(arguments)
    own_options = [*switches, *(values or {})] if with_config else None
    raise_all(map(ConfigError, _unknown_arguments(unknown, own_options, arguments)))
    found = vars(known)
    first = found.pop("what")
    if with_config and first is not None and "=" in first and not Path(first).exists():
        raise ConfigError(_of_another_form(first))
    given = {name for name in switches if found.pop(name)}
    own = {
        name: value if isinstance(value, list) else [value]
        for name in values or {}
        if (value := found.pop(f"={name}", None)) is not None
    }
    overrides = {key: _option_value(key, text) for key, text in found.items()}
    return CommandLine(first, overrides, given, own)


def _unknown_arguments(
    unknown: Sequence[str], own: Sequence[str] | None, arguments: Sequence[str]
) -> Iterator[str]:
    """Yield the message of each unknown one of the ``arguments``; ``own`` are the command's own
    options, None for a command without those of the config."""
    for word in [word for word in unknown if word.startswith("--")] or unknown[:1]:
        key, equals, value = word.lstrip("-").partition("=")
        problem = f"unknown argument {word!r}"
        if own is None:
            yield f"{problem}; see --help for all options"
        else:
            after = arguments[arguments.index(word) + 1 :] if word in arguments else []
            yield unknown_key(key, problem, "--", own, value if equals else next(iter(after), None))


def _option_value(key: str, text: str) -> Any:
    """Return the value of an option, which is YAML."""
    try:
        return yaml_text.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"--{key}: its value is not valid YAML: {one_line(error)}; quote it"
        ) from error


def _without_help(arguments: Sequence[str]) -> tuple[list[str], str | None]:
    """Return ``arguments`` without ``--help``, and the section that follows it: a name, EVERYTHING,
    or "" if none does; None if there is no ``--help``."""
    left, section = [], None
    for word in arguments:
        if word in ("-h", "--help"):
            section = section or ""
        elif section == "" and (word in Config.model_fields or word == EVERYTHING):
            section = word
        else:
            left.append(word)
    return left, section


def _section_lines(program: str) -> str:
    """Return a line for each section of the config: its name and the first sentence about it."""
    lines = [f"sections of --section.key (see {program} --help SECTION, or --help {EVERYTHING}):"]
    for name, field in Config.model_fields.items():
        first = " ".join((field.description or "").split()).partition(". ")[0].rstrip(".")
        lines.append(f"  {name:<12}{first[:1].lower()}{first[1:]}")
    return "\n".join(lines)


def _add_options_of_config(parser: Parser, sections: Container[str]) -> None:
    """Add the config's options in ``sections``, with their defaults."""
    for section, options in groupby(leaves(Config), lambda each: each[0].partition(".")[0]):
        if section not in sections:
            continue
        group = parser.add_argument_group(section, Config.model_fields[section].description)
        for key, option in options:
            default = "none; required" if option.is_required() else _shown(option.default)
            text = f"{docstring(option)} (default: {default})".replace("%", "%%")
            group.add_argument(
                f"--{key}",
                *SHORTER.get(key, ()),
                help=text,
                metavar=shown_type(option),
                default=argparse.SUPPRESS,
            )


def _of_another_form(word: str) -> str:
    """Return the error for ``key=value``, verl's form, with what to write instead."""
    key, _, value = word.lstrip("+").partition("=")
    if any(key == name for name, _ in leaves(Config)):
        return f"{word:.200} is not a config file; write --{key} {value:.100}"
    problem = f"{word:.200} is neither a config file nor an option"
    return unknown_key(key, problem, "--", value=value)


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if isinstance(value, RewardSpec):
        return f"{value.name or value.custom} * {value.weight:g}"
    return "null" if value is None else str(value)
