"""Meaning of a row: a problem with its gold answer, or what an offline stage learns from, which is
a demonstration, a document, a preference or a judged completion.

Every form but the document has a prompt: text, one message or a list of messages that ends with the
user's. Columns have their usual names, or those that ``data.columns`` gives. The forms to learn
from are those of TRL's data set formats, plain and conversational. A row that is of another form is
an error with its file and line; nothing is guessed.

Differs: a plain text as prompt is a user's message for a model with a chat template, as it is when
completions are sampled; TRL tokenises it without the template.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from reason_llm.config import ColumnsSection
from reason_llm.data import code_cases
from reason_llm.data.box import BOX, last_boxed
from reason_llm.data.rows import Row
from reason_llm.errors import DataError

PROMPT_COLUMNS = ("messages", "question", "problem", "prompt")
ANSWER_COLUMNS = ("gt_answer", "answer", "solution", "reward_model")
SIDES = ("chosen", "rejected")
"""Columns of a preference."""

MOST_MESSAGES = 1000
"""Of one conversation to learn from: its template is rendered for each of them."""
NOT_READ = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Members of a message that some templates write, and that would be lost here."""

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
    prompt: str | None = None
    """The prompt as the row has it, if that is a text."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns that a custom reward asks for."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token ids of a row as they were sampled, which the command ``pairs`` writes beside the
    texts."""

    tokenizer: str
    """Digest of the tokenizer that they belong to."""
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]
    """Of a preference the chosen and the rejected one."""


@dataclass(frozen=True, slots=True)
class Completed:
    """A prompt with completions to learn from: a demonstration, ``{"prompt", "completion"}`` or
    ``{"messages"}``, a preference, ``{"prompt", "chosen", "rejected"}``, or a judged completion,
    ``{"prompt", "completion", "label"}``."""

    where: str
    messages: Messages
    """The prompt; of ``{"messages"}`` all before the assistant's first message."""
    completions: tuple[Messages, ...]
    """One, or the chosen and the rejected one. The first and the last message are the
    assistant's."""
    is_text: bool = False
    """Whether prompt and completions are texts in the row: a model without a chat template reads
    them as they are."""
    value: float = 0.0
    """Of a demonstration its score, where that is asked for; of a preference the margin, by how
    much the chosen one is better; of a judged completion +1 for good, -1 for bad."""
    sampled: Sampled | None = None


@dataclass(frozen=True, slots=True)
class Document:
    """A text of which every token is learned, ``{"text"}``."""

    where: str
    text: str


Learned = Completed | Document
"""What is learned from as it is, without sampling."""
Example = Problem | Learned


def read_problem(
    where: str, row: Row, columns: ColumnsSection, *, tests: bool = False, answer: bool = True
) -> Problem:
    """A row with a prompt and a gold answer.

    Args:
        tests: the answer is the row's tests, for the code rewards.
        answer: False for a row that needs no more than a prompt.

    Raises:
        DataError: with file, line, what was expected; so do all functions here.
    """
    column, messages = _prompt(where, row, columns)
    text = row[column] if isinstance(row[column], str) else None
    gold = (_tests if tests else _answer)(where, row, columns) if answer else ""
    return Problem(where, messages, gold, text)


def read_demonstration(
    where: str, row: Row, columns: ColumnsSection, *, score: bool = False
) -> Completed:
    """A row for supervised fine-tuning: a prompt with its completion, or a whole conversation.

    Args:
        score: the row needs a number in its column ``score``.
    """
    value = 0.0
    if score:
        value = number_in(where, row, _column(where, row, None, ("score",), "data.form"))
    whole = columns.prompt or "messages"
    if (columns.answer or "completion") in row or not isinstance(row.get(whole), list):
        return replace(_completed(where, row, columns, "completion"), value=value)
    messages = _conversation(where, row, whole)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles[1:] or roles[0] == "assistant":
        raise DataError(
            f"{where}: {whole!r} has the roles {_shown(roles)}; expected a message of the user and "
            "after it one of the assistant"
        )
    first = roles.index("assistant")
    end = len(roles) - roles[::-1].index("assistant")  # what follows teaches nothing
    return Completed(where, messages[:first], (messages[first:end],), value=value)


def read_document(where: str, row: Row, columns: ColumnsSection) -> Document:
    """A row for continued pretraining."""
    name = _column(where, row, columns.prompt, ("text",), "data.columns.prompt")
    text = row[name]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {name!r} is {_shown(text)}; expected text; fix the row")
    return Document(where, text)


def read_preference(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row for preference learning and reward models.

    The prompt is a column, or the messages with which both sides begin: where there is no such
    column, or it holds text and the sides are conversations from their first message on. These are
    TRL's two ways (``trl.data_utils.maybe_extract_prompt`` of trl 1.14.2), whose implicit prompts
    of plain texts are not read here.
    """
    margin = number_in(where, row, "margin") if "margin" in row else 0.0
    names = PROMPT_COLUMNS if columns.prompt is None else (columns.prompt,)
    prompt = next((row[name] for name in names if name in row), None)
    are_whole = all(
        isinstance(side := row.get(name), list)
        and side
        and isinstance(side[0], dict)
        and side[0].get("role") != "assistant"
        for name in SIDES
    )
    if are_whole and (prompt is None or isinstance(prompt, str)):
        example = _implicit(where, row)
    else:
        example = _completed(where, row, columns, *SIDES)
    return replace(example, value=margin)


def read_labelled(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row with one completion that is good (1.0) or bad (-1.0), for KTO. A score is refused: it
    does not say where good begins."""
    example = _completed(where, row, columns, "completion")
    label = row[_column(where, row, None, ("label",), "data.form")]
    meant = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": -1.0}
    meant |= dict.fromkeys(("0", "0.0", "-1", "-1.0"), -1.0)
    value = meant.get(str(label).strip().casefold())
    if value is None:
        raise DataError(
            f"{where}: 'label' is {_shown(label)}; expected true or false, for which 1 and 0 or -1 "
            "may stand; fix the row"
        )
    return replace(example, value=value)


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


def _prompt(where: str, row: Row, columns: ColumnsSection) -> tuple[str, Messages]:
    """The column of the prompt, and its messages."""
    column = _column(where, row, columns.prompt, PROMPT_COLUMNS, "data.columns.prompt")
    messages = _messages(row[column], "user")
    if not messages or messages[-1]["role"] != "user":
        raise DataError(
            f"{where}: {column!r} is {_shown(row[column])}; expected text, a message "
            '{"role": …, "content": …} or a list of such that ends with a user message'
        )
    return column, messages


def _completed(where: str, row: Row, columns: ColumnsSection, *names: str) -> Completed:
    """A prompt with the completions in the columns of these names."""
    if (sampled := _sampled(where, row, names)) is not None:
        return sampled
    usual = {"completion": columns.answer or "completion"}
    completions, are_texts = [], []
    for name in names:
        column = _column(where, row, None, (usual.get(name, name),), "data.form")
        _check_turns(where, column, row[column])
        messages = _messages(row[column], "assistant")
        if not messages or {messages[0]["role"], messages[-1]["role"]} != {"assistant"}:
            raise DataError(
                f"{where}: {column!r} is {_shown(row[column])}; expected text, a message of the "
                "assistant or a list of messages that begins and ends with one; fix the row"
            )
        completions.append(messages)
        are_texts.append(isinstance(row[column], str))
    _check_differ(where, completions)
    column, messages = _prompt(where, row, columns)
    _check_turns(where, column, row[column])
    is_text = isinstance(row[column], str) and all(are_texts)
    return Completed(where, messages, tuple(completions), is_text)


def _sampled(where: str, row: Row, names: Sequence[str]) -> Completed | None:
    """The token ids of a row and the texts beside them: the prompt as the chat template wrote it,
    and the completions, which may be empty; None for a row without token ids.
    """
    columns = ["prompt_ids", *(f"{name}_ids" for name in names)]
    there = [name for name in columns if name in row]
    if not there:
        return None
    asked = [(name, "a list of token ids", _are_token_ids) for name in columns]
    asked.append(("tokenizer", "the digest of their tokenizer", _is_text))
    asked += [(name, "the text of its tokens", _is_text) for name in ("prompt", *names)]
    for name, expected, is_good in asked:
        if not is_good(row.get(name)):
            raise DataError(
                f"{where}: {name!r} is {_shown(row.get(name))} beside {there[0]!r}; expected "
                f"{expected}, as the command pairs writes it; write the row again"
            )
    prompt, *completions = (tuple(row[name]) for name in columns)
    return Completed(
        where,
        [{"role": "user", "content": row["prompt"]}],
        tuple([{"role": "assistant", "content": row[name]}] for name in names),
        is_text=True,
        sampled=Sampled(row["tokenizer"], prompt, tuple(completions)),
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(type(token) is int and 0 <= token < 1 << 31 for token in value)


def _implicit(where: str, row: Row) -> Completed:
    """A preference whose prompt is the messages with which both sides begin."""
    chosen, rejected = (_conversation(where, row, side) for side in SIDES)
    _check_differ(where, (chosen, rejected))
    pairs = zip(chosen, rejected, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    tails = chosen[same:], rejected[same:]
    for name, tail in zip(SIDES, tails, strict=True):
        ends = {tail[0]["role"], tail[-1]["role"]} if tail else set()
        if ends != {"assistant"} or chosen[same - 1]["role"] == "assistant":
            raise DataError(
                f"{where}: 'chosen' and 'rejected' have {same} first messages in common, and after "
                f"them {name!r} has the roles {_shown([each['role'] for each in tail])}; expected "
                "messages that begin and end with the assistant's, after one of the user"
            )
    return Completed(where, chosen[:same], tails)


def _check_differ(where: str, completions: Sequence[Messages]) -> None:
    if len(completions) > 1 and completions[0] == completions[1]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are the same text; remove the row")


def _conversation(where: str, row: Row, column: str) -> Messages:
    """The messages of a list."""
    _check_turns(where, column, row[column])
    for number, message in enumerate(row[column], start=1):
        if not _is_message(message):
            raise DataError(
                f"{where}: {column!r} has as message {number} {_shown(message)}; expected "
                '{"role": …, "content": …} with text in both; fix the row'
            )
    return _messages(row[column], "")


def _messages(value: Any, role: str) -> Messages:
    """A text as one message of this role, a message, or a list of them; empty if one is none."""
    if isinstance(value, str):
        value = {"role": role, "content": value}
    messages = [value] if isinstance(value, dict) else value
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        return []
    return [{"role": each["role"], "content": each["content"]} for each in messages]


def _check_turns(where: str, column: str, value: Any) -> None:
    """Check that a list is no longer than a conversation, and holds no parts that would be lost."""
    messages = value if isinstance(value, list) else [value]
    if len(messages) > MOST_MESSAGES:
        raise DataError(
            f"{where}: {column!r} has {len(messages):,} messages; break it into rows of at most "
            f"{MOST_MESSAGES:,}"
        )
    for message in messages:
        lost = [n for n in NOT_READ if message.get(n)] if isinstance(message, dict) else []
        if lost:
            raise DataError(
                f"{where}: {column!r} has a message with {lost[0]!r}, which is not learned from; "
                "write it into 'content' as the model should write it, or remove it"
            )


def number_in(where: str, row: Row, column: str) -> float:
    """A finite number, which may be written as text, as in a .csv file."""
    value = row[column]
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{where}: {column!r} is {_shown(value)}; expected a number; fix the row")
    return number


def _column(where: str, row: Row, named: str | None, usual: Sequence[str], option: str) -> str:
    candidates = (named,) if named is not None else usual
    for name in candidates:
        if name in row:
            return name
    folded = {str(column).casefold(): column for column in row}
    for name in candidates:  # AIME's Problem and Answer
        if name.casefold() in folded:
            return str(folded[name.casefold()])
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
