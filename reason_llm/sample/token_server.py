"""The policy behind a port of this machine, while rollouts are sampled.

    POST /inference/v1/generate   token ids in, token ids and log-probs out; vLLM's form
    POST /v1/chat/completions     messages in, a message out; OpenAI's form, not streamed
    GET  /v1/models               the one model and its context

The port is of 127.0.0.1 and open while one wave is sampled. Who asks names a rollout of that wave:
by the rollout's own key, or by the wave's key and ``X-Session-ID``. Keys are new in each wave.

**The barrier.** The model is asked when every live rollout waits for it, in the rollouts' order, so
that what is drawn does not depend on who came first. With vLLM a request joins the batch under way.
Who keeps all others waiting for too long is ended. What was sampled is never encoded again: a chat
that goes on from an earlier answer is asked with the ids so far and those of the reply.

Source: the request and the answer of ``renderers`` 0.1.12 (``client.py``), which verifiers 0.4 and
vLLM's ``/inference/v1/generate`` share. Differs: temperature and filters of a request are ignored,
since what is learned must be drawn from the policy.
"""

import asyncio
import hmac
import secrets
import threading
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from aiohttp import web

from reason_llm.config import SampleSection
from reason_llm.data import Messages, Renderer, plain_messages, said_before
from reason_llm.errors import ReasonError, one_line
from reason_llm.files import MIB
from reason_llm.model import decode
from reason_llm.rollout import Completion, FinishReason, Prompt, Span, TokenIds, record_from_json

MODEL = "policy"
MOST_BYTES = 8 * MIB
"""Of a request."""
MOST_CONNECTIONS = 1024
"""Of connections beside one for each rollout."""
SESSION = "X-Session-ID"


@dataclass(slots=True)
class Branch:
    """A conversation of a rollout: a prompt, and all that came after it."""

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    """After the prompt."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: str = ""
    """Of the model's last turn."""
    messages: Messages = field(default_factory=list)
    """Where it is a chat: as the client knows them, the model's last answer included."""

    @property
    def sampled(self) -> int:
        """Number of tokens that the model wrote."""
        return len(self.ids) - sum(span.end - span.start for span in self.spans)


@dataclass(slots=True, eq=False)
class Ask:
    """What a rollout wants of the model."""

    branch: Branch
    added: tuple[int, ...]
    """Ids after those of the branch, which the model did not write."""
    most: int
    answer: "asyncio.Future[Completion]"

    @property
    def ids(self) -> tuple[int, ...]:
        """All that the model reads."""
        return (*self.branch.prompt, *self.branch.ids, *self.added)


@dataclass(slots=True, eq=False)
class Session:
    """One rollout, as the server knows it."""

    prompt: Prompt
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    branches: list[Branch] = field(default_factory=list)
    ask: Ask | None = None
    finish: FinishReason | None = None
    """Why it asks no more, where that is known."""
    has_ended: bool = False
    is_cut: bool = False
    """Whether its last turn had no end."""
    notes: dict[str, Any] = field(default_factory=lambda: {"turns": 0})
    cancel: Callable[[], Any] = lambda: None
    seats: list["Session"] = field(default_factory=list)
    """Of an episode with several trained seats: each as a rollout, with its own reward."""

    @property
    def why(self) -> FinishReason:
        """Why it ended."""
        return self.finish or ("length" if self.is_cut else "environment")

    @property
    def learned(self) -> Branch:
        """The branch in which the model wrote most."""
        return max(self.branches, key=lambda branch: branch.sampled)

    def fail(self, problem: str) -> None:
        """End it by a fault."""
        self.finish, self.notes["problem"] = "error", problem[:1000]
        self.notes.pop("reward", None)

    def take(self, ask: Ask, completion: Completion) -> Completion:
        """Add an answer of the model, cut where the rollout has no more room."""
        branch = ask.branch
        if not branch.ids:
            self.branches.append(branch)
        if ask.added:
            end = len(branch.ids) + len(ask.added)
            branch.spans.append(Span(len(branch.ids), end))
            branch.ids += ask.added
            branch.logprobs += [0.0] * len(ask.added)
        if len(completion.token_ids) > (most := ask.most):
            ids, logprobs = completion.token_ids[:most], completion.logprobs[:most]
            completion = replace(
                completion, token_ids=ids, logprobs=logprobs, finish_reason="length"
            )
        branch.ids += completion.token_ids
        branch.logprobs += completion.logprobs
        self.notes["turns"] += 1
        self.ask, self.is_cut = None, completion.finish_reason == "length"
        return completion


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one rollout asks for the model's turns: what a client of OpenAI's form takes."""

    base_url: str
    api_key: str
    messages: Messages
    """The row's prompt, its system prompt included."""
    model: str = MODEL


@dataclass(frozen=True, slots=True)
class _Params:
    max_tokens: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Generate:
    token_ids: TokenIds
    sampling_params: _Params = _Params()


@dataclass(frozen=True, slots=True)
class _Chat:
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stop: Any = None
    response_format: Any = None


@dataclass(eq=False)
class TokenServer:
    """The server of a wave's rollouts, open within its context."""

    sessions: Sequence[Session]
    section: SampleSection
    renderer: Renderer
    context_tokens: int
    most_tokens: int
    end_token_ids: Sequence[int]

    def __post_init__(self) -> None:
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self._by_key = {each.key: each for each in self.sessions}
        self._by_name: dict[str, Session] = {}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="token server", daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """What clients of OpenAI's form call ``base_url``."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> "TokenServer":
        self._thread.start()
        self._within(self._open())
        return self

    def __exit__(self, *exception: object) -> None:
        self._within(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _within(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, session: Session, name: str) -> None:
        """Let requests with the wave's key and this ``X-Session-ID`` be of that rollout."""
        with self._changed:
            self._by_name[name] = session

    def end(self, session: Session) -> None:
        """The rollout asks no more."""
        with self._changed:
            session.has_ended = True
            self._changed.notify_all()

    def wants(self, asked: tuple[Session, Ask]) -> bool:
        """Whether the rollout still waits for this."""
        session, ask = asked
        return session.ask is ask and not session.has_ended

    def waiting(
        self, under_way: Collection[tuple[Session, Ask]] = (), *, joins: bool = False
    ) -> list[tuple[Session, Ask]]:
        """The rollouts that wait, once every live one does, and none when all have ended; while
        others are under way, at once those that are not; with ``joins`` as soon as there is one."""
        seconds = self.section.environment_seconds
        with self._changed:
            while True:
                live = [each for each in self.sessions if not each.has_ended]
                late = [each for each in live if each.ask is None]
                asked = [(each, each.ask) for each in live if each.ask is not None]
                asked = [each for each in asked if each not in under_way]
                if not late or under_way or (joins and asked):
                    return asked
                if self._changed.wait(seconds):
                    continue
                for each in late:
                    each.fail(f"it took longer than {seconds:g} s to ask again or to end")
                    each.has_ended = True
                    each.cancel()

    def answer(self, asked: Sequence[tuple[Session, Ask]], answers: Sequence[Completion]) -> None:
        """Give each of these the model's answer; it is nothing to a client that has gone."""
        given = []
        with self._changed:
            for (session, ask), completion in zip(asked, answers, strict=True):
                if self.wants((session, ask)):
                    given.append((ask, session.take(ask, completion)))
        rows = [each.token_ids for _, each in given]
        texts = decode(self.renderer.tokenizer, rows, self.end_token_ids)
        for (ask, completion), text in zip(given, texts, strict=True):
            ask.branch.text = text
            self._loop.call_soon_threadsafe(_give, ask.answer, replace(completion, text=text))

    # In the server's own thread

    async def _open(self) -> None:
        app = web.Application(client_max_size=MOST_BYTES)
        app.router.add_post("/inference/v1/generate", self._answered(self._generate))
        app.router.add_post("/v1/chat/completions", self._answered(self._chat))
        app.router.add_get("/v1/models", self._answered(self._models))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self._runner, most = runner, MOST_CONNECTIONS + len(self.sessions)

        def connection() -> asyncio.Protocol:
            server = runner.server
            assert server is not None
            return server() if len(server.connections) < most else _Closed()

        listening = await self._loop.create_server(connection, "127.0.0.1", 0)
        self.port = listening.sockets[0].getsockname()[1]
        self._listening = listening

    async def _close(self) -> None:
        self._listening.close()
        assert self._runner is not None
        await self._runner.shutdown()
        await self._runner.cleanup()

    def _answered(self, handler: Callable[[Session, web.Request], Any]) -> Any:
        async def handle(request: web.Request) -> web.Response:
            try:
                content = orjson.dumps(await handler(self._session(request), request))
                return web.Response(body=content, content_type="application/json")
            except PermissionError as error:
                status, text = 401, str(error)
            except web.HTTPRequestEntityTooLarge:
                status, text = 413, f"a request has at most {MOST_BYTES:,} bytes"
            except (ReasonError, ValueError) as error:
                status, text = 400, one_line(error)
            problem = {"message": text, "type": "invalid_request_error", "code": status}
            return web.json_response({"error": problem}, status=status)

        return handle

    def _session(self, request: web.Request) -> Session:
        """The rollout that asks; nothing of its request's body is read before."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self._by_key.get(key)
        if hmac.compare_digest(key.encode(), self.key.encode()):
            session = self._by_name.get(request.headers.get(SESSION, ""), session)
        if session is None or session.has_ended:
            raise PermissionError(
                "this key names no rollout that is under way with the adapter of now; take the "
                "base_url and the key that the rollout was given"
            )
        return session

    async def _models(self, session: Session, request: web.Request) -> Any:
        model = {"id": MODEL, "object": "model", "max_model_len": self.context_tokens}
        return {"object": "list", "data": [model]}

    async def _generate(self, session: Session, request: web.Request) -> Any:
        asked = record_from_json(_Generate, orjson.loads(await request.read()))
        params = asked.sampling_params
        if not set(params.stop_token_ids) <= set(self.end_token_ids):
            raise ValueError(
                f"stop_token_ids={list(params.stop_token_ids)} are not all of the model's end "
                f"tokens {sorted(self.end_token_ids)}; take the renderer of this model"
            )
        if (last := len(self.renderer.tokenizer) - 1) < (largest := max(asked.token_ids)):
            raise ValueError(f"token_ids has {largest}; the vocabulary ends at {last}")
        ids, branch, added = asked.token_ids, Branch(asked.token_ids), tuple[int, ...]()
        for each in session.branches:
            so_far = (*each.prompt, *each.ids)
            if len(ids) > len(so_far) and ids[: len(so_far)] == so_far:
                branch, added = each, ids[len(so_far) :]
        completion = await self._sampled(session, branch, added, params.max_tokens)
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{number}", "logprob": logprob, "bytes": None, "top_logprobs": []}
            for number, logprob in zip(completion.token_ids, completion.logprobs, strict=True)
        ]
        return {"request_id": secrets.token_hex(8), "choices": [{
            "index": 0, "token_ids": completion.token_ids, "logprobs": {"content": content},
            "finish_reason": completion.finish_reason,
        }]}  # fmt: skip

    async def _chat(self, session: Session, request: web.Request) -> Any:
        asked = record_from_json(_Chat, orjson.loads(await request.read()))
        for name, usual in (("n", 1), ("stream", False), ("stop", None), ("response_format", None)):
            if (value := getattr(asked, name)) not in (None, usual):
                raise ValueError(f"{name}={value!r:.100} is not offered; leave it out")
        messages = plain_messages(asked.messages)
        renderer = replace(self.renderer, tools=tuple(asked.tools or ()))
        if asked.tools:
            renderer.check_tools("a request")
        branch, added = Branch(()), list[int]()
        for each in session.branches:
            known = len(each.messages)
            if known and known < len(messages) and messages[:known] == each.messages:
                branch = each
        if branch.ids:
            tail = messages[len(branch.messages) :]
            added = renderer.after(branch.ids, tail, self.section.reply_tokens)
        else:
            branch = Branch(renderer.prompt("a chat", messages, "").token_ids)
        most = asked.max_completion_tokens or asked.max_tokens
        completion = await self._sampled(session, branch, tuple(added), most)
        message: dict[str, Any] = {"role": "assistant"}
        message["content"] = renderer.content_of(completion.text)
        reason: str = completion.finish_reason
        found = renderer.calls(completion.text, completion.token_ids) if asked.tools else []
        if calls := [each for each in found if each]:
            message["content"] = said_before(completion.text) or None
            message["tool_calls"] = [
                {"id": f"call_{session.notes['turns']}_{number}", "type": "function", "function": {
                    "name": name, "arguments": orjson.dumps(arguments).decode(),
                }} for number, (name, arguments) in enumerate(calls)
            ]  # fmt: skip
            reason = "tool_calls" if reason == "stop" else reason
            session.notes["calls"] = session.notes.get("calls", 0) + len(calls)
        branch.messages = [*messages, *plain_messages([message])]
        read, wrote = len(branch.prompt) + len(branch.ids), len(completion.token_ids)
        return {
            "id": f"chatcmpl-{secrets.token_hex(8)}", "object": "chat.completion", "created": 0,
            "model": MODEL,
            "choices": [{"index": 0, "message": message, "finish_reason": reason}],
            "usage": {
                "prompt_tokens": read - wrote, "completion_tokens": wrote, "total_tokens": read,
            },
        }  # fmt: skip

    async def _sampled(
        self, session: Session, branch: Branch, added: tuple[int, ...], most: int | None
    ) -> Completion:
        """The model's answer, once all rollouts wait."""
        section, own = self.section, self.most_tokens - len(branch.ids) - len(added)
        room = min(own, self.context_tokens - len(branch.prompt) - self.most_tokens + own)
        if session.notes["turns"] >= section.turns:
            session.finish = "turns"
            raise ValueError(f"the rollout had its {section.turns} turns (sample.turns)")
        if room < 1:
            problem = (
                f"a prompt of {len(branch.prompt)} tokens leaves no room in the context of "
                f"{self.context_tokens} (model.context_tokens)"
            )
            if own > 0:
                session.fail(problem)
                raise ValueError(problem)
            session.finish = "length"
            raise ValueError(f"the rollout had its {self.most_tokens} tokens (max_new_tokens)")
        ask = Ask(
            branch, added, min(room, section.turn_tokens or room, most or room),
            self._loop.create_future(),
        )  # fmt: skip
        with self._changed:
            if session.ask is not None:
                raise ValueError("the rollout waits for an answer; ask one at a time")
            session.ask = ask
            self._changed.notify_all()
        try:
            return await ask.answer
        finally:
            with self._changed:
                if session.ask is ask:  # the client has gone
                    session.ask = None


class _Closed(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _give(answer: "asyncio.Future[Completion]", completion: Completion) -> None:
    if not answer.done():
        answer.set_result(completion)


Play = Callable[[Session, Endpoint], Awaitable[Any]]
"""Plays a rollout; what it gives is the reward, or None."""
Plays = Callable[[TokenServer], AbstractAsyncContextManager[Play]]
"""What is open while a wave is played."""
