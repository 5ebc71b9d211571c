"""Tools that a model may call: their schemas, and the calls in what it wrote."""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import orjson

from reason_llm.data.messages import Messages
from reason_llm.data.own_code import load_function
from reason_llm.errors import ConfigError, DataError, one_line

NO_TOOLS = {"reset", "step", "get_reward", "close"}
"""Public methods of an environment that the model does not call."""
ENVIRONMENT = "environment"
"""The column that names a row's environment."""
OPENS, CLOSES = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""Mark with which Llama 3.1 may begin a call."""
Call = tuple[str, dict[str, Any]]
SESSIONS = ("agent", "mcp", "verifiers")
"""What ``sample.environment`` begins with where a program asks for the model's turns itself."""


def own_session(where: str | Mapping[str, str] | None) -> tuple[str, str]:
    """Which of ``SESSIONS`` a ``sample.environment`` is, and what comes after it; empty for a class
    that answers the model's turns."""
    kind, mark, rest = str(where).partition(":")
    if kind.partition("?")[0] == "verifiers":
        return "verifiers", str(where).partition("?")[2]
    return (kind, rest) if mark and kind in SESSIONS else ("", "")


def environments_by_name(given: str | Mapping[str, str] | None) -> dict[str, str]:
    """The classes of ``sample.environment`` by the name in a row's column ``environment``; a single
    one, for all rows, by the empty name."""
    return {"": given} if isinstance(given, str) else dict(given or {})


def environment_name(
    given: str | Mapping[str, str] | None, where: str, row: Mapping[str, Any]
) -> str:
    """The name of a row's environment in ``environments_by_name``; DataError if there is none."""
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
    """The class of ``sample.environment``; ConfigError if there is none, or it has no ``reset``, or
    neither ``step`` nor another public method."""
    found = load_function(where, "sample.environment")
    if not inspect.isclass(found):
        raise ConfigError(f"sample.environment={where} is no class; name one")
    if "step" not in dir(found) and not tool_methods(found):
        raise ConfigError(
            f"sample.environment={where} has neither a method step(text), which answers what the "
            "model writes, nor public methods that the model could call; add one"
        )
    if not callable(getattr(found, "reset", None)):
        raise ConfigError(
            f"sample.environment={where} has no method reset; add it: reset(**row) gives a text or "
            "None"
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


def reset_columns(where: str) -> list[str]:
    """The columns without which ``reset`` of ``sample.environment`` cannot be called."""
    if own_session(where)[0]:
        return []
    kind = environment_class(where)
    try:
        parameters = inspect.signature(MethodType(kind.reset, kind)).parameters.values()
    except (TypeError, ValueError):
        return []  # of no function; asked with all columns that fit
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.kind not in variadic and p.default is p.empty]


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


def calls_of(text: str) -> list[Call | None]:
    """The calls in a turn, as Qwen and Hermes write them, ``<tool_call>{"name": ..., "arguments":
    {...}}</tool_call>``, or as Llama does, the whole turn one JSON object with ``parameters``. None
    stands for one that cannot be read."""
    stripped = text.strip().removeprefix(PYTHON_TAG).strip()
    if stripped.startswith("{"):
        call = _call(stripped)
        return [] if call is None else [call]
    parts = [part.partition(CLOSES) for part in text.split(OPENS)[1:]]
    return [_call(inside) if closes else None for inside, closes, _ in parts]


def said_before(text: str) -> str:
    """What a turn says before its calls."""
    before = text.partition(OPENS)[0].strip().removeprefix(PYTHON_TAG).strip()
    return "" if before.startswith("{") else before


def plain_messages(messages: list[dict[str, Any]]) -> Messages:
    """Messages of OpenAI's form as chat templates read them: contents are texts, and arguments of
    calls are objects; ValueError for anything else."""
    return [_plain(message) for message in messages]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    role = message.get("role")
    if not isinstance(role, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"a message is {str(message)[:100]!r}; give its role and a text")
    found: dict[str, Any] = {"role": role, "content": "".join(map(str, texts))}
    found |= {name: message[name] for name in ("name", "tool_call_id") if message.get(name)}
    if calls := message.get("tool_calls"):
        try:
            found["tool_calls"] = [
                {"type": "function", "function": {"name": f["name"], "arguments": _object(f)}}
                for f in (call["function"] for call in calls)
            ]
        except (TypeError, KeyError) as error:
            raise ValueError(f"tool_calls is {str(calls)[:100]!r}; give OpenAI's form") from error
    return found


def _object(function: dict[str, Any]) -> Any:
    arguments = function["arguments"]
    return orjson.loads(arguments) if isinstance(arguments, str) else arguments


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
