"""Rollouts in environments of verifiers 0.4, as they come, and their rewards.

verifiers runs a task's own code in this process, and its tool servers in processes; rewards and
metrics of what the model wrote are called in the sandbox. Its client hands each request of a chat
to the token server. Its harness for plain chats, which starts a process for each rollout, is
replaced by one that runs in this process; a taskset that ships a harness keeps it.
"""

import asyncio
import inspect
import pickle
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cache, partial, wraps
from types import ModuleType
from typing import Any

from reason_llm.config import Config, installation
from reason_llm.environments.mcp_tools import client, converse
from reason_llm.environments.task_rows import TASKSET, parsed_source, tasks_of
from reason_llm.environments.token_server import WAVE, Endpoint, Play, Plays, Session, TokenServer
from reason_llm.errors import ConfigError, one_line
from reason_llm.sample import openai_api
from reason_llm.score.code import CheckerError, Mode, Subject, checkers_of, finite

HARNESS = "reason_llm_chat"
"""The module by whose name verifiers finds our harness."""
SANDBOX, TRAINER = "sandbox", "trainer"
"""Places where rewards are called."""


def tasksets(config: Config, query: str) -> Plays:
    """Rollouts of the tasks of ``data.train`` and ``data.eval``.

    Args:
        query: options of ``sample.environment``: ``scoring=trainer``.
    """
    where = f"sample.environment={config.sample.environment}"
    try:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import EvalClientConfig
    except ImportError as error:
        raise ConfigError(
            f"{where} needs the package verifiers; install it with: "
            f"{installation.install('verifiers')}"
        ) from error
    scoring = query.removeprefix("scoring=") if query else SANDBOX
    if scoring not in (SANDBOX, TRAINER):
        raise ConfigError(f"{where} is not known; write verifiers, or verifiers?scoring={TRAINER}")

    @asynccontextmanager
    async def plays(server: TokenServer) -> AsyncIterator[Play]:
        context = ModelContext(
            openai_api.MODEL,
            EvalClientConfig(
                base_url=server.url,
                api_key_var="REASON_LLM_HAS_NO_SUCH_VARIABLE",  # the header has the key
                headers={WAVE: server.key},
            ),
        )
        async with AsyncExitStack() as stack:
            stack.enter_context(_scoring_in(config.score.sandbox if scoring == SANDBOX else None))
            sources = {_place(session)[0] for session in server.sessions}
            opened = {name: _environment(name, config.sample.turns) for name in sorted(sources)}
            for environment in opened.values():
                await stack.enter_async_context(environment.serving())

            async def play(session: Session, endpoint: Endpoint) -> float | None:
                source, number = _place(session)
                environment = opened[source]
                (slot,) = environment.slots(tasks_of(source)[number])
                episode = await environment.run_slot(
                    slot, context, on_trace=lambda trace: server.call(session, trace.id)
                )
                return _reward(session, episode)

            yield play

    return plays


def _place(session: Session) -> tuple[str, int]:
    """The source of a rollout's task, and its number there."""
    source, _, number = session.prompt.id.rpartition(":row ")
    if not source.startswith(TASKSET):
        raise ValueError(
            f"{session.prompt.id}: sample.environment=verifiers plays rows of "
            "data.train=verifiers:TASKSET alone"
        )
    return source, int(number) - 1


@cache
def _environment(source: str, turns: int) -> Any:
    """The environment of a taskset, all of whose roles are the policy."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import default_harness_id, env_config_type, load_environment

    sys.modules.setdefault(HARNESS, _harness())
    name, _, options = parsed_source(source)
    kind = env_config_type(name)
    role: dict[str, Any] = {"runtime": {"type": "subprocess"}, "max_turns": turns}
    if default_harness_id(name) != name:
        role["harness"] = {"id": HARNESS}
    fields = kind.model_fields.items()
    roles = [role_name for role_name, field in fields if isinstance(field.default, AgentConfig)]
    settings = {"taskset": {"id": name, **options}, **dict.fromkeys(roles, role)}
    return load_environment(kind.model_validate(settings))


def _reward(session: Session, episode: Any) -> float | None:
    """The reward of an episode with one trained seat, whose parts go to the rollout's notes. With
    several seats each is a rollout of the group, with its own conversations and its own reward."""
    if not episode.ok:
        errors = [*episode.errors, *(error for t in episode.traces for error in t.errors)]
        raise ValueError(f"{errors[0].type}: {errors[0].message}" if errors else "it has no reward")
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    conversations = {
        trace.id: [branch for branch in session.branches if branch.trace == trace.id]
        for trace in episode.traces
    }
    if len(traces) == 1:
        (trace,) = traces
        session.branches = conversations[trace.id]
        session.notes |= _notes(trace)
        return _paid(trace)
    for trace in traces:
        if not conversations[trace.id]:
            continue  # it never asked the model
        turns = sum(call.node is not None for call in trace.calls)
        notes = {"turns": turns, "seat": trace.agent.name} | _notes(trace)
        if (paid := _paid(trace)) is not None:
            notes["reward"] = paid
        is_cut = bool(trace.calls) and trace.calls[-1].finish_reason == "length"
        part = Session(session.prompt, branches=conversations[trace.id], is_cut=is_cut, notes=notes)
        session.seats.append(part)
    if not session.seats:
        session.branches = []  # of seats that are not trained
    return None


def _paid(trace: Any) -> float | None:
    rewards = [reward.value for reward in trace.rewards.values() if reward is not None]
    return float(sum(rewards)) if rewards else None


def _notes(trace: Any) -> dict[str, Any]:
    rewards = {n: float(reward.value) for n, reward in trace.rewards.items() if reward is not None}
    return {"rewards": rewards, "metrics": dict(trace.metrics)}


@contextmanager
def _scoring_in(mode: Mode | None) -> Iterator[None]:
    """Context in which rewards and metrics of tasks are called in the sandbox; None: here."""
    from verifiers.v1.task import Task

    hooks = Task.hooks

    called_by = cache(partial(checkers_of, mode)) if mode is not None else None  # found once

    def confined(task: Any, kind: str) -> list[Callable[..., Any]]:
        functions: list[Callable[..., Any]] = hooks(task, kind)
        if kind == "stop" or called_by is None:
            return functions
        return [_confined(function, called_by) for function in functions]

    Task.hooks = confined
    try:
        yield
    finally:
        Task.hooks = hooks


def _confined(function: Callable[..., Any], called_by: Callable[..., Any]) -> Callable[..., Any]:
    """A reward or metric, called in the sandbox; one that asks the task's runtime itself, here."""
    runtime = inspect.signature(function).parameters.get("runtime")
    if runtime is not None and runtime.default is runtime.empty:
        return function

    def call(named: dict[str, Any]) -> float | dict[str, float] | None:
        # The sandbox imports the modules of the function and of its task, to call them there.
        own = getattr(function, "__func__", function)
        task = (function.__self__,) if inspect.ismethod(function) else ()
        modules = {own.__module__, *(type(owner).__module__ for owner in task)}
        try:
            scores: float | dict[str, float] | None = called_by(*sorted(modules)).call(
                Subject(own), task, named, read=_scores
            )
            return scores
        except (CheckerError, pickle.PicklingError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{function.__name__} cannot be called in the sandbox ({one_line(error)}); if "
                f"it asks a judge or reads files, set verifiers?scoring={TRAINER}"
            ) from error

    @wraps(function)
    async def called(**named: Any) -> float | dict[str, float]:
        named.pop("runtime", None)
        scores = await asyncio.to_thread(call, named)
        return 0.0 if scores is None else scores

    return called


def _scores(value: Any) -> float | dict[str, float]:
    if isinstance(value, dict):
        return {str(name): finite(score) for name, score in value.items()}
    return finite(value)


def _harness() -> ModuleType:
    """A module with the harness, as verifiers loads one."""
    from verifiers.v1.configs.harness import HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.harness import Harness
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
    from verifiers.v1.runtimes import ProgramResult

    class Chat(Harness[HarnessConfig]):
        """Asks until no tool is called."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> ProgramResult:
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or []]
            # verifiers' own harness would start a process for this; here it is a task of the loop.
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                http = await stack.enter_async_context(client())
                tools, known, links = await connect_mcp({"mcpServers": servers}, stack)

                async def use(name: str, arguments: dict[str, Any]) -> str:
                    return str(await call_mcp(links, known, name, arguments))

                await converse(http, endpoint, secret, messages, tools, use)
            return ProgramResult(0, "", "")

    module = ModuleType(HARNESS)
    vars(module).update(__all__=["Chat"], Chat=Chat)
    return module
