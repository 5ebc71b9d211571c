"""Countdown: the checker pays for right expressions alone, the data holds what it says, the script
makes a model."""

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from reason_llm.config.file import load as read_config

DATA = {name: ROOT / "data" / f"countdown_{name}.jsonl" for name in ("train", "test")}


def load(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def checker() -> Any:
    return load("examples/countdown.py")


@pytest.fixture
def maker(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    return load("scripts/make_countdown.py")


def told(answer: str) -> str:
    return f"<think>tries</think><answer>{answer}</answer>"


@pytest.mark.parametrize("answer", ["5*(6-2)", "(6-2)*5", "((5)*((6)-2))", "5*6-2*5+2-2"])
def test_the_checker_pays(checker: Any, answer: str) -> None:
    assert checker.countdown(told(answer), sorted(map(int, filter(str.isdigit, answer))), 20) == 1


@pytest.mark.parametrize(
    "answer",
    [
        "20", "5*4", "5*(6-2)+6-6", "5*(6-1)", "(2-6)*5", "-5*(2-6)", "", "5*(6-2", "5(6-2)",
        "5**2-(6-1)", "5*(6-2)#", "5*(6-2)/1", "numbers", "5*(6-2)if 1else 0", "05*(6-2)", "5.0*4",
        "9" * 40, "9" * 5000, "(" * 19 + "5*4" + ")" * 18, "(" * 5000 + "5*(6-2)" + ")" * 5000,
        "9**9**9**9", "+".join(["5"] * 3000), "5*(6-2)\n5", "５*(6-2)",
    ],
)  # fmt: skip
def test_the_checker_refuses_at_once(checker: Any, answer: str) -> None:
    """Expressions of other numbers, no expressions, and what would take long to work out."""
    began = time.process_time()
    assert checker.countdown(told(answer), [2, 5, 6], 20) == 0
    assert time.process_time() - began < 30


@pytest.mark.parametrize(
    "text",
    [
        "5*(6-2)", "<answer>5*(6-2)</answer>", "<think></think>5*(6-2)",
        "<think></think><answer>5*4</answer><answer>5*(6-2)</answer> and more",
        "<think>" * 9999 + "</think><answer>" * 9999,
    ],
)  # fmt: skip
def test_the_form_is_needed(checker: Any, text: str) -> None:
    assert checker.countdown(text, [2, 5, 6], 20) == 0


def test_tries_are_counted_before_the_answer(checker: Any) -> None:
    lines = "5-2*6=5-12=-7 no\n2+5*6=2+30=32 no\nno\n5*(6-2)=5*4=20 yes\n"
    assert checker.tries(f"<think>{lines}</think><answer>1+1=2 yes\n</answer>") == 3
    assert checker.tries("") == 0


def test_an_expression_of_each_value(maker: Any, checker: Any) -> None:
    """Every try is an expression of the three numbers, worked out as Python does."""
    found = maker.tries_of((6, 5, 2))
    assert list(found)[:3] == [6 + 5 + 2, 6 * 5 + 2, 6 * 2 + 5]
    assert found[20] == "(6-2)*5=4*5=20"
    for value, told_try in found.items():
        text, working, result = told_try.split("=")
        assert eval(text) == eval(working) == int(result) == value
        assert checker.countdown(told(text), [2, 5, 6], value) == 1
    assert {(6 - 2) * 5, 6 * 5 - 2, 2 * 6 * 5} <= found.keys()
    assert (6 - 5) * 2 not in found


def test_drills_are_sums_with_their_verdicts(maker: Any) -> None:
    triples = maker.itertools.combinations(reversed(maker.WIDER), 3)
    sums = maker.sums(
        [(numbers, value) for numbers in triples for value in maker.tries_of(numbers)]
    )
    rng = maker.random.Random(0)
    assert sorted(sums) == list(maker.TARGETS)
    drilled = "".join(maker.drill(sums, 20, rng) for _ in range(50))
    lines = [line.split() for line in drilled.splitlines()]
    for told_sum, verdict in lines:
        text, result = told_sum.split("=")
        assert eval(text) == int(result)
        assert verdict == ("yes" if result == "20" else "no")
    assert len(lines) == 600
    assert 0.25 < sum(verdict == "yes" for _, verdict in lines) / 600 < 0.45


def test_tries_are_a_part_of_all_in_order(maker: Any) -> None:
    """Until one is right or patience ends; of a target that none makes, patience does not end."""
    tries, rng = maker.tries_of((6, 5, 2)), maker.random.Random(0)
    drawn = [maker.trace(tries, 20, rng) for _ in range(300)]
    assert all(values == [v for v in tries if v in values] for values in drawn)
    assert all(20 not in values[:-1] for values in drawn)
    assert {len(values) for values in drawn} >= {1, 2, 3, 5}
    assert 0.1 < sum(20 in values for values in drawn) / 300 < 0.4
    whole = [maker.trace(tries, 1, rng) for _ in range(300)]
    assert 0.6 < sum(map(len, whole)) / 300 / len(tries) < 0.7
    text = maker.completion(tries, [28, 20], 20)
    told_tries = "6*5-2=30-2=28 no\n(6-2)*5=4*5=20 yes\n"
    assert text == f"<think>{told_tries}</think><answer>(6-2)*5</answer>"


def test_numbers_of_the_test_set_are_in_no_other_row(maker: Any) -> None:
    rows = {
        name: [json.loads(line) for line in path.read_text().splitlines()]
        for name, path in DATA.items()
    }
    triples = {name: {tuple(sorted(row["numbers"])) for row in rows[name]} for name in rows}
    assert not triples["train"] & triples["test"]
    assert (len(rows["train"]), len(rows["test"])) == (maker.NUM_TRAIN, maker.NUM_TEST)
    for row in rows["train"][:50] + rows["test"][:50]:
        assert row["target"] in maker.tries_of(tuple(row["numbers"]))
        assert row["question"] == maker.question(row["numbers"], row["target"])


def test_the_script_makes_data_and_a_model(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are those of the repository; the model has learned for 4 steps only."""
    monkeypatch.setattr(maker, "STEPS", 4)
    monkeypatch.setattr("sys.argv", ["make_countdown.py", "--out", str(tmp_path), "--batch", "2"])
    maker.main()
    for path in DATA.values():
        assert (tmp_path / "data" / path.name).read_bytes() == path.read_bytes()
    folder = tmp_path / "model" / "countdown"
    made, shipped = (AutoTokenizer.from_pretrained(f) for f in (folder, ROOT / "model/countdown"))
    text = maker.completion(maker.tries_of((6, 5, 2)), [28, 20], 20)
    ids = shipped.encode(text)
    assert shipped.decode(ids) == text == made.decode(made.encode(text))
    assert len(ids) == 35
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.get_input_embeddings().num_embeddings == len(made)


def test_the_lesson_fits_its_files() -> None:
    config = read_config(ROOT / "configs" / "countdown_tiny.yaml", {})
    assert config.eval.samples > 1
    assert config.score.judged_by == "accuracy"
    assert [reward.weight for reward in config.score.rewards] == [1, 0]
    files = list((ROOT / "model" / "countdown").iterdir())
    assert sum(path.stat().st_size for path in files) < 4e6
