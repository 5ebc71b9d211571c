"""``scripts/chat.py`` itself: in a pipe, and typed to in a real terminal (tmux)."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import ROOT, TINY
from reason_llm.chat import Chat, Options, find_subject
from reason_llm.config import Config
from reason_llm.config_file import to_yaml
from reason_llm.model import adapters
from reason_llm.model.base import Model

CHAT = str(ROOT / "scripts" / "chat.py")
QUESTION = "What is 3 + 4?"


def call(*arguments: str, message: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, CHAT, *arguments], input=message, capture_output=True, text=True,
        cwd=ROOT, timeout=120, check=False,
    )  # fmt: skip


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
    adapters.save(model.policy, folder / "adapter")
    config = small_run(model__path=str(tmp_path / "model"))
    (folder / "resolved_config.yaml").write_text(to_yaml(config))
    return folder


def test_a_message_piped_in_is_answered_by_a_hostile_model(tmp_path: Path) -> None:
    """The tiny model with a vocabulary in which its 7 is ESC and its 0 is the byte CSI."""
    folder = tmp_path / "hostile"
    shutil.copytree(TINY, folder)
    tree = json.loads((folder / "tokenizer.json").read_text())
    vocab = tree["model"]["vocab"]
    for digit, byte in zip("70", (0x1B, 0x9B), strict=True):
        other = next(c for c, b in byte_alphabet().items() if b == byte)
        vocab[digit], vocab[other] = vocab[other], vocab[digit]
    (folder / "tokenizer.json").write_text(json.dumps(tree))
    ended = call(str(folder), "--temperature", "0", message=QUESTION)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.endswith("\n")
    assert "<answer>\\x1b</answer>" in ended.stdout
    assert "\ufffd" in ended.stdout  # 0x9b alone is no character
    assert all(c.isprintable() for c in ended.stdout.replace("\n", ""))


def byte_alphabet() -> dict[str, int]:
    """How a byte-level vocabulary spells bytes. Source: bytes_to_unicode of GPT-2's encoder."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


def test_bad_input_is_one_line() -> None:
    ended = call("docs", message=QUESTION)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: docs is neither a run .* nor a model .*; name .*\n", ended.stderr)


class Terminal:
    """A tmux of its own, 80 columns wide."""

    def __init__(self, socket: Path, command: str) -> None:
        self.socket = str(socket)
        self.tmux("new-session", "-d", "-x", "80", "-y", "40", f"{command}; echo ended $?; cat")

    def tmux(self, *arguments: str) -> str:
        return subprocess.run(
            ["tmux", "-f", "/dev/null", "-S", self.socket, *arguments],
            capture_output=True, text=True, check=True, cwd=ROOT, timeout=20,
            env={**os.environ, "LC_ALL": "C.UTF-8"},
        ).stdout  # fmt: skip

    def type(self, line: str) -> None:
        self.tmux("send-keys", "-l", line)
        self.tmux("send-keys", "Enter")

    def wait(self, text: str, times: int = 1, styles: bool = False) -> str:
        """The screen, once it holds the text."""
        for _ in range(600):
            shown = self.tmux("capture-pane", "-p", "-J", *(["-e"] if styles else []))
            if shown.count(text) >= times:
                return shown
            time.sleep(0.1)
        raise AssertionError(f"{text!r} did not come:\n{shown}")


@pytest.fixture
def terminal(run_folder: Path, tmp_path: Path) -> Iterator[Terminal]:
    if shutil.which("tmux") is None:
        pytest.skip("tmux is not installed")
    opened = Terminal(
        tmp_path / "tmux", f"{sys.executable} {CHAT} {run_folder} --temperature 0 --seed 0"
    )
    yield opened
    opened.tmux("kill-server")


def test_typed_to_answered_and_switched(terminal: Terminal, run_folder: Path) -> None:
    chat = Chat(find_subject(str(run_folder), None), Options(temperature=0, max_new_tokens=32))
    tuned = "".join(chat.answer(QUESTION))
    chat.messages, chat.uses_adapter = [], False
    plain = "".join(chat.answer(QUESTION))
    terminal.wait("adapter> ")
    terminal.type(QUESTION)
    screen = terminal.wait("adapter> ", times=2)
    assert tuned != plain
    assert tuned.split("\n")[0] in screen
    terminal.type("/base")
    terminal.wait("base> ")
    terminal.type("/new")
    terminal.wait("base> ", times=2)
    terminal.type("What is 3 \\")
    terminal.wait("... ")
    terminal.tmux("send-keys", "C-c")  # a message given up
    terminal.wait("base> ", times=3)
    terminal.tmux("send-keys", "Up", "Up", "Up", "Up", "Enter")  # history: the question again
    assert plain.split("\n")[0] in terminal.wait("base> ", times=4)
    dim = terminal.wait("<think>", styles=True)
    assert "\x1b[2m<think>" in dim  # the base thinks before it answers
    terminal.type("/tempreature 1")
    terminal.wait("/tempreature is no command; did you mean /temperature?")
    terminal.type("/max_new_tokens 4000")
    terminal.type("Talk")
    terminal.wait("base> Talk\n")
    time.sleep(0.5)
    terminal.tmux("send-keys", "C-c")
    screen = terminal.wait("(stopped)")
    assert "Traceback" not in screen
    terminal.tmux("send-keys", "C-d")
    terminal.wait("ended 0")
