"""OpenAI-compatible server of a run or a model, over the Transformers sampler.

    POST /v1/chat/completions   messages in, a message out
    POST /v1/responses          items in, items out
    POST /v1/completions        texts or token ids in, texts out; with echo and logprobs scores
    GET  /v1/models             the run's name and its base's

Requests are answered one at a time; the others wait. Log-probs are the model's own, before
temperature and filters, as vLLM reports them. By default, only this machine can connect;
another address needs a key. What the model writes is sent as text and never run.

Batching and paged KV are not supported; ``vllm serve`` has both, and its command is printed.
"""

import asyncio
import hmac
import logging
import os
import random
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import torch
from aiohttp import web
from torch import Tensor

from reason_llm.app.chat import ChatOptions, ChatSession, ChatSubject, parse_option, text_pieces
from reason_llm.config import Config
from reason_llm.data import chat_template
from reason_llm.errors import ConfigError, ReasonError, one_line
from reason_llm.files import without_panics, write_atomically
from reason_llm.model import adapters, base, default_device, load_tokenizer, positions
from reason_llm.model.vllm import MAX_LORA_RANKS
from reason_llm.rollout import Completion, FinishReason, Prompt
from reason_llm.run.store import folder as run_folder
from reason_llm.sample import SamplingParams, openai_api, stream

KEY = "REASON_LLM_API_KEY"
"""Environment variable of the key that each request must have."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_WAITING = 256
MOST_PROMPTS = 128
MOST_TOP = 20
"""Limit of the likeliest tokens that are reported for each position."""
SCORED_AT_ONCE = 256
"""Number of positions whose logits are in memory at once."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
CHAT, TEXT, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
DONE = b"data: [DONE]"
Members = openai_api.Members
Part = Members | bytes
"""The whole answer, or a chunk of a stream, as members or as encoded lines."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed and checked request."""

    model: str
    prompts: list[tuple[int, ...]]
    draw: openai_api.Draw
    options: ChatOptions
    streams: bool
    has_usage: bool
    logprobs: int | None
    """Number of most likely tokens to report with each token's log-prob. None: no log-probs."""
    echo: bool = False
    """Whether the prompt is part of the text."""
    is_score: bool = False
    """Whether nothing is sampled."""
    chat: openai_api.ChatRequest | None = None
    path: str = CHAT


@dataclass(slots=True)
class PartialAnswer:
    """The tokens of an answer sampled so far, and why it ended."""

    ids: list[int]
    reason: FinishReason = "length"


@dataclass(eq=False)
class PolicyServer:
    """The server of a loaded model under its names.

    Args:
        names: the model of each name, ``policy`` or ``reference``; the first name is the default.
    """

    chat: ChatSession
    names: Mapping[str, Any]
    key: str | None = None
    hosts: frozenset[str] | None = None
    """Accepted values of the header Host. None: all."""

    def __post_init__(self) -> None:
        self.tokenizer = self.chat.renderer.tokenizer
        self._worker = ThreadPoolExecutor(1, "sampling")
        self._waiting = 0

    def app(self) -> web.Application:
        """The application, not yet listening."""
        app = web.Application(client_max_size=openai_api.MAX_BYTES)
        app.router.add_get(MODELS, self._answered(self._models))
        for path in (*openai_api.FORMS, TEXT):
            app.router.add_post(path, self._answered(self._completions))
        return app

    def _answered(self, handler: Callable[[web.Request], Any]) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            """Answer, or say why not in OpenAI's JSON; no error ends the server."""
            try:
                self._check(request)
                answer: web.StreamResponse = await handler(request)
                return answer
            except web.HTTPRequestEntityTooLarge:
                status, text = 413, f"a request has at most {openai_api.MAX_BYTES:,} bytes"
            except web.HTTPException as error:
                status, text = error.status, str(error.text)
            except (ReasonError, ValueError) as error:
                status, text = 400, one_line(error)
            except Exception as error:  # the server keeps running
                logger.exception("a request failed")
                status, text = 500, f"{type(error).__name__}: {one_line(error)[:300]}"
            problem = {"message": text, "type": "invalid_request_error", "code": status}
            return web.json_response({"error": problem}, status=status)

        return handle

    def _check(self, request: web.Request) -> None:
        """Reject requests from other sites' pages in a local browser, and those without the key."""
        if self.hosts is not None and request.host not in self.hosts:
            raise web.HTTPMisdirectedRequest(text=f"ask for {min(self.hosts)}")
        if request.method == "POST" and request.content_type != "application/json":
            raise web.HTTPUnsupportedMediaType(text="send application/json")
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key and not hmac.compare_digest(given.encode(), self.key.encode()):
            raise web.HTTPUnauthorized(text=f"the key is not that of the server's {KEY}")

    async def _models(self, request: web.Request) -> web.Response:
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "reason_llm",
             "max_model_len": self.chat.context_tokens}
            for name in self.names
        ]  # fmt: skip
        return web.json_response({"object": "list", "data": models})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = openai_api.body_of(await request.read())
        if self._waiting >= MOST_WAITING:
            raise web.HTTPServiceUnavailable(text=f"{MOST_WAITING} requests wait already")
        asked = self._asked(body, request.path)
        self._waiting += 1
        try:
            parts = self._parts(asked)
            if not asked.streams:
                content = orjson.dumps([each async for each in parts][-1])
                return web.Response(body=content, content_type="application/json")
            first = await anext(parts)  # an error up to here can still set the status
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(_lines(first))
            async for each in parts:
                await response.write(_lines(each))
            return response
        finally:
            self._waiting -= 1

    async def _parts(self, asked: Asked) -> AsyncIterator[Part]:
        """Chunks of a stream, or the whole answer, made in the thread of the model."""
        loop, gone = asyncio.get_running_loop(), threading.Event()
        made: asyncio.Queue[Part | Exception | None] = asyncio.Queue()

        def give(each: Part | Exception | None) -> None:
            loop.call_soon_threadsafe(made.put_nowait, each)

        def work() -> None:
            """Sample on the worker's thread; None, or the error, is the last that it gives."""
            try:
                answer = self._text_answer if asked.chat is None else self._chat_answer
                with self.chat.model.using(self.names[asked.model]):
                    for each in () if gone.is_set() else answer(asked, gone):
                        give(each)
                give(None)
            except Exception as error:  # noqa: BLE001  (the client receives it)
                give(error)

        running = loop.run_in_executor(self._worker, work)
        try:
            while (each := await made.get()) is not None:
                if isinstance(each, Exception):
                    raise each
                yield each
        finally:
            gone.set()
            running.cancel()  # has no effect once it has started

    def _asked(self, body: Members, path: str) -> Asked:
        name = body.get("model", next(iter(self.names)))
        if name not in self.names:
            raise web.HTTPNotFound(
                text=f"model={name!r:.100} is not served; there is {', '.join(self.names)}"
            )
        options = self.chat.options
        for each in SAMPLING:
            if each in body:
                options = parse_option(options, each, str(body[each]))
        if path in openai_api.FORMS:
            asked = self._asked_chat(name, body, options, path)
        else:
            asked = self._asked_texts(name, body, options)
        longest = max(map(len, asked.prompts))
        if longest + (not asked.is_score) > self.chat.context_tokens:
            raise ValueError(
                f"a prompt of {longest} tokens leaves no room in the context of "
                f"{self.chat.context_tokens} tokens (model.context_tokens)"
            )
        return asked

    def _asked_chat(self, name: str, body: Members, options: ChatOptions, path: str) -> Asked:
        top = body.pop("top_logprobs", 0)
        chat = openai_api.FORMS[path][0](body, options)
        self._check_size(sum(len(message["content"]) for message in chat.messages))
        renderer = replace(self.chat.renderer, tools=chat.tools)
        if chat.tools:
            renderer.check_tools("a request")
        prompt = renderer.prompt("this conversation", chat.messages, answer="")
        return Asked(
            name, [prompt.token_ids], chat.draw, options, chat.stream, chat.has_usage,
            _number_of_top(top) if chat.logprobs else None, chat=chat, path=path,
        )  # fmt: skip

    def _asked_texts(self, name: str, body: Members, options: ChatOptions) -> Asked:
        read = ("prompt", "max_tokens", "stop", "seed", "logprobs", "stream", "echo")
        openai_api.check_members({k: v for k, v in body.items() if k not in read}, read, options)
        flags = {each: body.get(each, False) for each in ("stream", "echo")}
        for flag, value in flags.items():
            if not isinstance(value, bool):
                raise ValueError(f"{flag}={value!r:.100} is neither true nor false")
        is_score = flags["echo"] and body.get("max_tokens") == 0
        wanted = body.get("stream_options", {})
        return Asked(
            name, self._prompts(body.get("prompt")),
            openai_api.draw_of({k: v for k, v in body.items() if k != "max_tokens" or v}),
            options, flags["stream"],
            isinstance(wanted, dict) and wanted.get("include_usage") is True,
            None if body.get("logprobs") is None else _number_of_top(body["logprobs"]),
            flags["echo"], is_score,
        )  # fmt: skip

    def _prompts(self, given: Any) -> list[tuple[int, ...]]:
        """Token ids of the prompts, which are texts or token ids, one or a list."""
        is_list = isinstance(given, list) and given and not isinstance(given[0], int)
        prompts = given if is_list else [given]
        if len(prompts) > MOST_PROMPTS:
            raise ValueError(f"a request has {len(prompts)} prompts; give at most {MOST_PROMPTS}")
        return [self._prompt(each) for each in prompts]

    def _prompt(self, given: Any) -> tuple[int, ...]:
        if isinstance(given, list):
            ids, size = given, len(self.tokenizer)
            if not ids or not all(type(each) is int and 0 <= each < size for each in ids):
                raise ValueError(f"prompt={given!r:.100} is no list of token ids below {size}")
        elif isinstance(given, str):
            self._check_size(len(given))
            with without_panics():
                ids = self.tokenizer.encode(given)  # with the special tokens at the start of a text
            ids = ids or [self.tokenizer.bos_token_id or self.chat.model.end_token_ids[0]]
        else:
            raise ValueError(f"prompt={given!r:.100} is neither text nor a list of token ids")
        return tuple(ids)

    def _check_size(self, characters: int) -> None:
        if characters > openai_api.MAX_TOKEN_CHARACTERS * self.chat.context_tokens:
            raise ValueError(
                f"{characters:,} characters leave no room in the context of "
                f"{self.chat.context_tokens} tokens (model.context_tokens)"
            )

    # The methods below run in the thread of the model

    def _chat_answer(self, asked: Asked, gone: threading.Event) -> Iterator[Part]:
        chat, (prompt,) = asked.chat, asked.prompts
        assert chat is not None
        renderer = replace(self.chat.renderer, tools=chat.tools)
        # Calls, log-probs and Responses are known only at the end.
        is_whole = bool(chat.tools) or asked.logprobs is not None or asked.path != CHAT
        chunk = _head("chatcmpl", "chat.completion.chunk", asked.model)
        sampled, text, sent = PartialAnswer([]), "", ""

        def delta(reason: str | None = None, **members: str) -> Members:
            choice = {"index": 0, "delta": members, "finish_reason": reason, "logprobs": None}
            return chunk | {"choices": [choice], "usage": None}

        if streams := asked.streams and not is_whole:
            yield delta(role="assistant", content="")
        for piece in self._pieces(asked, prompt, sampled, gone):
            text += piece
            said = renderer.content_of(text) if streams else ""
            if said.startswith(sent) and len(said) > len(sent):
                yield delta(content=said[len(sent) :])
                sent = said
        logprobs: list[float] = []
        likely: list[Members] = []
        if asked.logprobs is not None:
            logprobs, likely = self._scores([*prompt, *sampled.ids], len(prompt), asked.logprobs)
        completion = Completion(tuple(sampled.ids), text, tuple(logprobs), sampled.reason)
        answer, _ = openai_api.chat_answer(chat, renderer, completion, len(prompt), 0)
        answer = replace(answer, model=asked.model, likely=likely)
        whole, lines = openai_api.FORMS[asked.path][1](answer)
        if not asked.streams:
            yield whole
        elif is_whole:
            yield from lines
        else:
            yield delta(sampled.reason)
            if asked.has_usage:
                yield chunk | {"choices": [], "usage": whole["usage"]}
            yield DONE

    def _text_answer(self, asked: Asked, gone: threading.Event) -> Iterator[Part]:
        head = _head("cmpl", "text_completion", asked.model)
        choices, read, wrote = list[Members](), 0, 0
        for index, prompt in enumerate(asked.prompts):
            sampled = PartialAnswer([])
            before = self.chat.decode(list(prompt)) if asked.echo else ""
            text, said = before, [before] if before else []
            for piece in self._pieces(asked, prompt, sampled, gone):
                text += piece
                said.append(piece)
                if asked.streams and asked.logprobs is None:
                    yield head | {"choices": [_text_choice(index, "".join(said))], "usage": None}
                    said = []
            logprobs = None
            if asked.logprobs is not None:
                start = 0 if asked.echo else len(prompt)
                logprobs = self._text_logprobs([*prompt, *sampled.ids], start, asked.logprobs)
            choices.append(_text_choice(index, text, sampled.reason, logprobs))
            if asked.streams:
                yield head | {"choices": [choices[-1] | {"text": "".join(said)}], "usage": None}
            read, wrote = read + len(prompt), wrote + len(sampled.ids)
        usage = {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}
        if not asked.streams:
            yield head | {"choices": choices, "usage": usage}
            return
        if asked.has_usage:
            yield head | {"choices": [], "usage": usage}
        yield DONE

    def _pieces(
        self, asked: Asked, prompt: tuple[int, ...], sampled: PartialAnswer, gone: threading.Event
    ) -> Generator[str, None, None]:
        """The answer's text in pieces, before any stop string; no part of a stop string is sent."""
        if asked.is_score:
            return
        own, draw = asked.options, asked.draw
        room = self.chat.context_tokens - len(prompt)
        params = SamplingParams(
            1, min(draw.max_tokens or own.max_new_tokens, room), own.temperature, own.top_k,
            own.top_p, own.min_p,
        )  # fmt: skip
        seed = random.Random(draw.seed).getrandbits(63)  # of the system's entropy for None

        def tokens() -> Generator[int, None, None]:
            """Yield token ids as they are sampled, until the client has gone."""
            asked_for = Prompt("", "", prompt, "")
            with closing(stream(self.chat.model, asked_for, params, seed)) as drawn:
                for token in drawn:
                    sampled.ids.append(token)
                    if token in self.chat.model.end_token_ids:
                        sampled.reason = "stop"
                    yield token
                    if gone.is_set():
                        return

        held, longest = "", max(map(len, draw.stop), default=0)
        with closing(text_pieces(tokens(), self.chat.decode)) as pieces:
            for piece in pieces:
                held += piece
                if ends := [at for each in draw.stop if (at := held.find(each)) >= 0]:
                    sampled.reason = "stop"
                    yield held[: min(ends)]
                    return
                kept = next(
                    (n for n in range(min(longest - 1, len(held)), 0, -1)
                     if any(each.startswith(held[-n:]) for each in draw.stop)), 0,
                )  # fmt: skip
                if len(held) > kept:
                    yield held[: len(held) - kept]
                    held = held[len(held) - kept :]
        if held:
            yield held

    @torch.inference_mode()
    def _scores(self, ids: list[int], start: int, top: int) -> tuple[list[float], list[Members]]:
        """Log-probs of the tokens from ``start`` on, which is above 0, and the likeliest there."""
        model = self.chat.model
        hidden_TD: Tensor = model.hidden_states(torch.tensor([ids], device=model.device))[0]
        found: list[float] = []
        likely: list[Members] = []
        for at in range(start, len(ids), SCORED_AT_ONCE):
            here = slice(at, min(at + SCORED_AT_ONCE, len(ids)))
            logits_NV = model.logits(hidden_TD[here.start - 1 : here.stop - 1])
            logprobs_NV = logits_NV.float().log_softmax(-1)
            wanted_N1 = torch.tensor(ids[here], device=model.device)[:, None]
            found += logprobs_NV.gather(-1, wanted_N1)[:, 0].tolist()
            values, tokens = logprobs_NV.topk(top, -1)
            for row, of_row in zip(values.tolist(), tokens.tolist(), strict=True):
                likely.append(dict(zip(map(self._token, of_row), row, strict=True)))
        return found, likely

    def _text_logprobs(self, ids: list[int], start: int, top: int) -> Members:
        found, likely = self._scores(ids, max(start, 1), top)
        tokens = [self._token(id) for id in ids[start:]]
        if start == 0:  # the first token has no context, so no log-prob
            found, likely = [None, *found], [{}, *likely]  # type: ignore[list-item]
        for token, value, each in zip(tokens, found, likely, strict=True):
            if value is not None and top:
                each.setdefault(token, value)
        offsets = [0]
        for token in tokens[:-1]:
            offsets.append(offsets[-1] + len(token))
        return {"tokens": tokens, "token_logprobs": found, "top_logprobs": likely if top else None,
                "text_offset": offsets[: len(tokens)]}  # fmt: skip

    def _token(self, token_id: int) -> str:
        return str(self.tokenizer.decode([token_id]))


def _head(prefix: str, kind: str, model: str) -> Members:
    identity = f"{prefix}-{secrets.token_hex(8)}"
    return {"id": identity, "object": kind, "created": int(time.time()), "model": model}


def _text_choice(
    index: int, text: str, reason: str | None = None, logprobs: Members | None = None
) -> Members:
    return {"index": index, "text": text, "finish_reason": reason, "logprobs": logprobs}


def _number_of_top(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST_TOP:
        raise ValueError(f"logprobs={value!r:.100} is no number of tokens from 0 to {MOST_TOP}")
    return value


def _lines(part: Part) -> bytes:
    return (part if isinstance(part, bytes) else b"data: " + orjson.dumps(part)) + b"\n\n"


def names_of(subject: ChatSubject, target: str) -> dict[str, Any]:
    """Names under which a run, an adapter or a model is served."""
    own = str(subject.config.model.path)
    name = str(subject.config.run.name) if run_folder.is_run(Path(target)) else Path(target).name
    if subject.adapter is None:
        return {name: "reference"}
    return {name: "policy"} | ({own: "reference"} if own != name else {})


def own_template(config: Config) -> str | None:
    """The chat template of ``data.template``; None if it is the tokenizer's."""
    model, data = config.model, config.data
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    has_one = tokenizer.chat_template is not None
    return chat_template(data.template, model.path, has_one, data.template_arguments).jinja


def vllm_command(
    subject: ChatSubject, target: str, host: str, port: int, template: str | None
) -> list[str]:
    """The vLLM command that serves the same models under the same names. A run's ``template`` is
    first written to the run's folder."""
    (config, adapter), (name, *_) = subject, names_of(subject, target)
    dtype = str(base.weights_dtype(config.model, default_device())).removeprefix("torch.")
    options = ["--host", host, "--port", str(port), "--dtype", dtype]
    if config.model.trust_remote_code:
        options.append("--trust-remote-code")
    if config.data.template_arguments:
        given = orjson.dumps(config.data.template_arguments).decode()
        options += ["--default-chat-template-kwargs", given]
    if config.model.context_tokens is not None:
        options += ["--max-model-len", str(config.model.context_tokens)]
        described = base.read_config(config.model.path)
        if longer := positions.keys(described, config.model.context_tokens):
            options += ["--hf-overrides", orjson.dumps(longer).decode()]
    if config.model.quantize == "nf4":
        options += ["--quantization", "bitsandbytes"]
    if template is not None and run_folder.is_run(Path(target)):
        write_atomically(file := Path(target) / "chat_template.jinja", template.encode())
        options += ["--chat-template", str(file)]
    if adapter is None:
        return ["vllm", "serve", config.model.path, "--served-model-name", name, *options]
    rank = adapters.section_of(adapter).rank
    most = next((each for each in MAX_LORA_RANKS if each >= rank), MAX_LORA_RANKS[-1])
    options += [
        "--enable-lora",
        "--max-lora-rank",
        str(most),
        "--lora-modules",
        f"{name}={adapter}",
    ]
    return ["vllm", "serve", config.model.path, *options]


def serve(server: PolicyServer, host: str, port: int, say: Callable[[str], None]) -> None:
    """Serve until interrupted; ``say`` receives the address once it answers."""

    async def listen() -> None:
        runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port).start()
            bound = runner.addresses[0][1]
            if host in LOOPBACK:
                server.hosts = frozenset(f"{name}:{bound}" for name in (*LOOPBACK[:2], "[::1]"))
            say(f"serving {', '.join(server.names)} at http://{host}:{bound}/v1; Ctrl-C ends")
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()

    try:
        asyncio.run(listen())
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--host {host} --port {port} cannot be listened on ({one_line(error)}); name others"
        ) from error


def key_for(host: str) -> str | None:
    """The key that requests must have, from the environment; required for other machines."""
    key = os.environ.get(KEY)
    if host not in LOOPBACK and not key:
        raise ConfigError(
            f"--host {host} lets other machines ask: set the environment variable {KEY} to a key "
            "that they send, or leave --host out"
        )
    return key
