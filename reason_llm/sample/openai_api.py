"""Requests and answers in the forms of OpenAI's API, of the token server and of ``serve``.

    POST /v1/chat/completions   messages in, a message out
    POST /v1/responses          items in, items out; the form that the OpenAI Agents SDK sends

Every member of a request is honoured, harmless, ignored with a warning, or refused by its name: one
that would change the distribution which is sampled contradicts what is learned.

Source: the types of ``openai`` 3.57 (``types/chat``, ``types/responses``).
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import orjson
from pydantic import Field

from reason_llm.config import SampleSection
from reason_llm.data import Messages, Renderer, plain_messages, said_before
from reason_llm.files import MIB, check_nesting
from reason_llm.rollout import Completion, Number, record_from_json

log = logging.getLogger(__name__)
MODEL = "policy"
Members = dict[str, Any]

MAX_BYTES = 8 * MIB
"""Largest request."""
MAX_TOKEN_CHARACTERS = 256
"""A longer text for each token of the context is refused before it is encoded, which holds up all
others: longest tokens have about 128."""
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 256
"""Longest string of ``stop``."""

_HARMLESS = {
    "model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "stream_options", "cache_salt", "content_parts", "return_token_ids",
    "request_id", "priority", "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    "output_kind", "routed_experts_prompt_start",
}  # fmt: skip
"""Members that change nothing of what is sampled."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "logit_bias": ({},), "presence_penalty": (0,),
    "frequency_penalty": (0,), "repetition_penalty": (1,), "length_penalty": (1,),
    "min_tokens": (0,), "ignore_eos": (False,), "use_beam_search": (False,), "bad_words": ([],),
    "top_logprobs": (0,), "prompt_logprobs": (0,), "echo": (False,), "functions": ([],),
    "function_call": ("none", "auto"), "parallel_tool_calls": (True,), "modalities": (["text"],),
    "add_generation_prompt": (True,), "continue_final_message": (False,),
    "include_stop_str_in_output": (False,), "background": (False,), "truncation": ("disabled",),
    "response_format": ({"type": "text"},), "text": ({}, {"format": {"type": "text"}}),
    "reasoning": ({},), "tool_choice": ("none", "auto"), "extra_args": ({},),
    "include": ([], ["reasoning.encrypted_content"]),
}  # fmt: skip
"""Members that have one meaning which is that of leaving them out."""
_WHOLE = "send the whole conversation as input"
_MASK = "a mask over tokens is not part of what the learner scores; ask for JSON in the prompt"
_WHY = {
    "response_format": _MASK, "text": _MASK, "previous_response_id": _WHOLE, "conversation": _WHOLE,
    "top_logprobs": "only the sampled token's log-prob is known",
    "tool_choice": "whether a tool is called is the policy's choice; leave it out",
}  # fmt: skip

Limit = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
Seed = Annotated[int, Field(strict=True, ge=-(1 << 63), lt=1 << 64)]
Stop = Annotated[str, Field(strict=True, min_length=1, max_length=MAX_STOP_CHARACTERS)]


@dataclass(frozen=True, slots=True)
class Draw:
    """Options with which one answer is sampled."""

    max_tokens: Limit | None = None
    stop: Annotated[tuple[Stop, ...], Field(max_length=MAX_STOPS)] = ()
    seed: Seed | None = None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for one answer to a conversation."""

    draw: Draw
    messages: Messages
    tools: tuple[dict[str, Any], ...]
    may_call: bool
    """Whether calls in the answer are read."""
    logprobs: bool
    stream: bool
    has_usage: bool
    """Whether a stream ends with the numbers of tokens."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """The answer to it."""

    request: ChatRequest
    completion: Completion
    tokens: Sequence[str]
    """The text of each token, where log-probs are asked for."""
    calls: Sequence[Members]
    text: str
    """Text of the message before its calls."""
    prompt_tokens: int
    model: str = MODEL
    thought: str = ""
    """Its thought, where that is not in the text."""

    @property
    def message(self) -> Members:
        """The message in the form of a chat."""
        thought = {"reasoning_content": self.thought} if self.thought else {}
        if not self.calls:
            return {"role": "assistant", "content": self.text, **thought}
        content = self.text or None
        return {"role": "assistant", "content": content, "tool_calls": self.calls, **thought}


def draw_of(body: Members) -> Draw:
    """Sampling options of a request; ValueError names what is wrong."""
    stop = body.get("stop", ())
    options = {"stop": [stop] if isinstance(stop, str) else stop, "seed": body.get("seed")}
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if name in body:
            try:
                options["max_tokens"] = record_from_json(Limit, body[name])
            except ValueError:
                raise ValueError(
                    f"{name}={body[name]!r:.100} is not a number of tokens; give 1 or more"
                ) from None
    return record_from_json(Draw, options)


def body_of(content: bytes) -> Members:
    """The members of a request that are not null; ValueError if it is no JSON object."""
    body = check_nesting(orjson.loads(content))
    if not isinstance(body, dict):
        raise ValueError("a request is one JSON object")
    return {name: value for name, value in body.items() if value is not None}


def check_members(body: Members, read: Sequence[str], section: SampleSection) -> None:
    """Refuse by name what is neither read nor harmless; warn once of filters that are ignored."""
    own: Members = {
        "temperature": section.temperature,
        "top_p": section.top_p,
        "top_k": section.top_k,
        "min_p": section.min_p,
    }
    for name, value in body.items():
        if name in own:
            number = record_from_json(Number, value)
            if number != own[name] and name not in _WARNED:
                _WARNED.add(name)
                log.warning(
                    f"{name}={number:g} of a request is ignored, since what is learned is drawn "
                    f"from the policy as sample.{name}={own[name]:g} says; leave it out"
                )
        elif name in read or name in _HARMLESS or value in _ONLY.get(name, ()):
            continue
        else:
            why = _WHY.get(name, "leave it out")
            raise ValueError(f"{name}={value!r:.100} is not offered: {why}")


_WARNED: set[str] = set()
"""Members of which this process has warned."""


def chat_request(body: Members, section: SampleSection) -> ChatRequest:
    """A request of ``/v1/chat/completions``; ValueError names what is wrong or not offered."""
    limits = ("max_tokens", "max_completion_tokens")
    read = ("messages", "tools", "stop", "seed", "logprobs", "stream", *limits)
    check_members(body, read, section)
    tools = [_function(tool, tool.get("function")) for tool in _dicts(body, "tools")]
    options = body.get("stream_options", {})
    return ChatRequest(
        draw_of(body),
        _conversation(_dicts(body, "messages")),
        tuple(tools),
        body.get("tool_choice") != "none",
        _flag(body, "logprobs"),
        _flag(body, "stream"),
        isinstance(options, dict) and options.get("include_usage") is True,
    )


def response_request(body: Members, section: SampleSection) -> ChatRequest:
    """A request of ``/v1/responses``; ValueError names what is wrong or not offered."""
    # Clients send these objects with null members, which ask for nothing.
    for name in ("text", "reasoning"):
        if isinstance(body.get(name), dict):
            body[name] = {key: value for key, value in body[name].items() if value is not None}
    read = ("input", "instructions", "tools", "max_output_tokens", "stream")
    check_members(body, read, section)
    messages: list[dict[str, Any]] = []
    if (instructions := body.get("instructions")) is not None:
        messages.append({"role": "system", "content": instructions})
    if isinstance(body.get("input"), str):
        messages.append({"role": "user", "content": body["input"]})
    else:
        messages += _messages(_dicts(body, "input"))
    return ChatRequest(
        draw_of(body),
        _conversation(messages),
        tuple(_function(tool, tool) for tool in _dicts(body, "tools")),
        body.get("tool_choice") != "none",
        logprobs=False,
        stream=_flag(body, "stream"),
        has_usage=True,
    )


def _dicts(body: Members, name: str) -> list[dict[str, Any]]:
    items = body.get(name, [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ValueError(f"{name}={items!r:.100} is not a list of objects")
    return items


def _flag(body: Members, name: str) -> bool:
    if not isinstance(value := body.get(name, False), bool):
        raise ValueError(f"{name}={value!r:.100} is neither true nor false")
    return value


def _conversation(messages: list[dict[str, Any]]) -> Messages:
    """The messages as templates read them, which know no role of developers."""
    if not messages:
        raise ValueError("a request has one message at least")
    plain = plain_messages(messages)
    return [m | {"role": "system"} if m["role"] == "developer" else m for m in plain]


def _function(tool: dict[str, Any], function: Any) -> dict[str, Any]:
    """A tool in the form of a chat, which chat templates read."""
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise ValueError(f"tools has {tool!r:.100}; give functions, no other tools are offered")
    if not isinstance(function.get("name"), str):
        raise ValueError(f"tools has {tool!r:.100}, which has no name")
    members = {name: value for name, value in function.items() if name not in ("strict", "type")}
    return {"type": "function", "function": members}


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items of a Response as messages of a chat: an assistant's calls are part of its message."""
    messages: list[dict[str, Any]] = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "message":
            messages.append({"role": item.get("role"), "content": item.get("content")})
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append({"type": "function", "function": item})
        elif kind == "function_call_output":
            reply = {"role": "tool", "tool_call_id": item.get("call_id")}
            messages.append({**reply, "content": item.get("output")})
        else:
            raise ValueError(
                f"input has an item of type {kind!r:.60}; give messages, function_call and "
                "function_call_output"
            )
    return messages


def _logprobs(answer: ChatAnswer) -> list[Members]:
    return [
        _token(token, logprob) | {"top_logprobs": []}
        for token, logprob in zip(answer.tokens, answer.completion.logprobs, strict=True)
    ]


def _token(token: str, logprob: float) -> Members:
    written = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": logprob, "bytes": written}


def _usage(answer: ChatAnswer, read: str, wrote: str) -> Members:
    tokens = len(answer.completion.token_ids)
    total = answer.prompt_tokens + tokens
    return {read: answer.prompt_tokens, wrote: tokens, "total_tokens": total}


def chat_answer(
    request: ChatRequest,
    renderer: Renderer,
    completion: Completion,
    prompt_tokens: int,
    turn: int,
    thought: str = "",
) -> tuple[ChatAnswer, list[Any]]:
    """The answer that a completion is, and the calls in it: None for one that cannot be read."""
    ids, parsed = completion.token_ids, list[Any]()
    calls: list[Members] = []
    if request.tools and request.may_call:
        parsed = renderer.calls(completion.text, ids)
        calls = [
            {
                "id": f"call_{turn}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": orjson.dumps(arguments).decode()},
            }
            for number, (name, arguments) in enumerate(filter(None, parsed))
        ]
    text = completion.text
    text = said_before(text) if calls else renderer.content_of(text)
    tokens = [renderer.tokenizer.decode([id]) for id in ids] if request.logprobs else []
    answer = ChatAnswer(request, completion, tokens, calls, text, prompt_tokens, thought=thought)
    return answer, parsed


def chat_completion(answer: ChatAnswer) -> tuple[Members, list[bytes]]:
    """The answer of ``/v1/chat/completions``, whole and as the lines of a stream."""
    reason: str = answer.completion.finish_reason
    choice: Members = {
        "index": 0,
        "message": answer.message,
        "finish_reason": "tool_calls" if answer.calls and reason == "stop" else reason,
        "logprobs": None,
    }
    if answer.request.logprobs:
        choice["logprobs"] = {"content": _logprobs(answer), "refusal": None}
    whole: Members = {
        "id": f"chatcmpl-{secrets.token_hex(8)}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": answer.model,
        "choices": [choice],
        "usage": _usage(answer, "prompt_tokens", "completion_tokens"),
    }
    delta = dict(answer.message)
    if answer.calls:
        delta["tool_calls"] = [{"index": n, **call} for n, call in enumerate(answer.calls)]
    streamed = {name: value for name, value in choice.items() if name != "message"}
    # Usage is in a chunk of its own at the end, if the client asks for it, and null before.
    chunk = whole | {"object": "chat.completion.chunk", "usage": None}
    chunks = [chunk | {"choices": [streamed | {"delta": delta}]}]
    if answer.request.has_usage:
        chunks.append(chunk | {"choices": [], "usage": whole["usage"]})
    return whole, [*(b"data: " + orjson.dumps(chunk) for chunk in chunks), b"data: [DONE]"]


def response(answer: ChatAnswer) -> tuple[Members, list[bytes]]:
    """The answer of ``/v1/responses``, whole and as the lines of a stream."""
    completion, number = answer.completion, secrets.token_hex(8)
    is_cut = completion.finish_reason == "length"
    status = "incomplete" if is_cut else "completed"
    output: list[Members] = []
    if answer.text or not answer.calls:
        text = {"type": "output_text", "text": answer.text, "annotations": [], "logprobs": []}
        output.append(
            {
                "type": "message",
                "id": f"msg_{number}",
                "role": "assistant",
                "status": status,
                "content": [text],
            }
        )
    output += [
        {
            "type": "function_call",
            "id": f"fc_{number}_{n}",
            "call_id": call["id"],
            "status": "completed",
            **call["function"],
        }
        for n, call in enumerate(answer.calls)
    ]
    usage = _usage(answer, "input_tokens", "output_tokens")
    usage |= {"input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}}
    usage |= {"output_tokens_details": {"reasoning_tokens": 0}}
    request = answer.request
    # Clients check the types of all members: those that do not apply are null.
    whole: Members = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "model": answer.model,
        "status": status,
        "output": output,
        "usage": usage,
        "error": None,
        "instructions": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "metadata": {},
        "parallel_tool_calls": True,
        "tool_choice": "auto" if request.may_call else "none",
        "tools": [
            {"type": "function", "strict": False, "parameters": None, **tool["function"]}
            for tool in request.tools
        ],
        "temperature": None,
        "top_p": None,
    }
    return whole, [
        b"event: %b\ndata: %b"
        % (event["type"].encode(), orjson.dumps({**event, "sequence_number": n}))
        for n, event in enumerate(_events(whole))
    ]


def _events(whole: Members) -> Iterator[Members]:
    """Events of a stream, which build a Response item by item."""
    yield _event("created", response=whole | {"output": [], "usage": None})
    for index, item in enumerate(whole["output"]):
        at = {"item_id": item["id"], "output_index": index}
        yield _event("output_item.added", output_index=index, item=_unfilled(item))
        if item["type"] == "message":
            (part,) = item["content"]
            at |= {"content_index": 0}
            yield _event("content_part.added", **at, part=part | {"text": ""})
            yield _event("output_text.delta", **at, delta=part["text"], logprobs=[])
            yield _event("output_text.done", **at, text=part["text"], logprobs=[])
            yield _event("content_part.done", **at, part=part)
        else:
            arguments, name = item["arguments"], "function_call_arguments"
            yield _event(f"{name}.delta", **at, delta=arguments)
            yield _event(f"{name}.done", **at, arguments=arguments, name=item["name"])
        yield _event("output_item.done", output_index=index, item=item)
    yield _event(whole["status"], response=whole)


def _event(kind: str, **members: Any) -> Members:
    return {"type": f"response.{kind}", **members}


def _unfilled(item: Members) -> Members:
    """An item of a stream before anything is in it."""
    empty: Members = {"content": []} if item["type"] == "message" else {"arguments": ""}
    return item | empty | {"status": "in_progress"}


Form = tuple[
    Callable[[Members, SampleSection], ChatRequest],
    Callable[[ChatAnswer], tuple[Members, list[bytes]]],
]
FORMS: Mapping[str, Form] = {
    "/v1/chat/completions": (chat_request, chat_completion),
    "/v1/responses": (response_request, response),
}
"""Reader of requests and writer of answers, by path."""
