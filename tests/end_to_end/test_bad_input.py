"""Bad input: one line with cause, value and fix, exit code 2, nothing written, nothing lost.

A case or two for each place that can refuse; the tests beside each module have the rest. The
command is ``scripts/train.py`` itself, called in this process; two cases run as a real process.
"""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import yaml

from conftest import ROOT, TINY, tree_of
from hostile_cases import HOSTILE
from reason_llm.files import FileLock
from reason_llm.run.store.buffer import RolloutBuffer, lock
from reason_llm.run.store.document import RunIdentity

TRAIN = ROOT / "scripts" / "train.py"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A good config in a folder of its own, which the cases below spoil."""
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 1 + 2?", "answer": "3"}\n')
    tree = {
        "run": {"directory": str(tmp_path / "runs"), "buffer": str(tmp_path / "buffer.json"),
                "steps": 1},
        "model": {"path": str(TINY), "adapter": {"rank": 4}},
        "data": {"train": str(tmp_path / "rows.jsonl")},
        "sample": {"prompts_per_step": 1, "completions_per_prompt": 2, "max_new_tokens": 4},
    }  # fmt: skip
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.fixture
def call(script: Callable[..., tuple[int, str, str]]) -> Callable[..., tuple[int, str]]:
    """train.py: its exit code and standard error."""
    return lambda *arguments: script("train.py", *arguments)[::2]


def tiny_copy(folder: Path, **changes: Any) -> Path:
    """model/tiny without some files, or with some replaced."""
    names = {
        "tokenizer": "tokenizer_config.json",
        "spelling": "tokenizer.json",
        "config": "config.json",
        "weights": "model.safetensors",
        "template": "chat_template.jinja",
    }
    shutil.copytree(TINY, folder)
    for name, content in changes.items():
        path = folder / names[name]
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    return folder


def rows(folder: Path, text: str) -> list[str]:
    (folder / "rows.jsonl").write_text(text)
    return []


def model(folder: Path, **changes: Any) -> list[str]:
    return ["--model.path", str(tiny_copy(folder / "my_model", **changes))]


def empty_model(folder: Path) -> list[str]:
    (folder / "my_model").mkdir()
    return ["--model.path", str(folder / "my_model")]


def own_config(folder: Path, text: str) -> list[str]:
    (folder / "config.yaml").write_text(text)
    return []


def buffer_of_another_run(folder: Path, keep: int | None = None) -> list[str]:
    with RolloutBuffer(folder / "buffer.json", RunIdentity("other-id", "other", {})) as buffer:
        buffer.write(0, [], whole=False)
    content = (folder / "buffer.json").read_bytes()
    (folder / "buffer.json").write_bytes(content[:keep])
    return []


def file_in_the_way(folder: Path) -> list[str]:
    (folder / "runs").write_text("a file, not a folder")
    return []


CASES: dict[str, tuple[Callable[[Path], list[str]], list[str]]] = {
    "broken YAML": (lambda f: own_config(f, "data: [1\n"), ["config.yaml", "not valid YAML"]),
    "unknown option": (lambda f: ["--train.lr", "1"], ["--train.lr"]),
    "contradiction": (
        lambda f: ["--sample.completions_per_prompt", "1", "--algorithm.scale", "none"],
        ["completions_per_prompt=1", "algorithm.name=grpo"],
    ),
    "no such model": (lambda f: ["--model.path", str(f / "none")], ["none does not exist"]),
    "empty model folder": (empty_model, ["my_model", "config.json"]),
    "no tokenizer": (lambda f: model(f, tokenizer=None), ["my_model", "tokenizer"]),
    "half a tokenizer": (lambda f: model(f, spelling=None), ["my_model", "tokenizer"]),
    "broken chat template": (
        lambda f: model(f, template=b"{{ raise_exception('no system role') }}"),
        ["rows.jsonl:1", "no system role"],
    ),
    "config of another model": (
        lambda f: model(
            f,
            config=(TINY / "config.json")
            .read_bytes()
            .replace(b'"intermediate_size": 384', b'"intermediate_size": 256'),
        ),
        ["model.safetensors", "384", "256", "config.json"],
    ),
    "no such target": (lambda f: ["--model.adapter.targets", "[foo]"], ["['foo']", "q_proj"]),
    "a key twice": (
        lambda f: own_config(f, "data: {train: x}\nrun: {steps: 1, steps: 2}\n"),
        ["line 2", "'steps'"],
    ),
    "a form that is not the stage's": (
        lambda f: ["--data.form", "preferences"],
        ["data.form=preferences contradicts stage=rl"],
    ),
    "no weights": (lambda f: model(f, weights=None), ["my_model", "safetensors"]),
    "weights cut short": (
        lambda f: model(f, weights=(TINY / "model.safetensors").read_bytes()[:100_000]),
        ["model.safetensors", "damaged"],
    ),
    "damaged model config": (lambda f: model(f, config=b"{"), ["my_model"]),
    "unknown architecture": (
        lambda f: model(f, config=b'{"model_type": "nonesuch"}'),
        ["my_model", "nonesuch"],
    ),
    "no such data": (lambda f: ["--data.train", str(f / "no.jsonl")], ["no.jsonl does not exist"]),
    "bad held-out set": (lambda f: ["--data.eval", str(f / "no.csv")], ["no.csv"]),
    "buffer of another run": (buffer_of_another_run, ["'other'", "--run.resume never"]),
    "buffer cut short": (
        lambda f: buffer_of_another_run(f, keep=50),
        ["buffer.json is cut short", "--run.resume never"],
    ),
    "output folder in a file": (file_in_the_way, ["runs", "cannot be written", "is a file"]),
    "buffer in a file": (
        lambda f: ["--run.buffer", str(f / "rows.jsonl" / "buffer.json")],
        ["cannot be written"],
    ),
    **{
        f"{option} too long for a name": (
            lambda f, option=option: [f"--{option}", str(f / ("x" * 300))],
            [problem],
        )
        for option, problem in (
            ("run.directory", "cannot be written"),
            ("run.buffer", "cannot be written"),
            ("run.resume", "no checkpoint's folder"),
            ("run.from_buffer", "does not exist"),
        )
    },
}


CASES |= HOSTILE


@pytest.mark.parametrize("name", CASES)
def test_one_line_and_nothing_changes(
    name: str, config: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    spoil, named = CASES[name]
    arguments = [str(config), *spoil(tmp_path)]
    before = tree_of(tmp_path)
    code, shown = call(*arguments)
    assert code == 2
    assert shown.startswith("error: ")
    assert shown.count("\n") == 1
    assert "Traceback" not in shown
    for part in named:
        assert part in shown
    assert tree_of(tmp_path) == before


@pytest.mark.long
def test_a_missing_config_and_a_busy_buffer_as_real_processes(config: Path, tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TRAIN), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT)

    missing = run(str(tmp_path / "confg.yaml"))
    assert missing.returncode == 2
    assert "confg.yaml does not exist" in missing.stderr
    assert "config.yaml?" in missing.stderr
    with lock(tmp_path / "buffer.json"):
        before = tree_of(tmp_path)
        busy = run(str(config), "--data.system_prompt", "none")
        assert busy.returncode == 2
        assert "is using the rollout buffer" in busy.stderr
        assert "loading PyTorch" not in busy.stdout + busy.stderr
        assert "Traceback" not in missing.stderr + busy.stderr
        assert tree_of(tmp_path) == before


def test_a_run_started_afresh_moves_nothing_before_all_is_good(
    config: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    assert call(str(config))[0] == 0
    before = tree_of(tmp_path)
    afresh = [str(config), "--run.resume", "never"]
    assert call(*afresh, "--model.adapter.targets", "[foo]")[0] == 2
    assert tree_of(tmp_path) == before
    with lock(tmp_path / "buffer.json"):
        code, shown = call(*afresh)
        assert (code, "is using" in shown) == (2, True)
    after = tree_of(tmp_path)
    assert {k: v for k, v in after.items() if ".lock" not in k} == {
        k: v for k, v in before.items() if ".lock" not in k
    }


def test_a_run_in_use_is_refused_whatever_its_buffer(
    config: Path, tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    other = ["--run.buffer", str(tmp_path / "other.json"), "--log.console", "plain"]
    with FileLock(tmp_path / "runs" / ".config.lock", what="it"):
        code, printed, shown = script("train.py", str(config), *other)
    assert (code, printed) == (2, "")  # nothing was loaded
    assert "is using the run" in shown


def test_vllm_asked_for_and_not_installed(
    config: Path, call: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "vllm" else find(name, *rest),
    )
    code, shown = call(str(config), "--sample.engine", "vllm")
    assert code == 2
    assert "sample.engine=vllm: vLLM is not installed; pip install -e '.[gpu]'" in shown
    assert shown.count("\n") == 1


def test_other_data_under_the_same_name(
    config: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    assert call(str(config))[0] == 0
    (tmp_path / "rows.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "4"}\n')
    code, shown = call(str(config), "--run.steps", "2")
    assert code == 2
    assert "data.prompts_sha256" in shown


def test_a_learning_rate_that_diverges_ends_in_one_line(
    config: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    code, shown = call(
        *(str(config), "--train.learning_rate", "1e30", "--run.steps", "3"),
        *("--data.train", str(ROOT / "data" / "arithmetic_train.jsonl")),
        *("--score.rewards", "[{name: think_answer_tags}]", "--data.system_prompt", "none"),
        *("--sample.completions_per_prompt", "8", "--sample.prompts_per_step", "4"),
        *("--sample.max_new_tokens", "32"),
    )
    assert code == 2
    assert "--run.resume never" in shown
    assert "Traceback" not in shown


def test_another_config_for_the_same_run(
    config: Path, tmp_path: Path, call: Callable[..., tuple[int, str]]
) -> None:
    assert call(str(config))[0] == 0
    before = tree_of(tmp_path)
    code, shown = call(str(config), "--run.seed", "7")
    assert code == 2
    assert "run.seed: 0 -> 7" in shown
    assert "--run.name" in shown
    assert tree_of(tmp_path) == before


def test_a_damaged_checkpoint_is_passed_over(
    config: Path, tmp_path: Path, call: Callable[..., tuple[int, str]], caplog: Any
) -> None:
    assert call(str(config))[0] == 0
    newest = tmp_path / "runs" / "config" / "checkpoints" / "step-00000001"
    (newest / "state.json").write_bytes(b"{")
    code, shown = call(str(config), "--run.steps", "2")
    assert (code, shown) == (0, "")
    assert "step-00000001 is damaged" in caplog.text
    value = orjson.loads((newest.with_name("step-00000002") / "state.json").read_bytes())
    assert value["step"] == 2
