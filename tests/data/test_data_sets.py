"""Several sets side by side, what filters leave out, evaluation problems in training sets."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reason_llm.data.forms import Problem
from reason_llm.data.sets import question_key
from reason_llm.errors import ConfigError, DataError

ROWS = [{"question": "What is 1 + 2?", "answer": "3"}, {"question": "Two\nlines", "answer": "4"}]


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def named_lines(folder: Path, name: str, *rows: Any) -> str:
    lines(folder, *rows).rename(folder / name)
    return str(folder / name)


def test_sets_stand_side_by_side_with_their_weights(tmp_path: Path, load: Callable) -> None:
    a, b = named_lines(tmp_path, "a.jsonl", *ROWS), named_lines(tmp_path, "b.jsonl", ROWS[0])
    data = load([{"source": a, "weight": 3}, b], eval__sets={"x": a, "y-2": b}, data__eval=b)
    assert (data.sizes, data.weights) == ([2, 1], [3.0, 1.0])
    assert [prompt.id for prompt in data.prompts] == [f"{a}:1", f"{a}:2", f"{b}:1"]
    assert [(s.name, len(s.prompts)) for s in data.held_out] == [("", 1), ("x", 2), ("y-2", 1)]
    assert len(load(a, eval__sets={"x": a}, eval__limit=1).held_out[0].prompts) == 1


def test_filters_count_what_they_leave_out(tmp_path: Path, load: Callable) -> None:
    rows = [
        {"question": "What is 1 + 2?", "answer": "3", "rate": 0.5},
        {"question": "what is  1 + $2$?", "answer": "3", "rate": "0.5"},
        {"question": "Too hard", "answer": "3", "rate": 0},
        {"question": "Too easy", "answer": "3", "rate": 1},
        {"question": "Too long " * 50, "answer": "3", "rate": 0.5},
        {"question": "What is 1 - 2?", "answer": "-1", "rate": 0.9},
        {"question": "What is 1 * 2?", "answer": "2", "rate": 0.1},
    ]
    rate = {"column": "rate", "min": 0.1, "max": 0.9}
    path = lines(tmp_path, *rows)
    (loaded,) = load(
        path, data__max_prompt_tokens=60, data__deduplicate=True, data__pass_rate=rate
    ).training
    assert [prompt.id[-2:] for prompt in loaded.prompts] == [":1", ":6", ":7"]
    assert loaded.num_rows == 7
    assert dict(loaded.dropped) == {
        "data.pass_rate": 2, "data.max_prompt_tokens": 1, "data.deduplicate": 1,
    }  # fmt: skip
    assert loaded.left_out == (
        "left out: 1 by data.deduplicate, 2 by data.pass_rate, 1 by data.max_prompt_tokens"
    )
    assert len(load(path).prompts) == 7
    with pytest.raises(DataError, match=r"no row is left; left out: 7 by data\.max_prompt_tokens"):
        load(path, data__max_prompt_tokens=2)
    with pytest.raises(ConfigError, match=r"max_prompt_tokens=500 is more than the 60"):
        load(path, room=60, data__max_prompt_tokens=500)


@pytest.mark.parametrize("rate", [None, "high", True, "nan"])
def test_a_row_without_a_pass_rate_is_named(rate: Any, tmp_path: Path, load: Callable) -> None:
    path = lines(tmp_path, ROWS[0] | {"rate": 0.5}, ROWS[1] | {"rate": rate})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: 'rate' is .*; expected a number"):
        load(path, data__pass_rate={"column": "rate"})
    with pytest.raises(DataError, match=r"rows\.jsonl:1: lacks column 'rates'"):
        load(path, data__pass_rate={"column": "rates"})


def test_duplicates_are_found_across_sets_and_held_out_sets_are_left_alone(
    tmp_path: Path, load: Callable
) -> None:
    a = named_lines(tmp_path, "a.jsonl", *ROWS)
    b = named_lines(tmp_path, "b.jsonl", ROWS[0], {"question": "New", "answer": "5"})
    data = load(
        [a, b], data__deduplicate=True, data__eval=named_lines(tmp_path, "c.jsonl", *ROWS, *ROWS)
    )
    assert data.sizes == [2, 1]
    assert len(data.held_out[0].prompts) == 4


def test_evaluation_problems_in_the_training_set(tmp_path: Path, load: Callable) -> None:
    train = named_lines(tmp_path, "a.jsonl", *ROWS, {"question": "New", "answer": "5"})
    shouted = named_lines(tmp_path, "b.jsonl", {"problem": "WHAT is 1+2?", "answer": "3"})
    held_out = {"eval__sets": {"shouted": shouted}}
    data = load(train, **held_out)
    assert data.contamination == [(f"{train}:1", f"{shouted}:1")]
    assert len(data.prompts) == 3
    warning = str(data.contamination_warning())
    assert f"evaluation set asks: 1, such as {train}:1, which is {shouted}:1; set" in warning
    dropped = load(train, data__contamination="drop", **held_out)
    assert (dropped.sizes, dropped.contamination_warning()) == ([2], None)
    assert dropped.notes() == [f"{train}: left out: 1 by data.contamination"]
    assert load(train, data__contamination="ignore", **held_out).contamination_warning() is None


def test_faults_can_be_collected(tmp_path: Path, load: Callable) -> None:
    found: list[DataError] = []
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "a"}\n{\n{"question": "a", "answer": "1"}\n[]\n')
    data = load([str(path), str(tmp_path / "none.jsonl")], fault=found.append)
    assert data.sizes == [1, 0]
    places = [str(error).partition(": ")[0] for error in found]
    assert [p.rpartition(":")[2] for p in places[:3]] == ["1", "2", "4"]
    assert "none.jsonl does not exist" in str(found[3])
    assert len(found) == 4


def test_what_counts_as_the_same_question() -> None:
    def key(text: str) -> str:
        return question_key(Problem("x", [{"role": "user", "content": text}], ""))

    same = [
        "Find $x$ if \\[x^{2} = 1.5\\,,\\] where $x > 0$.",
        "find  x, if $$x^2=1.5,$$ where \\( x\\gt 0\\)".replace("\\gt ", ">"),
    ]
    assert len(set(map(key, same))) == 1
    different = ["1.5", "15", "1 + 2", "1 - 2", "5!", "5", "f'(x)", "f(x)", "?", "."]
    assert len(set(map(key, different))) == len(different)
