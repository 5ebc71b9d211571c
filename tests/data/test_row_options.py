"""Options of rows: bad ones skipped, columns of single sets, a limit, a function for each row, and
arguments of the chat template."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from reason_llm.app.chat import find_subject
from reason_llm.app.data_check import check_data
from reason_llm.config import Config, file as config_file
from reason_llm.data import Data, load_data
from reason_llm.errors import ConfigError, DataError, ReasonError

MATH = [
    {"problem": f"What is {n} + 2?", "solution": f"It is \\boxed{{{n + 2}}}."} for n in range(8)
]
AIME = [{"ID": f"2024-I-{n}", "Problem": f"What is {n} + 70?", "Answer": n + 70} for n in range(3)]


def lines(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{json.dumps(r) if not isinstance(r, str) else r}\n" for r in rows))
    return str(path)


@pytest.fixture
def read(small_run: Callable[..., Config], tokenizer: Any) -> Callable[..., Data]:
    def read(**options: Any) -> Data:
        return load_data(small_run(**options), tokenizer, 4000)

    return read


def test_sets_with_other_columns_in_any_case(tmp_path: Path, read: Callable[..., Data]) -> None:
    train, aime = lines(tmp_path / "math.jsonl", *MATH), lines(tmp_path / "aime.jsonl", *AIME)
    found = read(data__train=train, data__eval=aime)
    assert [p.answer for p in found.prompts[:2]] == ["2", "3"]
    assert [p.answer for p in found.held_out_prompts] == ["70", "71", "72"]
    assert "What is 1 + 70?" in found.held_out_prompts[1].text
    mixed = lines(tmp_path / "exact.jsonl", {"Problem": "no", "problem": "yes", "answer": 1})
    assert "yes" in read(data__train=mixed).prompts[0].text


def test_bad_rows_are_skipped_counted_and_shown(
    tmp_path: Path, read: Callable[..., Data], small_run: Callable[..., Config]
) -> None:
    bad = ["{", {"problem": "no answer"}, {"problem": "", "answer": 1}, {"x": 1}]
    train = lines(tmp_path / "rows.jsonl", *MATH[:2], *bad, *MATH[2:4])
    with pytest.raises(DataError, match=r"rows\.jsonl:3: not valid JSON"):
        read(data__train=train)
    found = read(data__train=train, data__on_bad_row="skip")
    assert [p.id.rpartition(":")[2] for p in found.prompts] == ["1", "2", "7", "8"]
    told = found.notes()
    assert told[0].endswith("rows.jsonl: left out: 4 by data.on_bad_row")
    assert len(told) == 4 and "rows.jsonl:3: not valid JSON" in told[1]
    report = check_data(small_run(data__train=train, data__on_bad_row="skip"), [])
    assert report.num_errors == 0
    assert any("8 rows, 4 taken; left out: 4 by data.on_bad_row" in line for line in report.lines)
    says = (
        r"aime.*:2: lacks any of the columns.*; data\.on_bad_row=skip does not skip held-out rows"
    )
    with pytest.raises(DataError, match=says):
        held_out = lines(tmp_path / "aime.jsonl", AIME[0], {"x": 1})
        read(data__train=train, data__on_bad_row="skip", data__eval=held_out)
    with pytest.raises(DataError, match="does not exist"):
        read(data__train=str(tmp_path / "none.jsonl"), data__on_bad_row="skip")
    none = lines(tmp_path / "none_good.jsonl", *bad)
    with pytest.raises(DataError, match=r"rows are left \(left out: 4 by .*the first: .*:1: not"):
        read(data__train=none, data__on_bad_row="skip")


def test_bad_rows_of_a_held_out_share_are_skipped_with_any_seed(
    tmp_path: Path, read: Callable[..., Data], small_run: Callable[..., Config]
) -> None:
    bad = [{"problem": f"no answer {n}"} for n in range(4)]
    train = lines(tmp_path / "rows.jsonl", *MATH, *bad)
    options = {"data__train": train, "data__eval": "50%", "data__on_bad_row": "skip"}
    for seed in range(3):
        found = read(**options, run__seed=seed)
        held_out, training = found.held_out[0], found.training[0]
        assert (held_out.num_rows, training.num_rows) == (6, 6)
        assert held_out.size + training.size == len(MATH)
        assert held_out.size == 6 - held_out.dropped["data.on_bad_row"]
        counts = [re.findall(r"every run: (\d+) rows?; (\d+) rows? for", n) for n in found.notes()]
        assert [(str(held_out.size), str(training.size))] in counts
        if left_out := held_out.left_out:
            assert f"{train}, held out: {left_out}" in found.notes()
    with pytest.raises(DataError, match="lacks any of the columns"):
        read(**options | {"data__on_bad_row": "error"})


def test_rows_held_out_for_loss_and_accuracy_count_once(
    tmp_path: Path, small_run: Callable[..., Config], tokenizer: Any
) -> None:
    def read(**options: Any) -> Data:
        ends = [tokenizer.eos_token_id]
        return load_data(small_run(**options), tokenizer, 4000, end_token_ids=ends)

    rows = [{"prompt": f"{n}?", "completion": f"\\boxed{{{n}}}", "more": "x"} for n in range(20)]
    train = lines(tmp_path / "rows.jsonl", *rows)
    options = {"stage": "sft", "data__train": train, "data__form": "demonstrations"}
    options |= {"algorithm": {}, "data__eval": "20%", "score": {"rewards": ["boxed"]}}
    both = read(**options, eval__rows="20%")
    assert both.num_held_out == 4
    told = both.notes()
    assert len(set(told)) == len(told) == 3, told
    assert (
        f"{train}: 20% of its rows are held out, the same in every run: 4 rows; 16 rows" in told[-1]
    )
    assert read(**options, eval__rows="40%").num_held_out == 8
    assert read(**options, eval__rows=train).num_held_out == 4 + 20


def test_too_long_rows_are_bad_rows(
    tmp_path: Path, small_run: Callable[..., Config], tokenizer: Any
) -> None:
    train = lines(tmp_path / "rows.jsonl", MATH[0], {"problem": "x " * 500, "answer": 1})
    config = small_run(data__train=train, data__on_bad_row="skip")
    assert load_data(config, tokenizer, 200).notes()[0].endswith("1 by data.on_bad_row")


def test_bad_rows_to_learn_from_are_skipped(
    tmp_path: Path, small_run: Callable[..., Config], tokenizer: Any
) -> None:
    good = {"prompt": "Say hello.", "completion": "Hello!"}
    train = lines(
        tmp_path / "rows.jsonl", good, {"prompt": "x"}, good, {**good, "prompt": "y " * 900}
    )
    options = {"stage": "sft", "data__train": train, "data__form": "demonstrations"}
    options["algorithm"] = {}
    config = small_run(**options)
    ends = [tokenizer.eos_token_id]
    with pytest.raises(DataError, match=r"rows\.jsonl:2"):
        load_data(config, tokenizer, 400, end_token_ids=ends)
    config = small_run(**options, data__on_bad_row="skip")
    found = load_data(config, tokenizer, 400, end_token_ids=ends)
    assert (len(found.units), found.training[0].dropped["data.on_bad_row"]) == (2, 2)
    assert "rows.jsonl:2" in found.notes()[1]


def test_a_limit_takes_the_first_rows_of_each_training_set(
    tmp_path: Path, read: Callable[..., Data]
) -> None:
    one, two = lines(tmp_path / "one.jsonl", *MATH), lines(tmp_path / "two.jsonl", *AIME)
    found = read(data__train=[one, two], data__limit=2, data__eval=two)
    assert found.sizes == [2, 2]
    assert len(found.held_out_prompts) == 3


PREPROCESS = """
def made(row):
    if row["problem"].startswith("What is 3"):
        return None
    return {"question": "Please: " + row["problem"], "answer": row["solution"]}


def broken(row):
    return {"question": row["nothing"]}


def number(row):
    return 3


def half(row):
    return {"question": "a", "answer": "\\ud800"}


def endless(row):
    return {"question": "a", "answer": 10**5000}
"""


def test_each_row_goes_through_the_user_s_function(
    tmp_path: Path, read: Callable[..., Data]
) -> None:
    (tmp_path / "mine.py").write_text(PREPROCESS)
    train = lines(tmp_path / "math.jsonl", *MATH)
    options = {"data__train": train, "data__eval": train, "data__contamination": "ignore"}
    found = read(**options, data__preprocess=f"{tmp_path}/mine.py:made")
    assert "Please: What is 0 + 2?" in found.prompts[0].text
    assert len(found.prompts) == len(found.held_out_prompts) == 7
    assert found.notes()[0].endswith("left out: 1 by data.preprocess")
    for function, message in (
        ("broken", r"math\.jsonl:1: data\.preprocess=.* failed \(KeyError: 'nothing' at .*py:9\)"),
        ("number", r"math\.jsonl:1: .* returned '3'; expected a dict of columns, or None"),
        ("half", r"math\.jsonl:1: data\.preprocess=.*:half returned a row .* surrogates"),
        ("endless", r"math\.jsonl:1: data\.preprocess=.*:endless returned a row .*4300 digits"),
        ("none", r"data\.preprocess=.*mine\.py has no function 'none'; it has made"),
    ):
        with pytest.raises(ReasonError, match=message):
            read(**options, data__preprocess=f"{tmp_path}/mine.py:{function}")


THINKING = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% if enable_thinking is defined and not "
    "enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def test_the_template_takes_arguments(
    tmp_path: Path, read: Callable[..., Data], small_run: Callable[..., Config]
) -> None:
    (tmp_path / "thinking.jinja").write_text(THINKING)
    train = lines(tmp_path / "math.jsonl", *MATH)
    options = {"data__train": train, "data__template": str(tmp_path / "thinking.jinja")}
    assert read(**options).prompts[0].text.endswith("assistant:")
    arguments = {"enable_thinking": False}
    found = read(**options, data__template_arguments=arguments)
    assert found.prompts[0].text.endswith("assistant:<think></think>")
    config = small_run(**options, data__template_arguments=arguments)
    path = tmp_path / "my_run.yaml"
    path.write_text(config_file.to_yaml(config))
    assert find_subject(str(path), None).config.data.template_arguments == arguments
    for name in ("tokenize", "a-b"):
        text = f"data: {{train: x, template_arguments: {{{name}: 1}}}}\nmodel: {{path: {TINY}}}\n"
        path.write_text(text)
        with pytest.raises(
            ConfigError, match=f"has '{name}', which is not an identifier or is reserved"
        ):
            config_file.load(path)


def test_a_template_that_ignores_the_generation_prompt_is_refused(
    tmp_path: Path, read: Callable[..., Data]
) -> None:
    train = lines(tmp_path / "math.jsonl", *MATH)
    path = tmp_path / "deaf.jinja"
    path.write_text("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}")
    with pytest.raises(ConfigError, match=r"deaf\.jinja does not write '<\|im_start\|>assistant'"):
        read(data__train=train, data__template=str(path))
    path.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")  # it has no headers
    assert len(read(data__train=train, data__template=str(path)).prompts) == 8
