"""Checkers of other packages: they are called in the sandbox.

1. Who runs where.      2. Wrong answers are 0, counted.      3. Limits of time.
4. One answer changes nothing for the next.                   5. Functions of packages, TRL's too.

The witness is a file: text that is evaluated with the trainer's rights would make it.
"""

import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import reasoning_gym
import trl.rewards
from reasoning_gym.factory import DATASETS

from conftest import ROOT
from reason_llm.config import ScoreSection
from reason_llm.data.rows import read_rows
from reason_llm.errors import ConfigError, RewardError
from reason_llm.rollout import ROW, Completion, Group, Prompt
from reason_llm.score import Scorer
from reason_llm.score.code import CheckerError, Checkers, Subject, finite

SUMS = "gym:chain_sum?size=3&seed=1"


def scored(
    source: str, *answers: str, row: int = 1, seconds: float | None = None
) -> tuple[list[float], dict[str, float]]:
    """The rewards of these answers to a row of reasoning-gym, and the step's counts."""
    where, columns = list(read_rows(source, "train"))[row - 1]
    made = tuple(
        Completion((1,), f"<answer>{each}</answer>", (0.0,), "stop")
        for each in answers or (columns["answer"],)
    )
    section = ScoreSection.model_validate({"rewards": ["gym"], "timeout_seconds": seconds})
    with Scorer(section, 32) as scorer:
        (group,) = scorer.score([Group(Prompt(where, "x", (1,), columns["answer"]), made)])
        return [each.rewards["gym"] for each in group.completions], scorer.take_counts()


def witness_of(path: Path) -> str:
    """Text that makes the file, where it is evaluated."""
    return f"[__import__('pathlib').Path({str(path)!r}).write_text('x')]"


# 1. Who runs where


@pytest.mark.parametrize("task", ["spiral_matrix", "countdown", "n_queens"])
def test_text_of_the_model_does_not_run_with_our_rights(task: str, tmp_path: Path) -> None:
    """Harmless text; ``chain_sum`` shows that the same row's right answer is paid."""
    witness = tmp_path / "witness"
    text = witness_of(witness)
    dataset = reasoning_gym.create_dataset(task, size=2, seed=1)
    if task == "spiral_matrix":  # its checker evaluates what looks like this
        dataset.score_answer(text, dataset[0])
        assert witness.exists()
        witness.unlink()
    (value,), _ = scored(f"gym:{task}?size=2&seed=1", text)
    assert value < 1
    assert not witness.exists()
    assert scored(f"gym:{task}?size=2&seed=1")[0] == [1.0]


def test_a_checker_sees_neither_files_nor_variables_of_ours(monkeypatch: Any) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    checkers = Checkers(num_workers=1)
    try:
        for code in ("open('/etc/hostname').read()", "__import__('os').environ['MY_TOKEN']"):
            told = Subject(partial(eval, code))
            assert checkers.call(told, read=finite) is None
        assert checkers.num_failed == 2
    finally:
        checkers.close()


def test_the_table_of_the_page_names_each_reward() -> None:
    """Rewards that call what others wrote, and where they are called."""
    page = (ROOT / "docs" / "security.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (the trainer|the sandbox|a worker)", page, re.MULTILINE)
    places = dict(rows)
    assert places["`gym`: checkers of reasoning-gym"] == "the sandbox"
    assert places["functions of an installed package, such as `trl.rewards`"] == "the sandbox"
    assert places["rewards and metrics of a taskset of verifiers"] == "the sandbox"
    assert places["functions of your own, from a file or given in Python"] == "the trainer"


# 2. Wrong answers


@pytest.mark.parametrize(
    ("task", "answer", "raises"),
    [
        ("prime_factorization", "2 x 3", True),
        ("boxnet", "null", True),
        ("game_of_life", "{}", True),
        ("coin_flip", "heads or tails", False),
        ("chain_sum", "12345678", False),
    ],
)
def test_a_checker_that_raises_pays_0_and_is_counted(task: str, answer: str, raises: bool) -> None:
    values, counts = scored(f"gym:{task}?size=1&seed=1", answer)
    assert values == [0.0]
    assert counts == {"score/errors": float(raises), "score/timeouts": 0.0}


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # of the generators
def test_no_answer_to_any_task_ends_the_run() -> None:
    answers = ("7", "2 x 3", "{}", "[]", "[[1]]", "null", "x", "1/2", "heads", "2^3 × a", "1e999")
    failed = 0.0
    for task in sorted(set(DATASETS) - {"composite"}):
        values, counts = scored(f"gym:{task}?size=1&seed=1", *answers)
        assert all(0 <= value <= 1 for value in values), task
        failed += counts["score/errors"]
    assert failed > 10


def test_a_function_without_what_it_needs_is_an_error() -> None:
    checkers = Checkers(num_workers=1)
    try:
        with pytest.raises(CheckerError, match="no network, no files but installed packages"):
            checkers.call(Subject(Path("/etc/hostname").read_text), read=finite)
    finally:
        checkers.close()


# 3. Limits


def test_a_large_number_ends_at_the_limit() -> None:
    values, counts = scored("gym:countdown?size=1&seed=1", "9**9**9", seconds=0.5)
    assert values == [0.0]
    assert counts == {"score/errors": 0.0, "score/timeouts": 1.0}
    assert scored(SUMS)[0] == [1.0]  # its worker was replaced


# 4. What stays


@pytest.fixture(scope="module")
def one_worker() -> Iterator[Checkers]:
    checkers = Checkers(num_workers=1)
    yield checkers
    checkers.close()


SPIRAL = "reasoning_gym.algorithmic.spiral_matrix"
CHANGES = [
    f"[setattr(__import__({SPIRAL!r}, fromlist=['x']).SpiralMatrixDataset, 'score_answer', "
    "lambda *_: 1.0)]",
    f"[(lambda: exec({f'import {SPIRAL} as m; m.SpiralMatrixDataset.score_answer = len'!r}))()]",
    "[__import__('os').kill(__import__('os').getppid(), 9)]",
    "[[__import__('os').write(n, (18).to_bytes(8, 'little') + b'{\"value\": 1000000}') "
    "for n in range(3, 20)]]",
]


@pytest.mark.parametrize("change", CHANGES)
def test_an_answer_changes_nothing_for_the_next(one_worker: Checkers, change: str) -> None:
    make = partial(reasoning_gym.create_dataset, "spiral_matrix", size=2, seed=1)
    subject, entry = Subject(make, is_maker=True), make()[0]
    ask = partial(one_worker.call, subject, method="score_answer", seconds=1, read=finite)
    for _ in range(2):
        ask((change, entry))
        assert ask(("1 2", entry)) in (0.0, 0.01)
        assert ask((entry["answer"], entry)) == 1.0


# 5. Functions of packages


def group_of(*texts: str, **columns: Any) -> Group:
    prompt = [{"role": "user", "content": "1/3 = ?"}]
    row = {ROW: {"prompt": prompt, "columns": columns}}
    made = tuple(Completion((1,), text, (0.0,), "stop") for text in texts)
    return Group(Prompt("x.jsonl:1", "x", (1,), "", row), made)


def of_function(function: Any, group: Group) -> tuple[list[float], dict[str, float]]:
    with Scorer(ScoreSection.model_validate({"rewards": [function]}), 32) as scorer:
        (found,) = scorer.score([group])
        (name,) = scorer.weights
        return [each.rewards[name] for each in found.completions], scorer.take_counts()


def test_functions_of_trl_give_what_they_give(tmp_path: Path) -> None:
    texts = (r"so \boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}", "no")
    group = group_of(*texts, solution=r"\frac{1}{3}")
    values, counts = of_function(trl.rewards.accuracy_reward, group)
    said = [[{"role": "assistant", "content": text}] for text in texts]
    assert values == trl.rewards.accuracy_reward(said, [r"\frac{1}{3}"] * 3) == [1.0, 0.0, 0.0]
    assert counts == {"score/errors": 0.0, "score/timeouts": 0.0}
    own = tmp_path / "own.py"
    own.write_text("import trl.rewards\n\nlong = trl.rewards.get_soft_overlong_punishment(2, 4)\n")
    assert of_function({"custom": f"{own}:long"}, group)[0] == [-0.75] * 3
    named = f"{trl.rewards.accuracy_reward.__code__.co_filename}:accuracy_reward"
    assert of_function({"custom": named}, group)[0] == values


PACKAGE = """
def evaluated(completions, **kwargs):
    return [float(eval(text[0]["content"])) for text in completions]


def made(value):
    return lambda completions, **kwargs: [value] * len(completions)


def stream():
    numbers = iter(int, 1)
    endless = (number for number in numbers)
    return lambda completions, **kwargs: [next(endless)] * len(completions)


async def waited(completions, **kwargs):
    return [float(len(text)) for text in completions]
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module that stands where pip installs."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    name = f"checkers_{tmp_path.name}".replace("-", "_")
    (folder / f"{name}.py").write_text(PACKAGE)
    tmp_path.chmod(0o755)
    monkeypatch.syspath_prepend(str(folder))
    return __import__(name)


def test_a_function_of_a_package_runs_in_the_sandbox(package: Any, tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    text = f"len({witness_of(witness)})"
    (tmp_path / "own.py").write_text(
        "def paid(completions, **kwargs):\n"
        "    return [float(eval(text[0]['content'])) for text in completions]\n"
    )
    own = {"custom": f"{tmp_path}/own.py:paid"}
    assert of_function(own, group_of(text))[0] == [1.0]  # one's own runs in this process
    assert witness.exists()
    witness.unlink()
    values, counts = of_function(package.evaluated, group_of("3", text, "nonsense", "4"))
    assert values == [3.0, 0.0, 0.0, 4.0]
    assert counts["score/errors"] >= 2
    assert not witness.exists()
    assert of_function(package.waited, group_of("a"))[0] == [1.0]


def test_one_that_cannot_be_sent_is_refused(package: Any, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        f"import {package.__name__} as p\n\nmade = p.stream()\nfactory_made = p.made(0.5)\n"
    )
    found = of_function({"custom": f"{tmp_path}/own.py:factory_made"}, group_of("a"))
    assert found[0] == [0.5]
    with pytest.raises(ConfigError, match=r"cannot be sent to the sandbox .* of your own"):
        of_function({"custom": f"{tmp_path}/own.py:made"}, group_of("a"))


def test_one_that_cannot_be_loaded_there_ends_the_run(package: Any, tmp_path: Path) -> None:
    folder = Path(package.__file__).parent
    (folder / "is_broken.py").write_text("def paid(completion):\n    return 1.0\n")
    (tmp_path / "own.py").write_text("from is_broken import paid\n")
    __import__("is_broken")
    try:
        (folder / "is_broken.py").write_text("import a_module_that_is_nowhere\n")
        with pytest.raises(RewardError, match="cannot be loaded in the sandbox: ModuleNotFound"):
            of_function({"custom": f"{tmp_path}/own.py:paid"}, group_of("a"))
    finally:
        del sys.modules["is_broken"]
