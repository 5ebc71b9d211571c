"""Gold answers of a row: which column holds them, and what of its value is the answer. The answer
in a text is found by ``score.math.gold_answer``."""

import json
import re
from typing import Any

from reason_llm.data.cells import Cells
from reason_llm.data.choices import Choices
from reason_llm.data.messages import shown
from reason_llm.data.rows import check_made
from reason_llm.errors import DataError
from reason_llm.score.code import (
    BESIDE,
    answer_of_row,
    check_runs,
    column_of_tests,
    private_tests,
)
from reason_llm.score.math import (
    gold_answer,
    has_box,
    hashed_answer,
    is_only_text,
    last_answer_tags,
    last_boxes,
)

ANSWER_COLUMNS = (
    "gt_answer", "answer", "final_answer", "expected_answer", "answerKey", "ground_truth",
    "solution", "reward_model",
)  # fmt: skip
ANSWER_KEYS = ("ground_truth", "target", "spans", "text")
"""Keys of the answer in an object: verl's and PRIME's reward_model, Search-R1's in it, DROP's
answers_spans, and SQuAD's answers."""
CHECKER_KEYS = ("inputs", "outputs", "assert_code", "fn_name", "func_name")
"""Keys of tests, and of the constraints that RLVR's sets check by a function."""
_DECIMAL_COMMA = re.compile(
    r"[-+]?\d{1,3}(?:\.\d{3})++,\d++(?: ?[^\W\d_]{1,20}+| ?[%€$£])?+"
    r"|[-+]?\d{1,9},\d{1,2}"
    r"|[-+]?\d{1,9},(?:\d{1,2}|\d{4,9}) ?(?:[^\W\d_]|[%€$£°\\])[^,;]{0,20}+"
    r"|[€$£] ?[-+]?\d{1,9},(?:\d{1,2}|\d{4,9})"
    r"|\d{1,2}(?:,\d{2}(?!\d))++,\d{3}"
)
"""``1.234,5``, ``2,5``, one number with a comma and a unit or a currency, ``3,50 €``, and
``12,34,567``."""
_POINT = re.compile(
    r"(?:[€$£] ?)?+[-+]?[1-9]\d{0,2}(?:\.\d{3})++(?: ?(?:[^\W\d_]|[%€$£°\\])[^.,;]{0,30}+)?+"
)
"""``1.250``, ``1.250.000`` and ``1.250 €``."""
_TAILS = {
    "t": "ext|imes|heta|frac|riangle", "f": "rac|orall", "b": "inom|eta|oxed|egin|ullet|ar",
    "r": "ight|ho|angle|floor|ceil", "v": "ec|ar|ee|dots", "a": "lpha|ngle|pprox|rctan",
}  # fmt: skip
"""Ends of LaTeX commands, by first letters that are escapes of JSON or Python."""
_ESCAPED = dict(zip(_TAILS, "\t\f\b\r\v\a", strict=True))
_DAMAGED = re.compile("|".join(f"{_ESCAPED[name]}({tails})" for name, tails in _TAILS.items()))
_EXPONENT = re.compile(r"[-+]?\d++(?:\.\d++)?+[eE][-+]?\d++")
_QUANTITIES = re.compile(r"\d [^\W\d_]{1,20}+,? and \d[\d.,]*+ [^\W\d_]")
"""``2 hours and 30 minutes``."""
_RANGE = re.compile(r"(\d{1,6}+) ?[-–] ?(\d{1,6}+)")
_REMARK = re.compile(r"([-+]?\d[\d.,/]*+) \(([^\W\d_]{3,20}+(?: [^\W\d_]{1,20}+){0,3})\)")
"""A number with its unit in brackets: ASDiv's ``16 (apples)``."""
MOST_NESTS = 8
"""Most objects, lists and JSON texts that may stand around a gold answer."""
NO_VALUES = (
    "nan", "none", "null", "n/a", "undefined", "unknown", "proof", "see solution", "notfound",
    "not found", "?", "-", "--", "–", "—",
)  # fmt: skip
"""Texts that programs, and sets such as NuminaMath, write where there is no answer."""


def has_answer(cells: Cells) -> bool:
    """Whether a row has a column of the gold answer."""
    named = cells.columns.answer
    return cells.find(answer_columns(cells) if named is None else (named,)) is not None


def answer_columns(cells: Cells) -> tuple[str, ...]:
    """Usual names of the gold answer's column: SQuAD's, too, unless it holds xLAM's calls."""
    is_squad = isinstance(cells.row.get("answers"), dict)
    return (*ANSWER_COLUMNS, "answers") if is_squad else ANSWER_COLUMNS


def read_gold(cells: Cells, choices: Choices | None = None) -> tuple[str, str]:
    """The gold answer of a row, as the label of a choice where there are choices, and why it is in
    doubt: empty where it is not."""
    tests = column_of_tests(cells.row)
    if tests and cells.columns.answer is None and not has_answer(cells):
        raise DataError(
            f"{cells.where}: lacks a gold answer and has tests in column {tests!r}; make "
            "code_tests the first reward, or set data.columns.answer"
        )
    where, column = (
        cells.where,
        cells.column(cells.columns.answer, answer_columns(cells), "data.columns.answer"),
    )
    given = cells[column]
    value = _value(where, column, given)
    if choices is not None:
        return choices.label(where, value)
    if isinstance(value, float) and len(repr(value)) > len(short := f"{value:.15g}") + 2:
        value = short  # 0.30000000000000004: digits of the computer's rounding, which nobody writes
    is_scalar = isinstance(value, str | int | float)
    if isinstance(value, list) and all(isinstance(each, str | int | float) for each in value):
        count = len({*value})
        raise DataError(
            f"{where}: {column!r} holds "
            + (f"{count} different answers, {shown(value)}" if value else "no answer")
            + "; expected one gold answer: reduce it by data.preprocess, which returns None to "
            "drop a row"
        )
    if isinstance(value, str) and (tagged := last_answer_tags(value)) is not None:
        value = tagged  # R1-V's solution
    if not is_scalar or not (answer := gold_answer(str(value))):
        raise DataError(
            f"{where}: {column!r} is {shown(given)}; expected text or a number that is the "
            "gold answer, alone or after ####, in a last \\boxed{}, in a list of one or as "
            '{"ground_truth": …}; fix the row or set data.columns.answer'
        )
    if _is_for_a_checker(answer):
        raise DataError(
            f"{where}: {column!r} is {shown(given)}, the tests of a program or the arguments of a "
            "checker; make code_tests the first reward for programs, or leave such rows out by "
            "data.preprocess"
        )
    if (with_unit := _REMARK.fullmatch(answer)) is not None:
        spelled = f"{with_unit[1]} {with_unit[2]}"
        answer = answer if is_only_text(spelled) else spelled  # 5 (five) stays
    return answer, _doubt(value if isinstance(value, str) else "", answer)


def _is_for_a_checker(answer: str) -> bool:
    """Whether a gold answer is JSON that only a program can read."""
    if not answer.startswith("{"):
        return False
    try:
        value = json.loads(answer)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint(CHECKER_KEYS)


def _doubt(text: str, answer: str) -> str:
    """The reason why a gold answer is ambiguous; empty where it is not."""
    if damaged := damaged_command(text):
        return damaged
    if answer.casefold() in NO_VALUES:
        return "the gold answer is a word for no value"
    if answer.startswith(("{'", "('")):
        return "the gold answer is a value as Python prints it: only the same words are paid"
    if _DECIMAL_COMMA.fullmatch(answer):
        return "a comma of the gold answer is read as one between two numbers, not as a part of one"
    if text and _POINT.fullmatch(answer):
        return "a point of the gold answer is read as a decimal point, not as one of thousands"
    if text and _EXPONENT.fullmatch(answer):
        return "an e of the gold answer is read as a power of ten"
    if "|||" in answer:
        return "the gold answer is several in one text: only all of them, as written, are paid"
    if _QUANTITIES.search(answer) is not None:
        return "several quantities of the gold answer are several answers, not their sum"
    if (span := _RANGE.fullmatch(answer)) is not None and int(span[1]) < int(span[2]):
        return "the gold answer is read as a difference, not as a range"
    if hashed_answer(text) is not None:
        return ""
    if has_box(text):
        return "several boxes are read as one gold answer" if len(last_boxes(text)) > 1 else ""
    return "a whole text of several lines is the gold answer" if "\n" in answer else ""


def damaged_command(text: str) -> str:
    """What to say of a text in which an escape of JSON or Python took the first letter of a LaTeX
    command; empty where it did not."""
    if (found := _DAMAGED.search(text)) is None or found.lastindex is None:
        return ""
    command = list(_TAILS)[found.lastindex - 1] + found[found.lastindex]
    return f"a control character begins \\{command}: in JSON, write two backslashes for one"


def _value(where: str, column: str, value: Any) -> Any:
    """The value that holds the answer: ``ground_truth`` of an object, the item of a list of one.
    Both may be JSON text, as CSV files have them, and stand within one another."""
    for _ in range(MOST_NESTS):
        inner = _unwrapped(where, column, value)
        if inner is value:
            break
        value = inner
    return value


def _unwrapped(where: str, column: str, value: Any) -> Any:
    """The value without the outermost object, list or JSON text around it."""
    if isinstance(value, str):
        start = "".join(value.lstrip()[:40].split())
        is_object = start.startswith("{") and "ground_truth" in value
        if is_object or start.startswith(('["', '[{"')):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                value = {} if is_object else value
            check_made(where, {column: value})
        elif start.startswith("['"):
            raise DataError(
                f"{where}: {column!r} is {shown(value)}, a list as Python prints it; write the "
                "answer alone, or the list as JSON with json.dumps"
            )
    if isinstance(value, dict):
        value = next((value[name] for name in ANSWER_KEYS if name in value), None)
        if isinstance(value, list) and all(each == value[0] for each in value):
            value = value[:1]  # DROP and SQuAD have an answer for each annotator
    if isinstance(value, list) and len(value) == 1:  # OlympiadBench
        value = value[0]
    return value


def read_tests(cells: Cells) -> str:
    """The tests of a row as JSON."""
    row = cells.row
    if (named := cells.columns.answer) is None and {"base_input", "plus_input"} <= row.keys():
        raise DataError(
            f"{cells.where}: the row is of evalplus's own file, whose plus_input has inputs alone, "
            "so that only the base tests could be run; give evalplus/humanevalplus or "
            "evalplus/mbppplus of the Hub, or a folder with a copy, where they are assertions"
        )
    if named is not None:
        column = cells.column(named, (), "data.columns.answer")
        row = {
            **{name: row[name] for name in (*BESIDE, "metadata") if name in row},
            "tests": cells[column],
        }
    try:
        found = answer_of_row(row)
        check_runs(found)
    except (ValueError, TypeError) as error:  # TypeError: a value that JSON does not have
        problem = str(error) if named is None else str(error).replace("'tests'", repr(named), 1)
        raise DataError(
            f"{cells.where}: {problem}; fix the row, or set data.columns.answer to the column of "
            "the tests"
        ) from error
    for name in (column_of_tests(row), *BESIDE, "metadata"):
        if name in cells and (name != "metadata" or "func_name" in (row[name] or ())):
            cells[name]
    if private_tests(row):
        cells["private_test_cases"]
    return found
