"""Our renderer in the form of the package renderers, for the training client of verifiers 0.4."""

import copy
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import Any, ClassVar

from renderers import DefaultRenderer, DefaultRendererConfig, ParsedToolCall, RenderedTokens

from reason_llm.data import Messages, Renderer, date_argument, plain_messages, said_before
from reason_llm.environments.data_side import REPLY
from reason_llm.errors import ReasonError
from reason_llm.model import decode

_ONE_AT_A_TIME = Lock()


class Options(DefaultRendererConfig):
    """Options of the renderer."""

    reply_tokens: int
    _internal_fields = DefaultRendererConfig._internal_fields | {"reply_tokens"}


class Turns(DefaultRenderer):
    """Renders by the chat template; continues from the sampled ids as our own renderer does.

    A subclass sets ``own`` and ``end_token_ids``: verifiers makes the object by the class's name.
    """

    config_class = Options
    supports_tools = True
    own: ClassVar[Renderer]
    end_token_ids: ClassVar[Collection[int]]

    def __init__(self, tokenizer: Any, config: Any = None) -> None:
        dated, date = copy.copy(tokenizer), date_argument(self.own.template.date)
        dated.apply_chat_template = partial(tokenizer.apply_chat_template, **date)
        super().__init__(dated, config)

    def _apply(
        self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
    ) -> list[int]:
        renderer = replace(self.own, tools=tuple(tools or ()))
        if tools:
            renderer.check_tools("a task of sample.environment=verifiers")
        if not renderer.spells_controls(messages):
            options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
            return list(super()._apply(messages, **options))
        pairs = zip(messages, plain_messages(messages), strict=True)
        merged = [{**message, **plain} for message, plain in pairs]
        with _ONE_AT_A_TIME:
            text = renderer.marked_text("a task", merged, add_generation_prompt)
            return renderer.marked_ids("a task", text)

    def bridge_to_next_turn(
        self, prompt: list[int], answer: list[int], reply: Messages, *, tools: Any = None
    ) -> RenderedTokens | None:
        """Ids of the conversation with the reply; None if it has to be rendered again."""
        renderer, ids = replace(self.own, tools=tuple(tools or ())), [*prompt, *answer]
        try:
            with _ONE_AT_A_TIME:
                added = renderer.after(ids, plain_messages(reply), self.config.reply_tokens, REPLY)
        except ReasonError:
            return None
        return RenderedTokens(
            token_ids=[*ids, *added],
            message_indices=[-1] * len(ids) + [len(reply) - 1] * len(added),
            message_roles=[message["role"] for message in reply],
        )

    def parse_response(
        self, answer: list[int], *, tools: Any = None, prompt_ids: Any = None
    ) -> Any:
        """The message in an answer, with our own calls where no parser is named."""
        parsed = super().parse_response(answer, tools=tools, prompt_ids=prompt_ids)
        if self._tool_parser is self._reasoning_parser is None and parsed.content:
            # As rewards see it, where it left special tokens out.
            (text,) = decode(self.own.tokenizer, [answer], self.end_token_ids)
            has_thought = parsed.reasoning_content is not None
            parsed.content = text.partition("</think>")[2] if has_thought else text
        if tools and self.config.tool_parser is None:
            renderer = replace(self.own, tools=tuple(tools))
            if calls := [call for call in renderer.calls(parsed.content, answer) if call]:
                parsed.tool_calls = [ParsedToolCall("", *call) for call in calls]
                parsed.content = said_before(parsed.content)
        return parsed
