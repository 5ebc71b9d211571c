"""``reason-llm serve``: what OpenAI's SDK gets of a run and of its base, and what is refused."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch

from conftest import TINY
from reason_llm.app import serve as serving
from reason_llm.app.chat import ChatSession, find_subject, options_of
from reason_llm.app.cli import main
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from reason_llm.model import adapters, base
from reason_llm.model.base import Model

ASKED: Any = [{"role": "user", "content": "What is 3 + 4?"}]
GREEDY: Any = {"messages": ASKED, "temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose adapter changes the answers."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    tree = {"stage": "sft", "model": {"path": str(TINY)}, "run": {"name": "sums"},
            "data": {"train": "none", "system_prompt": "Be brief, please."}}  # fmt: skip
    config = Config.model_validate(tree)
    model = Model(config.model, base.load_tokenizer(str(TINY)), seed=0, checkpointing=False)
    torch.manual_seed(0)
    for parameter in model.policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.15)
    adapters.snapshot(model.policy).write(folder / "adapter")
    (folder / "resolved_config.yaml").write_text(to_yaml(config))
    return folder


@pytest.fixture(scope="module")
def url(run_folder: Path) -> Iterator[str]:
    """Address of a server in this process, which ends with the tests."""
    subject = find_subject(str(run_folder), None)
    chat = ChatSession(subject, options_of(subject, {}))
    server = serving.PolicyServer(chat, serving.names_of(subject, str(run_folder)))
    said: list[str] = []
    has_said, stop = threading.Event(), list[Callable[[], Any]]()

    def say(text: str) -> None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        stop.append(lambda: loop.call_soon_threadsafe(task.cancel))
        said.append(text)
        has_said.set()

    def run() -> None:
        with pytest.raises(asyncio.CancelledError):
            serving.serve(server, "127.0.0.1", 0, say)

    thread = threading.Thread(target=run)
    thread.start()
    assert has_said.wait(300)
    yield said[0].partition(" at ")[2].partition(";")[0]
    stop[0]()
    thread.join()


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def test_a_chat_is_answered_by_the_adapter_or_its_base(client: openai.OpenAI) -> None:
    assert [each.id for each in client.models.list()] == ["sums", str(TINY)]
    plain = [{"role": "system", "content": "Be brief, please."}, *ASKED]
    for name in ("sums", str(TINY)):
        whole = client.chat.completions.create(model=name, **GREEDY)
        same = client.chat.completions.create(model=name, **GREEDY | {"messages": plain})
        assert (whole.model, whole.choices[0].message) == (name, same.choices[0].message)
        parts = list(client.chat.completions.create(
            model=name, **GREEDY, stream=True, stream_options={"include_usage": True}
        ))  # fmt: skip
        text = "".join(each.choices[0].delta.content or "" for each in parts if each.choices)
        assert text == whole.choices[0].message.content
        assert parts[-1].usage == whole.usage
        assert len(parts) > 4  # as it is sampled
        answer = client.responses.create(
            model=name, input=ASKED, temperature=0, max_output_tokens=24
        )
        assert answer.output_text == text
    texts = {client.chat.completions.create(model=n, **GREEDY).choices[0].message.content
             for n in ("sums", str(TINY))}  # fmt: skip
    assert len(texts) == 2


def test_a_stop_string_is_in_no_part(client: openai.OpenAI) -> None:
    asked: Any = {"model": str(TINY), **GREEDY, "max_tokens": 48}
    text = client.chat.completions.create(**asked).choices[0].message.content or ""
    assert len(text) > 8
    stop = text[4:7]
    whole = client.chat.completions.create(**asked, stop=[stop, "never"]).choices[0]
    assert (whole.message.content, whole.finish_reason) == (text[: text.find(stop)], "stop")
    parts = list(client.chat.completions.create(**asked, stop=stop, stream=True))
    sent = [each.choices[0].delta.content or "" for each in parts]
    assert "".join(sent) == text[: text.find(stop)]
    assert parts[-1].choices[0].finish_reason == "stop"


def test_a_seed_repeats_the_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": "sums", **GREEDY, "temperature": 1}
    first, second, other = (
        client.chat.completions.create(**asked, seed=seed).choices[0].message for seed in (7, 7, 8)
    )
    assert first == second != other


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        ({"model": "other"}, 404, "model='other' is not served; there is sums"),
        ({"echo": True}, 400, "echo=True is not offered"),
        ({"n": 2}, 400, "n=2 is not offered"),
        ({"temperature": -1}, 400, "temperature='-1'"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"messages": [{"role": "user", "content": "7 " * 4000}]}, 400, "leave no room"),
        ({"messages": [{"role": "user", "content": "7 " * 5_000_000}]}, 413, "8,388,608 bytes"),
        ({"logprobs": True}, 400, "logprobs=True is not offered"),
    ],
)
def test_what_is_not_offered_is_refused(url: str, body: Any, status: int, says: str) -> None:
    answer = httpx.post(f"{url}/chat/completions", json=GREEDY | body, timeout=300)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


def test_a_page_of_another_site_gets_nothing(url: str) -> None:
    """By a name that resolves to this machine, or a form that a browser sends without asking."""
    address = f"{url}/chat/completions"
    elsewhere = httpx.post(address, json=GREEDY, headers={"Host": "evil.example"}, timeout=300)
    form = httpx.post(address, content=b"{}", headers={"Content-Type": "text/plain"}, timeout=300)
    assert (elsewhere.status_code, form.status_code) == (421, 415)


def test_other_machines_need_a_key(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(serving.KEY, raising=False)
    assert main(["serve", str(run_folder), "--host", "0.0.0.0"]) == 2
    assert "set the environment variable REASON_LLM_API_KEY" in capsys.readouterr().err
    monkeypatch.setenv(serving.KEY, "secret")
    assert serving.key_for("0.0.0.0") == "secret"


def test_the_command_of_vllm_serves_the_same(run_folder: Path) -> None:
    subject = find_subject(str(run_folder), None)
    asked = {"data.template_arguments": {"thinks": False}, "model.trust_remote_code": True}
    subject = subject._replace(config=subject.config.with_options(asked))
    command = serving.vllm_command(subject, str(run_folder), "127.0.0.1", 8000, "{{ messages }}")
    template, adapter = run_folder / "chat_template.jinja", run_folder / "adapter"
    assert template.read_text() == "{{ messages }}"
    options = [
        *("--host", "127.0.0.1", "--port", "8000", "--dtype", "float32", "--trust-remote-code"),
        *("--default-chat-template-kwargs", '{"thinks":false}', "--chat-template", str(template)),
    ]
    lora = ["--enable-lora", "--max-lora-rank", "32", "--lora-modules", f"sums={adapter}"]
    assert command == ["vllm", "serve", str(TINY), *options, *lora]
