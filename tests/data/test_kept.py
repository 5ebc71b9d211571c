"""Data that are kept between starts: the same prompts and rows, never those of other options."""

import pickle
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from conftest import TINY
from reason_llm.config import Config
from reason_llm.data import Data, cache, kept, load_data, load_evaluation, load_kept
from reason_llm.errors import DataError
from reason_llm.model import base
from reason_llm.rollout import ROW

ROWS = [{"question": f"What is {n} + 4?", "answer": f"#### {n + 4}"} for n in range(60)]
TALKS: list[dict[str, Any]] = [
    {"prompt": f"Say {n}.", "completion": "ja " * n, "note": n} for n in range(1, 30)
]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(20)]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache's folder; small files are kept, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "LEAST_BYTES", 1)
    return cache.folder()


@pytest.fixture
def asked(tmp_path: Path) -> Callable[..., Config]:
    def make(rows: list[dict[str, Any]], **options: Any) -> Config:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"\n".join(map(orjson.dumps, rows)))
        tree = {"model": {"path": str(TINY)}, "data": {"train": str(path)}, **options}
        if tree.get("stage") is None:
            tree["sample"] = {"max_new_tokens": 8}
        return Config.model_validate(tree)

    return make


def load(config: Config, lines: list[str] | None = None, **options: Any) -> Data:
    tokenizer = base.load_tokenizer(config.model.path)
    ends = base.end_token_ids(config.model.path, tokenizer)
    given = {"extra_columns": [], **options}
    if lines is None:
        return load_data(config, tokenizer, 128, end_token_ids=ends, **given)
    return load_kept(config, tokenizer, 128, given["extra_columns"], ends, lines.append)


def test_prompts_that_surely_fit_are_tokenised_when_they_are_drawn(
    asked: Callable[..., Config],
) -> None:
    rows = [*ROWS, {"question": "Was ist 3 + 4, bitte schön?", "answer": "7"}]
    # Normalization makes 33 bytes of the last one's characters, so that it may not fit.
    texts = ("<|im_end|>", "1, " * 25, "\ufdfa" * 4)
    rows += [{"question": f"Add {text}.", "answer": "1"} for text in texts]
    config = asked(rows).with_options({"data.system_prompt": "none"})
    eager, later = load(config).training[0].prompts, load(config, []).training[0].prompts
    tokens = [len(prompt.token_ids) for prompt in eager]
    assert eager.lengths.tolist() == tokens
    assert later.lengths.tolist() == [0] * (len(ROWS) + 1) + tokens[len(ROWS) + 1 :]
    assert [*later] == [*eager]
    in_order = sorted(eager, key=lambda prompt: len(prompt.token_ids))
    assert load(config).shortest(3) == in_order[:3]
    assert load(config, []).shortest(9) == in_order[:9]


def content(data: Data) -> Any:
    sets = [*data.training, *data.held_out, *filter(None, [data.held_out_rows])]
    return [
        [
            *([*each.prompts], [*each.units], each.num_rows, each.dropped, each.skipped),
            *(each.ignored, each.doubts, each.origins, each.name, each.form, each.is_training),
        ]
        for each in sets
    ] + [data.weights, data.contamination, data.notes()]


QUESTIONS = (
    "Add 1 and 2.", " Add", "Add {n}", "{1}", "[1]", '"a"', "array(1)", "Human: a\n\nAssistant: b",
    "é?", "a\\nb", "A &lt; b", "", " ", "Two\nlines", "1", "What does <|im_end|> do?",
    "Add 1 and 2", "Trailing ", "*" * 7000, "A" * 200, "\x85",
    "Was sind \u0661 Äpfel\u2028?", "Ã© ist é",
)  # fmt: skip
ANSWERS = (
    "3", " 3 ", "a\n#### 3", "#### 1\n#### 2", "#### 3\n", "####\n3", "5 ####### 7", "-3", "1,000",
    "#### 1,000", "٣", "a &lt; b #### 3", "<answer>4</answer> #### 3", "[1] #### 3", "{1} #### 3",
    "\\boxed{3}", "\trac #### 3", "####", "", "2.5", "three", "3.", "#### 3 4", "x #### 3 apples",
)  # fmt: skip


@pytest.mark.parametrize(
    ("reward", "options"),
    [
        ("boxed", {}),
        ("boxed", {"data.deduplicate": True}),
        ("boxed", {"data.template": "plain_chat", "data.system_prompt": "Be brief."}),
        ("boxed", {"data.template_arguments": {"nothing": 1}}),
        ("exact", {"data.system_prompt": "none"}),
    ],
)
def test_a_column_that_says_nothing_changes_nothing(
    reward: str, options: dict[str, Any], asked: Callable[..., Config]
) -> None:
    texts = [*product(QUESTIONS, ANSWERS)]

    def read(names: tuple[str, str], **more: None) -> Any:
        """What is known of the rows, whose errors may list all columns."""
        rows = [dict(zip(names, pair, strict=True)) | more for pair in texts]
        config = asked(
            [*rows, {names[0]: "Q", names[1]: 3}, *rows[:9]], score={"rewards": [reward]}
        )
        changed = {"data.on_bad_row": "skip", "data.max_prompt_tokens": 100, **options}
        data = load(config.with_options(changed), [])
        (given,) = data.training
        known = [[*given.contradictions.values()], given.readings, data.with_digests().digests]
        return str([content(data), *known]).replace(", other;", ";").replace(", other do", " do")

    for names in (("question", "answer"), ("prompt", "final_answer")):
        assert read(names) == read(names, other=None)
    assert len(texts) > 500


CASES: list[tuple[list[dict[str, Any]], dict[str, Any]]] = [
    ([*ROWS, ROWS[0], {**ROWS[0], "answer": "#### 5"}], {}),
    (TALKS, {"stage": "sft"}),
    (PAIRS, {"stage": "preference"}),
]


@pytest.mark.parametrize(("rows", "options"), CASES, ids=["problems", "demonstrations", "pairs"])
def test_kept_data_are_those_that_were_read(
    asked: Callable[..., Config], rows: list[dict[str, Any]], options: dict[str, Any], home: Path
) -> None:
    config = asked(rows, **options)
    lines: list[str] = []
    expected = content(load(config))
    assert content(load(config, lines)) == expected
    again = load(config, lines)
    assert content(again) == expected
    assert [line.split(" /")[0] for line in lines] == [
        "cached tokenised data in",
        "loaded tokenised data from",
    ]
    assert content(pickle.loads(pickle.dumps(again))) == expected
    (file,) = home.iterdir()
    assert str(file) in lines[1]
    one = again.training[0]
    assert (one.prompts or one.units)[-1] == [*(one.prompts or one.units)][-1]
    assert [*(one.prompts or one.units)[3:9:2]] == [*(one.prompts or one.units)][3:9:2]


def test_columns_of_rewards_are_kept(asked: Callable[..., Config]) -> None:
    rows = [{**row, "level": {"of": [n, None, "é"]}} for n, row in enumerate(ROWS)]
    config = asked(rows)
    lines: list[str] = []
    for _ in range(2):
        data = load(config, lines, extra_columns=["level"])
        assert [each.extra for each in data.prompts] == [{"level": row["level"]} for row in rows]
    assert "loaded tokenised data" in lines[1]


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-9],
    "empty": lambda content: b"",
    "bit": lambda content: content[:-5] + bytes([content[-5] ^ 1]) + content[-4:],
    "foreign": lambda content: b"another program's file\n" * 50,
    "head": lambda content: content[:18] + bytes(32) + content[50:],
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_made_again(
    asked: Callable[..., Config], home: Path, damage: Callable[[bytes], bytes]
) -> None:
    config = asked(ROWS)
    lines: list[str] = []
    expected = content(load(config, lines))
    (file,) = home.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert content(load(config, lines)) == expected
    assert "is damaged" in lines[1]
    assert "cached tokenised data" in lines[2]
    assert file.read_bytes() == whole


def test_other_rows_or_options_are_read_anew(asked: Callable[..., Config], home: Path) -> None:
    lines: list[str] = []
    load(asked(ROWS), lines)
    assert len(load(asked(ROWS[:50]), lines).prompts) == 50
    changed = asked(ROWS).with_options({"data.limit": 7})
    assert len(load(changed, lines).prompts) == 7
    load(asked(ROWS).with_options({"run.name": "another", "train.learning_rate": 1e-4}), lines)
    assert "loaded tokenised data" in lines[-1]


def test_rows_of_user_code_are_never_kept(
    asked: Callable[..., Config], home: Path, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text("def change(row):\n    return row\n")
    changed = asked(ROWS).with_options({"data.preprocess": f"{tmp_path}/own.py:change"})
    lines: list[str] = []
    assert content(load(changed, lines)) == content(load(asked(ROWS)))
    load(asked(ROWS), lines, extra_columns=[ROW])
    assert not home.exists()
    assert lines == []


def test_the_folder_is_bounded(
    asked: Callable[..., Config], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "MOST_FILES", 2)
    lines: list[str] = []
    for count in (10, 20, 30):
        load(asked(ROWS[:count]), lines)
    assert len([*home.iterdir()]) == 2
    load(asked(ROWS[:30]), lines)
    assert "loaded tokenised data" in lines[-1]


def test_a_share_of_the_training_set_is_held_out(asked: Callable[..., Config]) -> None:
    """Also of equal rows none is on both sides, and evaluating alone reads the same ones."""
    config = asked([*ROWS, *ROWS[:9]]).with_options({"data.eval": "10%"})
    lines: list[str] = []
    data = load(config, lines)
    held, trained = (
        Counter(each.text for each in p) for p in (data.held_out_prompts, data.prompts)
    )
    assert len(held) == 6
    assert held.keys().isdisjoint(trained)
    assert held + trained == Counter(each.text for each in load(asked([*ROWS, *ROWS[:9]])).prompts)
    source, (num_held, num_trained) = config.data.train, map(Counter.total, (held, trained))
    assert (
        f"{source}: 10% of its rows are held out, the same in every run: {num_held} rows; "
        f"{num_trained} rows for training" in data.notes()
    )
    assert content(load(config, lines)) == content(load(config)) == content(data)
    alone = load_evaluation(config, base.load_tokenizer(str(TINY)), 128)
    assert [*alone[0].prompts] == [*data.held_out_prompts]
    other = load(config.with_options({"run.seed": 1}), lines)
    assert {each.text for each in other.held_out_prompts} == held.keys()
    rows = load(asked(TALKS, stage="sft").with_options({"eval.rows": "20%"}))
    assert rows.held_out_rows is not None
    assert (len(rows.held_out_rows.units), rows.sizes) == (6, [23])
    with pytest.raises(DataError, match="has 1 different rows, too few"):
        load(asked(ROWS[:1]).with_options({"data.eval": "10%"}))
