"""All sets of an offline stage: forms, filters, what fits, what is held out."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chat_templates import END, without_template
from reason_llm.config import Config
from reason_llm.data import Condition, TokenRows, load_rows
from reason_llm.data.rows import raise_fault
from reason_llm.errors import ConfigError, DataError, ModelError
from stages import OF_FORM

DEMONSTRATIONS = [
    {"prompt": "One?", "completion": "1", "score": 1, "rate": 0.5},
    {"prompt": "Two?", "completion": "2", "score": 2, "rate": 0.5},
    {"prompt": "one ?", "completion": "1 again", "score": 3, "rate": 0.5},
    {"prompt": "Hard?", "completion": "3", "score": 4, "rate": 0},
    {"prompt": "Long " * 5, "completion": "4", "score": 5, "rate": 0.5},
    {"prompt": "Five?", "completion": "5" * 40, "score": 6, "rate": 0.5},
]
Load = Callable[..., TokenRows]


@pytest.fixture
def load(tokenizer: Any) -> Load:
    """``load_rows`` with options of the data section; others by their section's name."""

    def load(
        train: Any, form: str, *, context: int = 300, by: Any = tokenizer, fault: Any = raise_fault,
        held_out: str | None = None, condition: Condition | None = None,
        eval: dict | None = None, **data: Any,
    ) -> TokenRows:  # fmt: skip
        tree = {
            **OF_FORM[form],
            "data": {"train": train, "form": form, "system_prompt": "none"} | data,
            "sample": {"max_new_tokens": 8}, **({"eval": eval} if eval else {}),
        }  # fmt: skip
        config = Config.model_validate(tree)
        return load_rows(config, by, context, [END], fault, held_out=held_out, condition=condition)

    return load


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_sets_stand_side_by_side_in_units(tmp_path: Path, load: Load) -> None:
    pair = {"prompt": "Q", "chosen": "good", "rejected": "bad", "margin": 2}
    a, b = lines(tmp_path / "a.jsonl", pair, pair), lines(tmp_path / "b.jsonl", pair)
    found = load([{"source": a, "weight": 3}, b], "preferences", held_out=b)
    assert (found.sizes, found.weights) == ([2, 1], [3.0, 1.0])
    assert [row.name for unit in found.units for row in unit] == [
        f"{a}:1", f"{a}:1", f"{a}:2", f"{a}:2", f"{b}:1", f"{b}:1"
    ]  # fmt: skip
    assert [[row.group for row in unit] for unit in found.units] == [[0, 0], [1, 1], [2, 2]]
    assert [row.value for row in found.units[0]] == [2.0, 0.0]
    assert found.held_out is not None
    assert [row.group for row in found.held_out.rows] == [0, 0]


def test_each_form(tmp_path: Path, load: Load, tokenizer: Any) -> None:
    rows = {
        "demonstrations": {"prompt": "Q", "completion": "A"},
        "labels": {"prompt": "Q", "completion": "A", "label": False},
        "texts": {"text": "abc" * 20},
    }
    found = {
        form: load(lines(tmp_path / f"{form}.jsonl", row, row), form, max_tokens=40)
        for form, row in rows.items()
    }
    assert found["demonstrations"].sizes == found["labels"].sizes == [2]
    assert [row.value for row in found["labels"].training[0].rows] == [-1.0, -1.0]
    assert found["texts"].sizes == [4]  # 61 tokens each, in rows of at most 40
    assert [len(row.ids) for row in found["texts"].training[0].rows] == [40, 21, 40, 21]
    assert [unit[0].group for unit in found["texts"].units] == [0, 1, 2, 3]


def test_filters_count_what_they_drop(tmp_path: Path, load: Load) -> None:
    train = lines(tmp_path / "a.jsonl", *DEMONSTRATIONS)
    others = lines(tmp_path / "b.jsonl", {"question": "TWO", "answer": "2"})
    found = load(
        train, "demonstrations", deduplicate=True, contamination="drop",
        eval={"sets": {"x": others}}, pass_rate={"column": "rate", "min": 0.1},
        max_prompt_tokens=30, max_tokens=50,
    )  # fmt: skip
    (loaded,) = found.training
    assert [row.name[-2:] for row in loaded.rows] == [":1"]
    assert dict(loaded.dropped) == {
        "data.pass_rate": 1, "data.deduplicate": 1, "data.contamination": 1,
        "data.max_prompt_tokens": 1, "data.max_tokens": 1,
    }  # fmt: skip
    assert loaded.num_rows == 6
    assert found.notes() == [f"{train}: {loaded.left_out}"]
    assert found.contamination == [(f"{train}:2", f"{others}:1")]
    assert found.contamination_warning() is None
    assert [len(each.prompts) for each in found.evaluation] == [1]
    kept = load(train, "demonstrations", eval={"sets": {"x": others}})
    assert kept.sizes == [6]
    assert f"{train}:2, which is {others}:1" in str(kept.contamination_warning())


def test_held_out_rows_are_whole_and_are_questions_too(tmp_path: Path, load: Load) -> None:
    train = lines(tmp_path / "a.jsonl", *DEMONSTRATIONS[:2])
    held_out = lines(tmp_path / "b.jsonl", *DEMONSTRATIONS[1:2], *DEMONSTRATIONS[4:])
    found = load(train, "demonstrations", held_out=held_out, max_tokens=40, max_prompt_tokens=21)
    assert found.held_out is not None
    assert len(found.held_out.units) == 3  # the limits are for training rows
    assert found.contamination == [(f"{train}:2", f"{held_out}:1")]
    with pytest.raises(DataError, match=rf"^{held_out}:3: the row has \d+ tokens"):
        load(train, "demonstrations", held_out=held_out, context=40, max_tokens=40)


def test_a_row_beyond_the_context_is_an_error_or_is_counted(tmp_path: Path, load: Load) -> None:
    train = lines(tmp_path / "a.jsonl", *DEMONSTRATIONS)
    with pytest.raises(DataError, match=rf"^{train}:5: the row has \d+ tokens and the context 30"):
        load(train, "demonstrations", context=30)
    found = load(train, "demonstrations", context=30, max_tokens=30)
    assert dict(found.training[0].dropped) == {"data.max_tokens": 2}
    with pytest.raises(DataError, match=r"no row is left; left out: 6 by data\.max_tokens"):
        load(train, "demonstrations", max_tokens=2)


def test_scores_are_written_into_the_prompts(tmp_path: Path, load: Load, tokenizer: Any) -> None:
    rows = [{"prompt": "Q", "completion": "A", "score": score} for score in (2, 4, 9)]
    train = lines(tmp_path / "a.jsonl", *rows)
    held_out = lines(tmp_path / "b.jsonl", rows[0] | {"score": 5})
    found = load(train, "demonstrations", held_out=held_out, condition=Condition())
    texts = [tokenizer.decode(row.ids) for row in found.training[0].rows]
    assert ["Q <rm_score>: -0.83 <" in texts[0], "Q <rm_score>: 1.11 <" in texts[2]] == [True] * 2
    assert [row.value for row in found.training[0].rows] == [2.0, 4.0, 9.0]
    assert found.conditioning is not None
    assert found.conditioning.mean == 5.0
    assert found.held_out is not None
    assert "Q <rm_score>: 0.00 <" in tokenizer.decode(found.held_out.rows[0].ids)
    with pytest.raises(DataError, match="all 1 scores are equal"):
        load(held_out, "demonstrations", condition=Condition())
    with pytest.raises(DataError, match=r"a\.jsonl:1: lacks column 'score'"):
        load(lines(tmp_path / "a.jsonl", {"prompt": "Q", "completion": "A"}), "demonstrations",
             condition=Condition())  # fmt: skip


def test_faults_are_noted_and_reading_goes_on(tmp_path: Path, load: Load) -> None:
    rows = [{"prompt": "Q", "completion": each} for each in ("A", None, "a<|im_end|>b", "B")]
    notes: list[DataError] = []
    train = lines(tmp_path / "a.jsonl", *rows)
    found = load(train, "demonstrations", fault=notes.append)
    assert found.sizes == [2]
    assert [str(note).split(": ")[0] for note in notes] == [f"{train}:2", f"{train}:3"]
    with pytest.raises(DataError, match=r"none\.jsonl does not exist"):
        load(train, "demonstrations", held_out=str(tmp_path / "none.jsonl"))


def test_a_model_without_a_chat_template_learns_texts(tmp_path: Path, load: Load) -> None:
    by = without_template()
    train = lines(tmp_path / "a.jsonl", {"prompt": "a b", "completion": "c"})
    (row,) = load(train, "demonstrations", by=by, system_prompt="auto").training[0].rows
    assert by.decode(row.ids) == "a bc<|im_end|>"
    (row,) = load(train, "demonstrations", by=by, template="plain_chat").training[0].rows
    assert by.decode(row.ids) == "User: a b\n\nAssistant: c<|im_end|>"
    with pytest.raises(ConfigError, match=r"data\.system_prompt='boxed' needs a chat template"):
        load(train, "demonstrations", by=by, system_prompt="boxed")
    problems = lines(tmp_path / "b.jsonl", {"question": "Q", "answer": "1"})
    with pytest.raises(ModelError, match="no chat template"):
        load(train, "demonstrations", by=by, eval={"sets": {"x": problems}})
    talk = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    with pytest.raises(DataError, match=r"c\.jsonl:1: the row is a conversation"):
        load(lines(tmp_path / "c.jsonl", talk), "demonstrations", by=by)


@pytest.mark.parametrize(
    ("form", "options", "named"),
    [
        ("problems", {}, r"data\.form=problems are prompts to sample from"),
        ("labels", {"max_tokens": 301}, r"data\.max_tokens=301 is not from 2 to 300"),
        ("labels", {"max_tokens": 1}, r"data\.max_tokens=1 is not"),
        ("labels", {"condition": Condition()}, r"data\.form=labels has no prompts that scores"),
    ],
)
def test_options_that_contradict_each_other(
    form: str, options: dict, named: str, tmp_path: Path, load: Load
) -> None:
    train = lines(tmp_path / "a.jsonl", {"prompt": "Q", "completion": "A", "label": 1})
    with pytest.raises(ConfigError, match=named):
        load(train, form, **options)
