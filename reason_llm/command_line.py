"""``[CONFIG.yaml] [--section.key value ...]`` becomes a Config; ``--help`` lists every option."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import yaml
from pydantic.fields import FieldInfo

from reason_llm.config import Config
from reason_llm.config_file import docstring, leaves, load, shown_type, unknown_key
from reason_llm.errors import ConfigError, one_line

SHORTER = {"run.from_buffer": ("--from-buffer",)}
"""Other names of options."""


def parse_command_line(
    program: str,
    description: str,
    default: Path,
    arguments: Sequence[str],
    switches: Mapping[str, str],
) -> tuple[Config, set[str]]:
    """A positional config path, then ``--section.key value`` for any option; ``--help`` lists them
    all.

    Values are read as YAML, as they would be in the file.

    Args:
        switches: what else may be asked for, with its help: ``{"plan": "print and stop"}``.

    Returns:
        The config, and the switches that were given.
    """
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [CONFIG.yaml] [--section.key value ...]",
        description=description,
        allow_abbrev=False,
        exit_on_error=False,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, 30, 110),
    )
    parser.add_argument(
        "config", nargs="?", type=Path, default=default, help=f"YAML file (default: {default})"
    )
    for name, text in switches.items():
        parser.add_argument(f"--{name}", dest=name, action="store_true", help=text)
    for section, options in _by_section():
        group = parser.add_argument_group(section, Config.model_fields[section].description)
        for key, option in options:
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
        raise ConfigError(
            unknown_key(
                unknown[0].lstrip("-").split("=")[0], f"unknown argument {unknown[0]!r}", "--"
            )
        )
    values = vars(known)
    path = values.pop("config")
    given = {name for name in switches if values.pop(name)}
    try:
        return load(path, {key: yaml.safe_load(text) for key, text in values.items()}), given
    except yaml.YAMLError as error:
        raise ConfigError(
            f"an option's value is not valid YAML: {one_line(error)}; quote it"
        ) from error


def _by_section() -> Iterator[tuple[str, list[tuple[str, FieldInfo]]]]:
    options = list(leaves(Config))
    for section in Config.model_fields:
        yield section, [(key, option) for key, option in options if key.startswith(f"{section}.")]


def _shown_default(option: FieldInfo) -> str:
    if option.is_required():
        return "none, it must be given"
    if isinstance(option.default, list):
        return ", ".join(f"{item.name} * {item.weight:g}" for item in option.default) or "none"
    return "null" if option.default is None else str(option.default)
