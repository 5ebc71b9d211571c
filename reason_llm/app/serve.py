"""OpenAI-compatible server of a run or a model, over the Transformers sampler.

    POST /v1/chat/completions   messages in, a message out
    POST /v1/responses          items in, items out
    GET  /v1/models             the run's name and its base's

Requests are answered one at a time; the others wait. By default, only this machine can connect;
another address needs a key. What the model writes is sent as text and never run.

Batching, paged KV, log-probs and ``/v1/completions`` are not supported; ``vllm serve`` has them,
and its command is printed.
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
from aiohttp import web

from reason_llm.app.chat import ChatOptions, ChatSession, ChatSubject, parse_option, text_pieces
from reason_llm.config import Config
from reason_llm.data import chat_template
from reason_llm.errors import ConfigError, ReasonError, one_line
from reason_llm.files import write_atomically
from reason_llm.model import adapters, base, default_device, load_tokenizer, positions
from reason_llm.rollout import Completion, FinishReason, Prompt
from reason_llm.run.store import folder as run_folder
from reason_llm.sample import openai_api, stream

KEY = "REASON_LLM_API_KEY"
"""Environment variable of the key that each request must have."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_WAITING_REQUESTS = 256
SAMPLING = ("temperature", "top_p", "top_k", "min_p")
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
DONE = b"data: [DONE]"
Members = openai_api.Members
Part = Members | bytes
"""The whole answer, or a chunk of a stream, as members or as encoded lines."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """A parsed and checked request."""

    model: str
    prompt: tuple[int, ...]
    chat: openai_api.ChatRequest
    options: ChatOptions
    path: str


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
        self._worker = ThreadPoolExecutor(1, "sampling")
        self._waiting = 0

    def app(self) -> web.Application:
        """The application, not yet listening."""
        app = web.Application(client_max_size=openai_api.MAX_BYTES)
        app.router.add_get(MODELS, self._handler(self._models))
        for path in openai_api.FORMS:
            app.router.add_post(path, self._handler(self._completions))
        return app

    def _handler(self, handler: Callable[[web.Request], Any]) -> Any:
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
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.key and not hmac.compare_digest(key.encode(), self.key.encode()):
            raise web.HTTPUnauthorized(text=f"the key is not that of the server's {KEY}")

    async def _models(self, request: web.Request) -> web.Response:
        common = {"object": "model", "created": 0, "owned_by": "reason_llm"}
        common["max_model_len"] = self.chat.context_tokens
        models = [{"id": name, **common} for name in self.names]
        return web.json_response({"object": "list", "data": models})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = openai_api.body_of(await request.read())
        if self._waiting >= MAX_WAITING_REQUESTS:
            raise web.HTTPServiceUnavailable(text=f"{MAX_WAITING_REQUESTS} requests wait already")
        parsed = self._parse(body, request.path)
        self._waiting += 1
        try:
            parts = self._parts(parsed)
            if not parsed.chat.stream:
                content = orjson.dumps([part async for part in parts][-1])
                return web.Response(body=content, content_type="application/json")
            first = await anext(parts)  # an error up to here can still set the status
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(_lines(first))
            async for part in parts:
                await response.write(_lines(part))
            return response
        finally:
            self._waiting -= 1

    async def _parts(self, request: ApiRequest) -> AsyncIterator[Part]:
        """Chunks of a stream, or the whole answer, made in the thread of the model."""
        loop, gone = asyncio.get_running_loop(), threading.Event()
        queue: asyncio.Queue[Part | Exception | None] = asyncio.Queue()

        def put(part: Part | Exception | None) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, part)

        def work() -> None:
            """Sample on the worker's thread; None, or the error, is the last that it gives."""
            try:
                with self.chat.model.using(self.names[request.model]):
                    for part in () if gone.is_set() else self._answer(request, gone):
                        put(part)
                put(None)
            except Exception as error:  # noqa: BLE001  (the client receives it)
                put(error)

        running = loop.run_in_executor(self._worker, work)
        try:
            while (part := await queue.get()) is not None:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            gone.set()
            running.cancel()  # has no effect once it has started

    def _parse(self, body: Members, path: str) -> ApiRequest:
        name = body.get("model", next(iter(self.names)))
        if name not in self.names:
            raise web.HTTPNotFound(
                text=f"model={name!r:.100} is not served; there is {', '.join(self.names)}"
            )
        options = self.chat.options
        for option in SAMPLING:
            if option in body:
                options = parse_option(options, option, str(body[option]))
        chat = openai_api.FORMS[path][0](body, options)
        if chat.logprobs:
            raise ValueError("logprobs=True is not offered: vLLM's server has them; leave it out")
        characters = sum(len(message["content"]) for message in chat.messages)
        if characters > openai_api.MAX_TOKEN_CHARACTERS * self.chat.context_tokens:
            raise ValueError(f"the prompt's {characters:,} characters {self._no_room()}")
        renderer = replace(self.chat.renderer, tools=chat.tools)
        if chat.tools:
            renderer.check_tools("a request")
        prompt = renderer.prompt("this conversation", chat.messages, answer="").token_ids
        if len(prompt) >= self.chat.context_tokens:
            raise ValueError(f"the prompt's {len(prompt):,} tokens {self._no_room()}")
        return ApiRequest(name, prompt, chat, options, path)

    def _no_room(self) -> str:
        tokens = self.chat.context_tokens
        return f"leave no room in the context of {tokens:,} tokens (model.context_tokens)"

    # The methods below run in the thread of the model

    def _answer(self, request: ApiRequest, gone: threading.Event) -> Iterator[Part]:
        chat, prompt = request.chat, request.prompt
        renderer = replace(self.chat.renderer, tools=chat.tools)
        at_end = bool(chat.tools) or request.path != CHAT  # calls are known only at the end
        chunk: Members = {
            "id": f"chatcmpl-{secrets.token_hex(8)}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": request.model,
        }
        sampled, text, sent = PartialAnswer([]), "", ""

        def delta(reason: str | None = None, **members: str) -> Members:
            choice = {"index": 0, "delta": members, "finish_reason": reason, "logprobs": None}
            return chunk | {"choices": [choice], "usage": None}

        if streams := chat.stream and not at_end:
            yield delta(role="assistant", content="")
        for piece in self._pieces(request, sampled, gone):
            text += piece
            content = renderer.content_of(text) if streams else ""
            if content.startswith(sent) and len(content) > len(sent):
                yield delta(content=content[len(sent) :])
                sent = content
        completion = Completion(tuple(sampled.ids), text, (), sampled.reason)
        answer, _ = openai_api.chat_answer(chat, renderer, completion, len(prompt), 0)
        answer = replace(answer, model=request.model)
        full_answer, lines = openai_api.FORMS[request.path][1](answer)
        if not chat.stream:
            yield full_answer
        elif at_end:
            yield from lines
        else:
            yield delta(sampled.reason)
            if chat.has_usage:
                yield chunk | {"choices": [], "usage": full_answer["usage"]}
            yield DONE

    def _pieces(
        self, request: ApiRequest, sampled: PartialAnswer, gone: threading.Event
    ) -> Generator[str, None, None]:
        """The answer's text in pieces, before any stop string; no part of a stop string is sent."""
        options, draw, prompt = request.options, request.chat.draw, request.prompt
        room = self.chat.context_tokens - len(prompt)
        params = options.params(min(draw.max_tokens or options.max_new_tokens, room))
        seed = random.Random(draw.seed).getrandbits(63)  # of the system's entropy for None

        def tokens() -> Generator[int, None, None]:
            """Yield token ids as they are sampled, until the client has gone."""
            drawn = stream(self.chat.model, Prompt("", "", prompt, ""), params, seed)
            with closing(drawn):
                for token in drawn:
                    sampled.ids.append(token)
                    if token in self.chat.model.end_token_ids:
                        sampled.reason = "stop"
                    yield token
                    if gone.is_set():
                        return

        pending, longest = "", max(map(len, draw.stop), default=0)
        with closing(text_pieces(tokens(), self.chat.decode)) as pieces:
            for piece in pieces:
                pending += piece
                if ends := [at for stop in draw.stop if (at := pending.find(stop)) >= 0]:
                    sampled.reason = "stop"
                    yield pending[: min(ends)]
                    return
                starts = range(max(0, len(pending) - longest + 1), len(pending))
                held = (i for i in starts if any(s.startswith(pending[i:]) for s in draw.stop))
                end = next(held, len(pending))  # from here on it may be part of a stop string
                if end:
                    yield pending[:end]
                    pending = pending[end:]
        if pending:
            yield pending


def _lines(chunk: Part) -> bytes:
    return (chunk if isinstance(chunk, bytes) else b"data: " + orjson.dumps(chunk)) + b"\n\n"


def names_of(subject: ChatSubject, target: str) -> dict[str, Any]:
    """Names under which a run, an adapter or a model is served."""
    base_name = str(subject.config.model.path)
    name = str(subject.config.run.name) if run_folder.is_run(Path(target)) else Path(target).name
    if subject.adapter is None:
        return {name: "reference"}
    return {name: "policy"} | ({base_name: "reference"} if base_name != name else {})


def own_template(config: Config) -> str | None:
    """The chat template of ``data.template``; None if it is the tokenizer's."""
    model, data = config.model, config.data
    tokenizer = load_tokenizer(model.path, model.trust_remote_code)
    has_one = tokenizer.chat_template is not None
    return chat_template(data.template, model.path, has_one, data.template_arguments).jinja


def vllm_command(
    subject: ChatSubject, target: str, host: str, port: int, template: str | None
) -> list[str]:
    """The vLLM command for the same models and names; a run's folder gets its ``template``."""
    (config, adapter), (name, *_) = subject, names_of(subject, target)
    dtype = str(base.weights_dtype(config.model, default_device())).removeprefix("torch.")
    options = ["--host", host, "--port", str(port), "--dtype", dtype]
    if config.model.trust_remote_code:
        options.append("--trust-remote-code")
    if config.data.template_arguments:
        template_arguments = orjson.dumps(config.data.template_arguments).decode()
        options += ["--default-chat-template-kwargs", template_arguments]
    if config.model.context_tokens is not None:
        options += ["--max-model-len", str(config.model.context_tokens)]
        described = base.read_config(config.model.path)
        if overrides := positions.keys(described, config.model.context_tokens):
            options += ["--hf-overrides", orjson.dumps(overrides).decode()]
    if config.model.quantize == "nf4":
        options += ["--quantization", "bitsandbytes"]
    if template is not None and run_folder.is_run(Path(target)):
        write_atomically(file := Path(target) / "chat_template.jinja", template.encode())
        options += ["--chat-template", str(file)]
    if adapter is None:  # also a run that trained all weights: its folder is the model
        return ["vllm", "serve", config.model.path, "--served-model-name", name, *options]
    options += adapters.vllm_options(adapter, name, str(adapter))
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
