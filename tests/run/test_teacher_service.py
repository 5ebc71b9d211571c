"""A teacher behind a URL (teacher.url): a server in this test speaks vLLM's format.

1. It gives the log-probs that the same model gives when it is loaded here, with its own prompt too.
2. A server with another tokenizer, or one that does not tell, is refused before a weight is read.
3. What is no answer, is too long or never comes is one line, without the key; the next try counts.
4. Options that contradict each other.
"""

import json
import logging
import math
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from conftest import TINY
from reason_llm.config import Config
from reason_llm.errors import ConfigError, ModelError, TrainingError
from reason_llm.loop import train
from reason_llm.model import Datum, load_tokenizer
from reason_llm.readers.teacher import TeacherService
from reason_llm.run import SILENT
from reason_llm.run.opening import open_run
from reason_llm.run.start.prepare import prepare
from reason_llm.score import service
from services import Server

Small = Callable[..., Config]
KEY = "sk-0123456789abcdef"
HINT = "{prompt} It is {answer}."


class Teacher:
    """vLLM's answers, of the tiny model."""

    def __init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
        self.tokenizer = load_tokenizer(str(TINY))
        self.changed: Callable[[dict[str, Any], list[int]], Any] = lambda answer, ids: answer

    def __call__(self, body: dict[str, Any], handler: BaseHTTPRequestHandler) -> bytes | None:
        if handler.path == "/tokenize":
            special = body["add_special_tokens"]
            ids = self.tokenizer.encode(body["prompt"], add_special_tokens=special)
            answer: Any = {"count": len(ids), "max_model_len": 4096, "tokens": ids}
            return json.dumps(self.changed(answer, ids)).encode()
        ids = body["prompt"]
        with torch.no_grad():
            logprobs = self.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
        told = [
            {str(id): {"logprob": float(logprobs[t, id]), "rank": 1, "decoded_token": None}}
            for t, id in enumerate(ids[1:])
        ]
        choice = {"index": 0, "text": "a", "finish_reason": "length", "stop_reason": None,
                  "logprobs": None, "prompt_logprobs": [None, *told]}  # fmt: skip
        answer = {"id": "cmpl-1", "object": "text_completion", "choices": [choice]}
        return json.dumps(self.changed(answer, ids)).encode()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Teacher, Server]]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    monkeypatch.setattr(service, "FIRST_WAIT_SECONDS", 0.01)
    teacher = Teacher()
    server = Server(teacher)
    yield teacher, server
    server.close()


def asking(small_run: Small, server: Server, **told: Any) -> Config:
    given = {"url": server.url, "model": "tiny"} | told
    return small_run(algorithm={"name": "opd"}, sample__completions_per_prompt=1, run__steps=1,
                     sample__max_new_tokens=8, teacher=given, train__packing="padded")  # fmt: skip


def test_it_teaches_as_the_model_loaded_here_does(
    served: tuple[Teacher, Server], small_run: Small, tmp_path: Path, monkeypatch: Any
) -> None:
    _, server = served
    monkeypatch.setenv("OUR_TEACHER", KEY)
    found = []
    for told in ({"key_env": "OUR_TEACHER"}, {"url": None, "model": str(TINY)}):
        config = asking(small_run, server, prompt=HINT, **told)
        job = prepare(config.with_options({"run.name": f"run{len(found)}"}), SILENT)
        prompts = [prompt.token_ids for prompt in job.data.prompts[:2]]
        data = [Datum.of(ids, a) for ids, a in zip(prompts, [(5, 6, 2), (7, 8, 2)], strict=True)]
        with open_run(job, SILENT) as run:
            found.append([row.on_trained("teacher_logprobs") for row in run.read(data)])
    torch.testing.assert_close(found[0], found[1], atol=1e-5, rtol=1e-5)
    assert all(row.isfinite().all() and (row < 0).all() for row in found[0])
    asked = [body for body in server.asked if body["path"] == "/v1/completions"]
    wanted = {"model": "tiny", "max_tokens": 1, "prompt_logprobs": 0}
    assert [{k: body[k] for k in wanted} for body in asked] == [wanted] * 2
    assert sorted(body["prompt"][-3:] for body in asked) == [[5, 6, 2], [7, 8, 2]]
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}


@pytest.mark.long
def test_a_run_learns_from_it(served: tuple[Teacher, Server], small_run: Small) -> None:
    summary = train(asking(small_run, served[1], prompt=HINT))
    assert summary["steps"] == 1


def test_another_tokenizer_is_refused(served: tuple[Teacher, Server], small_run: Small) -> None:
    teacher, server = served
    another = r"teacher\.url=\S+: tiny has another tokenizer than the model that learns.*; serve"
    teacher.changed = lambda answer, ids: answer | {"tokens": [*ids[:-1], ids[-1] + 1]}
    with pytest.raises(ModelError, match=another):
        prepare(asking(small_run, server), SILENT)
    teacher.changed = lambda answer, ids: {"detail": "Not Found"}
    with pytest.raises(ModelError, match=r"teacher\.url: it does not answer .*; start vLLM"):
        prepare(asking(small_run, server), SILENT)


def spoilt(change: Callable[[list[Any]], Any]) -> Callable[[dict[str, Any], list[int]], Any]:
    def changed(answer: dict[str, Any], ids: list[int]) -> Any:
        if "choices" in answer:
            choice = answer["choices"][0]
            choice["prompt_logprobs"] = change(choice["prompt_logprobs"])
        return answer

    return changed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda told: told[:-1], "no prompt_logprobs of the"),
        (lambda told: None, "no prompt_logprobs of the"),
        (lambda told: [None] * len(told), "no prompt_logprobs of the"),
        (lambda told: [{"1": {"logprob": -1}} for _ in told], "no prompt_logprobs of the"),
        (lambda told: [p and {k: {"logprob": 2.0} for k in p} for p in told], "is not a log-prob"),
        (lambda told: [p and {k: {"logprob": math.nan} for k in p} for p in told], "not a"),
        (lambda told: [*told, "x" * 2_000_000], "answer exceeds 0.0"),
    ],
)
def test_what_is_no_answer_is_one_line(
    change: Any, said: str, served: tuple[Teacher, Server], small_run: Small, monkeypatch: Any
) -> None:
    teacher, server = served
    monkeypatch.setenv("OUR_TEACHER", KEY)
    job = prepare(asking(small_run, server, key_env="OUR_TEACHER"), SILENT)
    teacher.changed = spoilt(change)
    data = [Datum.of(job.data.prompts[0].token_ids, (5, 6, 2), "row")]
    read = run_teacher(job)
    with pytest.raises(TrainingError, match=rf"teacher\.url: .*{said}.*; set it to") as told:
        read(data)
    assert "\n" not in str(told.value)
    assert KEY not in str(told.value)


def run_teacher(job: Any) -> Callable[[list[Datum]], Any]:
    """The run's teacher without a run."""
    (made,) = (reader for reader in job.run.readers if isinstance(reader, TeacherService))
    learner: Any = None  # it reads the rows' ids alone
    return lambda data: made.read(data, learner, lambda rows: None)


def test_a_refusal_tells_no_key_and_a_busy_server_is_asked_again(
    served: tuple[Teacher, Server], small_run: Small, monkeypatch: Any, caplog: Any
) -> None:
    teacher, server = served
    monkeypatch.setenv("OUR_TEACHER", KEY)
    job = prepare(asking(small_run, server, key_env="OUR_TEACHER"), SILENT)
    data = [Datum.of(job.data.prompts[0].token_ids, (5, 6, 2), "row")]
    statuses = [503, 401]

    def refuses(body: dict[str, Any], handler: BaseHTTPRequestHandler) -> bytes | None:
        if not statuses:
            return teacher(body, handler)
        handler.send_response(statuses.pop(0))
        handler.end_headers()
        handler.wfile.write(f"no, {handler.headers['authorization']}".encode())
        return None

    server.answer = refuses
    with caplog.at_level(logging.DEBUG), pytest.raises(TrainingError, match="status 401") as told:
        run_teacher(job)(data)
    assert KEY not in str(told.value) + caplog.text
    statuses.append(503)
    (row,) = run_teacher(job)(data)
    assert row.on_trained("teacher_logprobs").shape == (3,)
    monkeypatch.delenv("OUR_TEACHER")
    with pytest.raises(ConfigError, match=r"key_env=OUR_TEACHER of the teacher: .*; set it"):
        prepare(asking(small_run, server, key_env="OUR_TEACHER"), SILENT)


def test_a_slash_at_the_end_of_an_address_is_left_out(small_run: Small) -> None:
    teacher = {"url": "http://x/v1/", "model": "tiny"}
    assert small_run(algorithm={"name": "opd"}, teacher=teacher).teacher.url == "http://x/v1"
