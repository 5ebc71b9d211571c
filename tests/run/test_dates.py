"""Runs whose chat template reads the date: it stays that of the first start."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TINY
from reason_llm.app.chat import ChatOptions, ChatSession, find_subject
from reason_llm.config import Config
from reason_llm.loop import train
from reason_llm.run.store.document import read_document

TEMPLATE = (
    "Today is {{ strftime_now('%d %b %Y, %H:%M:%S.%f') }}.\n"
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
)
Script = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dated(small_run: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A small run whose template reads the time, so that two starts would never agree on it."""
    template = tmp_path / "dated.jinja"
    template.write_text(TEMPLATE)

    def config(**options: Any) -> Config:
        return small_run(data__template=str(template), run__save_every=1, **options)

    return config


def first_prompt(config: Config, step: int) -> str:
    folder = config.run.directory / str(config.run.name) / "buffers"
    return read_document(folder / f"step-{step:08}.json.gz").groups[0].prompt.text


def test_a_run_goes_on_with_the_date_of_its_first_start(
    dated: Callable[..., Config], caplog: pytest.LogCaptureFixture
) -> None:
    train(dated(run__steps=1, data__date="2024-07-26"))
    config = dated(run__steps=2)
    train(config)
    head = "Today is 26 Jul 2024, 00:00:00.000000.\n"
    assert [first_prompt(config, step)[: len(head)] for step in (0, 1)] == [head, head]
    assert "another experiment" not in caplog.text


@pytest.mark.long
def test_a_run_is_known_on_a_later_day_by_whatever_is_left_of_it(
    dated: Callable[..., Config],
) -> None:
    train(dated(run__steps=1))  # by today's date, at no time of the day
    config = dated(run__steps=2)
    folder = config.run.directory / str(config.run.name)
    (folder / "resolved_config.yaml").unlink()  # its checkpoints know it, too
    train(config)
    head = first_prompt(config, 0).split("\n")[0]
    assert head.endswith(", 00:00:00.000000.")
    assert first_prompt(config, 1).split("\n")[0] == head
    other = dated(run__steps=1, run__name="other", model__start=folder / "adapter",
                  data__date=None)  # fmt: skip
    (folder / "resolved_config.yaml").write_text(
        (folder / "resolved_config.yaml").read_text().split("\n", 1)[1].replace(
            f"date: '{dated_of(folder)}'", "date: '2024-07-26'")
    )  # fmt: skip
    train(other)
    assert first_prompt(other, 0).startswith("Today is 26 Jul 2024")


def dated_of(folder: Path) -> str:
    (line,) = [
        line for line in (folder / "resolved_config.yaml").read_text().splitlines()
        if line.strip().startswith("date:")
    ]  # fmt: skip
    return line.split("'")[1]


@pytest.mark.long
def test_chat_and_evaluation_of_a_run_read_its_date(
    dated: Callable[..., Config], script: Script, tmp_path: Path
) -> None:
    config = dated(run__steps=1, data__date="2024-07-26")
    train(config)
    folder = config.run.directory / str(config.run.name)
    chat = ChatSession(find_subject(str(folder), None), ChatOptions(max_new_tokens=1))
    prompt = chat.renderer.prompt("it", [{"role": "user", "content": "Hi"}], "")
    assert prompt.text.startswith("Today is 26 Jul 2024, 00:00:00.000000.\nHi")
    test = ROOT / "data" / "arithmetic_test.jsonl"
    out = tmp_path / "out"
    asked = ("evaluate.py", folder, "--sets", f"sums={test}", "--out", out, "--eval.limit", "2")
    code, _, errors = script(*asked)
    assert (code, errors) == (0, "")
    problems = [json.loads(line) for line in (out / "problems.jsonl").read_text().splitlines()]
    assert all(each["prompt"].startswith("Today is 26 Jul 2024") for each in problems)


def test_an_evaluation_of_a_model_goes_on_with_the_date_of_its_first_start(
    script: Script, tmp_path: Path
) -> None:
    model = shutil.copytree(TINY, tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "What is 1 + 1?", "answer": "2"}\n' * 2)
    out = tmp_path / "out"
    asked = (
        *("evaluate.py", model, "--sets", f"sums={rows}", "--out", out),
        *("--sample.max_new_tokens", "4"),
    )
    found = []
    for _ in range(2):
        code, shown, errors = script(*asked)
        assert (code, errors) == (0, ""), errors
        found.append((out / "problems.jsonl").read_text())
        (out / "summary.json").unlink()
    assert found[0] == found[1]
    assert "2 problems are done already" in shown
