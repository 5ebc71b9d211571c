"""Meaning of a row: a problem with its gold answer, or what an offline stage learns from: a
demonstration, a document, a preference or a judged completion, in the forms of TRL's data sets and
ShareGPT's conversations. Every function raises DataError: file and line, what was expected, the
option to set.

Differs: a plain text as prompt is a user's message for a model with a chat template, as it is when
completions are sampled; TRL tokenises it without the template.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

from reason_llm.config import ColumnsSection
from reason_llm.data.rows import Row, check_made
from reason_llm.errors import DataError
from reason_llm.score.code import BESIDE, answer_of_row
from reason_llm.score.math import has_box, last_boxed

CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("messages", "question", "problem", "prompt", "conversations")
ANSWER_COLUMNS = ("gt_answer", "answer", "solution", "reward_model")
SIDES = ("chosen", "rejected")
"""Columns of a preference."""
FORMS = {
    "preferences": ({"chosen", "rejected"}, "stage=preference and preference.name=dpo"),
    "labels": ({"completion", "label"}, "stage=preference and preference.name=kto"),
    "demonstrations": ({"completion"}, "stage=sft"),
    "texts": ({"text"}, "stage=pretrain"),
}
"""Columns by which the rows of a form are known, and the options that read them."""
ROLES = {"human": "user", "gpt": "assistant"} | {n: n for n in ("user", "assistant", "system")}
"""What ShareGPT and HH-RLHF call the roles of a conversation, in small letters."""

MOST_MESSAGES = 1000
"""Of one conversation to learn from: its template is rendered for each of them."""
NOT_READ = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking")
"""Members of a message that some templates write, and that would be lost here."""

Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem; for ``{"prompt"}`` alone the answer is empty."""

    where: str
    """File and line, or row."""
    messages: Messages
    answer: str
    """The gold answer, or the tests of a code row as JSON."""
    prompt: str | None = None
    """The prompt as the row has it, if that is a text."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns that a custom reward asks for."""
    environment: str = ""
    """Where each row names its environment: the name."""


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token ids of a row as the command ``pairs`` writes them beside the texts."""

    tokenizer: str
    """Digest of the tokenizer that they belong to."""
    prompt: tuple[int, ...]
    completions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """A demonstration, a preference or a judged completion."""

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
    origin: str = field(default="", compare=False)
    """Of a preference, which column is which side."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text of which every token is learned, ``{"text"}``."""

    where: str
    text: str


Learned = Completed | Document
"""What is learned from as it is, without sampling."""
Example = Problem | Learned


def read_problem(
    where: str,
    row: Row,
    columns: ColumnsSection,
    *,
    tests: bool = False,
    answer: bool = True,
    prompt: bool = True,
) -> Problem:
    """A row with a prompt and, unless ``answer`` is False, a gold answer: of code rewards the
    row's tests. Unless ``prompt`` is True, a row without one has an empty message of the user."""
    if not prompt and _found(row, (columns.prompt,) if columns.prompt else PROMPT_COLUMNS) is None:
        gold = _answer(where, row, columns) if answer else ""
        return Problem(where, [{"role": "user", "content": ""}], gold)
    column = column_of(where, row, columns.prompt, PROMPT_COLUMNS, "data.columns.prompt")
    messages = _talk(where, row, column, "user")
    text = row[column] if isinstance(row[column], str) else None
    gold = (_tests if tests else _answer)(where, row, columns) if answer else ""
    return Problem(where, messages, gold, text)


def read_demonstration(
    where: str, row: Row, columns: ColumnsSection, *, score: bool = False
) -> Completed:
    """A row for supervised fine-tuning: a prompt with its completion, or a whole conversation; with
    ``score``, and a number in that column."""
    value = 0.0
    if score:
        value = number_in(where, row, column_of(where, row, None, ("score",), "data.form"))
    whole = columns.prompt or _found(row, CHAT_COLUMNS) or "messages"
    if (columns.answer or "completion") in row or not isinstance(row.get(whole), list):
        return replace(_completed(where, row, columns, "completion"), value=value)
    messages = _conversation(where, row, whole)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles or roles[0] == "assistant":
        raise DataError(
            f"{where}: {whole!r} has the roles {_shown(roles)}; expected a message of the user and "
            "after it one of the assistant"
        )
    first = roles.index("assistant")
    end = len(roles) - roles[::-1].index("assistant")  # what follows teaches nothing
    return Completed(where, messages[:first], (messages[first:end],), value=value)


def read_document(where: str, row: Row, columns: ColumnsSection) -> Document:
    """A row for continued pretraining."""
    name = column_of(where, row, columns.prompt, ("text",), "data.columns.prompt")
    text = row[name]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {name!r} is {_shown(text)}; expected text; fix the row")
    return Document(where, text)


def read_preference(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row for preference learning and reward models. The prompt is a column, or what both sides
    begin with: where there is no such column, or it holds text and the sides are conversations from
    their first message on (``trl.data_utils.maybe_extract_prompt`` of trl 1.14.2).

    Differs: whole texts in HH-RLHF's form, ``\\n\\nHuman: …\\n\\nAssistant: …``, are conversations,
    and other texts are cut between two words; TRL cuts at the first letter that differs.
    """
    margin = number_in(where, row, "margin") if "margin" in row else 0.0
    prompt = _found(row, PROMPT_COLUMNS if columns.prompt is None else (columns.prompt,))
    names = [column_of(where, row, None, (side,), "data.form") for side in SIDES]
    sides = {side: row[name] for side, name in zip(SIDES, names, strict=True)}
    are_texts = prompt is None and all(isinstance(side, str) for side in sides.values())
    if are_texts and all(dialogues := [_dialogue(text) for text in sides.values()]):
        sides = dict(zip(SIDES, dialogues, strict=True))
    are_whole = all(
        isinstance(side, list)
        and side
        and isinstance(side[0], dict)
        and (_message(side[0]) or {}).get("role") != "assistant"
        for side in sides.values()
    )
    if are_whole and (prompt is None or isinstance(row[prompt], str)):
        example, prompt = _implicit(where, sides), None
    elif are_texts:
        example = _completed(where, _cut(where, sides), ColumnsSection(), *SIDES)
    else:
        example = _completed(where, row, columns, *SIDES)
    place = "the start that both share" if prompt is None else f"column {prompt!r}"
    origin = (
        f"chosen is column {names[0]!r}, rejected is column {names[1]!r}, the prompt is {place}"
    )
    return replace(example, value=margin, origin=origin)


def read_labelled(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row with one completion that is good (1.0) or bad (-1.0), for KTO. A score is refused: it
    does not say where good begins."""
    example = _completed(where, row, columns, "completion")
    label = row[column_of(where, row, None, ("label",), "data.form")]
    meant = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": -1.0}
    meant |= dict.fromkeys(("0", "0.0", "-1", "-1.0"), -1.0)
    value = meant.get(str(label).strip().casefold())
    if value is None:
        raise DataError(
            f"{where}: 'label' is {_shown(label)}; expected true or false, for which 1 and 0 or -1 "
            "may stand; fix the row"
        )
    return replace(example, value=value)


def option_for(row: Row, form: str, columns: ColumnsSection) -> str | None:
    """What to set for a row that is none of ``form``: ``"stage=sft"``; None where its columns tell
    no other form."""
    names = {str(name).casefold() for name in row}
    fits = [each for each, (needed, _) in FORMS.items() if needed <= names]
    talk = row.get(_found(row, CHAT_COLUMNS) or "")
    turns = [_message(each) for each in talk] if isinstance(talk, list) else []
    if any(turn and turn["role"] == "assistant" for turn in turns):
        fits.append("demonstrations")
    elif _found(row, PROMPT_COLUMNS):
        fits.append("prompts")
    if has_answer(row, columns):
        fits.append("problems")
    return None if form in fits else next((FORMS[each][1] for each in fits if each in FORMS), None)


def has_answer(row: Row, columns: ColumnsSection) -> bool:
    """Whether a row has a column of the gold answer."""
    names = ANSWER_COLUMNS if columns.answer is None else (columns.answer,)
    return _found(row, names) is not None


def gold_answer(text: str) -> str:
    """Final answer in a gold text: what follows GSM8K's ``####``, else MATH's last ``\boxed{}``,
    else the whole text. Empty if the mark is there without an answer.

    Example: ``"9 * 2 = 18\\n#### 1,018" -> "1018"``
    """
    _, mark, final = text.rpartition("####")
    if mark:
        return final.strip().replace(",", "")
    if has_box(text):
        return last_boxed(text) or ""
    return text.strip()


def _answer(where: str, row: Row, columns: ColumnsSection) -> str:
    column = column_of(where, row, columns.answer, ANSWER_COLUMNS, "data.columns.answer")
    value = row[column]
    if isinstance(value, str) and value.lstrip()[:1] == "{" and "ground_truth" in value:
        try:  # as a .csv file holds it
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = {}
        check_made(where, {column: value})
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
        column = column_of(where, row, columns.answer, (), "data.columns.answer")
        row = {**{name: row[name] for name in BESIDE if name in row},
               "tests": row[column]}  # fmt: skip
    try:
        return answer_of_row(row)
    except (ValueError, TypeError) as error:  # TypeError: a value that JSON does not have
        raise DataError(
            f"{where}: {error}; fix the row, or set data.columns.answer to the column of the tests"
        ) from error


def _talk(where: str, row: Row, column: str, role: str) -> Messages:
    """The messages in a column: of a prompt, which ends with the user's, or of a completion, which
    begins and ends with the assistant's."""
    messages, is_prompt = _messages(row[column], role), role == "user"
    ends = {messages[-1 if is_prompt else 0]["role"], messages[-1]["role"]} if messages else set()
    if ends != {role}:
        how = "ends with a user message" if is_prompt else "begins and ends with the assistant's"
        raise DataError(
            f"{where}: {column!r} is {_shown(row[column])}; expected text, a message "
            f'{{"role": …, "content": …}} or a list of such that {how}; fix the row'
        )
    return messages


def _completed(where: str, row: Row, columns: ColumnsSection, *names: str) -> Completed:
    """A prompt with the completions in the columns of these names."""
    if (sampled := _sampled(where, row, names)) is not None:
        return sampled
    completions, are_texts = [], []
    for name in names:
        usual, option = name, "data.form"
        if name == "completion":
            usual, option = columns.answer or name, "data.columns.answer"
        column = column_of(where, row, None, (usual,), option)
        _check_turns(where, column, row[column])
        completions.append(_talk(where, row, column, "assistant"))
        are_texts.append(isinstance(row[column], str))
    _check_differ(where, completions)
    column = column_of(where, row, columns.prompt, PROMPT_COLUMNS, "data.columns.prompt")
    _check_turns(where, column, row[column])
    is_text = isinstance(row[column], str) and all(are_texts)
    return Completed(where, _talk(where, row, column, "user"), tuple(completions), is_text)


def _sampled(where: str, row: Row, names: Sequence[str]) -> Completed | None:
    """The token ids of a row and the texts beside them; None for a row without token ids."""
    columns = ["prompt_ids", *(f"{name}_ids" for name in names)]
    there = [name for name in columns if name in row]
    if not there:
        return None
    for name in (*columns, "tokenizer", "prompt", *names):
        value = row.get(name)
        expected, is_good = "text", isinstance(value, str)
        if name in columns:
            expected = "a list of token ids"
            ids = value if isinstance(value, list) else []
            is_good = ids != [] and all(type(id) is int and 0 <= id < 1 << 31 for id in ids)
        if not is_good:
            raise DataError(
                f"{where}: {name!r} is {_shown(value)} beside {there[0]!r}; expected {expected}, "
                "as the command pairs writes it; write the row again"
            )
    prompt, *completions = (tuple(row[name]) for name in columns)
    return Completed(
        where,
        [{"role": "user", "content": row["prompt"]}],
        tuple([{"role": "assistant", "content": row[name]}] for name in names),
        is_text=True,
        sampled=Sampled(row["tokenizer"], prompt, tuple(completions)),
    )


def _dialogue(text: str) -> Messages:
    """The messages of a text in HH-RLHF's form; none of another text."""
    before, *parts = re.split(r"\n\n(Human|Assistant):", f"\n\n{text.strip()}")
    turns = zip(parts[::2], parts[1::2], strict=True)
    said = [{"role": ROLES[who.lower()], "content": what.strip()} for who, what in turns]
    return [] if before or len(said) < 2 else said


def _cut(where: str, sides: Mapping[str, str]) -> Row:
    """A preference with a prompt: the words with which both texts begin. The space after them
    belongs to the completions, as in TRL."""
    start = sides["chosen"][: _num_same(*sides.values())]
    end = max(start.rfind(" "), start.rfind("\n") + 1)
    if not start[:end].strip():
        raise DataError(
            f"{where}: has no column of the prompt, and 'chosen' and 'rejected' begin with no word "
            "in common; add a column 'prompt', or set data.columns.prompt to the one that has it"
        )
    return {"prompt": start[:end], **{side: text[end:] for side, text in sides.items()}}


def _implicit(where: str, row: Row) -> Completed:
    """A preference whose prompt is the messages with which both sides begin."""
    chosen, rejected = (_conversation(where, row, side) for side in SIDES)
    _check_differ(where, (chosen, rejected))
    same = _num_same(chosen, rejected)
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


def _num_same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items, or letters, two sequences have in common from their start."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _check_differ(where: str, completions: Sequence[Messages]) -> None:
    if len(completions) > 1 and completions[0] == completions[1]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are the same text; remove the row")


def _conversation(where: str, row: Row, column: str) -> Messages:
    """The messages of a list."""
    _check_turns(where, column, row[column])
    for number, message in enumerate(row[column], start=1):
        if _message(message) is None:
            raise DataError(
                f"{where}: {column!r}, message {number} is {_shown(message)}; expected "
                '{"role": …, "content": …} or {"from": …, "value": …} with text in both; fix it'
            )
    return _messages(row[column], "")


def _messages(value: Any, role: str) -> Messages:
    """A text as one message of this role, a message, or a list of them; empty if one is none."""
    if isinstance(value, str):
        value = {"role": role, "content": value}
    messages = [value] if isinstance(value, dict) else value
    read = [_message(each) for each in messages] if isinstance(messages, list) else []
    return [each for each in read if each is not None] if all(read) else []


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


def _found(row: Row, candidates: Sequence[str]) -> str | None:
    """The first of these columns that the row has."""
    for name in candidates:
        if name in row:
            return name
    folded = {str(column).casefold(): str(column) for column in row}
    return next((folded[n.casefold()] for n in candidates if n.casefold() in folded), None)


def column_of(where: str, row: Row, named: str | None, usual: Sequence[str], option: str) -> str:
    """The row's name of a column that ``option`` names, or that has a usual name, in any case."""
    candidates = (named,) if named is not None else usual
    if (found := _found(row, candidates)) is not None:
        return found
    names = ", ".join(map(repr, candidates))
    wanted = f"any of the columns {names}" if len(candidates) > 1 else f"column {names}"
    fix = "to the form that the rows have" if option == "data.form" else "to one of these"
    raise DataError(
        f"{where}: lacks {wanted}; it has {', '.join(map(str, row))}; set {option} {fix}"
    )


def _message(value: Any) -> dict[str, str] | None:
    """A message without its other members; None for what is none."""
    if not isinstance(value, dict):
        return None
    role, content = value.get("role"), value.get("content")
    if role is None and "from" in value:
        role, content = ROLES.get(str(value["from"]).lower()), value.get("value")
    if not isinstance(role, str) or not isinstance(content, str) or not content.strip():
        return None
    return {"role": role, "content": content}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
