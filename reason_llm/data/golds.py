"""Gold answers of a row: which column holds them, and what of its value is the answer. The answer
in a text is found by ``score.math.gold_answer``."""

import json
import re
from functools import partial
from html import unescape
from typing import Any

from reason_llm.data.cells import Cells
from reason_llm.data.choices import Choices
from reason_llm.data.messages import shown
from reason_llm.data.rows import check_made
from reason_llm.errors import DataError
from reason_llm.score.code import (
    EXTRA_COLUMNS,
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
    matches,
    outside_thinking,
    stated_label,
)

ANSWER_COLUMNS = (
    "gt_answer", "answer", "final_answer", "expected_answer", "answerKey", "ground_truth",
    "solution", "reward_model",
)  # fmt: skip
INDEX_COLUMN = "label"
"""The gold answer where there are choices, as an index from 0: COPA's, PIQA's and HellaSwag's."""
ANSWER_KEYS = ("ground_truth", "target", "spans", "text")
"""Keys of the answer in an object: verl's and PRIME's reward_model, Search-R1's in it, DROP's
answers_spans, and SQuAD's answers."""
CHECKER_KEYS = ("inputs", "outputs", "assert_code", "fn_name", "func_name")
"""Keys of tests, and of the constraints that RLVR's sets check by a function."""
_ENTITY = re.compile(r"&(?:[A-Za-z]{2,8}\d{0,2}|#\d{1,5}|#x[0-9a-fA-F]{1,5});")
_DAMAGE = {
    "control characters begin LaTeX commands; in JSON, write two backslashes for one": re.compile(
        "\t(?:ext|imes|heta|frac|riangle)|\f(?:rac|orall)|\b(?:inom|eta|oxed|egin|ullet|ar)"
        "|\r(?:ight|ho|angle|floor|ceil)|\v(?:ec|ar|ee|dots)|\a(?:lpha|ngle|pprox|rctan)"
    ),
    "letters that a wrong encoding left (Ã©) are read as they stand": re.compile(
        r"Ã[^\x00-\x7f]|â€\S|Â[\xa0-\xbf]|\ufffd"
    ),
    "two backslashes before LaTeX commands (\\\\frac) are read as they stand": re.compile(
        r"(?<!\\)\\\\(?:frac|sqrt|times|cdot|left|begin|text|mathbb|pi)(?![a-z])"
    ),
    "a backslash and n are read as two characters, not as a line break": re.compile(
        r"\A[^\n]*?\\n(?=\\n|[A-Z0-9 #*`-]|\Z)[^\n]*\Z"
    ),
}
"""Marks of what another program did to a text."""
_UNDAMAGED = bytes({*range(32, 256), *b"\n"} - {*b"&\\\x7f\xc3\xef"})
"""Bytes of UTF-8 that none of these marks has."""
_TWO_WAYS = re.compile(
    r"[-+]?\d{1,3}(?:\.\d{3})++,\d++(?: ?[^\W\d_]{1,20}+| ?[%€$£])?+"
    r"|[-+]?\d{1,9},\d{1,2}"
    r"|[-+]?\d{1,9},(?:\d{1,2}|\d{4,9}) ?(?:[^\W\d_]|[%€$£°\\])[^,;]{0,20}+"
    r"|[€$£] ?[-+]?\d{1,9},(?:\d{1,2}|\d{4,9})"
    r"|\d{1,2}(?:,\d{2}(?!\d))++,\d{3}"
    r"|\d{1,3}(?: \d{3})++,\d++"
    r"|(?:[€$£] ?)?+[-+]?[1-9]\d{0,2}(?:\.\d{3})++(?: ?(?:[^\W\d_]|[%€$£°\\])[^.,;]{0,30}+)?+"
    r"|[-+]?\d++(?:\.\d++)?+[eE][-+]?\d++"
    r"|\d{1,6}+ ?[-–] ?\d{1,6}+"
    r"|[^\n]{0,60}?\d [^\W\d_]{1,20}+,? and \d[\d.,]*+ [^\W\d_][^\n]{0,60}+"
)
"""``1.234,5``, ``2,5``, one number with a comma and a unit or a currency, ``3,50 €`` and
``12,34,567``; ``1.250`` and ``1.250 €``; ``1e3``; ``20 - 30``; and ``1 day, 2 hours
and 30 minutes``."""
_WITH_SUFFIX = re.compile(
    r"([-+]?\d{1,3}(?:_\d{3})++)|([-+]?\d[\d.,]*+) ?(?:[kKMB]|bn|[^\W\d_a-zA-Z]{1,10}+)"
)
"""``2k``, ``1_000`` and ``4º``."""
_HYPHEN = re.compile(r"(?<![\w)])[\u2010\u2011\u2043\ufe63](?=[\d.])")
"""Signs that look like a minus and are hyphens."""
_OR = re.compile(r"(?<=[\d)}$]) ?(?:或者|或|oder|ou|или) ?(?=[\d$\\(a-z-])")
"""Words of other languages between two values."""
_REMARK = re.compile(r"([-+]?\d[\d.,/]*+) \(([^\W\d_]{3,20}+(?: [^\W\d_]{1,20}+){0,3})\)")
"""A number with its unit in brackets: ASDiv's ``16 (apples)``."""
JUDGE_SECONDS = 2.0
"""Seconds for one comparison with a gold answer."""
MOST_CHECKED_CHARACTERS = 300
"""Longest gold answer that is compared with itself."""
MOST_NESTS = 8
"""Most objects, lists and JSON texts that may stand around a gold answer."""
NO_VALUES = (
    "nan", "null", "n/a", "unknown", "proof", "see solution", "notfound", "not found",
    "?", "-", "--", "–", "—",
)  # fmt: skip
"""Texts that programs, and sets such as NuminaMath, write where there is no answer."""
MAYBE_NO_VALUES = ("none", "undefined")
"""Texts like these that also answer questions, such as which solutions there are."""
NO_VALUE = (
    "the gold answer is a word for no value; write the answer, or leave such rows out with "
    "data.on_bad_row=skip"
)
"""The doubt of a gold answer of ``NO_VALUES``."""


def has_answer(cells: Cells) -> bool:
    """Whether a row has a column of the gold answer."""
    named = cells.columns.answer
    return cells.find(answer_columns(cells) if named is None else (named,)) is not None


def answer_columns(cells: Cells) -> tuple[str, ...]:
    """Usual names of the gold answer's column: SQuAD's, too, unless it holds xLAM's calls, and
    SYNTHETIC-1's, unless it holds tests."""
    found: tuple[str, ...] = ANSWER_COLUMNS
    verified = cells.row.get("verification_info")
    if isinstance(cells.row.get("answers"), dict):
        found = (*found, "answers")
    if isinstance(verified, str | dict) and "ground_truth" in verified:
        found = (*found, "verification_info")
    return found


def read_gold(
    cells: Cells, choices: Choices | None = None, is_label: bool = False
) -> tuple[str, str]:
    """The gold answer of a row, as the label of a choice where there are choices, and why it is in
    doubt: empty where it is not. With ``is_label`` it is the whole text of the column."""
    tests = column_of_tests(cells.row)
    if tests and cells.columns.answer is None and not has_answer(cells):
        raise DataError(
            f"{cells.where}: lacks a gold answer and has tests in column {tests!r}; make "
            "code_tests the first reward, or set data.columns.answer"
        )
    usual = answer_columns(cells)
    if choices is not None or is_label:
        usual = (*usual, INDEX_COLUMN)
    where, column = cells.where, cells.column(cells.columns.answer, usual, "data.columns.answer")
    given = cells[column]
    value = _value(where, column, given)
    if choices is not None:
        return choices.label(where, value, column.casefold() == INDEX_COLUMN)
    if isinstance(value, float) and len(repr(value)) > len(short := f"{value:.15g}") + 2:
        value = short  # 0.30000000000000004: digits of the computer's rounding, which nobody writes
    if is_label and isinstance(value, str | int | float) and (label := str(value).strip()):
        return label, damage(label)
    plain = without_entities(value) if isinstance(value, str) else value
    has_entities, value = plain != value, plain
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
    answer = _HYPHEN.sub("-", _OR.sub(" or ", answer))
    if _is_for_a_checker(answer):
        raise DataError(
            f"{where}: {column!r} is {shown(given)}, the tests of a program or the arguments of a "
            "checker; make code_tests the first reward for programs, or drop such rows in "
            "data.preprocess"
        )
    if (with_unit := _REMARK.fullmatch(answer)) is not None:
        spelled = f"{with_unit[1]} {with_unit[2]}"
        answer = answer if is_only_text(spelled) else spelled  # 5 (five) stays
    if has_entities:
        return answer, "HTML entities (&lt;) of the gold answer are read as their signs"
    return answer, _doubt(value if isinstance(value, str) else "", answer)


def number_of(text: str) -> str:
    """The gold answer of a text that is a whole number, or ends with ``####`` and one, as
    ``read_gold`` has it; empty for any other text, and for one in doubt."""
    answer = text.split("####")[-1].strip(" ")
    is_one = answer.isdecimal() and "<answer>" not in text and text.lstrip()[:1] not in ("[", "{")
    return answer if is_one and not damage(text) else ""


def gold_of_text(text: str, is_label: bool) -> str:
    """The gold answer in an assistant's answer: a label, or what is marked, or else the whole
    text; empty where the marks hold no single answer."""
    if is_label:
        return stated_label(text) or ""
    tagged = last_answer_tags(text)
    return gold_answer(outside_thinking(text)) if tagged is None else tagged


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
    if damaged := damage(text):
        return damaged
    if answer.casefold() in NO_VALUES:
        return NO_VALUE
    if answer.casefold() in MAYBE_NO_VALUES:
        return "the gold answer is none or undefined; remove the row if it has no answer"
    if answer.startswith(("{'", "('")) or "|||" in answer:
        return "several values are one gold answer: only all of them, as written, are accepted"
    if text and _TWO_WAYS.fullmatch(answer):
        return (
            "the gold answer can be read in two ways: commas and the word and separate values, a "
            "point is a decimal point, e is a power of ten, and a hyphen is a minus; write it "
            "without them, such as 6.5 for 6,5"
        )
    if hashed_answer(text) is not None:
        return ""
    if has_box(text):
        return "several boxes are read as one gold answer" if len(last_boxes(text)) > 1 else ""
    return "a whole text of several lines is the gold answer" if "\n" in answer else ""


def without_entities(text: str) -> str:
    """A text with the signs that HTML's entities stand for."""
    return _ENTITY.sub(lambda found: unescape(found[0]), text)


def damage(text: str) -> str:
    """Return the damage that another program did to a text, such as an escape of JSON or Python
    that took the first letter of a LaTeX command; empty without damage."""
    if not text.encode(errors="replace").translate(None, _UNDAMAGED):
        return ""
    if without_entities(text) != text:
        return "HTML entities (&lt;) are read as they stand"
    return next((says for says, mark in _DAMAGE.items() if mark.search(text)), "")


def unpaid(answer: str, question: str) -> str:
    """Why a policy that writes the gold answer, or its number alone, may not be paid, or one that
    writes another; empty where it is clear."""
    if len(answer) > MOST_CHECKED_CHARACTERS:
        return ""
    pays = partial(matches, answer, timeout_seconds=JUDGE_SECONDS, question=question)
    if not pays(answer):
        return "the gold answer itself is rejected when the model writes it"
    number = _WITH_SUFFIX.fullmatch(answer)
    if number is not None and not pays((number[1] or number[2]).replace("_", "")):
        return "the number of the gold answer alone is rejected"
    mirrored = answer[::-1]
    if answer.isascii() and answer.isalpha() and mirrored != answer and pays(mirrored):
        return "the letters of the gold answer are read as a product, so their order does not count"
    return ""


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
    if (named := cells.columns.answer) is not None:
        column = cells.column(named, (), "data.columns.answer")
        row = {
            **{name: row[name] for name in (*EXTRA_COLUMNS, "metadata") if name in row},
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
    for name in (column_of_tests(row), *EXTRA_COLUMNS, "metadata"):
        if name in cells and (name != "metadata" or "func_name" in (row[name] or ())):
            cells[name]
    if private_tests(row):
        cells["private_test_cases"]
    return found
