"""A chat of the model with tools, and such a chat with the tools of MCP servers.

    mcp:COMMAND ARGUMENTS        a program that speaks over its standard input and output
    mcp:https://host/mcp …       streamable HTTP, one or several addresses
    mcp:path/to/servers.json     several of either, as ``{"mcpServers": {name: {...}}}``

All are probe before a model is loaded. While sampling, programs are started once for each wave. A
result is read as it came: ``mcp`` 2.0.0 would check it by the tool's schema, and open the addresses
which that names (CVE-2026-116686).
"""

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Annotated, Any

import httpx
import orjson
from pydantic import Field

from reason_llm.config import installation
from reason_llm.environments.data_side import command_words
from reason_llm.environments.token_server import Endpoint, Play, Plays, Session, TokenServer
from reason_llm.errors import ConfigError, one_line
from reason_llm.files import read_object
from reason_llm.rollout import KNOWN_FIELDS_ONLY, record_from_json
from reason_llm.sample import openai_api

UseTool = Callable[[str, dict[str, Any]], Awaitable[str]]
START_SECONDS = 60.0
"""For all servers to start and to list their tools."""
MAX_TOOLS = 1000
MAX_CHARACTERS = 1 << 16
"""Longest result that the model reads."""
CALL_FRACTION = 0.8
"""Fraction of ``sample.environment_seconds`` after which a call has failed."""


def client() -> httpx.AsyncClient:
    """A client that waits as long as the model takes; what holds all up has a deadline itself."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False, verify=_certificates())


@cache
def _certificates() -> ssl.SSLContext:
    """The usual certificates, which take 20 ms to read: each rollout has a client."""
    return httpx.create_ssl_context(trust_env=False)


async def converse(
    http: httpx.AsyncClient,
    base_url: str,
    key: str,
    messages: list[Any],
    tools: list[dict[str, Any]],
    use: UseTool,
    notes: dict[str, Any] | None = None,
) -> None:
    """Ask the model until it calls no tool, or is refused another turn; ``notes`` count the calls
    that fail."""
    while True:
        answer = await http.post(
            f"{base_url}/chat/completions",
            json={
                "model": openai_api.MODEL,
                "messages": messages,
                **({"tools": tools} if tools else {}),
            },
            headers={"Authorization": f"Bearer {key}"},
        )
        if answer.status_code == httpx.codes.BAD_REQUEST:
            return
        if answer.is_error:
            raise ConnectionError(f"status {answer.status_code}: {answer.text[:500]}")
        choice = answer.json()["choices"][0]
        messages.append(choice["message"])
        calls = choice["message"].get("tool_calls") or []
        if not calls or choice["finish_reason"] == "length":
            return
        for call in calls:
            name = call["function"]["name"]
            try:
                arguments = orjson.loads(call["function"]["arguments"])
                text = await use(name, arguments)
            except Exception as error:  # noqa: BLE001  (the tool's error, which the model reads)
                text = orjson.dumps({"error": one_line(error)[:1000]}).decode()
                if notes is not None:
                    notes["failed_calls"] = notes.get("failed_calls", 0) + 1
            result = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}
            messages.append(result)


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server, as an entry of ``mcpServers``: a program or an address."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    command: Annotated[str, Field(min_length=1)] | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables in addition to a few harmless ones; ``${NAME}`` is one of ours."""
    cwd: str | None = None
    url: Annotated[str, Field(pattern="^https?://")] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    """HTTP headers; ``${NAME}`` is one of our environment variables."""
    type: str | None = None
    """Transport, as some write it; the command or the address tells it."""


def servers_of(setting: str) -> dict[str, McpServer]:
    """The servers by their names; a ConfigError if there are none, or one cannot be started."""
    where = f"sample.environment=mcp:{setting}"
    words = command_words(setting)
    if not words:
        raise ConfigError(
            "sample.environment=mcp: names no server; write mcp:COMMAND ARGUMENTS, "
            "mcp:https://… or mcp:servers.json"
        )
    if all(word.startswith(("http://", "https://")) for word in words):
        return {word: McpServer(url=word) for word in words}
    if len(words) > 1 or not words[0].endswith(".json"):
        servers = {words[0]: McpServer(command=words[0], args=tuple(words[1:]))}
    else:
        try:
            content = read_object(Path(words[0])).get("mcpServers")
            servers = record_from_json(dict[str, McpServer], content)
            servers = {name: _with_variables(server) for name, server in servers.items()}
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{where}: {one_line(error)}; write a file such as "
                '{"mcpServers": {"a": {"command": "python", "args": ["server.py"]}, '
                '"b": {"url": "https://…"}}}'
            ) from error
    # Checked at the start: a server itself is started by the first rollout.
    for name, server in servers.items():
        if (server.command is None) == (server.url is None):
            raise ConfigError(f"{where}: {name} needs a command or a url, one of them")
        if server.command is not None and which(server.command) is None:
            raise ConfigError(
                f"{where}: there is no program {server.command}; name the command that starts the "
                "server"
            )
    if not servers:
        raise ConfigError(f"{where} names no server in mcpServers; add one")
    return servers


def _with_variables(server: McpServer) -> McpServer:
    """The server with the values of environment variables; ValueError where one is not set."""

    def value(match: re.Match[str]) -> str:
        if (known := os.environ.get(match[1])) is None:
            raise ValueError(f"the environment variable {match[1]} is not set")
        return known

    def filled(values: Mapping[str, str]) -> dict[str, str]:
        return {name: re.sub(r"\$\{(\w++)\}", value, text) for name, text in values.items()}

    return replace(server, env=filled(server.env), headers=filled(server.headers))


async def _transport(server: McpServer, stack: AsyncExitStack) -> Any:
    if server.url is None:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        return stdio_client(
            StdioServerParameters(
                command=str(server.command),
                args=list(server.args),
                env=dict(server.env) or None,
                cwd=server.cwd,
            )
        )
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # Without redirects: headers with keys go to the address that was named, and to no other.
    timeout = httpx2.Timeout(30, read=300)
    http = httpx2.AsyncClient(headers=dict(server.headers), timeout=timeout)
    await stack.enter_async_context(http)
    return streamable_http_client(server.url, http_client=http)


@asynccontextmanager
async def _opened(
    servers: Mapping[str, McpServer], seconds: float
) -> AsyncIterator[tuple[list[dict[str, Any]], UseTool]]:
    """The tools of all servers as a chat describes them, and what calls one.

    Raises:
        ConfigError: a server cannot be reached, or two have a tool of one name.
    """
    from mcp import Client
    from mcp_types import CallToolRequest, CallToolRequestParams, CallToolResult

    described: list[dict[str, Any]] = []
    clients: dict[str, Any] = {}
    owners: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name, server in servers.items():
            try:
                opened = await stack.enter_async_context(Client(await _transport(server, stack)))
                tools = await _listed(opened)
            except Exception as error:
                raise ConfigError(
                    f"the MCP server {name} does not start or lists no tools "
                    f"({_first_error(error)}); start it by hand to see why"
                ) from error
            for tool in tools:  # the model calls them by name alone, so a name has one owner
                if tool.name in owners:
                    raise ConfigError(
                        f"the MCP servers {owners[tool.name]} and {name} both have a tool "
                        f"{tool.name}; leave one server out, or rename its tool"
                    )
                owners[tool.name], clients[tool.name] = name, opened
                described.append(_as_function(tool))

        async def use(name: str, arguments: dict[str, Any]) -> str:
            if name not in clients:
                raise ValueError(f"Tool {name} not found.")
            result = await clients[name].session.send_request(
                CallToolRequest(params=CallToolRequestParams(name=name, arguments=arguments)),
                CallToolResult,
                request_read_timeout_seconds=seconds,
            )
            text = "\n".join(map(_text, result.content))
            if not result.content and result.structured_content is not None:
                text = orjson.dumps(result.structured_content).decode()
            if result.is_error:
                raise ValueError(text)
            return text[:MAX_CHARACTERS].encode(errors="replace").decode()

        yield described, use


def _as_function(tool: Any) -> dict[str, Any]:
    """A tool as a chat template reads it."""
    function = {"name": tool.name, "description": tool.description or ""}
    return {"type": "function", "function": {**function, "parameters": tool.input_schema}}


async def _listed(client: Any) -> list[Any]:
    """Return the tools of a server, page by page; the limit is for one that never ends its list."""
    tools, cursor = list[Any](), None
    while len(tools) < MAX_TOOLS:
        page = await client.list_tools(cursor=cursor)
        tools, cursor = [*tools, *page.tools], page.next_cursor
        if cursor is None:
            break
    return tools


def _first_error(error: BaseException) -> str:
    """The first error of a group of them, in one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ConfigError):
        return one_line(error)
    return f"{type(error).__name__}: {one_line(error)[:300]}"


def _text(part: Any) -> str:
    """A part of a result as the model reads it: texts alone, others by their names."""
    match part.type:
        case "text":
            return str(part.text)
        case "resource_link":
            return str(part.uri)
        case "resource" if hasattr(part.resource, "text"):
            return str(part.resource.text)
        case "resource":
            data, kind = part.resource.blob, part.resource.mime_type or "binary"
        case _:
            data, kind = part.data, part.mime_type
    return f"[{kind} of {len(data) * 3 // 4:,} bytes, left out]"


def mcp_tools(setting: str) -> Plays:
    """Rollouts with the tools of these servers; a ConfigError if the package is missing, or a
    server does not start."""
    servers = servers_of(setting)
    if find_spec("mcp") is None:
        raise ConfigError(
            f"sample.environment=mcp:{setting} needs the package mcp; install it with: "
            f"{installation.install('mcp')}"
        )

    async def probe() -> None:
        async with _opened(servers, START_SECONDS):
            pass

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook's own has a loop already
            started = asyncio.wait_for(probe(), START_SECONDS)
            thread.submit(asyncio.run, started).result()
    except TimeoutError as error:
        raise ConfigError(
            f"sample.environment=mcp:{setting}: the servers took more than {START_SECONDS:g} s to "
            "start and to list their tools; start them by hand to see why"
        ) from error
    except Exception as error:
        raise ConfigError(f"sample.environment=mcp:{setting}: {_first_error(error)}") from error

    @asynccontextmanager
    async def plays(server: TokenServer) -> AsyncIterator[Play]:
        seconds = CALL_FRACTION * server.section.environment_seconds
        async with client() as http, _opened(servers, seconds) as (described, use):

            async def play(session: Session, endpoint: Endpoint) -> None:
                url, key, notes = endpoint.base_url, endpoint.api_key, session.notes
                notes.setdefault("calls", 0)
                await converse(http, url, key, list(endpoint.messages), described, use, notes)

            yield play

    return plays
