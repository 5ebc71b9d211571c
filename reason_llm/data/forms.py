"""Meaning of a row: a problem with its gold answer, a demonstration, or a preference.

Every form has a prompt: text, one message or a list of messages that ends with the user's. Columns
have their usual names, or those that ``data.columns`` gives. A row that is of another form is an
error with its file and line; nothing is guessed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from reason_llm.config import ColumnsSection
from reason_llm.data import code_cases
from reason_llm.data.box import BOX, last_boxed
from reason_llm.data.rows import Row
from reason_llm.errors import DataError

PROMPT_COLUMNS = ("messages", "question", "problem", "prompt")
ANSWER_COLUMNS = ("gt_answer", "answer", "solution", "reward_model")

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem, ``{"question", "answer"}`` and similar; for ``{"prompt"}`` alone the answer is
    empty."""

    where: str
    """File and line, or row."""
    messages: Messages
    answer: str
    """The gold answer, or the tests of a code row as JSON."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns that a custom reward asks for."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A demonstration to imitate, ``{"prompt", "completion"}``."""

    where: str
    messages: Messages
    completion: str


@dataclass(frozen=True, slots=True)
class Preference:
    """A preference between two completions, ``{"prompt", "chosen", "rejected"}``."""

    where: str
    messages: Messages
    chosen: str
    rejected: str


Example = Problem | Demonstration | Preference


def read_problem(
    where: str, row: Row, columns: ColumnsSection, *, tests: bool = False, answer: bool = True
) -> Problem:
    """A row with a prompt and a gold answer.

    Args:
        tests: the answer is the row's tests, for the code rewards.
        answer: False for a row that needs no more than a prompt.

    Raises:
        DataError: with file, line, what was expected.
    """
    messages = _prompt(where, row, columns)
    if not answer:
        return Problem(where, messages, "")
    return Problem(where, messages, (_tests if tests else _answer)(where, row, columns))


def read_demonstration(where: str, row: Row, columns: ColumnsSection) -> Demonstration:
    """A row for supervised fine-tuning.

    Raises:
        DataError: as ``read_problem``.
    """
    messages = _prompt(where, row, columns)
    return Demonstration(where, messages, _completion(where, row, "completion"))


def read_preference(where: str, row: Row, columns: ColumnsSection) -> Preference:
    """A row for preference learning.

    Raises:
        DataError: as ``read_problem``.
    """
    messages = _prompt(where, row, columns)
    chosen, rejected = (_completion(where, row, name) for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise DataError(f"{where}: 'chosen' and 'rejected' are the same text; remove the row")
    return Preference(where, messages, chosen, rejected)


def gold_answer(text: str) -> str:
    """Final answer in a gold text: what follows GSM8K's ``####``, else MATH's last ``\boxed{}``,
    else the whole text. Empty if the mark is there without an answer.

    Example: ``"9 * 2 = 18\\n#### 1,018" -> "1018"``
    """
    _, mark, final = text.rpartition("####")
    if mark:
        return final.strip().replace(",", "")
    if BOX.search(text):
        return last_boxed(text) or ""
    return text.strip()


def _answer(where: str, row: Row, columns: ColumnsSection) -> str:
    column = _column(where, row, columns.answer, ANSWER_COLUMNS, "data.columns.answer")
    value = row[column]
    if isinstance(value, dict):  # verl's and PRIME's reward_model
        value = value.get("ground_truth")
    if isinstance(value, list) and len(value) == 1:  # OlympiadBench
        value = value[0]
    is_scalar = isinstance(value, str | int | float) and not isinstance(value, bool)
    if not is_scalar or not (answer := gold_answer(str(value))):
        raise DataError(
            f"{where}: {column!r} is {_shown(row[column])}; expected text or a number that is the "
            "gold answer, alone or after ####, in a last \\boxed{}, in a list of one or as "
            '{"ground_truth": …}; fix the row or set data.columns.answer'
        )
    return answer


def _tests(where: str, row: Row, columns: ColumnsSection) -> str:
    if columns.answer is not None:
        column = _column(where, row, columns.answer, (), "data.columns.answer")
        row = {**{name: row[name] for name in code_cases.BESIDE if name in row},
               "tests": row[column]}  # fmt: skip
    try:
        return code_cases.answer_of_row(row)
    except (ValueError, TypeError) as error:  # TypeError: a value that JSON does not have
        raise DataError(
            f"{where}: {error}; fix the row, or set data.columns.answer to the column of the tests"
        ) from error


def _prompt(where: str, row: Row, columns: ColumnsSection) -> Messages:
    column = _column(where, row, columns.prompt, PROMPT_COLUMNS, "data.columns.prompt")
    value = row[column]
    if isinstance(value, str):
        value = {"role": "user", "content": value}
    messages = [value] if isinstance(value, dict) else value
    is_good = isinstance(messages, list) and messages and all(map(_is_message, messages))
    if not is_good or messages[-1]["role"] != "user":
        raise DataError(
            f"{where}: {column!r} is {_shown(row[column])}; expected text, a message "
            '{"role": …, "content": …} or a list of such that ends with a user message'
        )
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _completion(where: str, row: Row, column: str) -> str:
    """Completion text, from a string or from the one message of an assistant."""
    value = row[_column(where, row, None, (column,), "data.form")]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict) and _is_message(value) and value["role"] == "assistant":
        value = value["content"]
    if not isinstance(value, str) or not value.strip():
        raise DataError(
            f"{where}: {column!r} is {_shown(row[column])}; expected text or one message of the "
            "assistant; fix the row"
        )
    return value


def _column(where: str, row: Row, named: str | None, usual: Sequence[str], option: str) -> str:
    candidates = (named,) if named is not None else usual
    for name in candidates:
        if name in row:
            return name
    names = ", ".join(map(repr, candidates))
    wanted = f"any of the columns {names}" if len(candidates) > 1 else f"column {names}"
    fix = "to the form that the rows have" if option == "data.form" else "to one of these"
    raise DataError(
        f"{where}: lacks {wanted}; it has {', '.join(map(str, row))}; set {option} {fix}"
    )


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and isinstance(value.get("role"), str)
        and isinstance(value.get("content"), str)
        and bool(value["content"].strip())
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
