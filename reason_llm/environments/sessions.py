"""Rollouts of programs that ask for the model's turns themselves, over the token server.

    agent:path/to/file.py:function   an async function of the user's own, with any client of OpenAI
    mcp:COMMAND, address or file     the model calls the tools of MCP servers
    verifiers                        tasks of ``data.train: verifiers:TASKSET``, with their rewards

All programs of a wave run in one thread with one event loop. Each ends with what it returns: a
number is the reward ``environment``. One that raises, or keeps the others waiting for longer than
``sample.environment_seconds``, ends its rollout with the reason ``error``.

If an agent shortens or forks its messages, the rollout has several conversations. The one with the
most sampled tokens is the completion, which rewards judge; all are trained, with one advantage.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any, SupportsFloat

from reason_llm.config import Config
from reason_llm.data import Renderer, load_function
from reason_llm.environments.batches import Wave, batch_of, common_prompt, turn_seed
from reason_llm.environments.data_side import REPLY, own_session
from reason_llm.environments.mcp_tools import mcp_tools
from reason_llm.environments.tasksets import tasksets
from reason_llm.environments.token_server import Branch, Endpoint, Play, Plays, Session, TokenServer
from reason_llm.errors import ConfigError, one_line
from reason_llm.model import decode, end_token_ids
from reason_llm.rollout import CHAT, ROW, Completion, Conversation, Group, Span
from reason_llm.workers import abandon


class Sessions:
    """Rollouts of such programs; a ConfigError if there is no such function, a package is
    missing, or the chat template does not keep earlier answers."""

    def __init__(self, config: Config, renderer: Renderer, context_tokens: int) -> None:
        kind, rest = own_session(config.sample.environment)
        self.section = config.sample
        self.renderer = renderer
        self.context_tokens = context_tokens
        self.end_token_ids = end_token_ids(config.model.path, renderer.tokenizer)
        self.plays: Plays
        if kind == "agent":
            self.plays = _agent(load_function(rest, "sample.environment"), rest)
        elif kind == "mcp":
            self.plays = mcp_tools(rest)
        else:
            self.plays = tasksets(config, rest)
        if kind != "verifiers":  # which renders anew where turns cannot follow
            renderer.replies([[{"role": "user", "content": "."}]], self.section.reply_tokens, REPLY)

    def play(self, wave: Wave) -> list[Group]:
        """Play a wave; the same seed gives the same tokens where the programs do the same."""
        prompts, params, seed, progress, sampler, report = wave
        size = params.num_completions
        rollouts = [Session(prompt) for prompt in prompts for _ in range(size)]
        server = TokenServer(
            rollouts,
            self.section,
            self.renderer,
            self.context_tokens,
            params.max_new_tokens,
            self.end_token_ids,
        )
        parts = [rollouts[start : start + size] for start in range(0, len(rollouts), size)]
        played: dict[int, Group] = {}
        ended = 0
        with server, _played(self, server), batch_of(sampler, seed) as batch:
            while True:
                batch.keep(server.wants)
                requests = server.waiting(batch.keys, joins=batch.joins)
                before, ended = ended, sum(rollout.has_ended for rollout in rollouts)
                progress(0, ended - before)
                for place, part in enumerate(parts):
                    if place not in played and all(rollout.is_done for rollout in part):
                        played[place] = self._group(_seats(part))
                        report(place, played[place])
                for session, ask in requests:
                    prompt = replace(session.prompt, token_ids=ask.ids)
                    own = replace(params, num_completions=1, max_new_tokens=ask.max_tokens)
                    if batch.joins:  # else the answer is cut when it is whole
                        own = replace(own, stop=(*params.stop, *ask.stop))
                    turn = session.drawn if ask.seed is None else f"seed {ask.seed}"
                    session.drawn += 1
                    own_seed = turn_seed(seed, rollouts.index(session), turn)
                    batch.add((session, ask), prompt, own, own_seed, ask.seed is not None)
                if not batch.keys:
                    break
                done = dict(batch.step(lambda tokens, ended: progress(tokens, 0)))
                server.answer(list(done), [completion for (completion,) in done.values()])
        for place, part in enumerate(parts):
            if place not in played:
                _fail_silent(seats := _seats(part))
                played[place] = self._group(seats)
        return [played[place] for place in range(len(parts))]

    def close(self) -> None:
        """Nothing is held between waves."""

    def _group(self, group: list[Session]) -> Group:
        """The completions after what their prompts have in common."""
        ids = [session.learned.prompt for session in group]
        fix = "let what is asked first depend on the row alone"
        prompt = common_prompt(group[0].prompt, ids, self.renderer.tokenizer, fix)
        common = len(prompt.token_ids)
        return Group(prompt, tuple(self._completion(session, common) for session in group))

    def _completion(self, session: Session, common: int) -> Completion:
        branch = session.learned
        own = branch.prompt[common:]
        ids = (*own, *branch.ids)
        spans = [Span(0, len(own))] if own else []
        spans += [Span(len(own) + span.start, len(own) + span.end) for span in branch.spans]
        others = [other for other in session.branches if other is not branch]
        rows = [list(ids), *(other.ids for other in others)]
        text, *texts = decode(self.renderer.tokenizer, rows, self.end_token_ids)
        return Completion(
            ids,
            text,
            (*[0.0] * len(own), *branch.logprobs),
            session.why,
            spans=tuple(spans),
            environment=session.notes,
            last_turn=branch.text,
            others=tuple(
                Conversation(b.prompt, tuple(b.ids), other_text, tuple(b.logprobs), tuple(b.spans))
                for b, other_text in zip(others, texts, strict=True)
            ),
        )


def _seats(part: list[Session]) -> list[Session]:
    """The rollouts of a prompt, each seat for itself."""
    return [seat for session in part for seat in session.seats or [session]]


def _fail_silent(group: list[Session]) -> None:
    """Fail the rollouts that never asked; a completion has one token at least, here the prompt's
    last."""
    prompts = [session.learned.prompt for session in group if session.branches]
    prompt = prompts[0] if prompts else group[0].prompt.token_ids
    for session in group:
        if session.branches:
            continue
        if session.notes["turns"]:
            session.fail("all answers of the model were cut before their first token by stop")
        elif session.finish is None:
            session.fail("it never asked the model")
        session.branches.append(Branch(prompt, [prompt[-1]], [0.0]))


@cache
def _agents() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
    """The loop in which programs run, and its thread: one for all waves, since some libraries keep
    what belongs to the first loop that they meet."""
    loop = asyncio.new_event_loop()
    loop.set_task_factory(_task)
    thread = threading.Thread(target=_run, args=(loop,), name="agents", daemon=True)
    thread.start()
    return loop, thread


_PLAYED: ContextVar[tuple[TokenServer, Session] | None] = ContextVar("_PLAYED", default=None)
"""The rollout to which a task and those that it starts belong."""


def _task(loop: asyncio.AbstractEventLoop, work: Any, **options: Any) -> "asyncio.Task[Any]":
    """A task, counted where it is of a rollout."""
    task = asyncio.Task(work, loop=loop, **options)
    context = options.get("context")
    if (played := context.get(_PLAYED) if context is not None else _PLAYED.get()) is not None:
        server, session = played
        server.begins(session, task, asyncio.current_task(loop))
    return task


def _run(loop: asyncio.AbstractEventLoop) -> None:
    with suppress(BaseException):  # of a program that never let go
        loop.run_forever()


@contextmanager
def _played(own: Sessions, server: TokenServer) -> Iterator[None]:
    """Context in which the rollouts' programs run."""
    loop, thread = _agents()
    if not thread.is_alive():  # what a program left behind has ended it
        loop.close()
        _agents.cache_clear()
        loop, thread = _agents()
    playing = asyncio.run_coroutine_threadsafe(_play_all(own, server), loop)
    try:
        yield
    except BaseException:
        playing.cancel()
        raise
    finally:
        try:
            playing.result(own.section.environment_seconds)
        except TimeoutError:  # a program never lets go
            abandon(thread)
            _agents.cache_clear()
        except CancelledError:
            pass


async def _play_all(own: Sessions, server: TokenServer) -> None:
    loop = asyncio.get_running_loop()

    async def one(session: Session, play: Play) -> None:
        task = asyncio.current_task()
        assert task is not None
        endpoint = Endpoint(server.url, session.key, deepcopy(session.prompt.extra[CHAT]))
        session.cancel = lambda: loop.call_soon_threadsafe(task.cancel)
        _PLAYED.set((server, session))
        server.begins(session, task, None)
        try:
            _end(session, await play(session, endpoint))
        except asyncio.CancelledError:
            if not session.has_ended:  # the wave is broken off
                raise
        except BaseException as error:  # noqa: BLE001  (whatever it is, it is the program's)
            if session.finish is None:
                session.fail(f"it raised {type(error).__name__}: {one_line(error)}")
        finally:
            server.end(session)

    try:
        async with own.plays(server) as play:
            await asyncio.gather(*(one(session, play) for session in server.sessions))
    except Exception as error:  # noqa: BLE001  (of what all share: a tool server, a taskset)
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        for session in server.sessions:
            if not session.has_ended:
                session.fail(f"it could not begin: {type(first).__name__}: {one_line(first)}")
    finally:
        for session in server.sessions:
            server.end(session)


def _end(session: Session, reward: Any) -> None:
    """Store a program's result."""
    if reward is None or session.finish == "error":
        return
    if isinstance(reward, SupportsFloat) and math.isfinite(number := float(reward)):
        session.notes["reward"] = number
    else:
        session.fail(f"it gave {reward!r:.60}, and not a finite number or None")


def _agent(function: Callable[..., Any], where: str) -> Plays:
    """A function of the user's own."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"sample.environment=agent:{where} is not an async function, and would hold up all "
            "other rollouts; write async def agent(endpoint, row)"
        )

    async def play(session: Session, endpoint: Endpoint) -> Any:
        return await function(endpoint, deepcopy(session.prompt.extra[ROW]["columns"]))

    @asynccontextmanager
    async def plays(server: TokenServer) -> AsyncIterator[Play]:
        yield play

    return plays
