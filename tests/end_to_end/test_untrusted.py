"""Nothing of the environment's secrets gets out, nothing is written where it should not be, and no
words of others act on the terminal."""

import json
import logging
import os
import stat
import subprocess
import sys
from pathlib import Path

import orjson
import pytest
import yaml

from conftest import ROOT, TINY
from reason_llm.app.console import Console
from reason_llm.config import TrainSection
from reason_llm.data.render import Renderer
from reason_llm.data.templates import ChatTemplate
from reason_llm.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    WriteError,
    printable,
    shown,
    without_secrets,
)
from reason_llm.files import FileLock, move_aside, write_atomically
from reason_llm.model.base import Model
from reason_llm.run.store import checkpoint
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.document import RunIdentity
from reason_llm.run.store.writer import BackgroundWriter
from reason_llm.score.code.jail import launcher
from reason_llm.train.optim import make_optimizer

CANARY = "canary-5f1c90ab77"
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
ODD = "\x1b[2J\x9b1m\u202e\u2066\u200b\ud800\0\r\n"

REWARD = """\
import os

def leaky(completion):
    raise RuntimeError(f"cannot reach the judge with {os.environ['OPENAI_API_KEY']} \\x1b[2J")
"""
PEEPING = """\
import os, pathlib, sys
seen = repr(dict(os.environ))
for file in ("/proc/self/environ", "/proc/1/environ", f"/proc/{os.getppid()}/environ"):
    try:
        seen += pathlib.Path(file).read_text()
    except OSError:
        pass
assert "canary" not in seen
"""


def call(folder: Path, tree: dict, *options: str, umask: int = 0o022) -> tuple[int, str]:
    """scripts/train.py as its users start it, with secrets in its environment; its exit code and
    all that it printed."""
    (folder / "config.yaml").write_text(yaml.safe_dump(tree))
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "train.py"), str(folder / "config.yaml"), *options],
        cwd=folder,
        capture_output=True,
        timeout=600,
        umask=umask,
        env={
            **os.environ,
            **{name: f"{CANARY}-{name}" for name in SECRETS},
            "COLUMNS": "300",
            "PYTHONPATH": str(ROOT),
        },
    )
    return ended.returncode, (ended.stdout + ended.stderr).decode()


def config(folder: Path, **score: object) -> dict:
    tests = {"asserts": "assert f(1) == 1"}
    row = {"question": "Echo.", "answer": "3", "tests": tests["asserts"]}
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (folder / "mine.py").write_text(REWARD)
    return {
        "run": {"name": "run", "directory": str(folder / "out" / "runs"), "steps": 1,
                "buffer": str(folder / "out" / "buffer.json")},
        "model": {"path": str(TINY), "adapter": {"rank": 4}},
        "data": {"train": str(folder / "rows.jsonl"), "eval": str(folder / "rows.jsonl")},
        "sample": {"prompts_per_step": 1, "completions_per_prompt": 2, "max_new_tokens": 4},
        "score": score,
    }  # fmt: skip


def files_of(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.long
@pytest.mark.parametrize("umask", [0, 0o077])
def test_secrets_get_nowhere_and_files_are_their_user_s(tmp_path: Path, umask: int) -> None:
    """Also: two real runs under two umasks."""
    rewards = [{"name": "code_tests"}, {"custom": f"{tmp_path / 'mine.py'}:leaky"}]
    tree = config(tmp_path, rewards=rewards, on_error="zero")
    code, said = call(tmp_path, tree, umask=umask)
    assert code == 0, said
    told = "(RuntimeError: cannot reach the judge with <OPENAI_API_KEY> \\x1b[2J"
    scored = f"{tmp_path / 'rows.jsonl'}:1"
    tried = f"a made-up completion of {scored}"
    for number in range(2):
        for what in (tried, scored):
            assert said.count(f"failed on {what}#{number} and counts 0 {told}") == 1
    assert CANARY not in said
    assert "\x1b" not in said
    written = files_of(tmp_path / "out")
    assert {"buffer.json", ".buffer.json.lock", "metrics.jsonl", "summary.json", "curves.png",
            "resolved_config.yaml", "state.json", "adapter_model.safetensors",
            "optimizer.safetensors"} <= {path.name for path in written}  # fmt: skip
    assert [path for path in written if CANARY.encode() in path.read_bytes()] == []
    for path in (tmp_path / "out").rglob("*"):
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode & (0o022 | umask) == 0, f"{path} {mode:o}"


@pytest.mark.long
def test_a_reward_that_stops_the_run_tells_no_secret(tmp_path: Path) -> None:
    tree = config(tmp_path, rewards=[{"custom": f"{tmp_path / 'mine.py'}:leaky"}])
    code, said = call(tmp_path, tree)
    assert code == 2
    assert said.splitlines()[-1].startswith("error: the reward leaky failed")
    assert "<OPENAI_API_KEY>" in said
    assert CANARY not in said
    assert "\x1b" not in said


def test_a_program_sees_nothing_of_the_environment(
    sandbox: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = sandbox.run(PEEPING + "print(sorted(os.environ))")  # type: ignore[attr-defined]
    assert ended.status == 0, ended.stderr
    assert set(eval(ended.stdout)) <= {
        *launcher._ENVIRONMENT, "PYTHONPATH", "LC_CTYPE", "LD_LIBRARY_PATH"
    }  # fmt: skip


def test_secrets_are_told_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SECRETS, "github_token", "DB_PASSWD"):
        monkeypatch.setenv(name, f"value of {name}")
        assert without_secrets(f"a value of {name} b") == f"a <{name}> b"
    for name, value in (
        ("MONKEYS", "value of it"),
        ("SHORT_KEY", "EMPTY"),
        ("KEYBOARD", "value 2"),
    ):
        monkeypatch.setenv(name, value)
        assert without_secrets(value) == value


def test_nothing_shown_acts_on_a_terminal(capsys: pytest.CaptureFixture) -> None:
    assert printable(ODD) == r"\x1b[2J\x9b1m\u202e\u2066\u200b\ud800\x00\r\n"
    assert shown(DataError("a\nb" + "c" * 5000)).startswith("a\\nbccc")
    assert len(shown(DataError("c" * 5000))) == 2001
    console = Console("plain")
    console.line(f"data {ODD} file [bold]")
    logging.getLogger("reason_llm.anywhere").warning("file %s", ODD)
    out = capsys.readouterr().out
    assert out.count("\n") == 2
    assert out.replace("\n", "").isprintable()
    assert "[bold]" in out


def test_a_terminal_that_knows_ascii_alone(tmp_path: Path) -> None:
    code = "from reason_llm.app.console import Console; Console('plain').line('35 \\u2192 91 é')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert ended.stdout == b"35 \\u2192 91 \\xe9\n"


def test_links_are_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    target = tmp_path / "buffer.json"
    (tmp_path / ".buffer.json.writing").symlink_to(victim)
    write_atomically(target, b"new")
    assert target.read_bytes() == b"new"
    target.unlink()
    target.symlink_to(victim)
    write_atomically(target, b"newer")  # the link itself is replaced
    assert not target.is_symlink()
    for make in (os.symlink, os.link):
        lock = tmp_path / f".{make.__name__}.lock"
        make(victim, lock)
        with pytest.raises(WriteError, match="cannot be written"), FileLock(lock, "it"):
            pass
    os.mkfifo(tmp_path / ".fifo.lock")
    with pytest.raises(WriteError), FileLock(tmp_path / ".fifo.lock", "it"):
        pass
    (tmp_path / "gone.json").symlink_to(tmp_path / "nowhere")
    move_aside(tmp_path / "gone.json")
    assert not (tmp_path / "gone.json").is_symlink()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize(
    ("template", "wrong"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "took"),
        ("{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}", "took|recur"),
        ("{{ range(10 ** 9 // 3) }}", "Range too big"),
        ("{{ messages[0].content * 20000000 }}", "more than 16,777,216 characters"),
        ("{{ range(1000000000) }}", "Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "recursion"),
        ("{{ '{9}'.format(1) }}", "out of range"),
    ],
)
def test_chat_templates_are_bounded(
    template: str, wrong: str, tokenizer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    if wrong.startswith("took"):
        monkeypatch.setattr("reason_llm.data.render.RENDER_SECONDS", 0.5)
    renderer = Renderer(tokenizer, ChatTemplate("their template", template), None)  # type: ignore[arg-type]
    with pytest.raises((ConfigError, DataError), match=wrong):
        renderer.prompt("rows.jsonl:1", [{"role": "user", "content": "hi"}], "3")


def test_an_adapter_s_config_in_a_checkpoint_is_never_followed(
    tmp_path: Path, shared_model: Model
) -> None:
    optimizer = make_optimizer(shared_model.policy.parameters(), TrainSection())
    run = RunIdentity("run-a", "small", {})
    with BackgroundWriter() as writer:
        state = checkpoint.save(
            tmp_path, RunState(run, 1, None), shared_model, {"policy": optimizer}, 2, writer
        )
    assert state.folder is not None
    hostile = state.folder / "adapter_config.json"
    content = orjson.loads(hostile.read_bytes())
    content["base_model_name_or_path"] = "/nowhere/evil"
    content["auto_mapping"] = {"base_model_class": "X", "parent_library": "evil"}
    hostile.write_bytes(orjson.dumps(content))
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is not what was written"):
        checkpoint.read(state.folder)
    checkpoint.restore(state, shared_model, {"policy": optimizer})  # it reads the tensors alone
