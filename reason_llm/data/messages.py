"""Messages of a row: each member of a message is read, refused, or noted as ignored.

Forms: OpenAI's ``{"role", "content"}``, ShareGPT's ``{"from", "value"}``, a list of either, or the
same as JSON text, as CSV files and many Parquet sets hold it. Every function raises DataError.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from reason_llm.data.attachments import MEDIA
from reason_llm.data.rows import is_empty
from reason_llm.errors import DataError, one_line
from reason_llm.files import check_nesting

Message = dict[str, Any]
Messages = list[Message]
Note = Callable[[str], None]
"""Takes the name of a member that is ignored."""

ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant",
    "bing": "assistant", "model": "assistant", "observation": "tool", "function_response": "tool",
    "tool_response": "tool",
} | {name: name for name in ("user", "assistant", "system", "developer", "tool")}  # fmt: skip
"""Roles in lower case, by their names in ShareGPT, HH-RLHF, LLaMA-Factory and ms-swift."""
SYSTEM_ROLES = ("system", "developer")
RESPONSE = ("<tool_response>", "</tool_response>")
CALL_ROLES = ("function_call", "tool_call")
"""Roles of LLaMA-Factory and ms-swift for a turn whose content is calls as JSON text."""

MOST_MESSAGES = 1000
"""Most messages of one conversation to learn from: its template is rendered for each turn."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
"""Names of the thought before an answer; chat templates read one of the first two."""
THOUGHT_MEMBER = "messages[].reasoning_content"
"""A thought, as it is noted where a template does not write it."""
TRAIN_FLAGS = dict.fromkeys(
    ("weight", "train", "training", "loss", "trainable", "train_on_turn", "loss_mask"), True
) | dict.fromkeys(("mask", "masked"), False)
"""Members that say whether a turn is trained, with the value that trains it: any other one leaves
the turn out of the loss."""
WEIGHTS = ("loss_weight", "loss_scale", "train_detail")
"""Members that weigh a turn in a way that is not supported."""
_KEPT = ("name", "tool_call_id")
"""Members that some chat templates write."""
_PRINTED = tuple(f"{{'{name}':" for name in ("role", "content", "from", "value"))
"""Beginnings, without white space and brackets, of a conversation as Python prints it."""
_MAY_BE_TALK = ("[", "{", "(", "array(", '"')
_JSON_TALKS = ('{"role":', '{"content":')
"""Beginnings of a conversation as JSON text."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation, or a part of one."""

    messages: Messages
    trained: tuple[bool, ...]
    """One flag per message: False where the row leaves an assistant's turn out of the loss."""
    is_text: bool = False
    """Whether the row has it as a plain text."""

    @property
    def roles(self) -> list[str]:
        """The role of each message."""
        return [message["role"] for message in self.messages]


def without_nulls(value: Any) -> Any:
    """An object without its null members, which Arrow writes where rows have different keys."""
    if isinstance(value, dict):
        return {name: without_nulls(each) for name, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_talk(where: str, column: str, value: Any, role: str, note: Note) -> Talk:
    """The messages of a column: a text is one message of ``role``.

    A system message whose content is null is left out; an empty one is kept, with which some
    templates leave out a system message of their own.
    """
    value = from_json_text(where, column, value)
    if isinstance(value, str):
        messages = [{"role": role, "content": value}] if value.strip() else []
        return Talk(messages, (True,) * len(messages), is_text=True)
    given = [value] if isinstance(value, dict) else value
    if not isinstance(given, list):
        return Talk([], ())
    if len(given) > MOST_MESSAGES:
        raise DataError(
            f"{where}: {column!r} has {len(given):,} messages; split it into rows of at most "
            f"{MOST_MESSAGES:,}"
        )
    messages, trained = Messages(), list[bool]()
    for number, each in enumerate(given, start=1):
        place = f"{where}: {column!r}, message {number}"
        message = _message(place, column, each, note)
        if message["content"] is None:
            continue
        flag, is_trained = _train_flag(place, each)
        if flag and is_trained and message["role"] != "assistant":
            note(f"{column}[].{flag} of a turn that is not the assistant's")
        # Some data sets write each call of a turn as a message; templates want one with all calls.
        if (
            messages
            and _is_of_role(each, CALL_ROLES)
            and _is_of_role(given[number - 2], CALL_ROLES)
        ):
            if is_trained != trained[-1]:
                raise DataError(
                    f"{place} and the call before it are one turn, of which only one part is "
                    "masked (weight, train …); mask both or neither"
                )
            messages[-1]["tool_calls"] += message["tool_calls"]
            continue
        messages.append(message)
        trained.append(is_trained)
    return Talk(messages, tuple(trained))


def from_json_text(where: str, column: str, value: Any) -> Any:
    """A conversation that is written as JSON text or as an object of lists; any other value as it
    is.

    Raises:
        DataError: the text is a conversation as Python prints it, or as damaged JSON.
    """
    if isinstance(value, dict):
        return _listed(value)
    if not isinstance(value, str) or not value.lstrip().startswith(_MAY_BE_TALK):
        return value
    if value.lstrip().startswith('"'):  # JSON text of JSON text
        with suppress(ValueError, RecursionError):
            inner = json.loads(value)
            if isinstance(inner, str) and inner.lstrip().startswith(("[{", "{")):
                return from_json_text(where, column, inner)
        return value
    start = "".join(value[:200].split()).removeprefix("array(").lstrip("[(")
    if start.startswith(_PRINTED) or (start.startswith("{'") and "'role':'" in start):
        raise DataError(
            f"{where}: {column!r} is {shown(value)}, a conversation as Python prints it; write it "
            "as JSON with json.dumps"
        )
    try:
        parsed = json.loads(value)
        check_nesting(parsed)
        json.dumps(parsed, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        if start.startswith(_JSON_TALKS):
            raise DataError(
                f"{where}: {column!r} is {shown(value)}, a conversation as JSON text that cannot "
                f"be read ({one_line(error)}); fix the row"
            ) from error
        return value
    if isinstance(parsed, dict) and isinstance(parsed.get("messages"), list):
        raise DataError(
            f"{where}: {column!r} is JSON text of an object with 'messages'; write the list of "
            "messages alone, and the other members as columns"
        )
    items = parsed if isinstance(parsed, list) else [parsed]
    is_talk = bool(items) and all(
        isinstance(each, dict) and ("role" in each or {"from", "value"} <= each.keys())
        for each in items
    )
    return parsed if is_talk else value


def _listed(value: dict[str, Any]) -> Any:
    """The messages of an object of lists, ``{"role": […], "content": […]}``, as older versions of
    ``datasets`` keep a list of messages; any other object as it is."""
    lists = [each for each in value.values() if isinstance(each, list)]
    is_talk = isinstance(value.get("role", value.get("from")), list)
    if not is_talk or len(lists) < len(value) or len({len(each) for each in lists}) > 1:
        return value
    return [dict(zip(value, members, strict=True)) for members in zip(*lists, strict=True)]


def _message(place: str, column: str, value: Any, note: Note) -> Message:
    """One message; members that mean nothing here are passed to ``note``."""
    role, content = _role_and_content(value)
    calls = _calls(place, without_nulls(value)) if isinstance(value, dict) else []
    if calls and calls != _calls(place, value):  # Arrow gives each call the arguments of all
        note(f"{column}[].tool_calls[] arguments that are null")
    if role in CALL_ROLES:
        calls, role, content = _calls(place, {"tool_calls": content}), "assistant", ""
    if content is None and calls:
        content = ""
    if isinstance(content, list):
        content = _text_of_parts(place, content)
    if role == "tool" and isinstance(content, str) and "from" in value:
        content = _without_tags(content)
    if role == "function" and "from" not in value:  # OpenAI's older name of a tool's result
        role = "tool"
    known = {*ROLES.values(), *ROLES, *CALL_ROLES}
    if isinstance(role, str) and "from" in value and role.lower() not in known:
        raise DataError(
            f"{place} is from {role!r:.40}, an unknown role; expected one of "
            f"{', '.join(sorted({*ROLES, *CALL_ROLES}))}; rename it by data.preprocess"
        )
    may_be_empty = calls or role in (*SYSTEM_ROLES, "tool")
    if content is None and role in SYSTEM_ROLES:
        return {"role": role, "content": None}
    is_read = isinstance(role, str) and isinstance(content, str)
    if not is_read or not (str(content).strip() or may_be_empty):
        raise DataError(
            f"{place} is {shown(value)}; expected "
            '{"role": …, "content": …} or {"from": …, "value": …} with text in both; fix it'
        )
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    for name, member in value.items():
        if is_empty(member) or name in _ALWAYS_READ:
            continue
        if name in MEDIA or name in WEIGHTS:
            raise DataError(
                f"{place} has {name!r}, which is not supported: the model would learn from the row "
                "without it; remove it, or drop such rows in data.preprocess"
            )
        if name in THOUGHTS and isinstance(member, str):
            message |= dict.fromkeys(THOUGHTS[:2], member)
        elif name in _KEPT:
            message[name] = member
        else:
            note(f"{column}[].{name}")
    return message


_ALWAYS_READ = {"role", "content", "from", "value", "tool_calls", "function_call", *TRAIN_FLAGS}


def _role_and_content(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, dict):
        return None, None
    role, content = value.get("role"), value.get("content")
    if role is None and "from" in value:
        role, content = value["from"], value.get("value")
    if not isinstance(role, str):
        return None, None
    return ROLES.get(role.lower(), role.lower() if role.lower() in CALL_ROLES else role), content


def _text_of_parts(place: str, parts: Sequence[Any]) -> str | None:
    """The text of OpenAI's list of parts; None where it is none."""
    for part in parts:
        kind = part.get("type", "text") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind not in ("text", "input_text", "output_text"):
            raise DataError(
                f"{place} has a part of type {kind!r:.40}, which is not supported: the model would "
                "be asked without it; give rows of text, or drop such rows in data.preprocess"
            )
    texts = [part.get("text") if isinstance(part, dict) else None for part in parts]
    return "".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _without_tags(content: str) -> str:
    """A tool's reply without the tags that Hermes' sets write and chat templates add."""
    inner = content.strip()
    if (
        inner.count(RESPONSE[0]) == 1
        and inner.startswith(RESPONSE[0])
        and inner.endswith(RESPONSE[1])
    ):
        return inner.removeprefix(RESPONSE[0]).removesuffix(RESPONSE[1]).strip()
    return content


def _is_of_role(value: Any, roles: Sequence[str]) -> bool:
    role = _role_and_content(value)[0]
    return role in roles


def _train_flag(place: str, value: Mapping[str, Any]) -> tuple[str, bool]:
    """The first of ``TRAIN_FLAGS`` that leaves the turn out of the loss, or else the last one that
    trains it, and whether it does: the turn is trained where there is none."""
    last = ""
    for name, trains in TRAIN_FLAGS.items():
        flag = value.get(name)
        if flag is None:
            continue
        number = float(flag) if isinstance(flag, bool | int | float) else math.nan
        if number not in (0.0, 1.0):
            raise DataError(
                f"{place} has {name}={flag!r:.40}; expected 0 or 1, or false or true: other "
                "weights of a turn are not supported"
            )
        last = name
        if bool(number) is not trains:
            return name, False
    return last, True


def _calls(place: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
    given, old = value.get("tool_calls"), value.get("function_call")
    if is_empty(given):
        given = [] if is_empty(old) else [old]
    if isinstance(given, str):
        given = _json_value(place, given)
    if isinstance(given, dict):
        given = [given]
    if not isinstance(given, list):
        raise _no_calls(place, value.get("tool_calls"))
    return [_call(place, each) for each in given]


def _call(place: str, value: Any) -> dict[str, Any]:
    """A call in OpenAI's form, with the arguments as an object, as chat templates read it."""
    function = value.get("function", value) if isinstance(value, dict) else None
    if not isinstance(function, dict) or not isinstance(name := function.get("name"), str):
        raise _no_calls(place, value)
    arguments = function.get("arguments", function.get("parameters")) or {}
    call: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": _object(place, arguments)},
    }
    if isinstance(value.get("id"), str):
        call["id"] = value["id"]
    return call


def _object(place: str, value: Any) -> dict[str, Any]:
    """An object, which may be JSON text."""
    found = _json_value(place, value) if isinstance(value, str) else value
    if not isinstance(found, dict):
        raise _no_calls(place, value)
    return found


def _json_value(place: str, text: str) -> Any:
    """The value of JSON text that holds calls, or the arguments of one."""
    try:
        found = json.loads(text)
        check_nesting(found)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{place} has a call with {shown(text)}, which is not valid JSON ({one_line(error)}); "
            "fix it"
        ) from error
    return found


def _no_calls(place: str, value: Any) -> DataError:
    return DataError(
        f"{place} has tool calls {shown(value)}; expected "
        '[{"function": {"name": …, "arguments": {…}}}]; fix it'
    )


def shown(value: Any) -> str:
    """A value for an error message, at most 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
