"""Rollouts in environments of verifiers 0.4, as they come, and their rewards.

verifiers runs a task's own code in this process, and its tool servers beside it. It asks the token
server through its training client, with our renderer or with one of its own that was named. In the
place of its harness for plain chats, which starts a process for each rollout, stands one that asks
from here; a taskset that ships a harness keeps it.
"""

import copy
import sys
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from threading import Lock
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl

from reason_llm.config import Config, installation
from reason_llm.data import (
    DATE_OPTION,
    TASKSET,
    Messages,
    Renderer,
    date_argument,
    parsed_source,
    plain_messages,
    said_before,
    tasks_of,
)
from reason_llm.errors import ConfigError, ReasonError, one_line
from reason_llm.model import decode, end_token_ids
from reason_llm.sample.mcp_tools import client, converse
from reason_llm.sample.token_server import MODEL, Endpoint, Play, Plays, Session, TokenServer

HARNESS = "reason_llm_chat"
"""The module by whose name verifiers finds our harness."""
TURNS = "reason_llm_turns"
"""The module by whose name it finds our renderer."""


def tasksets(config: Config, asked: str, own: Renderer) -> Plays:
    """Rollouts of the tasks of ``data.train`` and ``data.eval``.

    Args:
        asked: options of ``sample.environment``: ``renderer=qwen3``.
        own: what puts turns together where no renderer is named.
    """
    where = f"sample.environment={config.sample.environment}"
    ends = end_token_ids(config.model.path, own.tokenizer)
    try:
        from verifiers.v1.clients import ModelContext
        from verifiers.v1.configs.client import TrainClientConfig
    except ImportError as error:
        raise ConfigError(
            f"{where} needs the package verifiers; install it with: "
            f"{installation.install('verifiers')}"
        ) from error
    try:
        options = dict(parse_qsl(asked, strict_parsing=True)) if asked else {"renderer": "auto"}
        named: dict[str, Any] = {"name": options.pop("renderer"), **options}
        if named["name"] in ("auto", "default"):
            sys.modules[TURNS] = _turns(own, ends)
            named |= {"name": "custom", "import_path": f"{TURNS}.Turns"}
            named |= {"reply_tokens": config.sample.reply_tokens}
            named |= {"chat_template": own.template.jinja, **dict(own.template.arguments)}
        if named["name"] == "gpt-oss":
            named.setdefault(DATE_OPTION, own.template.date)
        renderer = TrainClientConfig.model_validate({"renderer": named}).renderer
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"{where}: {one_line(error)[:300]}; write verifiers, or verifiers?renderer=qwen3 with "
            "a renderer of the package renderers and its own options"
        ) from error

    @asynccontextmanager
    async def plays(server: TokenServer) -> AsyncIterator[Play]:
        context = ModelContext(
            MODEL,
            TrainClientConfig(
                base_url=server.url,
                api_key_var="REASON_LLM_HAS_NO_SUCH_VARIABLE",  # the header has the key
                headers={"Authorization": f"Bearer {server.key}"},
                renderer_model_name=config.model.path,
                renderer=renderer,
            ),
        )
        async with AsyncExitStack() as stack:
            sources = {_place(session)[0] for session in server.sessions}
            opened = {each: _environment(each, config.sample.turns) for each in sorted(sources)}
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
    roles = [each for each, field in fields if isinstance(field.default, AgentConfig)]
    settings = {"taskset": {"id": name, **options}, **dict.fromkeys(roles, role)}
    return load_environment(kind.model_validate(settings))


def _reward(session: Session, episode: Any) -> float | None:
    """The reward of an episode, whose parts go to the rollout's notes."""
    if not episode.ok:
        errors = [*episode.errors, *(each for t in episode.traces for each in t.errors)]
        raise ValueError(f"{errors[0].type}: {errors[0].message}" if errors else "it has no reward")
    rewards: dict[str, float] = {}
    metrics: dict[str, Any] = {}
    for trace in episode.traces:
        rewards |= {n: float(each.value) for n, each in trace.rewards.items() if each is not None}
        metrics |= trace.metrics
    session.notes |= {"rewards": rewards, "metrics": metrics}
    return sum(rewards.values()) if rewards else None


def _turns(own: Renderer, ends: Collection[int]) -> ModuleType:
    """A module with the renderer, as verifiers loads one; ``ends`` are the end tokens."""
    from renderers import DefaultRenderer, DefaultRendererConfig, ParsedToolCall, RenderedTokens

    one_at_a_time = Lock()

    class Options(DefaultRendererConfig):
        reply_tokens: int
        _internal_fields = DefaultRendererConfig._internal_fields | {"reply_tokens"}

    class Turns(DefaultRenderer):
        """Renders by the chat template; goes on from what was sampled as our own renderer does."""

        config_class = Options
        supports_tools = True

        def __init__(self, tokenizer: Any, config: Any = None) -> None:
            dated, date = copy.copy(tokenizer), date_argument(own.template.date)
            dated.apply_chat_template = partial(tokenizer.apply_chat_template, **date)
            super().__init__(dated, config)

        def _apply(
            self, messages: Any, *, tools: Any = None, add_generation_prompt: bool = False
        ) -> list[int]:
            renderer = replace(own, tools=tuple(tools or ()))
            if tools:
                renderer.check_tools("a task of sample.environment=verifiers")
            if not renderer.spells_controls(messages):
                options = {"tools": tools, "add_generation_prompt": add_generation_prompt}
                return list(super()._apply(messages, **options))
            pairs = zip(messages, plain_messages(messages), strict=True)
            talk = [{**message, **plain} for message, plain in pairs]
            with one_at_a_time:
                text = renderer.marked_text("a task", talk, add_generation_prompt)
                return renderer.marked_ids("a task", text)

        def bridge_to_next_turn(
            self, prompt: list[int], answer: list[int], reply: Messages, *, tools: Any = None
        ) -> RenderedTokens | None:
            renderer, ids = replace(own, tools=tuple(tools or ())), [*prompt, *answer]
            try:
                with one_at_a_time:
                    added = renderer.after(ids, plain_messages(reply), self.config.reply_tokens)
            except ReasonError:
                return None  # it is rendered anew
            return RenderedTokens(
                token_ids=[*ids, *added],
                message_indices=[-1] * len(ids) + [len(reply) - 1] * len(added),
                message_roles=[message["role"] for message in reply],
            )

        def parse_response(
            self, answer: list[int], *, tools: Any = None, prompt_ids: Any = None
        ) -> Any:
            parsed = super().parse_response(answer, tools=tools, prompt_ids=prompt_ids)
            if self._tool_parser is self._reasoning_parser is None and parsed.content:
                # As rewards see it, where it left special tokens out.
                (text,) = decode(own.tokenizer, [answer], ends)
                has_thought = parsed.reasoning_content is not None
                parsed.content = text.partition("</think>")[2] if has_thought else text
            if tools and self.config.tool_parser is None:
                renderer = replace(own, tools=tuple(tools))
                if calls := [each for each in renderer.calls(parsed.content, answer) if each]:
                    parsed.tool_calls = [ParsedToolCall("", *each) for each in calls]
                    parsed.content = said_before(parsed.content)
            return parsed

    module = ModuleType(TURNS)
    vars(module).update(Turns=Turns)
    return module


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
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str,
            mcp_urls: dict[str, str], data: Any,
        ) -> ProgramResult:  # fmt: skip
            system, prompt = self.resolve_prompt(data)
            talk: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                talk.append({"role": "user", "content": prompt})
            else:
                talk += [message_to_wire(message) for message in prompt or []]
            servers = {name: {"url": url} for name, url in mcp_urls.items()}
            async with AsyncExitStack() as stack:
                http = await stack.enter_async_context(client())
                tools, known, links = await connect_mcp({"mcpServers": servers}, stack)

                async def use(name: str, arguments: dict[str, Any]) -> str:
                    return str(await call_mcp(links, known, name, arguments))

                await converse(http, endpoint, secret, talk, tools, use)
            return ProgramResult(0, "", "")

    module = ModuleType(HARNESS)
    vars(module).update(__all__=["Chat"], Chat=Chat)
    return module
