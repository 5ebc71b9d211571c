"""The policy behind a port of this machine, while rollouts are sampled.

    POST /v1/chat/completions     messages in, a message out; OpenAI's form
    POST /v1/responses            items in, items out; OpenAI's form
    GET  /v1/models               the one model and its context

The port is open on 127.0.0.1 while one wave is sampled. A request names a rollout of that wave, by
the rollout's own key, or by the wave's key and ``X-Session-ID``, a trace of verifiers. Keys are new
in each wave.

**The barrier.** The model is asked when every live rollout waits for it, in the rollouts' order, so
that samples do not depend on the order of arrival. With vLLM a request joins the batch under way.
A rollout that keeps all others waiting is ended. Sampled tokens are never encoded again: a chat
that continues an earlier answer is asked with the ids so far and those of the reply. A rollout
may ask in parallel: each request is a conversation, and it waits once all its tasks do.

A request's temperature and filters are ignored with a warning, and what else would change the
distribution is refused (``openai_api``), since what is learned must be drawn from the policy.
"""

import asyncio
import hmac
import secrets
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson
from aiohttp import web

from reason_llm.config import SampleSection
from reason_llm.data import Messages, Renderer, plain_messages
from reason_llm.environments.data_side import REPLY
from reason_llm.errors import ReasonError, one_line
from reason_llm.model import decode
from reason_llm.rollout import Completion, FinishReason, Prompt, Span
from reason_llm.sample import openai_api

MAX_CONNECTIONS = 1024
"""Connections allowed in addition to one for each rollout."""
SESSION, WAVE = "X-Session-ID", "X-Wave-Key"
"""Headers with a trace of verifiers, and with the wave's key."""
OPENING_TOKENS = 8
"""Tokens at the end of a prompt that may open a thought."""
SETTLE_SECONDS = 0.3
"""Time that the barrier waits for tasks of a rollout that asked and may ask in parallel. A task
that is idle for longer, such as a client's helper, is no longer waited for."""


@dataclass(slots=True)
class Branch:
    """A conversation of a rollout: a prompt, and all that came after it."""

    prompt: tuple[int, ...]
    ids: list[int] = field(default_factory=list)
    """After the prompt."""
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    text: str = ""
    """Text of the model's last turn."""
    messages: Messages = field(default_factory=list)
    """Messages of a chat as the client knows them, the model's last answer included."""
    tools: tuple[dict[str, Any], ...] = ()
    """Tools in the prompt of a chat."""
    trace: str = ""
    """The trace of verifiers that it belongs to."""

    @property
    def sampled(self) -> int:
        """Number of tokens that the model wrote."""
        return len(self.ids) - sum(span.end - span.start for span in self.spans)

    def add(self, ids: Sequence[int]) -> None:
        """Add ids that the model did not write."""
        start, end = len(self.ids), len(self.ids) + len(ids)
        if self.spans and self.spans[-1].end == start:
            start = self.spans.pop().start
        if end > start:
            self.spans.append(Span(start, end))
        self.ids += ids
        self.logprobs += [0.0] * len(ids)


@dataclass(slots=True, eq=False)
class Ask:
    """A request of a rollout for an answer of the model."""

    branch: Branch
    added: tuple[int, ...]
    """Ids after those of the branch, which the model did not write."""
    max_tokens: int
    answer: "asyncio.Future[Completion]"
    stop: tuple[str, ...] = ()
    """Strings before which the answer is cut."""
    seed: int | None = None
    """Its own, where the request has one."""
    ids: tuple[int, ...] = field(init=False)
    """All that the model reads."""
    known: int = field(init=False)
    """Number of the branch's ids among them."""

    def __post_init__(self) -> None:
        self.ids = (*self.branch.prompt, *self.branch.ids, *self.added)
        self.known = len(self.branch.ids)


@dataclass(slots=True, eq=False)
class Session:
    """One rollout, as the server knows it."""

    prompt: Prompt
    key: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    branches: list[Branch] = field(default_factory=list)
    asks: list[Ask] = field(default_factory=list)
    """Its open requests."""
    drawn: int = 0
    """Number of answers that were begun; they number the seeds."""
    tasks: "dict[asyncio.Task[Any], int]" = field(default_factory=dict)
    """Its running tasks, each with the number of those that it started."""
    idle: "set[asyncio.Task[Any]]" = field(default_factory=set)
    """Tasks that are not waited for."""
    finish: FinishReason | None = None
    """Why it asks no more, where that is known."""
    has_ended: bool = False
    is_cut: bool = False
    """Whether its last turn had no end."""
    notes: dict[str, Any] = field(default_factory=lambda: {"turns": 0})
    cancel: Callable[[], Any] = lambda: None
    seats: list["Session"] = field(default_factory=list)
    """Trained seats of an episode with several: each is a rollout with its own reward."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended by itself, and the model wrote something in each of its seats."""
        all_sampled = all(seat.branches for seat in self.seats or [self])
        return self.has_ended and self.finish != "error" and all_sampled

    @property
    def why(self) -> FinishReason:
        """Why it ended."""
        return self.finish or ("length" if self.is_cut else "environment")

    @property
    def learned(self) -> Branch:
        """The branch in which the model wrote most."""
        return max(self.branches, key=lambda branch: branch.sampled)

    @property
    def busy(self) -> "set[asyncio.Task[Any]]":
        """Tasks of which each may ask; one that waits for others does not."""
        return {task for task, started in self.tasks.items() if not started} - self.idle

    @property
    def waits(self) -> bool:
        """Whether all that it does is to wait for the model."""
        return bool(self.asks) and len(self.asks) >= len(self.busy)

    def fail(self, problem: str) -> None:
        """End it by a fault."""
        text = problem[:1000].encode(errors="replace").decode()
        self.finish, self.notes["problem"] = "error", text
        self.notes.pop("reward", None)

    def take(self, ask: Ask, completion: Completion, rest: Sequence[int] = ()) -> None:
        """Add an answer of the model, and the ids of its text after the last whole token."""
        branch, added = ask.branch, ask.added
        if len(branch.ids) > ask.known:  # another request went on from there
            branch, added = Branch(ask.ids, tools=branch.tools, trace=branch.trace), ()
            ask.branch = branch
        branch.add(added)
        branch.ids += completion.token_ids
        branch.logprobs += completion.logprobs
        branch.add(rest)
        branch.messages = []  # until the client has the answer
        if branch.sampled and all(known is not branch for known in self.branches):
            self.branches.append(branch)
        self.notes["turns"] += 1
        self.asks.remove(ask)
        self.is_cut = completion.finish_reason == "length"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address and key of one rollout, as OpenAI's clients take them."""

    base_url: str
    api_key: str
    messages: Messages
    """The row's prompt, its system prompt included."""
    model: str = openai_api.MODEL


@dataclass(eq=False)
class TokenServer:
    """The server of a wave's rollouts, open within its context."""

    sessions: Sequence[Session]
    section: SampleSection
    renderer: Renderer
    context_tokens: int
    max_tokens: int
    end_token_ids: Sequence[int]

    def __post_init__(self) -> None:
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self._by_key = {session.key: session for session in self.sessions}
        self._by_name: dict[str, Session] = {}
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        run = self._loop.run_forever
        self._thread = threading.Thread(target=run, name="token server", daemon=True)
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """The ``base_url`` of OpenAI's clients."""
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

    def begins(
        self, session: Session, task: "asyncio.Task[Any]", parent: "asyncio.Task[Any] | None"
    ) -> None:
        """The rollout runs this task, too, which that one started."""
        with self._changed:
            session.tasks[task] = 0
            if parent in session.tasks:
                session.tasks[parent] += 1
        task.add_done_callback(partial(self._done, session, parent))

    def _done(
        self, session: Session, parent: "asyncio.Task[Any] | None", task: "asyncio.Task[Any]"
    ) -> None:
        with self._changed:
            del session.tasks[task]
            session.idle.discard(task)
            if parent in session.tasks:
                session.tasks[parent] -= 1
            if session.asks:
                self._changed.notify_all()

    def wants(self, request: tuple[Session, Ask]) -> bool:
        """Whether the rollout still waits for this."""
        session, ask = request
        return ask in session.asks and not session.has_ended

    def waiting(
        self, under_way: Collection[tuple[Session, Ask]] = (), *, joins: bool = False
    ) -> list[tuple[Session, Ask]]:
        """Open requests, in an order that does not depend on arrival. Blocks until every live
        rollout waits; empty if all have ended. While requests are under way, returns the others at
        once; with ``joins``, as soon as there is one."""
        seconds = self.section.environment_seconds
        waited, until = set[Session](), 0.0
        with self._changed:
            while True:
                live = [session for session in self.sessions if not session.has_ended]
                late = [session for session in live if not session.asks]
                unsettled = [] if late or joins else [s for s in live if not s.waits]
                if joins or under_way or not (late or unsettled):
                    requests = self._within_turns(live, under_way)
                    if requests or under_way or not live:
                        return requests
                # A client that breaks off and asks again does not prolong the time of others.
                if not waited.issuperset(ready := set(self.sessions).difference(late)) or not until:
                    waited, until = waited | ready, time.monotonic() + seconds
                left = until - time.monotonic()
                if left > 0 and self._changed.wait(
                    min(SETTLE_SECONDS, left) if unsettled else left
                ):
                    continue
                for session in unsettled:
                    session.idle |= session.busy
                for session in [session for session in late if session not in waited] or late:
                    session.fail(f"it took longer than {seconds:g} s to ask again or to end")
                    session.has_ended = True
                    session.cancel()

    def _within_turns(
        self, live: Sequence[Session], under_way: Collection[tuple[Session, Ask]]
    ) -> list[tuple[Session, Ask]]:
        """The open requests that are not under way; refuse those beyond ``sample.turns``."""
        begun = Counter(session for session, _ in under_way)
        accepted: list[tuple[Session, Ask]] = []
        for session in live:
            asks = [ask for ask in session.asks if (session, ask) not in under_way]
            if len(asks) > 1:
                asks.sort(key=_order)
            room = self.section.turns - session.notes["turns"] - begun[session]
            for ask in asks[room:]:
                session.asks.remove(ask)
                self._loop.call_soon_threadsafe(_refuse, ask.answer, self._out_of_turns(session))
            accepted += [(session, ask) for ask in asks[:room]]
        return accepted

    def _out_of_turns(self, session: Session) -> ValueError:
        session.finish = session.finish or "turns"
        return ValueError(f"the rollout had its {self.section.turns} turns (sample.turns)")

    def _no_room(self, session: Session, size: str) -> ValueError:
        session.fail(
            f"a prompt of {size} leaves no room in the context of {self.context_tokens} "
            "(model.context_tokens)"
        )
        return ValueError(session.notes["problem"])

    def answer(
        self, requests: Sequence[tuple[Session, Ask]], answers: Sequence[Completion]
    ) -> None:
        """Give each of these the model's answer; it is nothing to a client that has gone."""
        answers = [
            _truncated(c, ask.max_tokens) for c, (_, ask) in zip(answers, requests, strict=True)
        ]
        rows = [list(answer.token_ids) for answer in answers]
        texts = decode(self.renderer.tokenizer, rows, self.end_token_ids)
        for (session, ask), completion, text in zip(requests, answers, texts, strict=True):
            try:
                completion, rest = self._before_stop(replace(completion, text=text), ask.stop)
            except ReasonError as error:  # the tokenizer cannot write what is before the string
                with self._changed:
                    if ask in session.asks:
                        session.asks.remove(ask)
                self._loop.call_soon_threadsafe(_refuse, ask.answer, error)
                continue
            with self._changed:
                if not self.wants((session, ask)):
                    continue
                session.take(ask, completion, rest)
                if ask.stop and len(completion.text) < len(text):
                    session.notes["stops"] = session.notes.get("stops", 0) + 1
            ask.branch.text = completion.text
            self._loop.call_soon_threadsafe(_give, ask.answer, completion)

    def _before_stop(
        self, completion: Completion, stop: Sequence[str]
    ) -> tuple[Completion, list[int]]:
        """The completion up to the first of these strings, in whole tokens, and ids of the text
        between the last of them and the string."""
        text, ids = completion.text, completion.token_ids
        ends = [at for string in stop if (at := text.find(string)) >= 0]
        if not ends:
            return completion, []
        text_before = text[: min(ends)]

        def begin(count: int) -> str:
            (decoded,) = decode(self.renderer.tokenizer, [list(ids[:count])])
            return decoded

        num_kept = bisect_right(
            range(1, len(ids) + 1), len(text_before), key=lambda n: len(begin(n))
        )
        while num_kept and not text_before.startswith(
            begin(num_kept)
        ):  # of a character of several tokens
            num_kept -= 1
        rest = text_before[len(begin(num_kept)) :] if num_kept else text_before
        completion = replace(
            completion,
            token_ids=ids[:num_kept],
            logprobs=completion.logprobs[:num_kept],
            text=text_before,
            finish_reason="stop",
        )
        return completion, self.renderer.token_ids("an answer", rest) if rest else []

    # In the server's own thread

    async def _open(self) -> None:
        app = web.Application(client_max_size=openai_api.MAX_BYTES)
        for path in openai_api.FORMS:
            app.router.add_post(path, self._answered(self._chat))
        app.router.add_get("/v1/models", self._answered(self._models))
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        self._runner, limit = runner, MAX_CONNECTIONS + len(self.sessions)

        def connection() -> asyncio.Protocol:
            server = runner.server
            assert server is not None
            return server() if len(server.connections) < limit else _Closed()

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
                answered = await handler(self._session(request), request)
                if isinstance(answered, web.Response):
                    return answered
                content = orjson.dumps(answered)
                return web.Response(body=content, content_type="application/json")
            except PermissionError as error:
                status, text = 401, str(error)
            except web.HTTPRequestEntityTooLarge:
                status, text = 413, f"a request has at most {openai_api.MAX_BYTES:,} bytes"
            except (ReasonError, ValueError) as error:
                status, text = 400, one_line(error)
            except Exception as error:  # noqa: BLE001  (whatever a request holds, the run continues)
                status, text = 400, f"{type(error).__name__}: {one_line(error)[:300]}"
            problem = {"message": text, "type": "invalid_request_error", "code": status}
            return web.json_response({"error": problem}, status=status)

        return handle

    def _session(self, request: web.Request) -> Session:
        """The rollout that asks; nothing of its request's body is read before."""
        key = request.headers.get("Authorization", "").removeprefix("Bearer ")
        session = self._by_key.get(key)
        if hmac.compare_digest(request.headers.get(WAVE, "").encode(), self.key.encode()):
            session = self._by_name.get(request.headers.get(SESSION, ""))
        if session is None or session.has_ended:
            raise PermissionError(
                "this key names no rollout that is under way with the adapter of now; take the "
                "base_url and the key that the rollout was given"
            )
        return session

    async def _models(self, session: Session, request: web.Request) -> Any:
        model = {"id": openai_api.MODEL, "object": "model", "max_model_len": self.context_tokens}
        return {"object": "list", "data": [model]}

    async def _chat(self, session: Session, request: web.Request) -> web.Response:
        read, write = openai_api.FORMS[request.path]
        chat = read(openai_api.body_of(await request.read()), self.section)
        name = request.headers.get(SESSION, "")
        trace = name if self._by_name.get(name) is session else ""
        answer = await self._chat_answer(session, chat, trace)
        whole, lines = write(answer)
        if not chat.stream:
            return web.Response(body=orjson.dumps(whole), content_type="application/json")
        content = b"".join(line + b"\n\n" for line in lines)
        return web.Response(body=content, content_type="text/event-stream")

    async def _chat_answer(
        self, session: Session, chat: openai_api.ChatRequest, trace: str
    ) -> openai_api.ChatAnswer:
        messages = chat.messages
        size = sum(len(message["content"]) for message in messages)
        if size > openai_api.MAX_TOKEN_CHARACTERS * self.context_tokens:
            raise self._no_room(session, f"{size:,} characters")
        renderer = replace(self.renderer, tools=chat.tools)
        if chat.tools:
            renderer.check_tools("a request")
        # Messages that continue a conversation follow its sampled ids: nothing is rendered again.
        new = branch = Branch((), tools=chat.tools, trace=trace)
        added: list[int] = []
        for other in session.branches:
            known = len(other.messages)
            if known and known < len(messages) and messages[:known] == other.messages:
                is_same = (other.tools, other.trace) == (chat.tools, trace)
                branch = other if is_same else branch
        if branch is not new:
            tail = messages[len(branch.messages) :]
            try:
                added = renderer.after(branch.ids, tail, self.section.reply_tokens, REPLY)
            except ReasonError:
                if not trace:
                    raise
                branch = new  # the template writes earlier answers anew
        if branch is new:
            branch.prompt = renderer.prompt("a chat", messages, "").token_ids
        completion, ask = await self._sampled(session, branch, tuple(added), chat.draw)
        notes = session.notes
        thought = ""
        if trace:
            opening = decode(renderer.tokenizer, [list(ask.ids[-OPENING_TOKENS:])])[0]
            thought, said = _divided(completion.text, opening)
            completion = replace(completion, text=said)
        answer, calls = openai_api.chat_answer(
            chat, renderer, completion, len(ask.ids), notes["turns"], thought
        )
        if calls:
            notes["calls"] = notes.get("calls", 0) + len(calls)
        if unreadable := calls.count(None):
            notes["failed_calls"] = notes.get("failed_calls", 0) + unreadable
        ask.branch.messages = [*messages, *plain_messages([answer.message])]
        return answer

    async def _sampled(
        self, session: Session, branch: Branch, added: tuple[int, ...], draw: openai_api.Draw
    ) -> tuple[Completion, Ask]:
        """The model's answer, once all rollouts wait."""
        section, own = self.section, self.max_tokens - len(branch.ids) - len(added)
        room = min(own, self.context_tokens - len(branch.prompt) - self.max_tokens + own)
        if session.notes["turns"] >= section.turns:
            raise self._out_of_turns(session)
        if room < 1:
            if own > 0:
                raise self._no_room(session, f"{len(branch.prompt)} tokens")
            session.finish = "length"
            raise ValueError(f"the rollout had its {self.max_tokens} tokens (max_new_tokens)")
        ask = Ask(
            branch,
            added,
            min(room, section.turn_tokens or room, draw.max_tokens or room),
            self._loop.create_future(),
            draw.stop,
            draw.seed,
        )
        with self._changed:
            session.asks.append(ask)
            self._changed.notify_all()
        try:
            return await ask.answer, ask
        finally:
            with self._changed:
                if ask in session.asks:  # the client has gone
                    session.asks.remove(ask)
                    self._changed.notify_all()


def _divided(text: str, opening: str) -> tuple[str, str]:
    """The thought in an answer, which rewards of verifiers do not read, and what is said after it;
    ``opening``: the end of what the model read."""
    thought, end, said = text.partition("</think>")
    if not end and not opening.rstrip().endswith("<think>") and "<think>" not in text:
        return "", text
    return thought, said


def _order(ask: Ask) -> Any:
    """Order of a rollout's open requests, whichever came first."""
    return ask.ids, ask.max_tokens, ask.stop, ask.seed is not None, ask.seed or 0


class _Closed(asyncio.Protocol):
    """A connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


def _give(answer: "asyncio.Future[Completion]", completion: Completion) -> None:
    if not answer.done():
        answer.set_result(completion)


def _refuse(answer: "asyncio.Future[Completion]", error: Exception) -> None:
    if not answer.done():
        answer.set_exception(error)


Play = Callable[[Session, Endpoint], Awaitable[Any]]
"""Plays a rollout; what it gives is the reward, or None."""
Plays = Callable[[TokenServer], AbstractAsyncContextManager[Play]]
"""Context that is open while a wave is played."""


def _truncated(completion: Completion, max_tokens: int) -> Completion:
    """The completion, truncated where the rollout has no more room."""
    if len(completion.token_ids) <= max_tokens:
        return completion
    ids, logprobs = completion.token_ids[:max_tokens], completion.logprobs[:max_tokens]
    return replace(completion, token_ids=ids, logprobs=logprobs, finish_reason="length")
