"""``scripts/chat.py`` itself: in a pipe, and typed to in a real terminal (tmux)."""

import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from conftest import ROOT, TINY
from hostile import hostile_model
from reason_llm.app.chat import ChatOptions, ChatSession, find_subject
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from reason_llm.model import adapters
from reason_llm.model.base import Model
from terminals import Terminal

CHAT = str(ROOT / "scripts" / "chat.py")
QUESTION = "What is 3 + 4?"


def call(*arguments: str, message: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHAT, *arguments],
        input=message,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=False,
    )


@pytest.fixture
def run_folder(small_run: Callable[..., Config], model: Model, tmp_path: Path) -> Path:
    """What a run leaves, with an adapter that changes the answers, and a base that does not stop by
    itself."""
    shutil.copytree(TINY, tmp_path / "model")
    for name in ("tokenizer_config.json", "generation_config.json"):
        file = tmp_path / "model" / name
        change = {"eos_token": "<|endoftext|>"} if "tok" in name else {"eos_token_id": 0}
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    for parameter in model.policy.parameters():
        if parameter.requires_grad:
            parameter.data *= 3
    folder = tmp_path / "runs" / "small"
    adapters.snapshot(model.policy).write(folder / "adapter")
    config = small_run(model__path=str(tmp_path / "model"))
    (folder / "resolved_config.yaml").write_text(to_yaml(config))
    return folder


@pytest.mark.long
def test_a_message_piped_in_is_answered_by_a_hostile_model(tmp_path: Path) -> None:
    folder = hostile_model(tmp_path / "hostile")
    ended = call(str(folder), "--temperature", "0", message=QUESTION)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("\n")
    assert "<answer>\\x1b</answer>" in ended.stdout
    assert "\ufffd" in ended.stdout  # 0x9b alone is no character
    assert all(c.isprintable() for c in ended.stdout.replace("\n", ""))


@pytest.mark.parametrize("lines", [1, 2])
def test_all_lines_of_a_pipe_are_one_message(
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[..., tuple[int, str, str]],
    run_folder: Path,
    lines: int,
) -> None:
    message = "\n".join([QUESTION] * lines)
    chat = ChatSession(
        find_subject(str(run_folder), None), ChatOptions(temperature=0, max_new_tokens=8)
    )
    answer = "".join(chat.answer(message))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{message}\n".encode())))
    code, shown, error = script(
        "chat.py", run_folder, "--temperature", "0", "--max-new-tokens", "8"
    )
    assert (code, shown) == (0, f"{answer}\n")
    said = "2 lines on standard input are one message; call again for another one\n"
    assert error == (said if lines == 2 else "")


@pytest.mark.parametrize(
    ("arguments", "message", "problem"),
    [
        (["docs"], QUESTION, r"docs is neither a run .* nor a model .*; name .*"),
        ([str(TINY)], " \n", r"standard input is empty; pipe a message in, .*"),
        ([str(TINY), "--top-k", "-1"], QUESTION, r"top_k='-1': input should be .*"),
        ([], "", r"the following arguments are required: target; see --help"),
        ([str(TINY), "--temprature", "1"], "", r"unrecognized arguments: --temprature 1; .*"),
        ([str(TINY), "--adapter", "runs/x"], QUESTION, r"--adapter runs/x holds no adapter_con.*"),
        ([str(TINY), "--data.template", "r2"], QUESTION, r"data\.template='r2' is not one of .*"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    script: Callable[..., tuple[int, str, str]],
    arguments: list[str],
    message: str,
    problem: str,
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(message.encode())))
    code, shown, error = script("chat.py", *arguments)
    assert (code, shown) == (2, "")
    assert re.fullmatch(f"error: {problem}\n", error)


@pytest.fixture
def terminal(run_folder: Path, tmp_path: Path) -> Iterator[Terminal]:
    command = f"{sys.executable} {CHAT} {run_folder} --temperature 0 --seed 0"
    with closing(Terminal(tmp_path, command)) as opened:
        yield opened


def is_asking(shown: str) -> bool:
    """Whether the last line of the screen is an empty prompt."""
    return shown.rstrip().endswith("\n>")


@pytest.mark.long
def test_typed_to_and_answered(terminal: Terminal, run_folder: Path) -> None:
    chat = ChatSession(
        find_subject(str(run_folder), None), ChatOptions(temperature=0, max_new_tokens=32)
    )
    answer = "".join(chat.answer(QUESTION)).split("\n")[0]
    terminal.wait_until(is_asking, "a prompt")
    terminal.type(QUESTION)
    terminal.wait(f"> {QUESTION}\n{answer}")
    terminal.wait_until(is_asking, "a prompt")
    terminal.tmux("send-keys", "What is", "C-c")  # a message given up
    terminal.tmux("send-keys", "Up", "Enter")  # history: the question again
    terminal.wait(f"> {QUESTION}\n", times=2)
    terminal.wait_until(is_asking, "a prompt")
    terminal.tmux("set-buffer", "What is\n3 + 4?\n")
    terminal.tmux("paste-buffer", "-p", "-r")
    terminal.wait("> What is\n3 + 4?\n")
    terminal.tmux("send-keys", "Enter")  # pasted lines are one message
    terminal.wait_until(is_asking, "a prompt")
    terminal.tmux("send-keys", "C-d")
    terminal.wait("ended 0")


@pytest.mark.long
def test_an_answer_is_stopped(run_folder: Path, tmp_path: Path) -> None:
    command = f"{sys.executable} {CHAT} {run_folder} --base --max-new-tokens 4000"
    with closing(Terminal(tmp_path, command)) as terminal:
        terminal.wait_until(is_asking, "a prompt")
        terminal.type("Talk")
        terminal.wait_until(lambda shown: bool(shown.partition("> Talk\n")[2].strip()), "an answer")
        terminal.tmux("send-keys", "C-c")
        terminal.wait_until(is_asking, "a prompt")  # or a slow terminal may lose the end
        terminal.tmux("send-keys", "C-d")
        assert "Traceback" not in terminal.wait("ended 0")
