"""Calls of tools in what a model wrote, and messages of OpenAI's form."""

from typing import Any

import orjson

from reason_llm.data.messages import Messages

OPENS, CLOSES = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
"""Mark with which Llama 3.1 may begin a call."""
Call = tuple[str, dict[str, Any]]


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
    """Text of a turn before its calls."""
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
