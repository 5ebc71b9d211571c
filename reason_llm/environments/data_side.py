"""The data side of ``sample.environment``: which class plays a row, its tools, the columns that its
``reset`` asks for, and digests of the user's own code."""

import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any

from reason_llm.data import file_of, load_function, module_file, with_imports
from reason_llm.environments.task_rows import TASKSET, parsed_source
from reason_llm.errors import ConfigError, DataError, one_line

NO_TOOLS = {"reset", "step", "get_reward", "close"}
"""Public methods of an environment that the model does not call."""
ENVIRONMENT = "environment"
"""The column that names a row's environment."""
REPLY = "an environment's reply"
"""A reply in errors of the tokenizer and the chat template."""
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
SESSIONS = ("agent", "mcp", "verifiers")
"""Prefixes of ``sample.environment`` for programs that ask for the model's turns themselves."""


@dataclass(frozen=True)
class DataSide:
    """See ``Player`` in ``data``."""

    named: str | Mapping[str, str]

    @property
    def option(self) -> str:
        """Option with its value."""
        return f"sample.environment={self.named}"

    @property
    def needs_prompt(self) -> bool:
        """Whether a program plays, which has no ``reset``."""
        return bool(own_session(self.named)[0])

    @property
    def needs_tools(self) -> bool:
        """Whether there are tools: those of MCP servers are not known yet."""
        return own_session(self.named)[0] == "mcp" or any(self.tools.values())

    @cached_property
    def tools(self) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """Schemas by the environments' names."""
        return {n: tool_schemas(where) for n, where in environments_by_name(self.named).items()}

    chat_note = (
        "a chat does not play sample.environment: each answer is one turn, your next message is "
        "the reply, and the model has no tools"
    )

    def needed_columns(self, name: str) -> Mapping[str, str]:
        """Columns without which ``reset`` cannot be called."""
        parameters = self._parameters.get(name, ())
        needed = [p.name for p in parameters if p.kind not in VARIADIC and p.default is p.empty]
        return dict.fromkeys(needed, "reset of the environment")

    def columns_of(self, row: Mapping[str, Any]) -> set[str]:
        """Columns that ``reset`` or the agent receives, and the one that names the environment."""
        name = row.get(ENVIRONMENT) if isinstance(self.named, Mapping) else ""
        parameters = self._parameters.get(str(name), ())
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)
        if takes_all or own_session(self.named)[0] == "agent":
            return {*row, ENVIRONMENT}
        return {*(parameter.name for parameter in parameters), ENVIRONMENT}

    @cached_property
    def _parameters(self) -> Mapping[str, list[inspect.Parameter]]:
        """The parameters of ``reset``, by the environments' names."""
        return {n: reset_parameters(where) for n, where in environments_by_name(self.named).items()}

    def name(self, where: str, row: Mapping[str, Any]) -> str:
        """Name of the row's environment."""
        return environment_name(self.named, where, row)

    def sources(self, data: Iterable[str]) -> dict[str, str]:
        """Digests of classes and agents, of MCP servers' files and of modules with tasksets."""
        digests = dict[str, str]()
        for name, where in environments_by_name(self.named).items():
            key = f"sample.environment.{name}".rstrip(".")
            if where.startswith("mcp:"):
                digests |= command_sources(key, where.removeprefix("mcp:"))
            else:
                digests |= with_imports(key, file_of(where.removeprefix("agent:")), sys.path)
        for name in (parsed_source(source)[0] for source in data if source.startswith(TASKSET)):
            if (place := module_file(name, sys.path)) is not None:
                digests |= with_imports(name, place, sys.path, name)
        return digests


def own_session(where: str | Mapping[str, str] | None) -> tuple[str, str]:
    """Which of ``SESSIONS`` a ``sample.environment`` is, and what comes after it; empty for a class
    that answers the model's turns."""
    kind, mark, rest = str(where).partition(":")
    if kind.partition("?")[0] == "verifiers":
        return "verifiers", str(where).partition("?")[2]
    return (kind, rest) if mark and kind in SESSIONS else ("", "")


def environments_by_name(setting: str | Mapping[str, str] | None) -> dict[str, str]:
    """The classes of ``sample.environment`` by the name in a row's column ``environment``; a single
    one, for all rows, by the empty name."""
    return {"": setting} if isinstance(setting, str) else dict(setting or {})


def environment_name(
    setting: str | Mapping[str, str] | None, where: str, row: Mapping[str, Any]
) -> str:
    """The name of a row's environment in ``environments_by_name``; DataError if there is none."""
    if not isinstance(setting, Mapping):
        return ""
    name = row.get(ENVIRONMENT)
    if name not in setting:
        raise DataError(
            f"{where}: column environment={name!r:.80} is not a name of sample.environment, which "
            f"has {', '.join(setting)}; write one of these"
        )
    return str(name)


def environment_class(where: str) -> type[Any]:
    """The class of ``sample.environment``; ConfigError if there is none, or it has no ``reset``, or
    neither ``step`` nor another public method."""
    cls = load_function(where, "sample.environment")
    if not inspect.isclass(cls):
        raise ConfigError(f"sample.environment={where} is not a class; name one")
    answers = "step" in dir(cls) or tool_methods(cls)
    if not answers or not callable(getattr(cls, "reset", None)):
        raise ConfigError(
            f"sample.environment={where} needs a method reset(**row), which gives a text or None, "
            "and step(text), which answers what the model writes, or public methods that the model "
            "may call; add what is missing"
        )
    return cls


def tool_methods(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """The methods of a class in TRL's form that the model may call; none where it has ``step``."""
    if "step" in dir(kind):
        return {}
    return {
        name: method
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NO_TOOLS
    }


def reset_parameters(where: str) -> list[inspect.Parameter]:
    """The parameters of the class's ``reset``; none of a program."""
    if own_session(where)[0]:
        return []
    kind = environment_class(where)
    try:
        return list(inspect.signature(MethodType(kind.reset, kind)).parameters.values())
    except (TypeError, ValueError):
        return []  # of no function; asked with all columns that fit


def tool_schemas(where: str) -> tuple[dict[str, Any], ...]:
    """JSON schemas of the tools of ``sample.environment``, from types and docstrings in Google's
    form, without which it is a ConfigError."""
    from transformers.utils import get_json_schema

    if own_session(where)[0]:
        return ()
    schemas = []
    for name, method in tool_methods(environment_class(where)).items():
        try:
            schemas.append(get_json_schema(MethodType(method, where)))
        except Exception as error:
            raise ConfigError(
                f"sample.environment={where}: its tool {name} cannot be described to the model "
                f"({one_line(error)[:300]}); give it types, and a docstring with Args in Google's "
                "form"
            ) from error
    return tuple(schemas)


def command_words(command: str) -> list[str]:
    """Words of the command line of an MCP server, split as a shell splits them.

    Raises:
        ConfigError: a quote is not closed, or nothing follows a backslash.
    """
    try:
        return shlex.split(command)
    except ValueError as error:
        raise ConfigError(
            f"sample.environment=mcp:{command:.200}: {one_line(error)}; quote it as a shell reads "
            "it"
        ) from error


def command_sources(key: str, command: str) -> dict[str, str]:
    """Digests of the files that a command line names, and of what its Python files import."""
    words = command_words(command)
    digests: dict[str, str] = {}
    for before, word in zip(["", *words], words, strict=False):
        file: Path | None = Path(word.partition("=")[2] if word.startswith("-") else word)
        name = word if before == "-m" else ""
        if name:
            file = module_file(name, [str(Path.cwd()), *sys.path])
        if file is not None and file.is_file():
            places = [str(Path.cwd() if name else file.parent), *sys.path]
            digests |= with_imports(f"{key} runs {word}", file, places, name)
    return digests
