"""A chat of the model with tools, and such a chat with the tools of an MCP server, which is started
by its command line, once for each wave, and speaks over its standard input and output.
"""

import shlex
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from shutil import which
from typing import Any

import httpx
import orjson

from reason_llm.config import installation
from reason_llm.errors import ConfigError, one_line
from reason_llm.sample.token_server import MODEL, Endpoint, Play, Plays, Session, TokenServer

UseTool = Callable[[str, dict[str, Any]], Awaitable[str]]


def client() -> httpx.AsyncClient:
    """A client that waits as long as the model takes; what holds all up has a deadline itself."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(timeout=None, limits=limits, trust_env=False)


async def converse(
    http: httpx.AsyncClient,
    base_url: str,
    key: str,
    messages: list[Any],
    tools: list[dict[str, Any]],
    use: UseTool,
) -> None:
    """Ask the model until it calls no tool, or is refused another turn."""
    while True:
        answer = await http.post(
            f"{base_url}/chat/completions",
            json={"model": MODEL, "messages": messages, **({"tools": tools} if tools else {})},
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
            except Exception as error:  # noqa: BLE001  (it is the tool's; the model is told)
                text = orjson.dumps({"error": one_line(error)[:1000]}).decode()
            told = {"role": "tool", "tool_call_id": call["id"], "name": name, "content": text}
            messages.append(told)


def mcp_tools(command: str) -> Plays:
    """Rollouts with the tools of the server of this command line; a ConfigError if the package is
    missing, or there is no such command."""
    words = shlex.split(command)
    if not words:
        raise ConfigError("sample.environment=mcp: names no server; write mcp:COMMAND ARGUMENTS")
    if find_spec("mcp") is None:
        raise ConfigError(
            f"sample.environment=mcp:{command} needs the package mcp; install it with: "
            f"{installation.install('verifiers')}"
        )
    if which(words[0]) is None:
        raise ConfigError(
            f"sample.environment=mcp:{command}: there is no program {words[0]}; name the command "
            "that starts the server"
        )

    @asynccontextmanager
    async def plays(server: TokenServer) -> AsyncIterator[Play]:
        from mcp import Client
        from mcp.client.stdio import StdioServerParameters, stdio_client

        started = stdio_client(StdioServerParameters(command=words[0], args=words[1:]))
        async with client() as http, Client(started) as tools:
            described = [
                {"type": "function", "function": {
                    "name": tool.name, "description": tool.description or "",
                    "parameters": tool.input_schema,
                }} for tool in (await tools.list_tools()).tools
            ]  # fmt: skip

            async def use(name: str, arguments: dict[str, Any]) -> str:
                result = await tools.call_tool(name, arguments)
                return "\n".join(getattr(part, "text", str(part)) for part in result.content)

            async def play(session: Session, endpoint: Endpoint) -> None:
                url, key = endpoint.base_url, endpoint.api_key
                await converse(http, url, key, list(endpoint.messages), described, use)

            yield play

    return plays
