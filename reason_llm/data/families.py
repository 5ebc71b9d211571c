"""Turns of families of models that the package ``renderers`` knows: a reply as tokens, and the
calls in an answer. A family is known by what it writes, not by the model's name: it is taken where
it writes a short conversation with the same tokens as the model's chat template, and reads the
calls in the answer.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

from reason_llm.data.messages import Messages
from reason_llm.data.tools import Call
from reason_llm.errors import ReasonError

CALL: Call = ("probe", {"text": "a b"})
CALLED = {"type": "function", "function": {"name": CALL[0], "arguments": CALL[1]}}
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string", "description": "Any."}}}
FUNCTION = {"name": CALL[0], "description": "A probe.", "parameters": PARAMETERS}
ASKED: Messages = [{"role": "user", "content": "."}]
ANSWER = {"role": "assistant", "content": "Yes."}
CALLS = {"user": [], "tool": [CALL] * 2}
PROBES: dict[str, tuple[Sequence[dict[str, Any]], dict[str, Any], Messages]] = {
    "user": ((), ANSWER, [{"role": "user", "content": "It is."}]),
    "tool": (
        ({"type": "function", "function": FUNCTION},),
        ANSWER | {"content": "", "tool_calls": [CALLED] * 2},
        [{"role": "tool", "name": CALL[0], "content": "It is."}] * 2,
    ),
}
"""Tools, an answer and a reply, by the reply's role."""
THOUGHTS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({}, {"reasoning_content": "Well."}),
    ({"enable_thinking": False}, {}),
)
"""Options of a family, and the thought before its answer."""
DATE_OPTION = "conversation_start_date"
"""Option of a family that writes the date, gpt-oss; its default is today's."""
Turn = tuple[list[int], list[int]]
"""Token ids of a prompt and of its answer."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family, for one tokenizer."""

    renderer: Any
    turns: dict[str, Turn]
    """A turn, by the role of replies that are proven after it."""

    def knows(self, reply: Messages) -> bool:
        """Whether such a reply is proven."""
        roles = {message["role"] for message in reply}
        return len(roles) == 1 and roles <= set(self.turns)

    def reply(self, reply: Messages) -> list[int]:
        """Token ids of the end of the answer, the reply, and what comes before the next answer."""
        prompt, answer = self.turns[reply[0]["role"]]
        ids: list[int] = self.renderer.bridge_to_next_turn(prompt, answer, reply).token_ids
        return ids[len(prompt) + len(answer) - 1 :]

    def calls(self, answer: Sequence[int], tools: Sequence[dict[str, Any]]) -> list[Call | None]:
        """The calls in the token ids of an answer, as ``calls_of`` gives them."""
        (prompt, _), *_ = self.turns.values()
        try:
            parsed = self.renderer.parse_response(list(answer), tools=tools, prompt_ids=prompt)
        except Exception:  # noqa: BLE001  (whatever a parser makes of what a model wrote)
            return [None]
        return [
            (each.name, each.arguments)
            if each.status in ("ok", "unknown_tool") and isinstance(each.arguments, dict)
            else None
            for each in parsed.tool_calls
        ]


def family_of(
    tokenizer: Any,
    written: Callable[[Messages, Sequence[dict[str, Any]]], list[int]],
    date: str | None = None,
) -> Family | None:
    """The family of which most is proven; None without one, or without ``renderers``. ``written``
    gives the token ids of a conversation with tools, as the chat template writes it on ``date``."""
    try:
        from renderers import config_from_name, create_renderer
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError:
        return None
    expected: dict[str, Turn] = {}
    for role, (tools, answer, reply) in PROBES.items():
        with suppress(ReasonError):  # the template takes no tools
            expected[role] = written(ASKED, tools), written([*ASKED, answer, *reply], tools)
    others = dict.fromkeys(MODEL_RENDERER_MAP.values())
    del others["gpt-oss"]  # fetches a file from the network, so for the models of the map alone
    best = None
    names = [MODEL_RENDERER_MAP.get(tokenizer.name_or_path), *others]
    for name, (options, thought) in product(names, THOUGHTS):
        turns: dict[str, Turn] = {}
        for role in expected:
            with suppress(Exception):  # of a family with other tokens
                config = config_from_name(name)
                config = config.model_copy(update={"thinking_retention": "all"} | options)
                if DATE_OPTION in type(config).model_fields:
                    config = config.model_copy(update={DATE_OPTION: date})
                renderer = create_renderer(tokenizer, config)
                if turn := _proven(renderer, role, thought, *expected[role]):
                    turns[role] = turn
        if len(turns) > len(best.turns if best else ()):
            best = Family(renderer, turns)
    return best


def _proven(
    renderer: Any, role: str, thought: dict[str, Any], prompt: list[int], whole: list[int]
) -> Turn | None:
    """A turn after which a reply of this role has the tokens that the template writes."""
    tools, answer, reply = PROBES[role]
    if renderer.render_ids(ASKED, tools=tools, add_generation_prompt=True) != prompt:
        return None
    for after in (reply, []):  # what ends the answer may be how the reply begins
        made = renderer.render([*ASKED, answer | thought, *after], tools=tools)
        ids, end = made.token_ids, max(i for i, is_own in enumerate(made.sampled_mask) if is_own)
        if ids[: len(prompt)] == prompt:
            break
    turn = prompt, ids[len(prompt) : end + 1]
    family = Family(renderer, {role: turn})
    more, bridged = family.reply(reply), renderer.bridge_to_next_turn(*turn, reply).token_ids
    is_exact = bridged == [*prompt, *turn[1], *more[1:]] and whole[-len(more) :] == more
    templates = whole[len(prompt) : len(whole) - len(more) + 1]
    return turn if is_exact and family.calls(templates, tools) == CALLS[role] else None
