"""Forms of rows to learn from, as TRL's data sets have them, and one clear line for every other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reason_llm.config.data import ColumnsSection
from reason_llm.data import forms
from reason_llm.data.forms import (
    Completed,
    TextDocument,
    read_demonstration,
    read_document,
    read_labelled,
    read_preference,
)
from reason_llm.data.rows import read_rows
from reason_llm.errors import DataError

COLUMNS = ColumnsSection()
U, A = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
R, B = {"role": "user", "content": "R"}, {"role": "assistant", "content": "B"}
S = {"role": "system", "content": "S"}


def said(text: str) -> dict:
    return {**A, "content": text}


def asked(text: str) -> dict:
    return {**U, "content": text}


def G(name: str, text: str) -> dict:
    """A message as ShareGPT has it."""
    return {"from": name, "value": text}


@pytest.mark.parametrize(
    ("row", "messages", "completion", "is_text"),
    [
        ({"prompt": "Q", "completion": "A"}, [U], [A], True),
        ({"prompt": [U], "completion": [A]}, [U], [A], False),
        ({"prompt": "Q", "completion": [A]}, [U], [A], False),
        ({"prompt": [S, U], "completion": "A"}, [S, U], [A], False),
        ({"prompt": U, "completion": A, "source": 7}, [U], [A], False),
        ({"prompt": [U], "completion": [A, R, B]}, [U], [A, R, B], False),
        ({"messages": [U, A]}, [U], [A], False),
        ({"messages": [S, U, A, R, B]}, [S, U], [A, R, B], False),
        ({"messages": [U, A, R]}, [U], [A], False),
        ({"messages": [U], "completion": "A"}, [U], [A], False),
        ({"conversations": {"from": ["human", "gpt"], "value": ["Q", "A"]}}, [U], [A], False),
        ({"messages": [U, A, R], "response": "B"}, [U, A, R], [B], False),
        ({"messages": [{**U, "name": None, "tool_calls": None}, A]}, [U], [A], False),
        ({"conversations": [G("system", "S"), G("human", "Q"), G("gpt", "A")]}, [S, U], [A], False),
        ({"conversations": [U, A]}, [U], [A], False),
        ({"prompt": [G("user", "Q")], "completion": G("assistant", "A")}, [U], [A], False),
    ],
)
def test_demonstrations(row: dict, messages: list, completion: list, is_text: bool) -> None:
    found = read_demonstration("x:1", row, COLUMNS)
    assert found == Completed("x:1", messages, (completion,), is_text)


def test_named_columns() -> None:
    columns = ColumnsSection(prompt="q", answer="a")
    row = {"q": "Q", "a": "A", "prompt": 1, "completion": 2, "label": 1}
    assert read_demonstration("x", row, columns) == Completed("x", [U], ([A],), True)
    assert read_labelled("x", row, columns) == Completed("x", [U], ([A],), True, 1.0)
    assert read_document("x", row, columns) == TextDocument("x", "Q")
    talk = ColumnsSection(prompt="talk")
    assert read_demonstration("x", {"talk": [U, A]}, talk).completions == ([A],)
    assert read_demonstration("x", {"talk": [U], "output": "A"}, talk).completions == ([A],)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Q", "chosen": "A", "rejected": "B"}, ([U], ([A], [B]), True, 0.0)),
        ({"prompt": [U], "chosen": [A], "rejected": [B]}, ([U], ([A], [B]), False, 0.0)),
        ({"input": "Q", "system": "S", "chosen": "It is A", "rejected": "It is B"},
         ([S, U], ([said("It is A")], [said("It is B")]), False, 0.0)),
        ({"prompt": "Q", "chosen": "A", "rejected": [B]}, ([U], ([A], [B]), False, 0.0)),
        ({"chosen": [U, A], "rejected": [U, B]}, ([U], ([A], [B]), False, 0.0)),
        ({"chosen": [S, U, A, R, A], "rejected": [S, U, A, R, B]},
         ([S, U, A, R], ([A], [B]), False, 0.0)),
        # UltraFeedback's form: the prompt stands in the sides, and as text beside them.
        ({"prompt": "Q", "chosen": [U, A], "rejected": [U, B]}, ([U], ([A], [B]), False, 0.0)),
        ({"prompt": "Q", "chosen": "A", "rejected": "B", "margin": 2},
         ([U], ([A], [B]), True, 2.0)),
        ({"chosen": [U, A, R, B], "rejected": [U, B]}, ([U], ([A, R, B], [B]), False, 0.0)),
        ({"conversations": [G("human", "Q")], "chosen": G("gpt", "A"), "rejected": G("gpt", "B")},
         ([U], ([A], [B]), False, 0.0)),
        ({"chosen": [G("human", "Q"), G("gpt", "A")], "rejected": [G("human", "Q"), G("gpt", "B")]},
         ([U], ([A], [B]), False, 0.0)),
        # Whole texts: of HH-RLHF, and others, which are cut between two words.
        ({"chosen": "\n\nHuman: Q\n\nAssistant: A\n\nHuman: R\n\nAssistant: It is B",
          "rejected": "\n\nHuman: Q\n\nAssistant: A\n\nHuman: R\n\nAssistant: It is A"},
         ([U, A, R], ([said("It is B")], [said("It is A")]), False, 0.0)),
        ({"chosen": "Q: 2?\nA: five", "rejected": "Q: 2?\nA: fish"},
         ([asked("Q: 2?\nA:")], ([said(" five")], [said(" fish")]), True, 0.0)),
        ({"chosen": "Q\nfive", "rejected": "Q\nfish"},
         ([asked("Q\n")], ([said("five")], [said("fish")]), True, 0.0)),
    ],
)  # fmt: skip
def test_preferences(row: dict, expected: tuple) -> None:
    assert read_preference("x", row, COLUMNS) == Completed("x", *expected)


def test_a_preference_says_which_column_is_which() -> None:
    for row, place in (
        ({"Prompt": "Q", "chosen": "A", "Rejected": "B"}, "column 'Prompt'"),
        ({"chosen": "Q a", "Rejected": "Q b"}, "the start that both share"),
    ):
        assert read_preference("x", row, COLUMNS).origin == (
            f"chosen is column 'chosen', rejected is column 'Rejected', the prompt is {place}"
        )


@pytest.mark.parametrize(
    ("label", "value"),
    [(True, 1.0), (False, -1.0), ("True", 1.0), ("false", -1.0), (1, 1.0), (0, -1.0),
     ("1.0", 1.0)],
)  # fmt: skip
def test_labels(label: Any, value: float) -> None:
    found = read_labelled("x", {"prompt": "Q", "completion": "A", "label": label}, COLUMNS)
    assert found == Completed("x", [U], ([A],), True, value)


DEEP: Any = "A"
for _ in range(40):
    DEEP = [DEEP]
MANY = [U, A] * 500_000
BAD = [
    (read_demonstration, {"prompt": "Q"}, "columns .completion., .*; it has prompt"),
    (read_demonstration, {"completion": "A"}, "lacks any of the columns"),
    (read_demonstration, {"prompt": "Q", "completion": None}, "'completion' is None"),
    (read_demonstration, {"prompt": "Q", "completion": " "}, "'completion' is ' '"),
    (read_demonstration, {"prompt": "Q", "completion": 3}, "'completion' is 3"),
    (read_demonstration, {"prompt": "Q", "completion": []}, r"'completion' is \[\]"),
    (read_demonstration, {"prompt": "Q", "completion": DEEP}, r"'completion', message 1 is \[\[\["),
    (read_demonstration, {"prompt": "Q", "completion": [U]}, "begins and ends with the"),
    (read_demonstration, {"prompt": "Q", "completion": [A, R]}, "begins and ends with the"),
    (read_demonstration, {"prompt": None, "completion": "A"}, "'prompt' is None"),
    (read_demonstration, {"prompt": [U, A], "completion": "A"}, "ends with a user message"),
    (read_demonstration, {"messages": None}, "lacks any of the columns 'completion'"),
    (read_demonstration, {"messages": []}, r"has the roles \[\]"),
    (read_demonstration, {"messages": [U]}, r"has the roles \['user'\]"),
    (read_demonstration, {"conversations": [G("gpt", "A"), G("human", "Q"), G("gpt", "B")]},
     "'conversations' begins with a message of the assistant, .*; remove that message"),
    (read_demonstration, {"messages": [U, None]}, "'messages', message 2 is None"),
    (read_demonstration, {"messages": [U, {"role": "assistant", "content": None}]}, "message 2"),
    (read_demonstration, {"messages": [U, {"role": "assistant", "content": [{"type": "text"}]}]},
     "message 2 .* with text in both"),
    (read_demonstration, {"messages": [{"from": "judge", "value": "Q"}]}, "message 1 is from"),
    (read_demonstration, {"messages": [{"from": ["human"], "value": "Q"}]}, "message 1"),
    (read_demonstration, {"conversations": [G("human", "Q"), G("gpt", "")]}, "message 2"),
    (read_demonstration, {"messages": [U, {**A, "tool_calls": [{"id": 1}]}]}, "has tool calls"),
    (read_demonstration, {"prompt": [{**U, "tool_calls": [1]}], "completion": "A"}, "tool calls 1"),
    (read_demonstration, {"messages": [U, A, R, {"role": "bot", "content": "B"}]}, "role 'bot'"),
    (read_labelled, {"prompt": "Q", "completion": [A, {"role": "bot", "content": "B"}, A],
                     "label": 1}, "role 'bot', which is not known"),
    (read_demonstration, {"messages": MANY}, "has 1,000,000 messages; .* at most 1,000"),
    (read_demonstration, {"prompt": MANY[:-1], "completion": "A"}, "999,999 messages"),
    (read_demonstration, {"prompt": "Q", "completion": MANY[1:]}, "999,999 messages"),
    (read_document, {"prompt": "Q"}, "lacks column 'text'"),
    (read_document, {"text": None}, "'text' is None; expected text"),
    (read_document, {"text": ["a"]}, "'text' is"),
    (read_document, {"text": "\n "}, "'text' is"),
    (read_preference, {"prompt": "Q", "chosen": "A"}, "'rejected'.*; make such columns by data"),
    (read_preference, {"chosen": "A", "rejected": "B"}, "no word in common; add a column"),
    (read_preference, {"chosen": "Q A", "rejected": "Q "}, "'rejected' is ' '; expected text"),
    (read_preference, {"chosen": "\n\nHuman: Q\n\nAssistant: A",
                       "rejected": "\n\nHuman: Q\n\nAssistant:"}, "'rejected', message 2 is"),
    (read_preference, {"prompt": "Q", "chosen": "A", "rejected": "A"}, "the same text"),
    (read_preference, {"prompt": "Q", "chosen": "A", "rejected": [A]}, "the same text"),
    (read_preference, {"chosen": [U, A], "rejected": [U, A]}, "the same text"),
    (read_preference, {"chosen": [U, A], "rejected": [R, B]}, "0 first messages in common"),
    (read_preference, {"chosen": [U, A], "rejected": [U]}, r"'rejected' has the roles \[\]"),
    (read_preference, {"chosen": [U, A, R, B], "rejected": [U, A, U, B]}, "2 first messages"),
    (read_preference, {"chosen": [U, A, B], "rejected": [U, A, A]}, "after one of the user"),
    (read_preference, {"chosen": [U, A, R], "rejected": [U, B]}, r"\['assistant', 'user'\]"),
    (read_preference, {"chosen": [U, None], "rejected": [U, B]}, "'chosen', message 2 is None"),
    (read_preference, {"chosen": MANY, "rejected": [U, B]}, "1,000,000 messages"),
    (read_preference, {"prompt": [U], "chosen": [U, A], "rejected": [U, B]}, "'chosen' is"),
    (read_preference, {"prompt": "Q", "chosen": "A", "rejected": "B", "margin": None}, "'margin'"),
    (read_preference, {"prompt": "Q", "chosen": "A", "rejected": "B", "margin": "inf"}, "'margin'"),
    (read_preference, {"prompt": "Q", "chosen": "A", "rejected": "B", "margin": -1}, "swap the"),
    (read_labelled, {"prompt": "Q", "completion": "A"}, "columns 'label', 'kto_tag'"),
    *[
        (read, {"prompt": "Q", "completions": ["A", "B"], "labels": [True, False]},
         "lacks .*data.preprocess")
        for read in (read_labelled, read_demonstration, read_preference)
    ],
    *[
        (read_labelled, {"prompt": "Q", "completion": "A", "label": label},
         "'label' is .* expected true or false \\(1 or 0")
        for label in (None, "yes", [True], {}, float("nan"), 10**400, "", 0.25, 5, -1, "-0.5")
    ],
]  # fmt: skip


@pytest.mark.parametrize(
    ("read", "row", "named"), BAD, ids=[f"{number}" for number in range(len(BAD))]
)
def test_a_bad_row_is_one_clear_line(read: Callable, row: dict, named: str) -> None:
    with pytest.raises(DataError, match=rf"^rows\.jsonl:7: .*{named}") as caught:
        read("rows.jsonl:7", row, COLUMNS)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_an_endless_conversation_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": MANY[:200_000]}) + "\n")
    ((where, row),) = read_rows(str(path), "train")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: 'messages' has 200,000 messages"):
        forms.read_demonstration(where, row, COLUMNS)
