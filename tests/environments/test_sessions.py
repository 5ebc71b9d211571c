"""Rollouts of programs that ask for the model's turns, over the token server.

1. What is asked is known.                     2. Agents of one's own; the barrier.
3. Agents that raise, hang, block or go on.    4. What the server refuses.
5. MCP.                                        6. verifiers: tasks, rewards, seats.
7. Runs: from the config to the adapter, killed in a wave.
"""

import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import trl
import yaml

from chat_templates import CHATML, DROPS_THINKING, renderer
from conftest import ROOT, TINY, small_config
from reason_llm.app.console import Console
from reason_llm.app.training import run_training
from reason_llm.config import Config
from reason_llm.data import Renderer, plain_messages
from reason_llm.data.rows import read_rows
from reason_llm.environments import mcp_tools, sessions as sessions_module, tasksets
from reason_llm.environments.data_side import own_session
from reason_llm.environments.playing import PlayedSampler
from reason_llm.environments.sessions import Sessions
from reason_llm.environments.task_rows import parsed_source
from reason_llm.environments.token_server import (
    SESSION,
    WAVE,
    Branch,
    Session,
    TokenServer,
)
from reason_llm.errors import ConfigError, DataError
from reason_llm.model.base import load_tokenizer
from reason_llm.rollout import CHAT, ROW, Completion, Group, Prompt, Span
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, openai_api
from waves import limit_waves

TOKENIZER = load_tokenizer(str(TINY))
END = 2
FIXTURES = ROOT / "tests" / "fixtures"
AGENTS = FIXTURES / "own_agents.py"
long = pytest.mark.long


def ids_of(text: str, tokenizer: Any = TOKENIZER) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def a_prompt(number: int = 0, where: str = "rows.jsonl:{}", **row: Any) -> Prompt:
    talk = [{"role": "user", "content": f"{number} + 1 = ?"}]
    made = renderer(TOKENIZER).prompt(where.format(number), talk, "")
    return replace(made, extra={CHAT: talk, ROW: {"prompt": talk, "columns": row}})


class Told:
    """Says these texts, turn by turn, with the rollout's number after them; log-probs differ. By
    letters, it samples other ids than the tokenizer has for the texts."""

    def __init__(
        self,
        *texts: str,
        numbered: bool = True,
        tokenizer: Any = TOKENIZER,
        by_letters: bool = False,
    ) -> None:
        self.texts, self.numbered, self.tokenizer = texts, numbered, tokenizer
        self.by_letters = by_letters
        self.asked: list[list[Prompt]] = []
        self.seeds: list[int] = []

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: int, progress: Any
    ) -> list[Group]:
        text = self.texts[len(self.asked) % len(self.texts)]
        self.asked.append(list(prompts))
        self.seeds.append(seed)
        groups = []
        for number, prompt in enumerate(prompts):
            said = text + (f" {number}" if self.numbered else "")
            parts = said if self.by_letters else [said]
            ids = [id for part in parts for id in ids_of(part, self.tokenizer)]
            ids = [*ids, END][: params.max_new_tokens]
            logprobs = tuple(-0.25 * (n + 1 + number) for n in range(len(ids)))
            why: Any = "stop" if ids[-1] == END else "length"
            groups.append(Group(prompt, (Completion(tuple(ids), said, logprobs, why),)))
        return groups

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        return len(prompts)


def sessions(
    environment: str, made: Renderer | None = None, context: int = 500, **options: Any
) -> Sessions:
    config = Config.model_validate(
        {
            "model": {"path": str(TINY)},
            "data": {"train": "verifiers:x" if environment[0] == "v" else "rows.jsonl"},
            "sample": {"environment": environment, "environment_seconds": 300, **options},
        }
    )
    return Sessions(config, made or renderer(TOKENIZER), context)


def play(
    own: Sessions, sampler: Any, prompts: Sequence[Prompt], each: int = 1, most: int = 200
) -> list[Group]:
    ended: list[int] = []
    groups = PlayedSampler(own, sampler).sample(
        prompts, SamplingParams(each, most), 7, lambda tokens, items: ended.append(items)
    )
    assert sum(ended) == each * len(prompts)
    return groups


def played(name: str, *texts: str, most: int = 200, **options: Any) -> Completion:
    (group,) = play(
        sessions(f"agent:{AGENTS}:{name}", **options), Told(*texts), [a_prompt()], 1, most
    )
    return group.completions[0]


# 1. What is asked


def test_which_program_asks() -> None:
    assert own_session("agent:my/agent.py:play") == ("agent", "my/agent.py:play")
    assert own_session("mcp:python server.py --x a:b") == ("mcp", "python server.py --x a:b")
    assert own_session("verifiers?scoring=trainer") == ("verifiers", "scoring=trainer")
    assert own_session("verifiers") == ("verifiers", "")
    assert own_session("my_game.py:Guess") == own_session(None) == ("", "")


def test_messages_are_as_templates_read_them() -> None:
    call = {"id": "1", "function": {"name": "f", "arguments": '{"a": 1}'}, "type": "function"}
    said = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
    ]
    function = {"name": "f", "arguments": {"a": 1}}
    assert plain_messages(said) == [
        {"role": "user", "content": "ab"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
    ]
    for wrong in ({"content": "x"}, {"role": "user", "content": [{"image_url": "x"}]},
                  {"role": "assistant", "tool_calls": ["f"]}):  # fmt: skip
        with pytest.raises(ValueError, match="give"):
            plain_messages([wrong])


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        (f"agent:{AGENTS}:in_step", "write async def"),
        (f"agent:{AGENTS}:no_such", "has no function"),
        ("mcp:", "write mcp:COMMAND"),
        ("mcp:no_such --x", "there is no program no_such"),
        ("mcp:'python", "No closing quotation; quote it"),
        ("mcp:no_such.json", "no_such.json"),
        pytest.param("verifiers?colour=red", "write verifiers, or", marks=long),
    ],
)
def test_a_wrong_one_is_one_line(environment: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as raised:
        sessions(environment)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("environment", "extra"), [("mcp:python server.py", "mcp"), ("verifiers", "verifiers")]
)
def test_without_the_package_it_says_so(
    environment: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reason_llm.environments.mcp_tools.find_spec", lambda name: None)
    for name in [name for name in sys.modules if name.startswith("verifiers")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=rf"pip install -e '\.\[{extra}\]'"):
        sessions(environment)
    with pytest.raises(DataError, match=r"pip install -e '\.\[verifiers\]'"):
        list(read_rows("verifiers:never_read", "train"))


# 2. Agents


@long
def test_an_agent_s_turns_follow_each_other_as_ids() -> None:
    own = sessions(f"agent:{AGENTS}:two_turns")
    sampler = Told("first", "second")
    prompts = [a_prompt(0), a_prompt(1)]
    groups = play(own, sampler, prompts, each=2)
    tail = ids_of("\n<|im_start|>user\n3 + 4 = ?<|im_end|>\n<|im_start|>assistant\n")
    pairs = [(group, completion) for group in groups for completion in group.completions]
    for number, (group, completion) in enumerate(pairs):
        assert group.prompt == prompts[number // 2]
        first, second = [*ids_of(f"first {number}"), END], [*ids_of(f"second {number}"), END]
        assert completion.token_ids == (*first, *tail, *second)
        assert completion.spans == (Span(len(first), len(first) + len(tail)),)
        assert completion.logprobs == (
            *(-0.25 * (n + 1 + number) for n in range(len(first))),
            *[0.0] * len(tail),
            *(-0.25 * (n + 1 + number) for n in range(len(second))),
        )
        assert (completion.finish_reason, completion.last_turn) == (
            "environment",
            f"second {number}",
        )
        assert completion.environment["reward"] == len(f"second {number}") / 10
        assert completion.environment["turns"] == 2
        assert sampler.asked[1][number].token_ids == (*group.prompt.token_ids, *first, *tail)


@long
def test_a_thread_that_a_program_has_ended_is_replaced() -> None:
    loop, thread = sessions_module._agents()
    loop.call_soon_threadsafe(loop.stop)
    thread.join(300)
    own, sampler = sessions(f"agent:{AGENTS}:two_turns"), Told("first", "second")
    (group,) = play(own, sampler, [a_prompt(0)], each=2)
    assert [c.finish_reason for c in group.completions] == ["environment"] * 2


@long
def test_clients_read_the_certificates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rollout of a taskset has a client, and reading them takes longer than its requests."""
    mcp_tools.client()

    def fail(*args: Any, **options: Any) -> None:
        raise AssertionError("the certificates are read again")

    monkeypatch.setattr(ssl, "create_default_context", fail)
    mcp_tools.client()


def test_the_barrier_makes_batches_that_hang_on_no_clock() -> None:
    """Who comes first differs each time; who is asked together, and in which order, does not."""
    own = sessions(f"agent:{AGENTS}:two_turns")
    seen = []
    for _ in range(3):
        sampler = Told("first", "second")
        groups = play(own, sampler, [a_prompt(n) for n in range(6)], each=4)
        assert [len(asked) for asked in sampler.asked] == [24, 24]
        seen.append(
            (groups, [[p.token_ids for p in asked] for asked in sampler.asked], sampler.seeds)
        )
    assert seen[0] == seen[1] == seen[2]


@long
def test_requests_of_a_rollout_in_parallel_make_the_same_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whichever comes first; those of a seed are drawn from it, alike in no two rollouts."""
    monkeypatch.setattr("reason_llm.environments.token_server.SETTLE_SECONDS", 10.0)
    own = sessions(f"agent:{AGENTS}:in_parallel")
    seen = []
    for _ in range(3):
        sampler = Told("some words")
        groups = play(own, sampler, [a_prompt(n) for n in range(3)], each=2)
        assert [len(asked) for asked in sampler.asked] == [6, *[1] * 12, 6]
        assert len(set(sampler.seeds)) == 2 + 6
        for completion in (each for group in groups for each in group.completions):
            assert completion.environment["turns"] == 4 and len(completion.others) == 3
        asked = [[prompt.token_ids for prompt in prompts] for prompts in sampler.asked]
        seen.append((groups, asked, sampler.seeds))
    assert seen[0] == seen[1] == seen[2]


@long
def test_conversations_of_a_rollout_are_learned_each() -> None:
    own, said = (
        sessions(f"agent:{AGENTS}:begins_anew"),
        ("first", "a summary", "second", "and last"),
    )
    (group,) = play(own, Told(*said), [a_prompt()])
    (completion,) = group.completions
    (other,) = completion.others
    assert completion.environment == {"turns": 4, "reward": 1.0}
    assert completion.last_turn == "and last 0"
    assert other.prompt_ids == a_prompt().token_ids != group.prompt.token_ids
    assert "so far: 7" in TOKENIZER.decode(group.prompt.token_ids)
    asked = "\n<|im_start|>user\n3 + 4 = ?<|im_end|>\n<|im_start|>assistant\n"
    for each, (first, second) in ((other, said[::2]), (completion, said[1::2])):
        text = f"{first} 0<|im_end|>{asked}{second} 0<|im_end|>"
        assert TOKENIZER.decode(each.token_ids) == text
        (span,) = each.spans
        assert TOKENIZER.decode(each.token_ids[span.start : span.end]) == asked
        sampled = [*range(span.start), *range(span.end, len(each.token_ids))]
        assert [n for n, logprob in enumerate(each.logprobs) if logprob] == sampled


def test_the_branch_in_which_the_model_wrote_most_is_learned() -> None:
    replied_at_length = Branch((1,), ids=[5] * 9, spans=[Span(1, 8)])
    written = Branch((1,), ids=[5] * 5, spans=[Span(1, 2)])
    assert Session(a_prompt(), branches=[replied_at_length, written]).learned is written


# 3. Agents that go wrong


@long
@pytest.mark.parametrize(
    ("name", "options", "reason", "says"),
    [
        ("raises", {}, "error", "it raised KeyError"),
        ("gives_text", {}, "error", "it gave 'good', and not a finite number or None"),
        ("raises_odd_text", {}, "error", "it raised ValueError: ? lost"),
        ("raises_no_text", {}, "error", "it raised Mute: its text raised RuntimeError"),
        ("is_silent", {}, "error", "it never asked the model"),
        ("hangs", {"environment_seconds": 3}, "error", "it took longer than 3 s to ask again"),
        ("blocks", {"environment_seconds": 3}, "error", "it took longer than 3 s to ask again"),
        ("goes_on", {"turns": 3}, "turns", None),
        ("goes_on", {"turns": 99}, "length", None),
        ("two_turns", {"context": 20}, "error", "leaves no room in the context of 20"),
    ],
)
def test_an_agent_that_goes_wrong_ends_its_rollout_alone(
    name: str, options: dict[str, Any], reason: str, says: str | None
) -> None:
    most = 100 if options.get("turns") == 99 else 200
    completion = played(name, "some words", most=most, **options)
    assert completion.finish_reason == reason
    assert (says or "") in completion.environment.get("problem", "")
    assert "reward" not in completion.environment
    assert len(completion.token_ids) == len(completion.logprobs) <= most
    assert orjson.dumps(completion)
    assert (
        played("two_turns", "fine", "good").environment["reward"] == 0.6
    )  # and the next wave is well


@long
def test_an_agent_cannot_change_its_row() -> None:
    prompt = a_prompt(words=["one"])
    before = deepcopy(prompt.extra)
    (group,) = play(sessions(f"agent:{AGENTS}:changes_its_row"), Told("words"), [prompt], 2)
    assert [c.environment["reward"] for c in group.completions] == [2.0, 2.0]
    assert prompt.extra == before


@long
def test_a_client_that_breaks_off_does_not_prolong_the_time_of_others() -> None:
    """Whose rollout would keep the wave open for ever."""
    own = sessions(f"agent:{AGENTS}:breaks_off_or_hangs", environment_seconds=10)
    groups = play(own, Told("words"), [a_prompt(n, hangs=n == 1) for n in range(2)])
    ended = [group.completions[0] for group in groups]
    assert [c.finish_reason for c in ended] == ["environment", "error"]
    assert "longer than 10 s" in ended[1].environment["problem"]


# 4. Refusals


class Open:
    """A server with two rollouts, and a thread that answers."""

    def __init__(self, **options: Any) -> None:
        self.sessions = [Session(a_prompt(0)), Session(a_prompt(1))]
        section = sessions(f"agent:{AGENTS}:two_turns", **options).section
        self.server = TokenServer(self.sessions, section, renderer(TOKENIZER), 100, 50, [END])
        self.sampler = Told("words")

    def __enter__(self) -> "Open":
        self.server.__enter__()
        self.thread = threading.Thread(target=self._answer)
        self.thread.start()
        return self

    def _answer(self) -> None:
        while asked := self.server.waiting():
            prompts = [replace(each.prompt, token_ids=ask.ids) for each, ask in asked]
            groups = self.sampler.sample(prompts, SamplingParams(1, 50), 0, None)
            self.server.answer(asked, [group.completions[0] for group in groups])

    def __exit__(self, *exception: object) -> None:
        for session in self.sessions:
            self.server.end(session)
        self.thread.join()
        self.server.__exit__()

    def has_open(self, count: int) -> None:
        """Wait until the first rollout has that many open requests."""
        asks, changed = self.sessions[0].asks, self.server._changed
        with changed:
            assert changed.wait_for(lambda: len(asks) == count, timeout=300)

    def ask(self, path: str, body: Any, key: str | None = None, **headers: str) -> httpx.Response:
        headers |= {"Authorization": f"Bearer {self.sessions[0].key if key is None else key}"}
        content = body if isinstance(body, bytes) else orjson.dumps(body)
        url = self.server.url.removesuffix("/v1") + path
        with httpx.Client(trust_env=False, timeout=300) as client:
            return client.post(url, content=content, headers=headers)


CHATS = "/v1/chat/completions"
SAID = {"messages": [{"role": "user", "content": "a"}]}


@long
def test_the_server_takes_and_refuses() -> None:
    with Open() as opened:
        opened.server.end(opened.sessions[1])
        (choice,) = opened.ask(CHATS, SAID | {"model": "x", "logprobs": True}).json()["choices"]
        assert choice["message"]["content"] == "words 0"
        assert len(choice["logprobs"]["content"]) == len(ids_of("words 0")) + 1
        long_one = {"messages": [{"role": "user", "content": "a " * 150}]}
        for path, body, status, why in [
            (CHATS, long_one, 400, "no room in the context of 100"),
            (CHATS, b"[" * 100_000, 400, ""),
            (CHATS, b" " * (100 << 20), 413, f"{openai_api.MAX_BYTES:,} bytes"),
            (CHATS, SAID | {"max_tokens": -100}, 400, "max_tokens=-100 is not a number"),
        ]:  # fmt: skip
            refused = opened.ask(path, body)
            assert (refused.status_code, why in refused.json()["error"]["message"]) == (
                status,
                True,
            ), why
        assert opened.ask("/v1/embeddings", {"input": "a"}).status_code == 404
        for key in ("none", "x", opened.sessions[1].key, opened.server.key):
            assert opened.ask(CHATS, SAID, key).status_code == 401
        opened.server.call(opened.sessions[0], "trace")
        for key, name, status in (("x", "trace", 401), (opened.server.key, "other", 401),
                                  (opened.server.key, "trace", 200)):  # fmt: skip
            named = opened.ask(CHATS, SAID, "EMPTY", **{WAVE: key, SESSION: name})
            assert named.status_code == status
        assert len(opened.sampler.asked) == 2
        old, port = opened.sessions[0].key, opened.server.port
    with Open() as opened:  # the next wave, perhaps of another adapter
        assert opened.ask(CHATS, SAID, old).status_code == 401
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"http://127.0.0.1:{port}/v1/models", trust_env=False)


@long
def test_a_rollout_asks_in_parallel_and_a_client_that_goes_is_forgotten() -> None:
    with Open() as opened:
        first, second = opened.sessions
        content = orjson.dumps(SAID)
        with socket.create_connection(("127.0.0.1", opened.server.port)) as client:
            client.sendall(
                f"POST {CHATS} HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer {first.key}\r\n"
                f"Content-Length: {len(content)}\r\n\r\n".encode()
                + content
            )
            opened.has_open(1)  # the second keeps it waiting
        opened.has_open(0)
        threads = [threading.Thread(target=opened.ask, args=(CHATS, SAID)) for _ in range(2)]
        for thread in threads:
            thread.start()
        opened.has_open(2)
        opened.server.end(second)
        for thread in threads:
            thread.join()
    assert (first.notes["turns"], len(first.branches)) == (2, 2)


# 5. MCP


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def qwen() -> Renderer:
    jinja = (Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja").read_text()
    return renderer(TOKENIZER, jinja)


SERVER = str(FIXTURES / "mcp_server.py")


@contextmanager
def http_server(script: str = SERVER) -> Iterator[str]:
    """The address of an MCP server over HTTP."""
    command, env = [sys.executable, script, "http"], {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          env=os.environ | env) as served:  # fmt: skip
        try:
            assert served.stdout is not None
            url = served.stdout.readline().strip()
            with httpx.Client(transport=httpx.HTTPTransport(retries=60), timeout=300) as http:
                http.get(url)  # until it listens
            yield url
        finally:
            served.kill()


@long
@pytest.mark.parametrize("kind", ["program", "http", "file"])
def test_the_model_calls_the_tools_of_an_mcp_server(kind: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        path = os.pathsep.join(sys.path)  # it gets no variables of ours
        asked = f"env PYTHONPATH={path} {sys.executable} {SERVER}"
        if kind != "program":
            asked = stack.enter_context(http_server())
        if kind == "file":
            other = {"command": sys.executable, "args": ["-c", OTHER], "env": {"PYTHONPATH": path}}
            servers = {"sums": {"type": "http", "url": asked}, "other": other}
            (tmp_path / "servers.json").write_bytes(orjson.dumps({"mcpServers": servers}))
            asked = str(tmp_path / "servers.json")
        own = sessions(f"mcp:{asked}", qwen(), context=3000)
        times = call("times", '{"first": 6, "second": 7}')
        broken = call("broken", "{}") + "<tool_call>x</tool_call>"
        texts = times, call("picture", "{}"), broken, call("greet", "{}"), "it is 42"
        played = Told(*texts, numbered=False)
        (group,) = play(own, played, [a_prompt()], each=2, most=900)
    for completion in group.completions:
        assert "<tool_response>\n42.\n</tool_response>" in completion.text
        assert "a dot:\n[image/png of 12 bytes, left out]" in completion.text
        assert "out of order" in completion.text
        assert ("hello" if kind == "file" else "Tool greet not found.") in completion.text
        assert completion.last_turn == "it is 42"
        failed = 2 + (kind != "file")
        assert completion.environment == {"turns": 5, "calls": 5, "failed_calls": failed}
        assert len(completion.spans) == 4
    assert metrics.describe([group])["sample/failed_calls_fraction"] == failed / 5
    tools = TOKENIZER.decode(group.prompt.token_ids)
    assert '"name": "times"' in tools
    assert "Multiply two numbers." in tools


OTHER = """
from mcp.server.mcpserver import MCPServer
server = MCPServer("other")
server.tool(name="greet")(lambda: "hello")
server.run("stdio")
"""
TWICE = '{"mcpServers": {"a": {"url": "URL"}, "b": {"url": "URL"}}}'


@long
def test_a_server_that_cannot_be_had_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "servers.json"
    with socket.socket() as deaf:  # nobody else gets its port, and it does not listen
        deaf.bind(("127.0.0.1", 0))
        closed = f"http://127.0.0.1:{deaf.getsockname()[1]}/mcp"
        for asked in (f"{sys.executable} -c pass", closed):
            with pytest.raises(ConfigError, match="does not start or lists no tools") as raised:
                sessions(f"mcp:{asked}")
            assert "\n" not in str(raised.value)
    with http_server() as url:
        file.write_text(TWICE.replace("URL", url))
        with pytest.raises(ConfigError, match="a and b both have a tool times"):
            sessions(f"mcp:{file}")
    for servers, says in (
        ('{"a": {}}', "a needs a command or a url"), ("{}", "names no server in mcpServers"),
        ('{"a": {"url": "ftp://x"}}', "url"), ('{"a": {"comand": "x"}}', "comand"),
        ('{"a": {"url": "http://x", "headers": {"A": "${NO_SUCH_NAME}"}}}', "NO_SUCH_NAME is not"),
    ):  # fmt: skip
        file.write_text('{"mcpServers": ' + servers + "}")
        with pytest.raises(ConfigError, match=says):
            sessions(f"mcp:{file}")


@long
def test_an_address_in_a_tool_s_schema_is_not_opened(tmp_path: Path) -> None:
    """CVE-2026-116686, in whichever version of the package."""
    with socket.socket() as witness:
        witness.bind(("127.0.0.1", 0))
        witness.listen()
        witness.setblocking(False)
        ref = f"http://127.0.0.1:{witness.getsockname()[1]}/schema.json"
        script = tmp_path / "server.py"
        script.write_text(SCHEMA.replace("REF", ref))
        path = os.pathsep.join(sys.path)
        own = sessions(f"mcp:env PYTHONPATH={path} {sys.executable} {script}", qwen(), context=3000)
        told = Told(call("see", "{}"), "well", numbered=False)
        (group,) = play(own, told, [a_prompt()], most=600)
        assert '"value"' in group.completions[0].text
        with pytest.raises(BlockingIOError):
            witness.accept()


SCHEMA = """
import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp_types import CallToolResult, ListToolsResult, Tool

async def tools(context, params):
    schema = {"type": "object", "$ref": "REF"}
    tool = Tool(name="see", input_schema={"type": "object"}, output_schema=schema)
    return ListToolsResult(tools=[tool])

async def call(context, params):
    return CallToolResult(content=[], structured_content={"value": 1})

async def main():
    server = Server("odd", on_list_tools=tools, on_call_tool=call)
    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())

anyio.run(main)
"""


# 6. verifiers


@pytest.fixture
def episodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Session, Any]]:
    """What verifiers recorded."""
    seen: list[tuple[Session, Any]] = []
    real = tasksets._reward

    def note(session: Session, episode: Any) -> float | None:
        seen.append((session, episode))
        return real(session, episode)

    monkeypatch.setattr(tasksets, "_reward", note)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*sys.path, str(FIXTURES)]))
    return seen


def check_equal(groups: list[Group], episodes: list[tuple[Session, Any]]) -> None:
    """Turns, last words and rewards of our records are verifiers' own."""
    theirs = []
    for _, episode in episodes:
        (trace,) = episode.traces
        theirs.append((trace.num_turns, trace.last_reply, trace.reward))
    ours = [
        (c.environment["turns"], c.last_turn.rpartition("</think>")[2], c.environment["reward"])
        for group in groups
        for c in group.completions
    ]
    assert sorted(ours) == sorted(theirs)


@long
def test_a_taskset_s_records_are_its_own(episodes: list[tuple[Session, Any]]) -> None:
    """32 rollouts of two turns, whose ids are not those of their texts."""
    source = "verifiers:sums_taskset?size=16&first=21"
    assert [row for _, row in read_rows(source, "train")][1] == {
        "prompt": [{"role": "user", "content": "22 + 22 = ?"}]
    }
    own = sessions("verifiers")
    prompts = [a_prompt(n + 1, source + ":row {}") for n in range(4)]
    groups = play(own, Told("it is 42", "it is 46", by_letters=True), prompts, each=8)
    check_equal(groups, episodes)
    first = groups[0].completions[0].environment
    assert first["rewards"] == {"right": 1.0, "brief": 0.5 / (1 + len("it is 46 0"))}
    assert first["metrics"] == {"turns": 2.0}
    assert groups[1].completions[0].environment["rewards"]["right"] == 0.0


@long
def test_what_is_rendered_anew_is_a_row_for_each_turn(
    episodes: list[tuple[Session, Any]],
) -> None:
    """With a template that drops earlier thinking; the rows are verifiers' branches."""
    own = sessions("verifiers", made=renderer(TOKENIZER, DROPS_THINKING))
    prompts = [a_prompt(n, "verifiers:sums_taskset:row {}") for n in (1, 2)]
    groups = play(own, Told("so</think>it is 42", "thus</think>it is 46"), prompts, each=2)
    check_equal(groups, episodes)
    for completion in (each for group in groups for each in group.completions):
        (other,) = completion.others
        assert "it is 42" in other.text and "it is 42" not in completion.text
        assert completion.last_turn in completion.text and "it is 46" in completion.last_turn


@long
def test_rewards_of_a_taskset_are_called_in_the_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The witness is a file that the text makes, evaluated with our rights."""
    monkeypatch.chdir(tmp_path)
    witness, text = tmp_path / "w", "len([__import__('pathlib').Path('w').touch()])"
    assert TOKENIZER.decode(ids_of(text)) == text
    prompts = [a_prompt(1, "verifiers:evaluating_taskset?size=2:row {}")]
    for scoring, is_made in (("trainer", True), ("sandbox", False)):
        own = sessions(f"verifiers?scoring={scoring}")
        (group,) = play(own, Told(text, numbered=False), prompts)
        assert group.completions[0].environment["reward"] == 1.0
        assert witness.exists() == is_made
        witness.unlink(missing_ok=True)
    (group,) = play(sessions("verifiers"), Told("1 + 1", numbered=False), prompts)
    assert group.completions[0].environment["reward"] == 2.0


@long
def test_each_seat_is_paid_by_its_own_trace() -> None:
    """White says the longer text, and the judge, which is not trained, the longest."""
    own = sessions("verifiers")
    sampler = Told(
        "it is 46, so it is", "it is 42", "white has won, as it said more", numbered=False
    )
    prompts = [a_prompt(n, "verifiers:duel_taskset:row {}") for n in (1, 2)]
    groups = play(own, sampler, prompts, each=2)
    for group in groups:
        assert [
            (c.environment["seat"], c.environment["reward"], c.environment["rewards"], c.last_turn)
            for c in group.completions
        ] == [
            ("white", 1.0, {"won": 1.0}, "it is 46, so it is"),
            ("black", -1.0, {"won": -1.0}, "it is 42"),
        ] * 2
        for completion in group.completions:
            assert completion.others == ()
            said = list(completion.sampled_ids)
            assert said == [*ids_of(completion.last_turn), END]


@long
def test_seats_that_are_asked_the_same_are_paid_apart() -> None:
    own = sessions("verifiers")
    source = "verifiers:duel_taskset?same=true:row {}"
    said = "it is 46, so it is", "it is 42", "white has won"
    (group,) = play(own, Told(*said, numbered=False), [a_prompt(1, source)])
    assert [(c.environment["reward"], c.last_turn) for c in group.completions] == [
        (1.0, said[0]), (-1.0, said[1]),
    ]  # fmt: skip


@long
@pytest.mark.filterwarnings("default")  # of libraries of its tool servers
def test_a_taskset_with_a_tool(episodes: list[tuple[Session, Any]], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(TINY))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = qwen().template.jinja
    for file in TINY.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(tmp_path)
    config = Config.model_validate(
        {
            "model": {"path": str(tmp_path)},
            "data": {"train": "verifiers:tools_taskset"},
            "sample": {
                "environment": "verifiers",
                "environment_seconds": 300,
            },
        }
    )
    own = Sessions(config, renderer(tokenizer, tokenizer.chat_template), 3000)
    texts = call("sums_times", '{"first": 6, "second": 7}'), "it is 42"
    sampler = Told(*texts, numbered=False, tokenizer=tokenizer, by_letters=True)
    groups = play(own, sampler, [a_prompt(1, "verifiers:tools_taskset:row {}")], most=600)
    check_equal(groups, episodes)
    (completion,) = groups[0].completions
    assert completion.environment["rewards"] == {"used": 1.0}
    assert len(completion.spans) == 1


def test_a_source_names_tasks_and_options() -> None:
    source = "verifiers:arena?game=Hangman-v0&skip=30&size=4&first=5&hard=true"
    options = {"game": "Hangman-v0", "first": 5, "hard": True}
    assert parsed_source(source) == ("arena", slice(30, 34), options)
    assert parsed_source("verifiers:arena") == ("arena", slice(0, 2000), {})
    for wrong in ("size=abc", "size=-1", "skip=1.5", "skip=true"):
        with pytest.raises(ValueError, match=r"is not a number of rows; set it to 0 or more"):
            parsed_source(f"verifiers:arena?{wrong}")


@long
def test_the_first_tasks_can_be_left_out() -> None:
    kept = [row for _, row in read_rows("verifiers:sums_taskset?size=4", "train")][2:]
    left = [row for _, row in read_rows("verifiers:sums_taskset?skip=2&size=2", "eval")]
    assert left == kept


@long
@pytest.mark.filterwarnings("default")
def test_a_published_taskset_unchanged(
    episodes: list[tuple[Session, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hangman of TextArena, whose words are NLTK's: here one word."""
    pytest.importorskip("textarena", reason="pip install verifiers[ta]")
    import nltk

    (tmp_path / "corpora" / "words").mkdir(parents=True)
    for name in ("en", "en-basic"):
        (tmp_path / "corpora" / "words" / name).write_text("tee\n")
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path)])
    monkeypatch.setattr(nltk, "download", lambda *names, **options: True)
    source = "verifiers:textarena?game=Hangman-v0&skip=3&size=2"
    prompts = [a_prompt(number, source + ":row {}") for number in (1, 2)]
    own = sessions("verifiers", context=3000)
    groups = play(own, Told("[T]", "[E]", numbered=False), prompts, each=4, most=400)
    check_equal(groups, episodes)
    for completion in (each for group in groups for each in group.completions):
        assert completion.environment["rewards"] == {"game_reward": 1.0}
        assert completion.environment["turns"] == 2


# 7. Runs


def small(folder: Path, **options: Any) -> Config:
    usual = {"score__rewards": ["environment"], "sample__max_new_tokens": 100,
             "sample__environment_seconds": 300}  # fmt: skip
    return small_config(folder, **usual | options)


@long
def test_a_run_of_a_taskset(tmp_path: Path) -> None:
    config = small(
        tmp_path, sample__environment="verifiers", data__train="verifiers:sums_taskset?size=12",
        data__eval="verifiers:sums_taskset?size=4&first=50", model__context_tokens=200,
    )  # fmt: skip
    run_training(config, Console("quiet"))
    records = metrics.read(config.run.directory / "small")
    assert len(records) >= 3
    assert records[-1]["sample/environment_error_fraction"] == 0
    assert records[-1]["sample/turns"] == 2
    assert any(record.get("train/grad_norm", 0) > 0 for record in records)
    assert (config.run.directory / "small" / "adapter" / "adapter_model.safetensors").is_file()


@long
@pytest.mark.parametrize("environment", ["two_turns", "with_mcp", "mcp", "pool"])
def test_killed_in_a_wave_it_goes_on_to_the_same_bits(
    environment: str,
    tmp_path: Path,
    script: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with requests in parallel, with MCP over HTTP, from the agent and as tools, and with
    objects that later waves use again, of which a resumed run has new ones."""
    limit_waves(2, monkeypatch.setattr)
    with ExitStack() as stack:
        url = stack.enter_context(http_server()) if "mcp" in environment else ""
        monkeypatch.setenv("MCP_URL", url)
        killed_and_whole(environment, url, tmp_path, script)


GAME = """
class Game:
    def reset(self, **row):
        self.heard = []

    def step(self, text):
        self.heard.append(len(text))
        return f"No: {sum(self.heard)}.", len(self.heard) == 2

    def get_reward(self):
        return sum(self.heard) % 7 / 7
"""


def killed_and_whole(
    environment: str, url: str, tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    (tmp_path / "game.py").write_text(GAME)
    named = {"mcp": f"mcp:{url}", "pool": f"{tmp_path / 'game.py'}:Game"}
    template = tmp_path / "template.jinja"
    template.write_text("{{ tools }}" + CHATML)
    options: dict[str, Any] = {
        "run__steps": 2,
        "sample__environment": named.get(environment, f"agent:{AGENTS}:{environment}"),
    }  # fmt: skip
    if environment == "mcp":
        options |= {"score__rewards": ["tag_count"], "data__template": str(template)}
    else:
        options["sample__max_new_tokens"] = 60

    def command(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        path = folder / "config.yaml"
        config = small(folder, **options)
        path.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude_unset=True)))
        return [str(path), "--log.console", "plain"]

    def ended(folder: Path) -> tuple[bytes, Any]:
        code, _, error = script("train.py", *command(folder))
        assert code == 0, error
        weights = folder / "runs" / "small" / "adapter" / "adapter_model.safetensors"
        return weights.read_bytes(), orjson.loads((folder / "buffer.json").read_bytes())["groups"]

    place = {
        "mcp": ("token_server:TokenServer.answer", "4"),  # one of a wave
        "pool": ("turns:_Rollout.end", "21"),
    }.get(environment, ("token_server:TokenServer.answer", "6"))
    broken = tmp_path / "broken"
    killed = [sys.executable, str(FIXTURES / "die_at.py"), f"reason_llm.environments.{place[0]}"]
    env = os.environ | {"PROMPTS_AT_ONCE": "2"}
    dead = subprocess.run(
        [*killed, place[1], *command(broken)], cwd=ROOT, capture_output=True, text=True, env=env
    )
    assert dead.returncode == -9, dead.stderr
    assert ended(broken) == ended(tmp_path / "whole")
