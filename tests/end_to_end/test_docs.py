"""Every command of README.md and docs/*.md, as it is written, in a copy of the repository.

What stands in for the Hub, a GPU and hours is in the tables below, and nothing else differs. A
command that is neither run nor exempt with a reason fails its document's test.
"""

import io
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TINY
from documents import DOCUMENTS, Command, blocks, commands
from shapes import write_config

EXEMPT = {
    "make": "CI's own (.ci/run); here it is asked what it would do",
    "pip": "make test has installed it; here it is asked whether it knows what is named",
    "-m venv": "of python: make test has made one",
    "pytest": "tests/gpu needs a GPU; make test collects it",
    "scripts/benchmark.py gpu": "needs a GPU and hours; tests/test_benchmark.py runs it dry",
    "scripts/benchmark.py gpu-check": "tests/test_benchmark.py runs it, in a process of its own",
    "scripts/benchmark.py cpu": "an hour; tests/test_benchmark.py runs it small",
    "scripts/export.py openai/gpt-oss-20b": "needs the Hub; tests/app/export has a small one",
    "hf auth login": "needs the Hub",
    "scripts/serve.py": "ends with Ctrl-C; tests/app/test_serve_command.py serves",
    "examples/minimal.py": "test_minimal.py runs it",
    "hf download": "needs the Hub",
    "examples/play.py configs/tools_qwen2.5-7b_24gb.yaml": "needs its tokenizer; see test_play.py",
    "scripts/make_digits.py": "two minutes; tests/images makes such a model, untrained",
    "scripts/pairs.py runs/quickstart/buffers --as conditioned": "all rewards of the small run are "
    "equal; tests/app/test_conditioned.py calls it",
    "scripts/train.py examples/digits.yaml": "needs that model; tests/images trains such a one",
    "scripts/train.py my_config.yaml --run.replicas": "starts Ray; test_replicas.py does",
}

STAND_INS = {
    "Qwen/Qwen2.5-1.5B-Instruct": "model/tiny",
    "Qwen/Qwen2.5-1.5B": "model/tiny",
    "Qwen/Qwen2.5-7B-Instruct": "model/tiny",
    "Qwen/Qwen2.5-Coder-7B-Instruct": "model/tiny",
    "Qwen/Qwen2.5-14B-Instruct": "model/tiny",
    "Qwen/Qwen2.5-32B-Instruct": "model/tiny",
    "Qwen/Qwen3-8B": "model/tiny",
    "openai/gsm8k:main": "hub/gsm8k.jsonl",
    "nlile/hendrycks-MATH-benchmark": "hub/math.jsonl",
    "open-r1/DAPO-Math-17k-Processed:en": "hub/dapo.jsonl",
    "newfacade/LeetCodeDataset": "hub/leetcode.jsonl",
    "gsm8k": "gsm8k=hub/gsm8k.jsonl",
    "math500": "math500=hub/math.jsonl",
    "aime2024": "aime2024=hub/math.jsonl",
    "aime2025": "aime2025=hub/math.jsonl",
    "humaneval+": "humaneval+=hub/leetcode.jsonl",
    "mbpp+": "mbpp+=hub/leetcode.jsonl",
}
"""For whole words of commands and values in configs."""

SMALL = (
    "--run.steps 1 --train.warmup_steps 0 --model.context_tokens null --model.dtype float32 "
    "--model.quantize none --sample.engine transformers --sample.prompts_per_step 2 "
    "--sample.completions_per_prompt 4 --sample.max_new_tokens 24 --eval.limit 2 "
    "--eval.max_new_tokens 24"
)
ADDED = {
    "scripts/train.py": SMALL,
    "scripts/evaluate.py": "--eval.limit 2 --eval.max_new_tokens 24 --sample.max_new_tokens 24 "
    "--sample.engine transformers",
    "scripts/chat.py": "--max-new-tokens 16",
    "--k": "--k 2",
    "ppo": "--critic.warmup_steps 0",
    "--plan": "--model.path hub/Qwen2.5-7B-Instruct",
    "configs/sample_tiny.yaml": "--data.eval data/arithmetic_test.jsonl "
    "--sample.prompts_per_step 16",  # so that some are right
    "--run.steps": "--run.steps 2",  # more than those that are done
    "--run.epochs": "--run.epochs 0.002",  # 3 steps
    "configs/dapo_qwen2.5-7b_24gb.yaml": "--sample.max_new_tokens 1024 --sample.prompts_per_step 1 "
    "--sample.completions_per_prompt 2",  # its punishment spans 1024 tokens
}
"""Options put behind the command, for each of its words that is here."""
AS_IT_IS = ("--plan", "--help")
"""With these, what makes a run small is not added."""

INPUT = "What is 1 + 2?"
"""Typed into scripts/chat.py, where the command pipes nothing in."""


def rows(path: Path, *made: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in made))


def sums(**columns: str) -> list[dict[str, Any]]:
    """Problems whose columns are ``What is 1 + 2?`` and ``3`` in these words."""
    return [
        {name: text.format(q=f"What is {n} + 2?", a=n + 2) for name, text in columns.items()}
        for n in range(1, 13)
    ]


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository's layout, the files that the docs speak of, and the quick start, run."""
    folder = tmp_path_factory.mktemp("docs")
    lessons = ("model/countdown", "model/wordle")
    for name in ("scripts", "configs", "docs", "examples", "model/tiny", *lessons):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(TINY, folder / "model" / "my_model")
    (folder / "data").mkdir()
    for path in (ROOT / "data").glob("*_*.jsonl"):
        shutil.copy(path, folder / "data")
    for path in (folder / "configs").glob("*.yaml"):
        text = path.read_text()
        for name, other in STAND_INS.items():
            text = re.sub(rf"(?<=: ){re.escape(name)}(?=\s)", other, text)
        path.write_text(text)
    write_config("Qwen/Qwen2.5-7B-Instruct", folder / "hub" / "Qwen2.5-7B-Instruct")
    rows(folder / "hub" / "gsm8k.jsonl", *sums(question="{q}", answer="So it is.\n#### {a}"))
    rows(
        folder / "hub" / "math.jsonl", *sums(problem="{q}", solution="\\boxed{{{a}}}", answer="{a}")
    )
    rows(folder / "hub" / "dapo.jsonl", *sums(prompt="{q}", solution="{a}", data_source="math"))
    check = "def check(candidate):\n    assert candidate(1) == 3\n"
    leetcode = {"query": "Write f.", "prompt": "import math", "test": check, "entry_point": "f",
                "input_output": [{"input": "x = 1", "output": "3"}]}  # fmt: skip
    rows(folder / "hub" / "leetcode.jsonl", leetcode)
    tests = {"prompt": "Write f.", "tests": {"fn_name": "f", "inputs": [[1]], "outputs": [3]}}
    for name in ("my_code_problems", "my_code_held_out"):
        rows(folder / f"{name}.jsonl", tests)
    for name in ("my_problems", "my_held_out", "aime2025"):
        rows(folder / f"{name}.jsonl", *sums(question="{q}", answer="{a}"))
    answered = ({"prompt": f"{n} + 2 =", "completion": f" {n + 2}"} for n in range(1, 13))
    rows(folder / "conditioned.jsonl", *answered)
    rows(folder / "my_texts.jsonl", *({"text": f"{n} + 2 = {n + 2}"} for n in range(1, 13)))
    (config,) = (
        b for b in blocks(ROOT / "docs" / "configs.md") if "path: model/my_model" in b.text
    )
    (folder / "my_config.yaml").write_text(config.text)
    rewards = [b.text for b in blocks(ROOT / "docs" / "rewards.md") if b.language == "python"]
    own = (text for text in rewards if "from reason_llm" not in text)
    (folder / "my_rewards.py").write_text("\n\n".join(own))
    # A process of its own, whose memory is the run's alone.
    command = [sys.executable, "scripts/train.py", *SMALL.split(), "--run.steps", "2"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 0, ended.stderr
    (folder / "shown.txt").write_text(ended.stdout + ended.stderr)
    for name in ("first", "second"):
        shutil.copytree(folder / "runs" / "quickstart", folder / "runs" / name)
    return folder


def call(words: list[str], piped: str = INPUT) -> tuple[int, str]:
    """Exit code and output of a script, called in this process and in its working folder."""
    given = io.TextIOWrapper(io.BytesIO(piped.encode()), encoding="utf-8")
    written = io.BytesIO()
    out = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    code = 0
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"argv": words, "stdin": given, "stdout": out, "stderr": out}.items():
            patch.setattr(sys, name, value)
        try:
            runpy.run_path(words[0], run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, written.getvalue().decode()


def exemption(text: str) -> str | None:
    """The row of ``EXEMPT`` that a command is under."""
    return next((name for name in EXEMPT if f"{text} ".startswith(f"{name} ")), None)


def script_of(command: Command) -> list[str]:
    """The command from its script on, without python; what is no script of ours is as it is."""
    words = list(command.words)
    if "|" in words:
        words = words[words.index("|") + 1 :]
    return words[1:] if words[0] in ("python", "python3") else words


def check_exempt(words: list[str]) -> None:
    """As much of an exempt command as can be had for nothing."""
    if words[0] == "make":
        subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, check=True, capture_output=True)
    setup = (ROOT / "setup.py").read_text()
    for word in words[2:] if words[0] == "pip" else []:
        extras = re.fullmatch(r"\.\[([\w,]+)\]", word)
        named = [f'"{each}": ' for each in extras[1].split(",")] if extras else [f'"{word}"']
        is_known = all(each in setup for each in named)
        assert is_known or word.startswith("-") or (ROOT / word).is_file(), word
    if words[0] == "pytest":
        assert (ROOT / words[1]).exists()


def feasible(words: list[str]) -> list[str]:
    """The words with what stands in for the Hub, a GPU and hours."""
    added = [
        option
        for word, options in ADDED.items()
        if word in words and (word in AS_IT_IS or not set(AS_IT_IS) & set(words))
        for option in options.split()
    ]
    return [STAND_INS.get(word, word) for word in words] + added


NO_COMMANDS = {"answers.md"}
"""Examples in Python are run by ``test_python_examples`` and ``test_documents``."""
WITH_COMMANDS = [path for path in DOCUMENTS if path.name not in NO_COMMANDS]


@pytest.mark.long
@pytest.mark.parametrize("path", WITH_COMMANDS, ids=lambda path: path.name)
def test_every_command_runs(
    path: Path, quickstart: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(quickstart, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    offline(monkeypatch, tmp_path / "home")
    found = commands(path)
    assert found
    for command in found:
        words = script_of(command)
        if exemption(" ".join(words)) is not None:
            check_exempt(words)
            continue
        assert Path(words[0]).is_file(), f"{command.where} is in no table: {command}"
        piped = command.words[1] if command.words[0] == "echo" else INPUT
        began = time.monotonic()
        if "--serve" in words:
            code, shown = served(feasible(words))
        else:
            code, shown = call(feasible(words), piped)
        print(f"{time.monotonic() - began:5.1f} s  {command.where}: {command}")
        assert code == 0, f"{command.where}: {command}\n{shown}"
        check_output(command, shown)


def check_output(command: Command, shown: str) -> None:
    """What a document shows below a plan or a data check is what it says; of the latter but for
    numbers, since less is read here."""
    alike = {"--plan": str, "--data-check": without_numbers}
    for switch in alike.keys() & set(command.words):
        said = alike[switch](" ".join(shown.split()))
        for line in command.output.splitlines():
            wanted = alike[switch](" ".join(line.split()))
            assert line == "..." or wanted in said, f"{command.where}: {line}\n{shown}"


def without_numbers(text: str) -> str:
    """The text with 0 for every number."""
    return re.sub(r"[\d.,]*\d", "0", text)


def served(words: list[str]) -> tuple[int, str]:
    """A server's exit code, 0 if it gave its page and ended with Ctrl-C."""
    command = [sys.executable, *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = process.stdout.readline()
        try:
            url = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", said)
            assert url is not None, said
            with urllib.request.urlopen(url[0], timeout=300) as answer:
                page = answer.read()
        finally:
            process.send_signal(signal.SIGINT)
        process.wait(timeout=300)
    return int(process.returncode != 130 or b"<title>" not in page), said


def offline(patch: pytest.MonkeyPatch, home: Path) -> None:
    """No network for trackers, and nothing outside of the test's own folder."""
    patch.setenv("WANDB_MODE", "offline")
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        patch.setenv(name, str(home))
    before = os.environ.get("PYTHONPATH", "")
    patch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{before}")


def test_the_tables_hold_nothing_that_no_document_needs() -> None:
    every = [script_of(command) for path in DOCUMENTS for command in commands(path)]
    assert {exemption(" ".join(words)) for words in every} >= set(EXEMPT)
    words = {word for command in every for word in command}
    configs = "".join(path.read_text() for path in (ROOT / "configs").glob("*.yaml"))
    assert [name for name in STAND_INS if name not in words and name not in configs] == []
    assert [word for word in ADDED if word not in words] == []


def test_a_command_that_is_in_no_table_is_told(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("So:\n\n    git pull it\n    make test\n")
    told = [exemption(str(command)) for command in commands(tmp_path / "page.md")]
    assert told == [None, "make"]


@pytest.mark.long
def test_the_quick_start_says_what_the_readme_shows(quickstart: Path) -> None:
    (block,) = (
        b for b in blocks(ROOT / "README.md") if b.text.startswith("run quickstart: loading")
    )

    said = "\n".join(map(without_numbers, (quickstart / "shown.txt").read_text().splitlines()))
    for line in block.text.splitlines():
        if line.startswith("sampling with "):
            continue  # SMALL names the engine
        assert without_numbers(line.partition("...")[0].rstrip()) in said, line
