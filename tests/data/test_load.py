"""Rows become prompts: every documented form, every fault with its line, an order that resumes."""

import json
import resource
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from reason_llm.config import Config
from reason_llm.data import Data, load_data
from reason_llm.data.rows import read_rows
from reason_llm.errors import DataError
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.document import RunIdentity, read_document
from reason_llm.score.code.cases import ProgramTests, read_tests
from reason_llm.score.math import gold_answer

ROWS = [{"question": "What is 1 + 2?", "answer": "3"}, {"question": "Two\nlines", "answer": "4"}]


@pytest.fixture
def read(load: Callable[..., Data]) -> Callable[..., list[Prompt]]:
    def read(path: Path, system: str = "none", room: int = 4000, **columns: str) -> Any:
        return load(path, room, data__system_prompt=system, data__columns=columns).prompts

    return read


CSV = 'question,answer\nWhat is 1 + 2?,3\n"Two\nlines",4\n'


def lines(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ODD_LINES = {
    r'{"question": "a", "answer": "1", "answer": "2"}': "key 'answer' occurs twice",
    r'{"a": "\\", "a": "\\"}': "key 'a' occurs twice",
    r'{"a": "\"", "a": "1"}': "key 'a' occurs twice",
    r'{"a": "\ud800"}': "surrogates not allowed",
    r'{"a": "b"} {}': "Extra data",
    '{"a": "\x01"}': "Invalid control character",
    r'{"a": NaN}': "NaN is not valid JSON",
    r'{"a": "b"': "delimiter",
}


@pytest.mark.parametrize("line", ODD_LINES)
def test_a_line_that_is_no_strict_json_is_an_error(line: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(f'{{"question": "a"}}\n{line}\n')
    errors = list[str]()
    rows = [*read_rows(str(tmp_path / "rows.jsonl"), "", lambda error: errors.append(str(error)))]
    assert [row for _, row in rows] == [{"question": "a"}]
    assert len(errors) == 1 and ":2: not valid JSON" in errors[0] and ODD_LINES[line] in errors[0]


def test_lines_are_read_as_python_reads_json(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"a": "\\", "b": '"'}, {"a": '\\"', '"': "\\\\"}, {"a": "é\u2028\x7f"}, {"": ""},
        {"a": 10**30, "b": 1e-7}, {"a": None, "b": [{"c": "d"}], "e": True}, {"a": "1"},
    ]  # fmt: skip
    for ascii in (False, True):
        text = "\n".join(json.dumps(row, ensure_ascii=ascii) for row in rows)
        (tmp_path / "rows.jsonl").write_text(f"{text}\n")
        assert [row for _, row in read_rows(str(tmp_path / "rows.jsonl"), "")] == rows


def test_four_kinds_of_file_read_alike(tmp_path: Path, read: Callable) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "rows.csv").write_text(CSV)
    table = pyarrow.Table.from_pylist(ROWS)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    from_lines = read(lines(tmp_path, *ROWS))
    assert [p.answer for p in from_lines] == ["3", "4"]
    assert from_lines[0].id.endswith("rows.jsonl:1")
    for mark in (";", "\t"):  # as spreadsheets save it
        text = (tmp_path / "rows.csv").read_text().replace(",", mark)
        (tmp_path / f"rows{ord(mark)}.csv").write_text(text)
    (tmp_path / "lines.json").write_text((tmp_path / "rows.jsonl").read_text())
    names = ("rows.json", "lines.json", "rows.csv", "rows59.csv", "rows9.csv", "rows.parquet")
    for name in names:
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
        (
            {"problem": "Q", "solution": "so \\boxed{1}, not \\boxed{\\frac{1}{2}}."},
            "Q",
            "\\frac{1}{2}",
        ),
        ({"problem": "Q", "answer": "204", "solution": "\\boxed{7}"}, "Q", "204"),
        ({"problem": "Q", "answer": ["$1,3$"]}, "Q", "$1,3$"),
        (
            {"prompt": [{"role": "user", "content": "Q"}], "reward_model": {"ground_truth": "34"}},
            "Q",
            "34",
        ),
        ({"question": "Q", "answer": "10 \\boxed{} presents\n#### 10"}, "Q", "10"),
        ({"question": "Q", "reward_model": '{"ground_truth": "1"}'}, "Q", "1"),
        ({"question": "Q", "answer": ' {"ground_truth": ["#### 7"]}'}, "Q", "7"),
        ({"question": "Q", "answer": {"text": ["7", "7"], "answer_start": [1, 1]}}, "Q", "7"),
        ({"question": "Q", "answer": {"spans": ["7"], "types": ["number"]}}, "Q", "7"),
        ({"question": "Q", "answer": '{"name": "Ann"}'}, "Q", '{"name": "Ann"}'),
        ({"conversations": [{"from": "human", "value": "Q"}], "answer": 1}, "Q", "1"),
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
    files = {".jsonl": path.read_text(), ".json": json.dumps(ROWS), ".csv": CSV}
    files[".tsv"] = CSV.replace(",", "\t")
    for kind, text in files.items():
        path.with_suffix(kind).write_text(text, encoding="utf-8-sig")
        assert [p.text for p in read(path.with_suffix(kind))] == plain


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("rows.tsv", CSV.encode("utf-16"), "not UTF-8 at byte 0; save it as UTF-8"),
        ("rows.json", b'{"version": 1, "data": [{}]}', "holds dict; expected a list of objects"),
    ],
)
def test_files_of_another_shape(
    name: str, content: bytes, says: str, tmp_path: Path, read: Callable
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        read(tmp_path / name)


def test_integers_of_any_length_stay_what_they_are(tmp_path: Path, read: Callable) -> None:
    path = lines(tmp_path, {"question": "Q", "answer": 2**70 + 1})
    assert read(path)[0].answer == str(2**70 + 1)
    path.write_text(json.dumps([{"question": "Q", "answer": 10**400 + 1}]))
    path = path.rename(tmp_path / "rows.json")
    assert read(path)[0].answer == str(10**400 + 1)


def test_columns_are_mapped(tmp_path: Path, read: Callable) -> None:
    path = lines(tmp_path, {"q": "Q", "a": "7", "question": "other", "answer": "other"})
    (prompt,) = read(path, prompt="q", answer="a")
    assert "Q<" in prompt.text
    assert prompt.answer == "7"


def test_system_prompt_goes_first_unless_the_row_has_one(tmp_path: Path, read: Callable) -> None:
    own = [{"role": "system", "content": "mine"}, {"role": "user", "content": "Q"}]
    path = lines(tmp_path, ROWS[0], {"messages": own, "answer": "1"})
    first, second = read(path, system="be yours")
    assert first.text.startswith("<|im_start|>system\nbe yours<|im_end|>\n<|im_start|>user")
    assert second.text.startswith("<|im_start|>system\nmine<|im_end|>")


def test_gold_answer_takes_the_last_mark() -> None:
    assert gold_answer("a #### 1\n#### -2,500 ") == "-2500"
    assert gold_answer(" 1,5 ") == "1,5"


@pytest.mark.parametrize(
    ("content", "where", "named"),
    [
        ('{"question": "a", "answer": "1"}\n{"question": "b", "ans', ":2", "cut short"),
        (
            '{"question": "a", "answer": "1"}\n\n[1]\n',
            ":3",
            "holds list; expected a JSON object, such as {",
        ),
        ('{"question": "a", "reply": "1"}\n', ":1", "reply"),
        ('{"body": "a", "answer": "1"}\n', ":1", "data.columns.prompt"),
        ('{"question": "", "answer": "1"}\n', ":1", "'question'"),
        ('{"question": 3, "answer": "1"}\n', ":1", "'question'"),
        ('{"question": "a", "answer": null}\n', ":1", "gold answer"),
        ('{"question": "a", "answer": " "}\n', ":1", "gold answer"),
        ('{"question": "a", "answer": "because ####"}\n', ":1", "gold answer"),
        ('{"question": "a", "solution": "so \\\\boxed{1"}\n', ":1", "gold answer"),
        ('{"question": "a", "answer": ["1", "2"]}\n', ":1", "holds 2 different answers"),
        ('{"question": "a", "answer": {"spans": ["1", "2"]}}\n', ":1", "holds 2 different answers"),
        ('{"prompt": "a", "reward_model": {"style": "rule"}}\n', ":1", "ground_truth"),
        ('{"prompt": "a", "answer": "{\'ground_truth\': 1}"}\n', ":1", "gold answer"),
        (
            '{"prompt": "a", "answer": "{\\"ground_truth\\": \\"\\\\ud800\\"}"}\n',
            ":1",
            "surrogates",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}, '
            '{"role": "assistant", "content": "1"}], "answer": "1"}\n',
            ":1",
            ", ends with a message of the assistant; expected text, ",
        ),
        ('{"messages": [{"role": "user"}], "answer": "1"}\n', ":1", "'messages'"),
        (
            '{"messages": [{"role": "user"}, {"role": "user", "content": "a"}], "answer": "1"}\n',
            ":1",
            "'messages'",
        ),
        ('{"question": "a\\ud800", "answer": "1"}\n', ":1", "surrogates"),
        ('{"question": "a", "answer": NaN}\n', ":1", "NaN is not valid JSON"),
        ("[" * 100_000 + "\n", ":1", "not valid JSON"),
        (f'{{"question": {"[" * 64 + "]" * 64}}}\n', ":1", "64 levels"),
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


# --- code rows


EQUAL = "self.assertEqual(f(1), 2)"
CODE = {"score__rewards": [{"name": "code_tests"}]}


def test_a_code_row_brings_its_tests(tmp_path: Path, load: Callable) -> None:
    cases = {"inputs": ["1\n"], "outputs": ["2\n"]}
    path = lines(
        tmp_path,
        {"messages": {"role": "user", "content": "Q"}, "test_cases": cases, "answer": "no"},
        {"prompt": "Q", "reward_model": {"ground_truth": json.dumps(cases)}},
    )
    found = [read_tests(prompt.answer) for prompt in load(path, **CODE).prompts]
    assert found == [ProgramTests(("1\n",), ("2\n",))] * 2
    path = lines(tmp_path, {"prompt": "Q", "mine": cases, "fn_name": "f", "tests": "broken"})
    (prompt,) = load(path, data__columns={"answer": "mine"}, **CODE).prompts
    assert prompt.answer == json.dumps({"tests": cases, "fn_name": "f"})
    with pytest.raises(DataError, match="'mine': 'inputs' is None"):
        load(lines(tmp_path, {"prompt": "Q", "mine": {"outputs": ["1"]}}),
             data__columns={"answer": "mine"}, **CODE)  # fmt: skip
    both = {"test": "def check(f): assert f(a=1) == 2", "entry_point": "Solution().add"}
    rows = [
        {"prompt": "Q", "input_output": [{"input": "a = 1", "output": "2"}], **both},
        {"prompt": "Q", "tests": {"input": ["1\n"], "output": ["2\n"]}},
    ]
    first, second = load(lines(tmp_path, *rows), **CODE).prompts
    assert first.answer == json.dumps(both)
    assert read_tests(second.answer) == ProgramTests(("1\n",), ("2\n",))


def test_the_private_tests_of_livecodebench_count(tmp_path: Path, load: Callable) -> None:
    cases = [
        {"input": f"[{n}]\n5", "output": f"[{n}, 5]", "testtype": "functional"} for n in range(3)
    ]
    row = {
        "question_content": "Q",
        "public_test_cases": json.dumps(cases[:1]),
        "private_test_cases": json.dumps(cases[1:]),
        "metadata": '{"func_name": "pair"}',
    }
    data = load(lines(tmp_path, row), **CODE)
    tests: Any = read_tests(data.prompts[0].answer)
    assert (tests.inputs, data.notes()) == ((([0], 5), ([1], 5), ([2], 5)), [])


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"prompt": "Q", "answer": "7"}, "lacks tests"),
        ({"prompt": "Q", "input_output": ""}, "the row lacks tests, 'input_output' is empty; it"),
        ({"prompt": "Q", "tests": {"inputs": ["1"], "outputs": []}}, "1 inputs and 0 outputs"),
        ({"prompt": "Q", "test": "assert f(1"}, "is not valid Python"),
        ({"prompt": "Q", "tests": {"inputs": [1], "outputs": ["2"]}}, "'tests': 'inputs', case 1"),
        (
            {"prompt": "Q", "test": f"class Test(TestCase):\n def test_f(self): {EQUAL}"},
            "a class of",
        ),
        ({"prompt": "Q", "test": "class TestF:\n def test_f(self): assert f(1)"}, "class of tests"),
        ({"prompt": "Q", "test": "from main import f\nassert f(1)"}, "the tests import 'main'"),
        (
            {"prompt": "Q", "test": "def check(f):\n assert f(1) == 2"},
            "'check' in the tests is not",
        ),
        ({"prompt": "Q", "test": "def test_f(tmp_path): assert f(1)"}, "'test_f' .* for fixtures"),
    ],
)
def test_a_bad_code_row_is_named(row: dict, named: str, tmp_path: Path, load: Callable) -> None:
    with pytest.raises(DataError, match=named) as caught:
        load(lines(tmp_path, ROWS[0] | {"tests": "assert f(1) == 1"}, row), **CODE)
    assert "rows.jsonl:2: " in str(caught.value)
    assert "\n" not in str(caught.value)


# --- prompts


def test_prompts_alone(tmp_path: Path, load: Callable) -> None:
    (prompt,) = load(lines(tmp_path, {"prompt": "Q"}), data__form="prompts").prompts
    assert ("Q<" in prompt.text, prompt.answer) == (True, "")


def test_a_held_out_prompt_needs_no_answer_for_a_reward_of_ones_own(
    tmp_path: Path, load: Callable
) -> None:
    rows = lines(tmp_path, {"prompt": "Q"}, {"prompt": "R", "answer": "7"})
    options = {"data__form": "prompts", "data__eval": str(rows)}
    own = {"score__rewards": [{"custom": "mine.py:own"}]}
    assert [p.answer for p in load(rows, **options, **own).held_out_prompts] == ["", "7"]
    with pytest.raises(DataError, match="answer"):
        load(rows, **options)


# --- data sets as they are shipped, in small


def test_gsm8k_math_500_and_aime_load_with_the_default_columns(
    tmp_path: Path, read: Callable
) -> None:
    gsm8k = {"question": "Ann has 9 hens …", "answer": "9 * 2 = $<<9*2=18>>18.\n#### 1,018",
             "final_answer": "1018"}  # fmt: skip
    math_500 = {"problem": "Convert $(0,3)$", "answer": "\\left( 3, \\frac{\\pi}{2} \\right)",
                "solution": "Therefore \\boxed{\\left( 3, \\frac{\\pi}{2} \\right)}", "level": 2,
                "subject": "Precalculus", "unique_id": "test/precalculus/807.json"}  # fmt: skip
    aime = {"problem": "Every morning Aya …", "answer": "204", "solution": "… \\boxed{205}",
            "url": "…"}  # fmt: skip
    answers = {"gsm8k": gsm8k, "math": math_500, "aime": aime}
    found = {name: read(lines(tmp_path, row))[0].answer for name, row in answers.items()}
    assert found == {"gsm8k": "1018", "math": math_500["answer"], "aime": "204"}


def test_held_out_problems_of_the_hub_are_of_the_test_split(
    load: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def rows(source: str, split: str, *more: Any) -> Any:
        asked.append((source, split))
        return iter([(f"{source}:{n}", ROWS[0] | {"question": split}) for n in range(2)])

    monkeypatch.setattr("reason_llm.data.load.read_rows", rows)
    load("some/set", data__split="train[:9]", data__eval="some/set")
    assert sorted(asked) == [("some/set", "test"), ("some/set", "train[:9]")]


@pytest.mark.parametrize(
    ("value", "is_kept"),
    [
        ({"cases": [[1.0, 2.5], [None]], "text": "½"}, True),
        (datetime(2026, 1, 2, tzinfo=UTC), False),
        (b"bytes", False),
        (Decimal("1.50"), False),
        (float("nan"), False),
        (1 << 70, False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_custom_reward_s_column_must_outlive_the_buffer(
    value: object, is_kept: bool, tmp_path: Path, small_run: Callable[..., Config], tokenizer: Any
) -> None:
    """What was sampled could not be saved, or would be scored otherwise after a resumption."""
    path = tmp_path / "rows.parquet"
    if isinstance(value, int):
        path = lines(tmp_path, {**ROWS[0], "unit": value})
    else:
        table = pyarrow.Table.from_pylist([{**ROWS[0], "unit": value}])
        pyarrow.parquet.write_table(table, path)
    config = small_run(data__train=str(path))
    if not is_kept:
        with pytest.raises(DataError, match=r"1: column 'unit'.* represent; write it as text"):
            load_data(config, tokenizer, 4000, extra_columns=["unit"])
        return
    found = load_data(config, tokenizer, 4000, extra_columns=["unit"]).prompts
    prompts = [Group(found[0], (Completion((5,), "a", (-0.5,), "stop"),))]
    buffer_path = tmp_path / "buffer.json"
    with RolloutBuffer(buffer_path, RunIdentity("a", "b", {})) as buffer:
        buffer.write(0, prompts, whole=False)
    assert read_document(buffer_path).groups[0].prompt.extra == {"unit": value}


@pytest.mark.parametrize("name", ["r.jsonl", "r.csv"])
def test_a_vast_line_or_field_is_refused_before_it_fills_the_memory(
    name: str, tmp_path: Path
) -> None:
    """30 MB, of which Python would make hundreds."""
    path, text = tmp_path / name, "x" * (30 << 20)
    path.write_text(f'question,answer\n"{text}",1\n' if name == "r.csv" else f'{{"a": "{text}"}}\n')
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DataError, match=r"r\.\w+:\d: (a line of more than|not valid CSV)") as told:
        list(read_rows(str(path), "train"))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 << 10
    assert len(str(told.value)) < 300


def test_columns_of_rewards_are_in_one_order(
    tmp_path: Path, small_run: Callable[..., Config], tokenizer: Any
) -> None:
    """Their digest is compared on resume, in a process whose sets have another order."""
    path = lines(tmp_path, {**ROWS[0], "unit": "m", "level": 3})
    config = small_run(data__train=str(path))
    for asked in (["unit", "level"], ["level", "unit"]):
        (prompt, *_) = load_data(config, tokenizer, 4000, extra_columns=asked).prompts
        assert list(prompt.extra) == ["level", "unit"]


U = {"role": "user", "content": "What is 9 * 2?"}
SAYS = "<think>9 + 9</think><answer>18</answer>"


@pytest.mark.parametrize(
    ("row", "reward", "gold"),
    [
        ({"prompt": "What is 9 * 2?", "completion": SAYS}, "think_answer_tags", "18"),
        ({"prompt": "What is 9 * 2?", "completion": "So\n#### 18"}, "boxed", "18"),
        ({"messages": [U, {"role": "assistant", "content": "\\boxed{18}"}]}, "boxed", "18"),
        ({"prompt": "What is 9 * 2?", "completion": "It is.", "answer": "18"}, "boxed", "18"),
        ({"prompt": "What is 9 * 2?", "completion": "Billing & more"}, "exact", "Billing & more"),
        ({"prompt": "What is 9 * 2?", "completion": SAYS}, "exact", "18"),
    ],
)
def test_a_share_of_demonstrations_is_asked_and_checked(
    row: dict[str, Any], reward: str, gold: str, tmp_path: Path, load: Callable[..., Data]
) -> None:
    """The rows that are held out of supervised fine-tuning, by their prompts and answers; the
    others are learned."""
    spelled = json.dumps(row)
    rows = [json.loads(spelled.replace("9 * 2", f"9 * {n}")) for n in range(10)]
    options = {"stage": "sft", "data__eval": "20%", "score": {"rewards": [reward]}}
    found = load(lines(tmp_path, *rows), **options)
    assert (len(found.held_out_prompts), found.sizes) == (2, [8])
    assert {prompt.answer for prompt in found.held_out_prompts} == {gold}
    asked = {prompt.text for prompt in found.held_out_prompts}
    assert all("What is 9 *" in text and "18" not in text for text in asked)


def test_a_demonstration_without_a_gold_answer_says_what_measures_it(
    tmp_path: Path, load: Callable[..., Data]
) -> None:
    rows = [{"prompt": f"Say {n}", "completion": f"I say {n}."} for n in range(10)]
    path = lines(tmp_path, *rows)
    with pytest.raises(
        DataError, match=r"this row has no gold answer: .*; set eval\.rows in place"
    ):
        load(path, stage="sft", data__eval="20%")
    both = load(path, stage="sft", data__eval="20%", eval__rows="20%", score={"rewards": ["exact"]})
    assert both.held_out_rows is not None
    assert (len(both.held_out_prompts), len(both.held_out_rows.units), both.sizes) == (2, 2, [8])
