"""Rows become prompts: every documented form, every fault with its line, an order that resumes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from reason_llm.config import ColumnsSection
from reason_llm.errors import DataError
from reason_llm.prompts import gold_answer, load_prompts, order, resolve_system_prompt
from reason_llm.rollout import Prompt

ROWS = [{"question": "What is 1 + 2?", "answer": "3"}, {"question": "Two\nlines", "answer": "4"}]


@pytest.fixture
def read(tokenizer: Any) -> Callable[..., list[Prompt]]:
    def read(path: Path, system: str | None = None, room: int = 4000, **columns: str) -> Any:
        return load_prompts(str(path), "train", ColumnsSection(**columns), system, tokenizer, room)

    return read


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_four_kinds_of_file_read_alike(tmp_path: Path, read: Callable) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "rows.csv").write_text('question,answer\nWhat is 1 + 2?,3\n"Two\nlines",4\n')
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    from_lines = read(lines(tmp_path, *ROWS))
    assert [p.answer for p in from_lines] == ["3", "4"]
    assert from_lines[0].id.endswith("rows.jsonl:1")
    for name in ("rows.json", "rows.csv", "rows.parquet"):
        found = read(tmp_path / name)
        assert [(p.text, p.answer, p.token_ids) for p in found] == [
            (p.text, p.answer, p.token_ids) for p in from_lines
        ]


@pytest.mark.parametrize(
    ("row", "question", "answer"),
    [
        ({"messages": {"role": "user", "content": "Q"}, "gt_answer": 7}, "Q", "7"),
        ({"messages": [{"role": "user", "content": "Q"}], "gt_answer": "7"}, "Q", "7"),
        ({"question": "Q", "answer": "9 * 2 = 18.\n#### 18"}, "Q", "18"),
        ({"question": "Q", "answer": "#### 1,018"}, "Q", "1018"),
        ({"problem": "Q", "answer": "\\frac{1}{2}"}, "Q", "\\frac{1}{2}"),
        ({"prompt": "Q", "answer": 2.5}, "Q", "2.5"),
    ],
)
def test_known_forms(row: dict, question: str, answer: str, tmp_path: Path, read: Callable) -> None:
    (prompt,) = read(lines(tmp_path, row))
    expected = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert (prompt.text, prompt.answer) == (expected, answer)


def test_token_ids_spell_the_rendered_text(tmp_path: Path, read: Callable, tokenizer: Any) -> None:
    (prompt,) = read(lines(tmp_path, {"question": "Zoë: 3 × 4 = ?", "answer": "12"}))
    assert tokenizer.decode(prompt.token_ids) == prompt.text


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path, read: Callable) -> None:
    path = lines(tmp_path, *ROWS)
    plain = [p.text for p in read(path)]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert [p.text for p in read(path)] == plain


def test_columns_are_mapped(tmp_path: Path, read: Callable) -> None:
    path = lines(tmp_path, {"q": "Q", "a": "7", "question": "other", "answer": "other"})
    (prompt,) = read(path, prompt="q", answer="a")
    assert "Q<" in prompt.text
    assert prompt.answer == "7"


def test_system_prompt_goes_first_unless_the_row_has_one(tmp_path: Path, read: Callable) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "Q"}]
    path = lines(tmp_path, ROWS[0], {"messages": own, "answer": "1"})
    first, second = read(path, system="yours")
    assert first.text.startswith("<|im_start|>system\nyours<|im_end|>\n<|im_start|>user")
    assert second.text.startswith("<|im_start|>system\nmine<|im_end|>")


def test_named_system_prompts() -> None:
    assert "<answer>" in str(resolve_system_prompt("auto", "think_answer_tags"))
    assert "\\boxed{}" in str(resolve_system_prompt("auto", "boxed"))
    assert resolve_system_prompt("none", "boxed") is None
    assert resolve_system_prompt("Be brief.", "boxed") == "Be brief."


def test_gold_answer_takes_the_last_mark() -> None:
    assert gold_answer("a #### 1\n#### -2,500 ") == "-2500"
    assert gold_answer(" 1,5 ") == "1,5"


@pytest.mark.parametrize(
    ("content", "where", "named"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": "b", "ans', ":2", "cut short"),
        ('{"question": "a", "answer": "1"}\n\n[1]\n', ":3", "object"),
        ('{"question": "a", "reply": "1"}\n', ":1", "question, reply"),
        ('{"body": "a", "answer": "1"}\n', ":1", "data.columns.prompt"),
        ('{"question": "", "answer": "1"}\n', ":1", "'question'"),
        ('{"question": 3, "answer": "1"}\n', ":1", "'question'"),
        ('{"question": "a", "answer": null}\n', ":1", "gold answer"),
        ('{"question": "a", "answer": " "}\n', ":1", "gold answer"),
        ('{"question": "a", "answer": "because ####"}\n', ":1", "gold answer"),
        (
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": "1"}], "answer": "1"}\n',
            ":1",
            "ends with a user message",
        ),
        ('{"messages": [{"role": "user"}], "answer": "1"}\n', ":1", "'messages'"),
        ("\n\n", "rows.jsonl", "no rows"),
        ("", "rows.jsonl", "empty"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(
    content: str, where: str, named: str, tmp_path: Path, read: Callable
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(DataError) as caught:
        read(path)
    message = str(caught.value)
    assert "rows.jsonl" in message
    assert where in message
    assert named in message
    assert "\n" not in message


def test_faults_of_other_kinds_of_file(tmp_path: Path, read: Callable) -> None:
    cases = {
        "rows.json": b'[{"question": "a"',
        "one.json": b'{"question": "a"}',
        "rows.csv": b"question,answer\na\n",
        "rows.parquet": b"PAR1 and no more",
        "latin.jsonl": '{"question": "é", "answer": "1"}\n'.encode("latin-1"),
        "rows.txt": b"hello",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=name) as caught:
            read(tmp_path / name)
        assert "\n" not in str(caught.value)


def test_missing_file_and_missing_named_column(tmp_path: Path, read: Callable) -> None:
    with pytest.raises(DataError, match=r"nowhere\.jsonl does not exist"):
        read(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: lacks column 'q'"):
        read(lines(tmp_path, *ROWS), prompt="q")


def test_a_prompt_beyond_the_context_names_both_lengths(tmp_path: Path, read: Callable) -> None:
    path = lines(tmp_path, ROWS[0], {"question": "long " * 50, "answer": "1"})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: the prompt has \d+ tokens and .* 60"):
        read(path, room=60)


def test_order_is_a_function_of_seed_and_position() -> None:
    whole = order(10, seed=1, start=0, count=35)
    assert sorted(whole[:10]) == list(range(10))
    assert sorted(whole[10:20]) == list(range(10))
    assert whole[:10] != whole[10:20]
    assert order(10, seed=1, start=7, count=6) == whole[7:13]
    assert order(10, seed=2, start=0, count=10) != whole[:10]
