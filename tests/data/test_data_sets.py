"""Several sets side by side, what filters leave out of any form, and what is in two sets."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from chat_templates import without_template
from conftest import config_of
from reason_llm.data import Data, load_evaluation
from reason_llm.data.forms import Problem
from reason_llm.data.load import check_files
from reason_llm.data.sets import question_key
from reason_llm.errors import ConfigError, DataError, ModelError
from stages import OF_FORM

Load = Callable[..., Data]


@pytest.fixture
def of_form(load: Load) -> Load:
    """``load`` of training rows of a form, with the longest row in tokens."""

    def of_form(form: str, train: Any, context: int = 4000, **options: Any) -> Data:
        return load(train, context - 1, data__form=form, **OF_FORM[form], **options)

    return of_form


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def row(question: str, answer: str = "3", **columns: Any) -> dict[str, Any]:
    """A problem and a demonstration in one."""
    return {"prompt": question, "answer": answer, "completion": answer, **columns}


ROWS = [row("What is 1 + 2?"), row("Two\nlines", "4")]
both = pytest.mark.parametrize("form", ["problems", "demonstrations"])


def places(data: Data) -> list[str]:
    """Lines of what is taken."""
    names = [prompt.id for prompt in data.prompts] + [unit[0].name for unit in data.units]
    return [name.rpartition(":")[2] for name in names]


# --- every form


def test_problems_stand_side_by_side(tmp_path: Path, load: Load) -> None:
    a, b = lines(tmp_path / "a.jsonl", *ROWS), lines(tmp_path / "b.jsonl", ROWS[0])
    data = load([{"source": a, "weight": 3}, b], eval__sets={"x": a, "y-2": b}, data__eval=b)
    assert (data.sizes, data.weights) == ([2, 1], [3.0, 1.0])
    assert [prompt.id for prompt in data.prompts] == [f"{a}:1", f"{a}:2", f"{b}:1"]
    assert [(s.name, len(s.prompts)) for s in data.held_out] == [("", 1), ("x", 2), ("y-2", 1)]
    assert len(load(a, eval__sets={"x": a}, eval__limit=1).held_out[0].prompts) == 1


def test_pairs_stand_side_by_side(tmp_path: Path, of_form: Load) -> None:
    pair = {"prompt": "Q", "chosen": "good", "rejected": "bad", "margin": 2}
    a, b = lines(tmp_path / "a.jsonl", pair, pair), lines(tmp_path / "b.jsonl", pair)
    data = of_form("preferences", [{"source": a, "weight": 3}, b], eval__rows=a)
    assert (data.sizes, data.weights) == ([2, 1], [3.0, 1.0])
    names = [f"{a}:1", f"{a}:1", f"{a}:2", f"{a}:2", f"{b}:1", f"{b}:1"]
    assert [each.name for unit in data.units for each in unit] == names
    assert [each.value for each in data.units[0]] == [2.0, 0.0]
    assert data.held_out_rows is not None
    assert [each.group for each in data.held_out_rows.rows] == [0, 0, 1, 1]


@both
def test_filters_count_what_they_leave_out(form: str, tmp_path: Path, of_form: Load) -> None:
    train = lines(
        tmp_path / "a.jsonl",
        row("What is 1 + 2?"),
        row("what is  1 + $2$?"),
        row("Too long " * 50),
        row("What is 1 - 2?", "-1"),
        row("In both", "2"),
    )
    others = lines(tmp_path / "b.jsonl", {"question": "in BOTH?", "answer": "2"})
    data = of_form(
        form, train, data__max_prompt_tokens=60, data__deduplicate=True,
        data__contamination="drop", eval__sets={"x": others},
    )  # fmt: skip
    assert places(data) == ["1", "4"]
    (data_set,) = data.training
    assert data_set.num_rows == 5
    assert data_set.left_out == (
        "left out: 1 by data.deduplicate, 1 by data.contamination, 1 by data.max_prompt_tokens"
    )
    unread = "completion" if form == "problems" else "answer"
    assert data.notes() == [
        f"{train}: {data_set.left_out}",
        f"{train}: ignored columns: {unread} (5 rows)",
    ]
    assert data.contamination == [(f"{train}:5", f"{others}:1")]
    assert data.contamination_warning() is None
    assert len(data.held_out_prompts) == 1
    assert of_form(form, train).sizes == [5]
    with pytest.raises(DataError, match=r"rows are left \(left out: 5 by data\.max_prompt_tokens"):
        of_form(form, train, data__max_prompt_tokens=2)


@both
def test_evaluation_problems_in_the_training_set(form: str, tmp_path: Path, of_form: Load) -> None:
    train = lines(tmp_path / "a.jsonl", *ROWS, row("New"))
    shouted = lines(tmp_path / "b.jsonl", {"problem": "WHAT is 1+2?", "answer": "3"})
    data = of_form(form, train, eval__sets={"shouted": shouted})
    assert data.contamination == [(f"{train}:1", f"{shouted}:1")]
    assert data.sizes == [3]
    warning = str(data.contamination_warning())
    assert f"evaluation set: 1, such as {train}:1, which asks the same as {shouted}:1;" in warning
    data = of_form(form, train, eval__sets={"x": shouted}, data__contamination="ignore")
    assert data.contamination_warning() is None


@both
def test_faults_can_be_collected(form: str, tmp_path: Path, of_form: Load) -> None:
    errors: list[DataError] = []
    path, none = tmp_path / "rows.jsonl", tmp_path / "none.jsonl"
    good, long = json.dumps(row("a")), json.dumps(row("a " * 200))
    path.write_text(f'{{"prompt": "a"}}\n{{\n{good}\n[]\n{long}\n')
    data = of_form(form, [str(path), str(none)], 200, fault=errors.append)
    assert data.sizes == [1, 0]
    assert [str(error).partition(": ")[0] for error in errors] == [
        f"{path}:1", f"{path}:2", f"{path}:4",
        f"data file {none} does not exist; check data.train, data.eval and eval.sets", f"{path}:5",
    ]  # fmt: skip


def test_duplicates_are_found_across_sets_and_held_out_sets_are_left_alone(
    tmp_path: Path, load: Load
) -> None:
    a = lines(tmp_path / "a.jsonl", *ROWS)
    b = lines(tmp_path / "b.jsonl", ROWS[0], row("New", "5"))
    held_out = lines(tmp_path / "c.jsonl", *ROWS, *ROWS)
    data = load([a, b], data__deduplicate=True, data__eval=held_out)
    assert data.sizes == [2, 1]
    assert len(data.held_out[0].prompts) == 4


def test_what_counts_as_the_same_question() -> None:
    def key(text: str) -> str:
        return question_key(Problem("x", [{"role": "user", "content": text}], ""))

    same = [
        "Find $x$ if \\[x^{2} = 1.5\\,,\\] where $x > 0$.",
        "find  x, if $$x^2=1.5,$$ where \\( x\\gt 0\\)".replace("\\gt ", ">"),
    ]
    assert len(set(map(key, same))) == 1
    assert key("Add 1,  23\nand 4") == key("add 1 23 and 4.")
    different = ["1.5", "15", "1 + 2", "1 - 2", "5!", "5", "f'(x)", "f(x)", "?", "."]
    different += ["Add 1 23 4", "Add 12 3 4", "Add 1 2 34", "Flat 1 2 a", "Flat 12 a"]
    assert len(set(map(key, different))) == len(different)
    # A mark of LaTeX says nothing, and keeps a text from the short way.
    rng = random.Random(0)
    for _ in range(4000):
        text = "".join(
            rng.choices("aB12 .,;:?${}\n\t\x1c-é\u0661\u3000\uff51½", k=rng.randrange(12))
        )
        assert key(f"q{text}") == key(f"\\(q{text}") == key(f"\uff51{text}"), text
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "5!"}]
    assert question_key(Problem("x", asked, "")) == key("5!")


def test_a_held_out_prompt_leaves_room_for_the_completion_of_an_evaluation(
    tmp_path: Path, load: Load
) -> None:
    held_out = lines(tmp_path / "a.jsonl", row("A longer question"))
    train = lines(tmp_path / "b.jsonl", row("Q"))
    many = len(load(held_out).prompts[0].token_ids)

    def judged(longest: int) -> Data:  # in a context of 10 tokens more than the question
        options = {"eval__sets": {"x": held_out}, "eval__max_new_tokens": longest}
        return load(train, many + 9, **options)

    assert len(judged(10).held_out_prompts) == 1
    with pytest.raises(DataError, match=f"has {many} tokens and the context leaves {many - 1}"):
        judged(11)
    with pytest.raises(ConfigError, match=rf"eval\.max_new_tokens={many + 10} leaves no prompt"):
        judged(many + 10)


def test_a_hub_set_is_learned_by_the_split_that_is_asked_for_and_judged_by_its_test_split(
    of_form: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def read_rows(source: str, split: str, *others: object) -> Any:
        asked.append((source, split))
        return iter([(f"{source}:1", row("Q"))])

    monkeypatch.setattr("reason_llm.data.load.read_rows", read_rows)
    of_form("demonstrations", "a/b", data__split="part", data__eval="c/d", eval__rows="e/f")
    assert asked == [("c/d", "test"), ("e/f", "test"), ("a/b", "part")]


def test_the_first_rows_of_all_files_are_read_and_none_of_the_hub(tmp_path: Path) -> None:
    good = lines(tmp_path / "good.jsonl", row("Q"))
    (tmp_path / "odd.xyz").write_text("x")
    names = ["a.jsonl", "b.CSV", "odd.xyz", "rows.json"]
    none, empty, odd, rows = (str(tmp_path / name) for name in names)
    tree = {"stage": "sft", "data": {"train": [good, none, "of/hub"], "eval": empty}}
    config = config_of(tree, eval__sets={"x": odd}, eval__rows=rows)
    told: list[DataError] = []
    check_files(config, told.append)
    assert [next(name for name in names if name in str(error)) for error in told] == names


def test_an_evaluation_alone_reads_what_it_needs(tmp_path: Path, tokenizer: Any) -> None:
    held_out = lines(tmp_path / "a.jsonl", row("Q", hint="h"), row("R", hint="i"))
    bare = lines(tmp_path / "b.jsonl", row("Q"))
    tree = {"data": {"train": "none", "eval": held_out, "system_prompt": "none"}}
    config = config_of(tree, eval__sets={"x": bare}, eval__limit=1, sample__max_new_tokens=1)
    sets = load_evaluation(config, tokenizer, 400, ["prompt"])
    assert [(each.name, each.source, each.size) for each in sets] == [
        ("", held_out, 1), ("x", bare, 1)
    ]  # fmt: skip
    for each in sets:
        assert each.prompts[0].extra == {"prompt": "Q"}
    with pytest.raises(DataError, match=r"b\.jsonl:1: lacks column 'hint'"):
        load_evaluation(config, tokenizer, 400, ["hint"])


# --- rows to learn from


def test_labels_and_texts(tmp_path: Path, of_form: Load) -> None:
    train = lines(tmp_path / "a.jsonl", *[row("Q", label=False, text="abc" * 20)] * 2)
    labels = of_form("labels", train)
    assert [unit[0].value for unit in labels.units] == [-1.0, -1.0]
    unread = f"{train}: ignored columns: answer (2 rows), text (2 rows)"
    assert labels.notes() == [unread, "all 2 rows are labelled bad; KTO needs good and bad"]
    good = lines(tmp_path / "b.jsonl", row("Q", label=True), row("R", label=True))
    assert of_form("labels", good).notes()[1:] == [
        "all 2 rows are labelled good; KTO needs good and bad"
    ]
    mixed = of_form("labels", [train, good])
    assert mixed.notes() == [unread, f"{good}: ignored columns: answer (2 rows)"]
    texts = of_form("texts", train, data__max_tokens=40, eval__rows=train)
    assert texts.held_out_rows is not None
    assert [len(each.ids) for each in texts.held_out_rows.rows] == [40, 21, 40, 21]
    assert texts.contamination == [(f"{train}:1", f"{train}:1"), (f"{train}:2", f"{train}:1")]
    assert texts.sizes == [4]  # 61 tokens each, in rows of at most 40
    assert [len(unit[0].ids) for unit in texts.units] == [40, 21, 40, 21]
    assert [unit[0].group for unit in texts.units] == [0, 1, 2, 3]


def test_held_out_rows_are_whole_and_are_questions_too(tmp_path: Path, of_form: Load) -> None:
    train = lines(tmp_path / "a.jsonl", *ROWS)
    held_out = lines(tmp_path / "b.jsonl", ROWS[1], row("Long " * 5), row("Five?", "5" * 40))
    limits = {"data__max_tokens": 40, "data__max_prompt_tokens": 30, "eval__rows": held_out}
    data = of_form("demonstrations", train, **limits)
    assert data.held_out_rows is not None
    assert len(data.held_out_rows.units) == 3  # the limits are for training rows
    assert data.contamination == [(f"{train}:2", f"{held_out}:1")]
    with pytest.raises(DataError, match=rf"^{held_out}:3: the row has \d+ tokens"):
        of_form("demonstrations", train, 40, **limits)


def test_a_row_beyond_the_context_is_an_error_or_is_counted(tmp_path: Path, of_form: Load) -> None:
    train = lines(tmp_path / "a.jsonl", row("One?"), row("Long " * 5), row("Five?", "5" * 40))
    with pytest.raises(DataError, match=rf"^{train}:2: the row has \d+ tokens and the context 30"):
        of_form("demonstrations", train, 30)
    data = of_form("demonstrations", train, 30, data__max_tokens=30)
    assert dict(data.training[0].dropped) == {"data.max_tokens": 2}
    pair = {"prompt": "Q", "chosen": "A", "rejected": "a much longer one than the other"}
    with pytest.raises(DataError, match=r"pairs\.jsonl:1: the row has"):
        of_form("preferences", lines(tmp_path / "pairs.jsonl", pair), 30)


def test_a_model_without_a_chat_template_learns_texts(tmp_path: Path, of_form: Load) -> None:
    by = without_template()

    def learned(train: str, **options: Any) -> str:
        data = of_form("demonstrations", train, by=by, **options)
        return str(by.decode(data.units[0][0].ids))

    train = lines(tmp_path / "a.jsonl", {"prompt": "a b", "completion": "c"})
    assert learned(train, data__system_prompt="auto") == "a bc<|im_end|>"
    assert learned(train, data__template="plain_chat") == "User: a b\n\nAssistant: c<|im_end|>"
    with pytest.raises(ConfigError, match=r"data\.system_prompt='boxed' needs a chat template"):
        learned(train, data__system_prompt="boxed")
    with pytest.raises(ModelError, match="no chat template"):
        learned(train, eval__sets={"x": lines(tmp_path / "b.jsonl", *ROWS)})
    talk = {"messages": [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]}
    with pytest.raises(DataError, match=r"c\.jsonl:1: the row is a conversation"):
        learned(lines(tmp_path / "c.jsonl", talk))


# --- options that contradict each other


@pytest.mark.parametrize(
    ("form", "options", "named"),
    [
        (
            "problems",
            {"data__max_prompt_tokens": 500},
            "max_prompt_tokens=500 is more than the 299",
        ),
        ("problems", {"sample__max_new_tokens": 300}, r"sample\.max_new_tokens=300 leaves no"),
        ("labels", {"data__max_tokens": 301}, r"data\.max_tokens=301 is not from 2 to 300"),
        ("labels", {"data__max_tokens": 1}, r"data\.max_tokens=1 is not"),
    ],
)
def test_options_that_contradict_each_other(
    form: str, options: dict, named: str, tmp_path: Path, of_form: Load
) -> None:
    with pytest.raises(ConfigError, match=named):
        of_form(form, lines(tmp_path / "a.jsonl", *ROWS), 300, **options)


def test_golds_of_a_hub_set_are_those_of_its_file(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``datasets`` makes 7 of "007" where a column holds texts and numbers."""
    golds = ["007", "1e3", "0.50", 7, 2.5, "x + 1", "12"]
    rows = [
        {"prompt": "Q", "reward_model": {"style": "rule", "ground_truth": gold}, "answer": gold}
        for gold in golds
    ]
    path = lines(tmp_path / "a.jsonl", *rows)
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset("json", data_files=path, split="train", cache_dir=cache)
    assert [row["answer"] for row in loaded] != golds
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **options: loaded)
    expected = [prompt.answer for prompt in load(path).prompts]
    assert expected == [*map(str, golds)]
    for column in ("answer", "reward_model"):
        columns = {"answer": column}
        assert [p.answer for p in load("of/hub", data__columns=columns).prompts] == expected
