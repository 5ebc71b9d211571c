"""Tools that a model may call: their schemas, and the calls in what it wrote."""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import orjson

from reason_llm.data.own_code import load_function
from reason_llm.errors import ConfigError, DataError, one_line

NO_TOOLS = {"reset", "step", "get_reward", "close"}
"""Public methods of an environment that the model does not call."""
ENVIRONMENT = "environment"
"""The column that names a row's environment."""
OPENS, CLOSES = "<tool_call>", "</tool_call>"
Call = tuple[str, dict[str, Any]]


def environments_by_name(given: str | Mapping[str, str] | None) -> dict[str, str]:
    """The classes of ``sample.environment`` by the name that a row's column ``environment`` has; a
    single one, for all rows, by no name."""
    return {"": given} if isinstance(given, str) else dict(given or {})


def environment_name(
    given: str | Mapping[str, str] | None, where: str, row: Mapping[str, Any]
) -> str:
    """The name of a row's environment in ``environments_by_name``.

    Args:
        where: the row's place, for the error.

    Raises:
        DataError: there is none of this name.
    """
    if not isinstance(given, Mapping):
        return ""
    name = row.get(ENVIRONMENT)
    if name not in given:
        raise DataError(
            f"{where}: column environment={name!r:.80} is no name of sample.environment, which has "
            f"{', '.join(given)}; write one of these"
        )
    return str(name)


def environment_class(where: str) -> type[Any]:
    """The class of ``sample.environment``.

    Raises:
        ConfigError: there is none; or it has neither ``step`` nor another public method.
    """
    found = load_function(where, "sample.environment")
    if not inspect.isclass(found):
        raise ConfigError(f"sample.environment={where} is no class; name one")
    if "step" not in dir(found) and not tool_methods(found):
        raise ConfigError(
            f"sample.environment={where} has neither a method step(text), which answers what the "
            "model writes, nor public methods that the model could call; add one"
        )
    return found


def tool_methods(kind: type[Any]) -> dict[str, Callable[..., Any]]:
    """The methods of a class in TRL's form that the model may call; none where it has ``step``."""
    if "step" in dir(kind):
        return {}
    return {
        name: method
        for name, method in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and name not in NO_TOOLS
    }


def tool_schemas(where: str) -> tuple[dict[str, Any], ...]:
    """JSON schemas of the tools of ``sample.environment``, from types and docstrings.

    Raises:
        ConfigError: a tool lacks a type or a docstring in Google's form.
    """
    from transformers.utils import get_json_schema

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


def calls_of(text: str) -> list[Call | None]:
    """The calls in a turn, as Qwen and Hermes write them, ``<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>``, or as Llama does, the whole turn one JSON object with ``parameters``. None
    stands for one that cannot be read."""
    stripped = text.strip()
    if stripped.startswith("{"):
        call = _call(stripped)
        return [] if call is None else [call]
    parts = [part.partition(CLOSES) for part in text.split(OPENS)[1:]]
    return [_call(inside) if closes else None for inside, closes, _ in parts]


def _call(text: str) -> Call | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    name = value.get("name") if isinstance(value, dict) else None
    arguments = name and value.get("arguments", value.get("parameters"))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, arguments
