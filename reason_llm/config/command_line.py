"""The command line: ``--section.key value`` for any option of the config, and a script's own
options; ``--help`` lists all."""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from pydantic.fields import FieldInfo

from reason_llm.config import yaml_text
from reason_llm.config.data import WeightedSource
from reason_llm.config.file import (
    CHECKOUT,
    QUICK_START,
    Mistakes,
    docstring,
    leaves,
    load,
    load_quick_start,
    shown_type,
    unknown_key,
)
from reason_llm.config.score import RewardSpec
from reason_llm.config.sections import Config
from reason_llm.errors import ConfigError, one_line, raise_all

SHORTER = {"run.from_buffer": ("--from-buffer",)}
"""Other names of options."""

WITHOUT_CONFIG = (
    f"YAML file (default: {QUICK_START}; with --model.path or --data.train none, and all options "
    "have their defaults)"
)

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
    """An argument parser whose errors are one line, printed by the caller.

    Args:
        usage: what stands after the program's name.
    """

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
    """An option of a command, beside those of the config, as ``add_argument`` takes it."""

    metavar: str
    help: str
    nargs: str | None = None
    const: str | None = None
    """What it is when given without a value, with nargs ``?``."""


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
    """What was given to each option of the command's own; those not given are left out."""

    def one(self, name: str) -> str | None:
        """The only value of an option; None if it was not given."""
        return self.values[name][0] if name in self.values else None


def config_of_line(line: CommandLine, mistakes: Mistakes | None = None) -> Config:
    """The config that a command line names (default: the quick start), with its options.

    Raises:
        ConfigError: as ``load``.
    """
    if line.what is None:
        return load_quick_start(line.overrides, mistakes)
    return load(Path(line.what), line.overrides, mistakes)


def read_command_line(
    program: str,
    description: str,
    what: tuple[str, str],
    arguments: Sequence[str],
    switches: Mapping[str, str],
    values: Mapping[str, Value] | None = None,
    with_config: bool = True,
    in_force: Callable[[CommandLine], Config] | None = None,
) -> CommandLine:
    """The parts of a command line.

    Args:
        what: name and help of the positional argument, which may be left out.
        values: the command's own options.
        with_config: whether options of the config are taken.
        in_force: the config that a command line comes to, whose values ``--help`` shows where they
            differ from the defaults.

    Raises:
        ConfigError: unknown arguments, or none where one is needed.
    """
    here: Mapping[str, Any] = {}
    asked = [word for word in arguments if word not in ("-h", "--help")]
    if in_force is not None and len(asked) < len(arguments):
        with suppress(ConfigError):  # the help is what tells how it is done
            line = read_command_line(program, description, what, asked, switches, values)
            here = _values(in_force(line))
            named = line.what or ("this command" if line.overrides else "the quick start")
            description += f"\nOptions show their default and, where {named} differs, its value."
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
        _add_options_of_config(parser, here)
    known, unknown = parser.parse_known_args(arguments)
    options = [word for word in unknown if word.startswith("--")] or unknown[:1]
    raise_all(_unknown(word, [*switches, *(values or {})], with_config) for word in options)
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
    overrides = {key: _value(key, text) for key, text in found.items()}
    return CommandLine(first, overrides, given, own)


def _add_options_of_config(parser: Parser, here: Mapping[str, Any]) -> None:
    """Add every option of the config, by sections.

    Args:
        here: values in force, by dotted names, that the help shows beside the defaults.
    """
    for section, of_section in _by_section():
        group = parser.add_argument_group(section, Config.model_fields[section].description)
        for key, option in of_section:
            default = f"default: {_shown_default(option)}"
            if key in here and _shown_value(here[key]) != _shown_default(option):
                default += f"; here: {_shown_value(here[key])}"
            text = f"{docstring(option)} ({default})".replace("%", "%%")
            group.add_argument(
                f"--{key}",
                *SHORTER.get(key, ()),
                help=text,
                metavar=shown_type(option),
                default=argparse.SUPPRESS,
            )


def _unknown(word: str, others: Sequence[str], with_config: bool) -> ConfigError:
    """The error for an argument that is neither an option of the config nor one of the others."""
    problem = f"unknown argument {word!r}"
    if not with_config:
        return ConfigError(f"{problem}; see --help for all options")
    key = word.lstrip("-").split("=")[0]
    return ConfigError(unknown_key(key, problem, "--", list(others)))


def _of_another_form(word: str) -> str:
    """What to write for ``key=value``, which is verl's form."""
    key, _, value = word.lstrip("+").partition("=")
    if any(key == name for name, _ in leaves(Config)):
        return f"{word:.200} is no config file; write --{key} {value:.100}"
    return unknown_key(key, f"{word:.200} is no config file and no option", "--")


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


def _values(config: Config) -> dict[str, Any]:
    """Values of all options by their dotted names."""
    found: dict[str, Any] = {}
    for key, _ in leaves(Config):
        value: Any = config
        for name in key.split("."):
            value = value[name] if isinstance(value, dict) else dict(value)[name]
        found[key] = value
    return found


def _shown_default(option: FieldInfo) -> str:
    return "none, it must be given" if option.is_required() else _shown_value(option.default)


def _shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown_item, value)) or "none"
    return "null" if value is None else str(value)


def _shown_item(item: Any) -> str:
    if isinstance(item, RewardSpec):
        return f"{item.name or item.custom} * {item.weight:g}"
    return f"{item.source} * {item.weight:g}" if isinstance(item, WeightedSource) else str(item)
