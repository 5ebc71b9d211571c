"""gsm8k, math500, aime2025, humaneval+ and mbpp+ from folders in the form of those on the Hub, with
rows that were made up."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow
import pyarrow.parquet
import pytest

from conftest import TINY
from reason_llm.config import Config
from reason_llm.data import load_evaluation
from reason_llm.errors import DataError
from reason_llm.rollout import Completion, Group
from reason_llm.score import Scorer

ASSERTION = """import numpy as np

def is_floats(x) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, (list, tuple)):
        return all(isinstance(i, float) for i in x)
    return False

def assertion(out, exp, atol):
    if atol == 0 and is_floats(exp):
        atol = 1e-6
    if out != exp and atol != 0:
        assert np.allclose(out, exp, rtol=1e-07, atol=atol)
    else:
        assert out == exp, f"out: {out}, exp: {exp}"

"""
HUMANEVAL = {
    "task_id": "HumanEval/900",
    "prompt": 'def halves(xs: list) -> list:\n    """Return half of each number."""\n',
    "canonical_solution": "    return [x / 2 for x in xs]\n",
    "entry_point": "halves",
    "test": ASSERTION + "def check(candidate):\n    inputs = [[[1.0, 3.0]], [[]]]\n"
    "    results = [[0.5, 1.5], []]\n    for i, (inp, exp) in enumerate(zip(inputs, results)):\n"
    "        assertion(candidate(*inp), exp, 0)\n",
}
MBPP = {
    "task_id": 900,
    "code": "\ndef span(xs):\n  return max(xs) - min(xs)\n",
    "prompt": "Write a function to find the span of a list.",
    "source_file": "Invented.ipynb",
    "test_imports": [],
    "test_list": ["assert span([3, 1]) == 2", "assert span([5]) == 0"],
    "test": ASSERTION + "inputs = [[[3, 1]], [[5]], [[-2, 7, 4]]]\nresults = [2, 0, 9]\n"
    "for i, (inp, exp) in enumerate(zip(inputs, results)):\n    assertion(span(*inp), exp, 0)\n",
}
CONFIGS = """---
configs:
- config_name: {}
  data_files:
  - split: test
    path: {}
---
"""


def published(folder: Path, name: str) -> Path:
    """A folder as on the Hub."""
    (folder := folder / name).mkdir()
    parquet: dict[str, tuple[str, str, dict[str, Any]]] = {
        "gsm8k": ("main", "main/test-00000-of-00001.parquet", {
            "question": "Ann has 2 pens and buys 5. How many has she?",
            "answer": "Ann has 2+5=<<2+5=7>>7 pens.\n#### 7"}),
        "humaneval+": ("default", "data/test-00000-of-00001-59039f.parquet", HUMANEVAL),
        "mbpp+": ("default", "data/test-00000-of-00001-d5781c.parquet", MBPP),
    }  # fmt: skip
    rows = {
        "math500": {"problem": "Halve $7$.", "solution": "It is $\\boxed{\\frac{7}{2}}$.",
                    "answer": "\\frac{7}{2}", "subject": "Algebra", "level": 1,
                    "unique_id": "test/algebra/9.json"},
        "aime2025": {"problem": "Find the last three digits of $10^9+33$.", "answer": "033",
                     "id": "0"},
    }  # fmt: skip
    if name in rows:
        (folder / "test.jsonl").write_bytes(orjson.dumps(rows[name]))
        return folder
    subset, file, row = parquet[name]
    (folder / "README.md").write_text(CONFIGS.format(subset, file))
    (folder / file).parent.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), folder / file)
    return folder


def config_of(sets: Any, reward: str) -> Config:
    return Config.model_validate({
        "model": {"path": str(TINY)}, "data": {"train": "none"}, "eval": {"sets": sets},
        "score": {"rewards": [{"name": reward}]},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("name", "reward", "asked", "right", "wrong"),
    [
        ("gsm8k", "boxed", "How many has she?", r"So \boxed{7}", r"So \boxed{5}"),
        ("math500", "boxed", "Halve $7$.", r"\boxed{3.5}", r"\boxed{\frac72} or \boxed{2}"),
        ("aime2025", "boxed", "last three digits", r"\boxed{33}", r"\boxed{330}"),
        ("humaneval+", "code_tests", "def halves(xs: list) -> list:",
         "```python\ndef halves(xs):\n    return [x * 0.5 for x in xs]\n```",
         "```python\ndef halves(xs):\n    return [x // 2 for x in xs]\n```"),
        ("mbpp+", "code_tests",
         "span of a list.\n\nYour code should satisfy the following assertion:\n"
            "assert span([3, 1]) == 2",
            "```python\ndef span(xs):\n    return max(xs) - min(xs)\n```",
         "```python\ndef span(xs):\n    return xs[0] - xs[-1]\n```"),
    ],
)  # fmt: skip
def test_a_copy_of_a_set_is_asked_and_judged(
    name: str, reward: str, asked: str, right: str, wrong: str, tmp_path: Path, tokenizer: Any
) -> None:
    """The wrong program passes the tests that a row lists, and not those of evalplus."""
    config = config_of({name: str(published(tmp_path, name))}, reward)
    (found,) = load_evaluation(config, tokenizer, 4096, ())
    (prompt,) = found.prompts
    assert found.name == name
    assert asked in prompt.text
    with Scorer(config.score, 256) as scorer:
        completions = tuple(Completion((1,), text, (0.0,), "stop") for text in (right, wrong))
        (group,) = scorer.score([Group(prompt, completions)])
    assert [each.reward for each in group.completions] == [1.0, 0.0]


@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize("name", ["humaneval+", "mbpp+"])
def test_evalplus_s_own_file_is_refused(
    name: str, is_file: bool, tmp_path: Path, tokenizer: Any
) -> None:
    """Inputs alone say nothing of results, and HumanEval's file has the base tests in ``test``."""
    row = {
        **(HUMANEVAL if name == "humaneval+" else MBPP),
        "entry_point": "halves",
        "contract": "",
        "base_input": [[[2.0]]],
        "plus_input": [[[1.0, 3.0], 2]],
        "atol": 0,
    }
    file = tmp_path / "Plus-v0.1.10.jsonl"
    file.write_bytes(orjson.dumps(row))
    source = str(file if is_file else tmp_path)
    with pytest.raises(DataError, match=r"jsonl:1: .*only the base tests would be run"):
        load_evaluation(config_of({name: source}, "code_tests"), tokenizer, 4096, ())


def test_a_folder_with_one_file_is_that_file_and_one_without_the_split_is_refused(
    tmp_path: Path, tokenizer: Any
) -> None:
    row = {"question": "Halve 7.", "answer": "3.5"}
    (tmp_path / "sums.jsonl").write_bytes(orjson.dumps(row))
    config = config_of({"mine": str(tmp_path)}, "boxed")
    (found,) = load_evaluation(config, tokenizer, 4096, ())
    assert [each.answer for each in found.prompts] == ["3.5"]
    (tmp_path / "sums.jsonl").rename(tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r'the folder .* \(Unknown split "test".*; name one of its'):
        load_evaluation(config, tokenizer, 4096, ())


def test_names_stand_for_sets_of_the_hub() -> None:
    assert config_of(["gsm8k", "mbpp+"], "boxed").eval.sets == {
        "gsm8k": "openai/gsm8k:main", "mbpp+": "evalplus/mbppplus",
    }  # fmt: skip
    assert config_of("aime2025", "boxed").eval.sets == {"aime2025": "math-ai/aime25"}
    with pytest.raises(ValueError, match="'gsm9k' is not one of gsm8k, math500"):
        config_of(["gsm9k"], "boxed")


@pytest.mark.long
def test_programs_are_judged_by_their_tests(
    script: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    """Of a model without a config, and in no other way than alone."""
    sets = [f"{name}={published(tmp_path, name)}" for name in ("mbpp+", "gsm8k")]
    few = ("--eval.max_new_tokens", "8", "--sample.engine", "transformers")
    rewards = {}
    for each in sets:
        out = tmp_path / each[:4]
        assert script("evaluate.py", TINY, "--sets", each, "--out", out, *few)[0] == 0
        rewards[each[:4]] = orjson.loads((out / "summary.json").read_bytes())["judged_by"]
    assert rewards == {"mbpp": "code_tests", "gsm8": "boxed"}
    code, _, error = script("evaluate.py", TINY, "--sets", *sets, "--out", tmp_path / "both")
    assert code == 2 and "evaluate mbpp+ alone" in error
