"""What a run shows on a real terminal (tmux), in a pipe and when it is to be quiet."""

import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from conftest import ROOT, until
from hostile import HOSTILE, hostile_model
from reason_llm.config import Config
from reason_llm.config.file import to_yaml
from terminals import ALLOWED, Terminal

TRAIN = str(ROOT / "scripts" / "train.py")


def write_config(small_run: Callable[..., Config], folder: Path, **options: object) -> Path:
    path = folder / "config.yaml"
    path.write_text(to_yaml(small_run(run__name=None, **options)))
    return path


@pytest.mark.long
def test_a_run_of_a_hostile_model_on_a_terminal(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    (tmp_path / "rewards.py").write_text(
        "import functools, logging\n"
        "@functools.cache\n"
        "def warn():\n"
        f"    logging.getLogger('reason_llm').warning('careful: ' + {HOSTILE!r})\n"
        "def seven(completion, answer):\n"
        "    warn()\n"
        "    return float('7' in answer)\n"
    )
    config = write_config(
        small_run,
        tmp_path,
        run__steps=15,
        model__path=str(hostile_model(tmp_path / "model")),
        score__rewards=[{"custom": f"{tmp_path / 'rewards.py'}:seven"}],
        data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"),
        eval={"every": 5, "limit": 4},
    )
    raw = tmp_path / "raw"
    command = f"env -u NO_COLOR {sys.executable} {TRAIN} {config}"
    with closing(Terminal(tmp_path, command, width=60, raw=raw)) as terminal:
        shown = terminal.wait("ended 0")
        assert until(lambda: b"ended 0" in raw.read_bytes())
        assert "━" not in shown  # the bars are gone, the lines are there
        assert re.search(r"^step 15/15  reward", shown, re.MULTILINE)
    written = raw.read_bytes().decode(errors="surrogateescape")
    assert "careful:" in written
    assert "\\x1b" in written  # what the model said
    assert "\x1b[2K" in written
    assert re.search(r"step +━.* [1-9]\d*/15 config", ALLOWED.sub("", written))  # the run's bar
    assert all(c.isprintable() for c in ALLOWED.sub("", written).replace("\b", ""))


@pytest.mark.long
def test_a_pipe_gets_plain_lines(small_run: Callable[..., Config], tmp_path: Path) -> None:
    config = write_config(small_run, tmp_path, run__steps=1)
    ended = subprocess.run(
        [sys.executable, TRAIN, str(config)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=600,
        check=True,
    )
    first, second, *_ = ended.stdout.splitlines()
    assert first == "run config: loading PyTorch and Transformers"
    assert second.startswith("run config starts: 64 prompts")
    assert re.search(r"^step 1/1  reward \d\.\d{3}  sampling", ended.stdout, re.MULTILINE)
    assert all(c.isprintable() for c in ended.stdout.replace("\n", ""))
    assert ended.stderr == ""


def test_a_warning_in_a_pipe_is_one_line_of_any_length() -> None:
    long = "the run resumes with train.learning_rate: 0.002 -> 0.001: from here on it is another"
    code = (
        "import logging; from reason_llm.app.console import Console; Console('auto'); "
        f"logging.getLogger('reason_llm').warning('%s', '{long} experiment')"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    ).stdout
    assert shown == f"WARNING  {long} experiment\n"


def test_quiet_shows_nothing(
    small_run: Callable[..., Config], tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    config = write_config(small_run, tmp_path, run__steps=1)
    assert script("train.py", config, "--quiet") == (0, "", "")
    assert (tmp_path / "runs" / "config" / "summary.json").exists()
