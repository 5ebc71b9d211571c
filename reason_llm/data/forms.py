"""Meaning of a row: a problem with its gold answer, or what an offline stage learns from: a
demonstration, a document, a preference or a judged completion, in the forms of TRL's data sets,
Alpaca and ShareGPT. Every function raises DataError: file and line, what was expected, the option
to set. Each column of a row is read, named in ``ignored``, or refused (``cells``).

Differs: a plain text as prompt is a user's message for a model with a chat template, as it is when
completions are sampled; TRL tokenises it without the template.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product, takewhile
from typing import Any, Self

from reason_llm.config import RESERVED_ARGUMENTS, ColumnsSection
from reason_llm.data.cells import Cells
from reason_llm.data.choices import Choices, check_no_wrong_choices, read_choices
from reason_llm.data.golds import (
    NO_VALUES,
    gold_of_text,
    has_answer,
    number_of,
    read_gold,
    read_tests,
)
from reason_llm.data.messages import (
    ROLES,
    SYSTEM_ROLES,
    Message,
    Messages,
    Talk,
    from_json_text,
    read_talk,
    shown,
    without_nulls,
)
from reason_llm.data.rows import Row
from reason_llm.errors import DataError
from reason_llm.files import check_nesting

CHAT_COLUMNS = ("messages", "conversations", "conversation")
PROMPT_COLUMNS = (
    "messages", "question", "problem", "prompt", "conversations", "conversation", "instruction",
    "query", "question_content", "goal", "ctx",
)  # fmt: skip
COMPLETION_COLUMNS = ("completion", "response", "output")
PLAIN: dict[tuple[str, ...], tuple[str, str]] = {
    pair: names
    for names in product(("question", "problem", "prompt", "query"), ("answer", "final_answer"))
    for pair in (names, names[::-1])
}
"""The columns of the prompt and the gold answer of rows that have no other, by all columns."""
_PLAIN_TEXT = re.compile(
    r"(?!array\(|Human:|Assistant:|[\W_])[^#&<\[\\{ÂÃâ\0-\t\x0b-\x1f\x7f-\x9f\ufdd0-\uffff]+"
)
"""Text that is no list or conversation, without the signs of markup, damage and control tokens."""
SYSTEM_COLUMNS = ("system", "system_prompt")
JOINED_COLUMNS = ("input", "context", "starter_code")
"""Columns whose text belongs to the prompt: Alpaca's, Dolly's, and those of programming tasks."""
PASSAGE_COLUMNS = ("passage", "article", "body", "premise")
"""Columns whose text comes before the question: DROP's and BoolQ's, RACE's, SVAMP's, and COPA's."""
NO_INPUTS = {*NO_VALUES, "noinput", "no input"} - {"proof", "?"}
"""Texts of joined columns that say nothing."""
STARTER = "Start from this code:\n\n```python\n{}\n```"
TOOL_COLUMNS = ("tools", "functions")
CALLS_COLUMN = "answers"
"""The completion of xLAM's rows, where there are tools: calls as JSON text."""
ARGUMENTS_COLUMN = "chat_template_kwargs"
LABEL_COLUMNS = ("label", "kto_tag")
"""Columns that say whether a completion is good: TRL's and LLaMA-Factory's."""
SIDES = ("chosen", "rejected")
"""Sides of a preference."""
SIDE_COLUMNS = (("chosen", "chosen_response"), ("rejected", "rejected_response"))
FORMS = {
    "preferences": ({"chosen", "rejected"}, "stage=preference and preference.name=dpo"),
    "labels": ({"completion", "label"}, "stage=preference and preference.name=kto"),
    "demonstrations": ({"completion"}, "stage=sft"),
    "texts": ({"text"}, "stage=pretrain"),
}
"""Columns by which the rows of a form are known, and the options that read them."""


@dataclass(frozen=True, slots=True)
class TemplateExtras:
    """Arguments of the chat template from a row, other than its messages."""

    tools: tuple[dict[str, Any], ...] = ()
    """Schemas of tools in OpenAI's form."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments by name, as in TRL's column ``chat_template_kwargs``."""


NO_EXTRAS = TemplateExtras()


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem; for ``{"prompt"}`` alone the answer is empty."""

    where: str
    """File and line, or row."""
    messages: Messages
    answer: str
    """The gold answer, or the tests of a code row as JSON."""
    prompt: str | None = None
    """The prompt as text, if the row has it as text."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns that a custom reward asks for."""
    toolset: str = ""
    """Name of the tools that the prompt offers, where each row names its own."""
    extras: TemplateExtras = NO_EXTRAS
    """Arguments of the chat template from the row: tools and others."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Columns, and members of messages, that have content and are not read."""
    doubt: str = field(default="", compare=False)
    """Why the gold answer may be another one; empty where it may not."""


@dataclass(slots=True)
class PlainProblem:
    """A problem of a plain text and a whole number, of which there is nothing to note. Large sets
    have many of these."""

    where: str
    text: str
    answer: str

    @property
    def problem(self) -> Problem:
        """The same as ``read_problem`` returns it."""
        asked = [{"role": "user", "content": self.text}]
        return Problem(self.where, asked, self.answer, self.text)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token ids of a row, as the command ``pairs`` writes them with the texts."""

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
    """Score of a demonstration, where that is asked for; margin of a preference, by how
    much the chosen one is better; of a judged completion +1 for good, -1 for bad."""
    sampled: Sampled | None = None
    extras: TemplateExtras = NO_EXTRAS
    """Arguments of the chat template from the row: tools and others."""
    untrained: frozenset[int] = frozenset()
    """Messages of the completion, by index, that the row leaves out of the loss."""
    origin: str = field(default="", compare=False)
    """Columns of the sides of a preference."""
    doubt: str = field(default="", compare=False)
    """Why the row may mean something else than it seems; empty where it is clear."""
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Columns, and members of messages, that have content and are not read."""


@dataclass(frozen=True, slots=True)
class TextDocument:
    """A text of which every token is learned, ``{"text"}``."""

    where: str
    text: str
    ignored: tuple[str, ...] = field(default=(), compare=False)
    """Columns that have content and are not read."""


Asked = Problem | PlainProblem
"""Examples that are prompts."""
Learned = Completed | TextDocument
"""Examples that are trained on as they are, without sampling."""
Example = Asked | Learned


def read_problem(
    where: str,
    row: Row,
    columns: ColumnsSection,
    *,
    tests: bool = False,
    label: bool = False,
    answer: bool = True,
    prompt: bool = True,
) -> Problem:
    """A row with a prompt and, unless ``answer`` is False, a gold answer: of code rewards the
    row's tests, of the reward ``exact`` a label. Unless ``prompt`` is True, a row without one has
    an empty message of the user."""
    cells = Cells(where, row, columns)
    names = PROMPT_COLUMNS if columns.prompt is None else (columns.prompt,)
    if not prompt and cells.find(names) is None:
        gold = read_gold(cells, is_label=label)[0] if answer else ""
        return Problem(where, [{"role": "user", "content": ""}], gold, ignored=cells.ignored())
    asked = _read_prompt(cells, _prompt_column(cells, PROMPT_COLUMNS))
    gold, doubt = "", ""
    if tests and answer:
        gold = read_tests(cells)
        asked = _with_first_test(cells, asked)
    elif answer:
        gold, doubt = read_gold(cells, asked.choices, label)
        if asked.choices is None:
            check_no_wrong_choices(cells)
        else:
            asked = asked.with_text(asked.choices.request)
    text = asked.messages[-1]["content"] if asked.is_text else None
    doubt = doubt or _doubt_of_prompt(cells, asked, ())
    return Problem(
        where, asked.messages, gold, text, extras=asked.extras, ignored=cells.ignored(), doubt=doubt
    )


def plain_problem(where: str, row: Row) -> PlainProblem | None:
    """What ``read_problem`` makes of a row, with a gold answer as usual, unless it has to look at
    more than a plain text and a whole number."""
    names = PLAIN.get((*row,))
    if names is None:
        return None
    text, given = row[names[0]], row[names[1]]
    if type(text) is not str or type(given) is not str or not _PLAIN_TEXT.fullmatch(text):
        return None
    return PlainProblem(where, text, gold) if (gold := number_of(given)) else None


def read_demonstration(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row for supervised fine-tuning: a prompt with its completion, or a whole conversation."""
    cells = Cells(where, row, columns)
    whole = cells.find(CHAT_COLUMNS if columns.prompt is None else (columns.prompt,))
    has_completion = cells.find((columns.answer or "completion",)) is not None
    if whole is not None and _roles(cells, whole)[-1:] in (["user"], ["tool"]):
        has_completion = has_completion or cells.find(COMPLETION_COLUMNS, filled=True) is not None
    usual = (*PROMPT_COLUMNS, *COMPLETION_COLUMNS)
    if columns.prompt is None and columns.answer is None and cells.find(usual) is None:
        wanted = ", ".join(map(repr, (*COMPLETION_COLUMNS, *CHAT_COLUMNS)))
        raise DataError(
            f"{where}: lacks any of the columns {wanted}; it has {', '.join(map(str, row))}; set "
            "data.columns.answer to that of the completion, or data.columns.prompt to that of a "
            "whole conversation, or make such a column by data.preprocess"
        )
    if (
        whole is None
        or has_completion
        or not isinstance(from_json_text(where, whole, cells.row[whole]), list)
    ):
        example = _completed(cells, _completion_column(cells))
    else:
        example = _whole(cells, whole)
    if any(cells.row.get(name) is False for name in LABEL_COLUMNS):
        example = replace(example, doubt="the row is labelled false, and its answer is learned")
    return replace(example, ignored=cells.ignored())


def read_demonstrated(
    where: str, row: Row, columns: ColumnsSection, *, label: bool = False, marked: bool = True
) -> Problem:
    """A row for supervised fine-tuning as the problem that its last answer solves: held out, its
    answer is sampled and checked. The gold answer is a column of its own or is in that answer.

    Args:
        label: the gold answer is a whole label, as ``read_problem`` has it.
        marked: the gold answer has to be marked in the answer; otherwise a whole text is one.
    """
    example = read_demonstration(where, row, columns)
    *asked, last = [*example.messages, *example.completions[0]]
    cells = Cells(where, row, columns)
    if columns.answer is None and has_answer(cells):
        gold, doubt = read_gold(cells, is_label=label)
    else:
        gold, doubt = gold_of_text(last["content"], label), ""
    if not gold or (marked and not label and gold == last["content"].strip()):
        raise DataError(
            f"{where}: a held-out part of the rows is checked by generation, and this row has no "
            "gold answer: none in a column such as answer, and none in its last answer behind "
            "####, in \\boxed{} or in <answer> tags; set eval.rows in place of data.eval, which "
            "measures the loss, or for labels the reward exact"
        )
    text = asked[-1]["content"] if example.is_text else None
    return Problem(
        where, asked, gold, text, extras=example.extras, ignored=example.ignored, doubt=doubt
    )


def read_document(where: str, row: Row, columns: ColumnsSection) -> TextDocument:
    """A row for continued pretraining."""
    cells = Cells(where, row, columns)
    name = cells.column(columns.prompt, ("text",), "data.columns.prompt")
    text = cells[name]
    if not isinstance(text, str) or not text.strip():
        raise DataError(f"{where}: {name!r} is {shown(text)}; expected text; fix the row")
    return TextDocument(where, text, cells.ignored())


def read_preference(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row for preference learning and reward models. The prompt is a column, or what both sides
    begin with: where there is no such column, or it holds text and the sides are conversations from
    their first message on (``trl.data_utils.maybe_extract_prompt`` of trl 1.14.2).

    Differs: whole texts in HH-RLHF's form, ``\n\nHuman: …\\n\\nAssistant: …``, are conversations,
    and other texts are cut between two words; TRL cuts at the first letter that differs.
    """
    cells = Cells(where, row, columns)
    if columns.prompt is None and cells.find(PROMPT_COLUMNS) is None:
        given = cells.find(("input",), filled=True)  # distilabel's Orca pairs
        cells = Cells(where, row, columns.model_copy(update={"prompt": given}))
    margin = _read_margin(where, cells["margin"]) if "margin" in cells else 0.0
    last = ""
    whole = cells.find(CHAT_COLUMNS)
    has_one_side = cells.find(SIDE_COLUMNS[0]) is None and cells.find(SIDE_COLUMNS[1]) is not None
    if has_one_side and whole is not None and _ends_with_an_answer(cells, whole):
        cells = _with_last_answer(cells, whole, SIDES[0])
        last = f"the last message of column {whole!r}"
    names = [cells.column(None, usual, "data.form") for usual in SIDE_COLUMNS]
    sides = [from_json_text(where, name, cells[name]) for name in names]
    prompt = _prompt_of_sides(cells)
    if prompt is not None and all(map(partial(_is_dialogue_after, cells.row[prompt]), sides)):
        cells[prompt]  # says the same
        prompt = None
    are_texts = prompt is None and all(isinstance(side, str) for side in sides)
    if are_texts and all(dialogues := [_dialogue(side) for side in sides]):
        sides, are_texts = list(dialogues), False
    is_outside = prompt is None or isinstance(cells.row[prompt], str)
    if is_outside and all(map(_begins_with_a_prompt, sides)):
        example, prompt = _implicit(cells, dict(zip(names, sides, strict=True)), prompt), None
    elif are_texts:
        cut = _cut(where, dict(zip(names, sides, strict=True)))
        example = _completed(Cells(where, cut, ColumnsSection()), *names)
    else:
        example = _completed(cells, *names)
    place = "the start that both share" if prompt is None else f"column {prompt!r}"
    chosen = last or f"column {names[0]!r}"
    origin = f"chosen is {chosen}, rejected is column {names[1]!r}, the prompt is {place}"
    return replace(
        example,
        value=margin,
        origin=origin,
        ignored=cells.ignored(),
    )


def _ends_with_an_answer(cells: Cells, column: str) -> bool:
    return _roles(cells, column)[-1:] == ["assistant"]


def _with_last_answer(cells: Cells, column: str, name: str) -> Cells:
    """The row with the last answer of a whole conversation as a column ``name``, as ms-swift's rows
    with ``rejected_response`` or ``label`` mean it."""
    talk = from_json_text(cells.where, column, cells.row[column])
    row = {**cells.row, column: talk[:-1], name: [talk[-1]]}
    return Cells(cells.where, row, cells.columns)


def read_labelled(where: str, row: Row, columns: ColumnsSection) -> Completed:
    """A row with one completion that is good (1.0) or bad (-1.0), for KTO. A score is refused: it
    does not say where good begins."""
    cells = Cells(where, row, columns)
    whole = cells.find(CHAT_COLUMNS)
    has_completion = cells.columns.answer is not None or cells.find(COMPLETION_COLUMNS) is not None
    if whole is not None and not has_completion and _ends_with_an_answer(cells, whole):
        cells = _with_last_answer(cells, whole, COMPLETION_COLUMNS[0])
    example = _completed(cells, _completion_column(cells))
    name = cells.column(None, LABEL_COLUMNS, "data.form")
    label = cells[name]
    meant = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": -1.0}
    meant |= {"desirable": 1.0, "undesirable": -1.0}
    meant |= dict.fromkeys(("0", "0.0"), -1.0)
    value = meant.get(str(label).strip().casefold())
    if value is None:
        raise DataError(
            f"{where}: {name!r} is {shown(label)}; expected true or false (1 or 0); fix the row, "
            "or drop it by data.preprocess"
        )
    return replace(example, value=value, ignored=cells.ignored())


def option_for(row: Row, form: str, columns: ColumnsSection) -> str | None:
    """The option to set for a row of another form than ``form``: ``"stage=sft"``; None where its
    columns show no other form."""
    cells = Cells("", row, columns)
    names = {str(name).casefold() for name in row}
    fits = [each for each, (needed, _) in FORMS.items() if needed <= names]
    asks = cells.find(PROMPT_COLUMNS) is not None
    if asks and cells.find(COMPLETION_COLUMNS) is not None:
        fits.append("demonstrations")
    if form == "preferences" and names & {name for usual in SIDE_COLUMNS for name in usual}:
        return None  # it lacks the other side
    if "texts" in fits and (asks or names & {"label", "code", "role"} or has_answer(cells)):
        fits.remove("texts")  # a text with something to learn it by is no document
    talk = cells.find(CHAT_COLUMNS)
    if talk is not None and "assistant" in _roles(cells, talk):
        fits.append("demonstrations")
    elif asks:
        fits.append("prompts")
    if has_answer(cells):
        fits.append("problems")
    if form == "labels" and not names & {*LABEL_COLUMNS}:  # another column may be the label, and
        fits = [each for each in fits if each != "demonstrations"]  # bad answers are no examples
    return None if form in fits else next((FORMS[each][1] for each in fits if each in FORMS), None)


def _read_margin(where: str, value: Any) -> float:
    """A finite number of at least 0, which may be written as text, as in a .csv file."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number) or number < 0:
        raise DataError(
            f"{where}: 'margin' is {shown(value)}; expected a number of at least 0; fix it, or "
            "swap the sides where the rejected one is better"
        )
    return number


@dataclass(frozen=True, slots=True)
class _PromptParts:
    """A prompt with all that belongs to it."""

    messages: Messages
    is_text: bool
    extras: TemplateExtras
    choices: Choices | None

    def with_text(self, text: str, is_before: bool = False) -> Self:
        """The prompt with a paragraph at the end, or at the start, of its last message."""
        *earlier, last = self.messages
        parts = (text, last["content"]) if is_before else (last["content"], text)
        return replace(self, messages=[*earlier, {**last, "content": "\n\n".join(parts)}])


def _with_first_test(cells: Cells, asked: _PromptParts) -> _PromptParts:
    """The prompt with the first of MBPP's tests, by which alone the function's name is known.
    Source: ``mbpp_plus_instruct`` of lm_eval 0.4.13."""
    listed = cells.row.get("test_list")
    first = listed[0] if isinstance(listed, list) and listed else None
    if not isinstance(first, str) or first.strip() in asked.messages[-1]["content"]:
        return asked
    cells["test_list"]
    return asked.with_text(f"Your code should satisfy the following assertion:\n{first.strip()}")


def _read_prompt(cells: Cells, column: str) -> _PromptParts:
    """The prompt in a column, with the system message, the input, the choices and the tools that
    stand in other columns."""
    value = cells[column]
    if isinstance(value, list) or (isinstance(value, str) and value.lstrip().startswith('["')):
        texts = value if isinstance(value, list) else _parsed(value)
        if isinstance(texts, list) and [type(text) for text in texts] == [str]:
            value = texts[0]
    talk = read_talk(cells.where, column, value, "user", cells.note)
    if talk.roles[-1:] not in (["user"], ["tool"]):
        ends = f", ends with a message of the {talk.roles[-1]:.40}" if talk.roles else ""
        raise DataError(
            f"{cells.where}: {column!r} is {shown(cells[column])}{ends}; expected text, a message "
            '{"role": …, "content": …} or a list of such that ends with a user message; fix the row'
        )
    _check_roles(cells.where, column, talk)
    messages = _with_system(cells, talk.messages)
    extras = _read_extras(cells, messages)
    asked = _PromptParts(messages, talk.is_text, extras, read_choices(cells))
    for name in (*PASSAGE_COLUMNS, *JOINED_COLUMNS):
        joined = cells.find((name,), filled=True)
        if joined is None or joined == column:
            continue
        text = cells[joined]
        if not isinstance(text, str):
            raise DataError(
                f"{cells.where}: column {joined!r} is {shown(text)}; expected text, which joins "
                "the prompt; write it as text by data.preprocess, or name it in data.columns.ignore"
            )
        if text.strip().strip("<>").casefold() in NO_INPUTS:
            cells.note(f"{joined} with a word for no value")
        elif text.strip() not in asked.messages[-1]["content"]:
            is_code = name == "starter_code"
            text = STARTER.format(text.rstrip()) if is_code else text
            asked = asked.with_text(text, is_before=name in PASSAGE_COLUMNS)
    if asked.choices is not None and not asked.choices.are_labelled_in(_written(asked.messages)):
        asked = asked.with_text(asked.choices.text)
    return asked


def _written(messages: Messages) -> str:
    return "\n".join(message["content"] for message in messages)


def _with_system(cells: Cells, messages: Messages) -> Messages:
    """The messages after the system message in a column of the row."""
    column = cells.find(SYSTEM_COLUMNS, filled=True)
    if column is None:
        return messages
    text = cells[column]
    if not isinstance(text, str):
        raise DataError(
            f"{cells.where}: {column!r} is {shown(text)}; expected the text of a system message; "
            "fix the row, or name it in data.columns.ignore"
        )
    if messages and messages[0]["role"] in SYSTEM_ROLES:
        if messages[0]["content"].strip() == text.strip():
            return messages
        raise DataError(
            f"{cells.where}: column {column!r} and the conversation have two different system "
            "messages; remove one of them, or name the column in data.columns.ignore"
        )
    return [{"role": "system", "content": text}, *messages]


def _read_extras(cells: Cells, messages: Messages) -> TemplateExtras:
    """The row's tools, unless its system message lists them already, and template arguments."""
    tools = _read_tools(cells)
    system = messages[0]["content"] if messages[0]["role"] in SYSTEM_ROLES else ""
    if all(f'"{tool["function"]["name"]}"' in system for tool in tools):
        tools = ()
    column = cells.find((ARGUMENTS_COLUMN,), filled=True)
    if column is None:
        return TemplateExtras(tools) if tools else NO_EXTRAS
    given = cells[column]
    value = _parsed(given) if isinstance(given, str) else given
    if not isinstance(value, dict) or not RESERVED_ARGUMENTS.isdisjoint(value):
        raise DataError(
            f"{cells.where}: column {column!r} is {shown(given)}; expected an object of the chat "
            "template's arguments by name; fix it, or name it in data.columns.ignore"
        )
    return TemplateExtras(tools, {name: v for name, v in value.items() if v is not None})


def _read_tools(cells: Cells) -> tuple[dict[str, Any], ...]:
    """The schemas of the row's tools in OpenAI's form."""
    column = cells.find(TOOL_COLUMNS, filled=True)
    if column is None:
        return ()
    value = cells[column]
    if isinstance(value, str):
        is_json = value.strip() == "null" or _parsed(value) is not None
        value = _parsed(value) if is_json else [None]
    items = (
        [_parsed(each) if isinstance(each, str) else each for each in value or ()]
        if isinstance(value, list | None)
        else [value]
    )
    schemas = [
        each
        if isinstance(each, dict) and "function" in each
        else {"type": "function", "function": each}
        for each in items
    ]
    for each in schemas:
        function = each["function"]
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(
                f"{cells.where}: column {column!r} is {shown(cells[column])}; expected a list of "
                "JSON schemas with the name of a function, or the same as JSON text; fix it, or "
                "name it in data.columns.ignore"
            )
    return tuple(map(without_nulls, schemas))


def _parsed(text: str) -> Any:
    """The value of JSON text; None where it is none."""
    try:
        value = json.loads(text)
        check_nesting(value)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value


def _roles(cells: Cells, column: str) -> list[str]:
    """The roles of a column's conversation that was not checked yet; none of any other value."""
    try:
        value = from_json_text(cells.where, column, cells.row[column])
    except DataError:  # read_talk raises it with the place
        return []
    items = value if isinstance(value, list) else []
    given = [each.get("role", each.get("from")) for each in items if isinstance(each, dict)]
    return [ROLES.get(str(role).lower(), str(role)) for role in given]


def _prompt_column(cells: Cells, usual: Sequence[str]) -> str:
    """The column of the prompt. A whole conversation is none where another column can be it.

    Raises:
        DataError: there is none, or the conversation says more than the other column.
    """
    named = cells.columns.prompt
    if named is not None:
        return cells.column(named, (), "data.columns.prompt")
    column = cells.find(("prompt",), filled=True)
    if cells.find(CHAT_COLUMNS) is None and column is not None:
        # TRL and verl read a conversation in this column; a question beside it is its source.
        roles = _roles(cells, column)
        if roles and roles[-1] != "assistant":
            return column
    whole: dict[str, list[str]] = {}
    for name in usual:
        column = cells.find((name,))
        if column is None or cells.row[column] is None:
            continue
        roles = _roles(cells, column)
        if roles[-1:] != ["assistant"]:
            for each, others in whole.items():
                if others != ["user", "assistant"]:
                    raise DataError(
                        f"{cells.where}: the prompt may be column {column!r}, or the beginning of "
                        f"{each!r}, which has the roles {shown(others)}; set data.columns.prompt, "
                        "or name the other one in data.columns.ignore"
                    )
            return column
        whole[column] = roles
    return cells.column(None, usual, "data.columns.prompt")


def _prompt_of_sides(cells: Cells) -> str | None:
    """The column of a preference's prompt; None without one."""
    if (named := cells.columns.prompt) is not None:
        return cells.find((named,))
    texts = [name for name in PROMPT_COLUMNS if name not in CHAT_COLUMNS]
    for column in (cells.find(texts), *(cells.find((name,)) for name in CHAT_COLUMNS)):
        if column is not None and _roles(cells, column)[-1:] != ["assistant"]:
            return column
    return None


def _completion_column(cells: Cells) -> str:
    usual: Sequence[str] = COMPLETION_COLUMNS
    if cells.find(TOOL_COLUMNS, filled=True) is not None:
        usual = (*usual, CALLS_COLUMN)
    return cells.column(cells.columns.answer, usual, "data.columns.answer")


def _completed(cells: Cells, *columns: str) -> Completed:
    """A prompt with the completions in these columns."""
    if (sampled := _sampled(cells, columns)) is not None:
        return sampled
    talks = [_completion(cells, column) for column in columns]
    completions = tuple(talk.messages for talk in talks)
    _check_differ(cells.where, completions)
    asked = _read_prompt(cells, _prompt_column(cells, PROMPT_COLUMNS))
    untrained = frozenset(n for n, is_trained in enumerate(talks[0].trained) if not is_trained)
    if len(talks) > 1 and not all(map(all, (talk.trained for talk in talks))):
        raise DataError(
            f"{cells.where}: a turn is masked (weight, train …), which preference stages do not "
            "support; remove the mask"
        )
    _check_trained(cells.where, completions[0], untrained)
    is_text = asked.is_text and len(asked.messages) == 1 and all(talk.is_text for talk in talks)
    return Completed(
        cells.where,
        asked.messages,
        completions,
        is_text,
        extras=asked.extras,
        untrained=untrained,
        doubt=_doubt_of_prompt(cells, asked, talks),
    )


def _doubt_of_prompt(cells: Cells, asked: _PromptParts, talks: Sequence[Talk]) -> str:
    """Why a prompt may be meant otherwise; empty where it is clear."""
    text = asked.messages[-1]["content"].strip()
    other = cells.find(("prompt",), filled=True) if cells.columns.prompt is None else None
    contents = [message["content"] for message in asked.messages]
    if other is not None and not cells.is_read(other) and cells.row[other] not in contents:
        return (
            f"column {other!r} is not read, because another column is taken as the prompt; set "
            "data.columns.prompt to the one you mean"
        )
    if not asked.is_text:
        return ""
    for name in re.findall(r"\{([^\W\d]\w{0,40})\}", text):
        if name in cells.row:
            return f"the prompt has the name of column {name!r} in braces, and not its text"
    if text[:1] in ("[", "{") and isinstance(_parsed(text), list | dict):
        return "the prompt is JSON text and is read as it stands"
    if len(text.split()) < 2:
        return ""
    if _dialogue(text):
        return "the prompt is a dialogue (Human:, Assistant:) and is read as one text"
    starts = [talk.messages[0]["content"].lstrip().startswith(text) for talk in talks]
    return "the answer begins with the whole prompt, which is learned, too," if any(starts) else ""


def _completion(cells: Cells, column: str) -> Talk:
    """A completion: text, or messages that begin and end with the assistant's."""
    talk = read_talk(cells.where, column, cells[column], "assistant", cells.note)
    if talk.is_text and (turn := _turn_of_calls(cells, cells[column])) is not None:
        talk = read_talk(cells.where, column, turn, "assistant", cells.note)
    _check_roles(cells.where, column, talk)
    if {*talk.roles[:1], *talk.roles[-1:]} != {"assistant"}:
        raise DataError(
            f"{cells.where}: {column!r} is {shown(cells[column])}; expected text, a message "
            '{"role": …, "content": …} or a list of such that begins and ends with the '
            "assistant's; fix the row"
        )
    return talk


def _turn_of_calls(cells: Cells, text: str) -> Message | None:
    """The message of a completion that is a list of calls of the row's tools as JSON text, as in
    the column ``answers`` of xLAM's sets; None for any other text."""
    calls = _parsed(text) if text.lstrip()[:1] == "[" else None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return None
    names = {tool["function"]["name"] for tool in _read_tools(cells)}
    has_calls = bool(calls) and all(call.get("name") in names for call in calls)
    return {"role": "assistant", "content": "", "tool_calls": text} if has_calls else None


def _check_trained(where: str, completion: Messages, untrained: frozenset[int]) -> None:
    turns = {n for n, message in enumerate(completion) if message["role"] == "assistant"}
    if turns <= untrained:
        raise DataError(
            f"{where}: every assistant turn is masked (weight, train …), so the loss has no "
            "tokens; remove the row"
        )


def _whole(cells: Cells, column: str) -> Completed:
    """A whole conversation: the prompt ends before the assistant's first message."""
    talk = read_talk(cells.where, column, cells[column], "user", cells.note)
    roles = talk.roles
    _check_roles(cells.where, column, talk)
    if roles[:1] == ["assistant"]:
        raise DataError(
            f"{cells.where}: {column!r} begins with a message of the assistant, which answers "
            "nothing; remove that message by data.preprocess, or put a message of the user or a "
            "system message before it"
        )
    if "assistant" not in roles:
        raise DataError(
            f"{cells.where}: {column!r} has the roles {shown(roles)} and none of the assistant, so "
            "there is nothing to learn; rename the roles, or leave the row out by data.preprocess"
        )
    first = roles.index("assistant")
    end = len(roles) - roles[::-1].index("assistant")  # what follows teaches nothing
    if end < len(roles):
        cells.note(f"{column}[] after the assistant's last message")
    completion = talk.messages[first:end]
    untrained = frozenset(n for n, is_one in enumerate(talk.trained[first:end]) if not is_one)
    _check_trained(cells.where, completion, untrained)
    _check_choices(cells, talk.messages)
    prompt = _with_system(cells, talk.messages[:first])
    extras = _read_extras(cells, prompt)
    return Completed(cells.where, prompt, (completion,), extras=extras, untrained=untrained)


def _check_roles(where: str, column: str, talk: Talk) -> None:
    """Refuse an unknown role, which may be another name of the assistant's."""
    for role in talk.roles:
        if role not in (*ROLES.values(), "ipython"):
            raise DataError(
                f"{where}: {column!r} has messages of the role {role!r:.40}, which is not known; "
                "rename it by data.preprocess to assistant, user, system or tool"
            )


def _check_choices(cells: Cells, messages: Messages) -> None:
    """Refuse choices in a column that a whole conversation does not hold."""
    choices = read_choices(cells)
    if choices is not None and not all(text in _written(messages) for text in choices.texts):
        raise DataError(
            f"{cells.where}: the row has choices, which the conversation does not hold; write them "
            "into it, or name the column in data.columns.ignore"
        )


def _sampled(cells: Cells, names: Sequence[str]) -> Completed | None:
    """The token ids of a row with their texts; None for a row without token ids."""
    columns = ["prompt_ids", *(f"{name}_ids" for name in names)]
    there = [name for name in columns if name in cells]
    if not there:
        return None
    for name in (*columns, "tokenizer", "prompt", *names):
        value = cells.get(name)
        expected, is_good = "text", isinstance(value, str)
        if name in columns:
            expected = "a list of token ids"
            ids = value if isinstance(value, list) else []
            is_good = ids != [] and all(type(id) is int and 0 <= id < 1 << 31 for id in ids)
        if not is_good:
            raise DataError(
                f"{cells.where}: {name!r} is {shown(value)} with {there[0]!r}; expected "
                f"{expected}, as the command pairs writes it; write the row again"
            )
    prompt, *completions = (tuple(cells[name]) for name in columns)
    return Completed(
        cells.where,
        [{"role": "user", "content": cells["prompt"]}],
        tuple([{"role": "assistant", "content": cells[name]}] for name in names),
        is_text=True,
        sampled=Sampled(cells["tokenizer"], prompt, tuple(completions)),
    )


def _dialogue(text: str) -> Messages:
    """The messages of a text in HH-RLHF's form; none of another text."""
    before, *parts = re.split(r"\n\n(Human|Assistant):", f"\n\n{text.strip()}")
    turns = zip(parts[::2], parts[1::2], strict=True)
    said = [{"role": ROLES[who.lower()], "content": what.strip()} for who, what in turns]
    return [] if before or len(said) < 2 else said


def _is_dialogue_after(prompt: Any, side: Any) -> bool:
    """Whether a side is a dialogue as a text that begins with the prompt's text."""
    are_texts = isinstance(prompt, str) and isinstance(side, str)
    return are_texts and side.strip().startswith(prompt.strip()) and bool(_dialogue(side))


def _cut(where: str, sides: Mapping[str, str]) -> Row:
    """A preference with a prompt: the words with which both texts begin. The space after them
    belongs to the completions, as in TRL."""
    start = next(iter(sides.values()))[: _num_same(*sides.values())]
    end = max(start.rfind(" "), start.rfind("\n") + 1)
    if not start[:end].strip():
        raise DataError(
            f"{where}: has no column of the prompt, and 'chosen' and 'rejected' begin with no word "
            "in common; add a column 'prompt', or set data.columns.prompt to the one that has it"
        )
    return {"prompt": start[:end], **{side: text[end:] for side, text in sides.items()}}


def _begins_with_a_prompt(value: Any) -> bool:
    """Whether a side is a conversation from its first message on."""
    roles = _roles(Cells("", {"side": value}, ColumnsSection()), "side")
    return isinstance(value, list) and len(roles) > 0 and roles[0] != "assistant"


def _implicit(cells: Cells, sides: Mapping[str, Any], prompt: str | None) -> Completed:
    """A preference whose prompt is the messages with which both sides begin."""
    where, note = cells.where, cells.note
    talks = [read_talk(where, name, side, "user", note) for name, side in sides.items()]
    chosen, rejected = (talk.messages for talk in talks)
    _check_differ(where, (chosen, rejected))
    same = _num_same(chosen, rejected)
    tails = chosen[same:], rejected[same:]
    for name, tail in zip(sides, tails, strict=True):
        ends = {tail[0]["role"], tail[-1]["role"]} if tail else set()
        if ends != {"assistant"} or not same or chosen[same - 1]["role"] == "assistant":
            raise DataError(
                f"{where}: 'chosen' and 'rejected' have {same} first messages in common, and after "
                f"them {name!r} has the roles {shown([each['role'] for each in tail])}; expected "
                "messages that begin and end with the assistant's, after one of the user"
            )
    shared = chosen[:same]
    if prompt is not None and any(cells.row[prompt] == each["content"] for each in shared):
        cells[prompt]  # says the same
    _check_choices(cells, shared)
    shared = _with_system(cells, shared)
    return Completed(where, shared, tails, extras=_read_extras(cells, shared))


def _num_same(first: Sequence[Any], second: Sequence[Any]) -> int:
    """The number of items, or letters, that two sequences have in common from their start."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _check_differ(where: str, completions: Sequence[Messages]) -> None:
    if len(completions) > 1 and completions[0] == completions[1]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are the same text; remove the row")
