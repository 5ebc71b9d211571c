"""Data section: training and evaluation sets, filters, prompts."""

import datetime
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import (
    AfterValidator,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    field_validator,
    model_validator,
)

from reason_llm.config.types import Count, MayBeText, Positive, Section

RESERVED_ARGUMENTS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools"),
        "truncation",
    }
)


class RowSequence(Protocol):
    """Rows with a length, to be read more than once, such as a ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class ColumnsSection(Section):
    """Column names of the data. null: detected by their usual names."""

    prompt: str | None = None
    """Column with the question: text, a message or a list of messages; in rows of the form texts,
    the text. null: messages, question, problem, prompt, instruction, query or conversations; for
    texts, text."""
    answer: str | None = None
    """Column with the gold answer; with the tests for a code reward; with the completion in
    demonstrations and labels. null: gt_answer, answer, final_answer, expected_answer, answerKey,
    ground_truth, solution or reward_model, from which the text after #### is taken if there is
    one, otherwise the last \\boxed{}; for completions, completion, response or output."""
    ignore: tuple[str, ...] = ()
    """Columns to ignore."""


class WeightedSource(MayBeText):
    """Training set with a weight."""

    source: str
    """File or Hub id."""
    weight: Positive = 1.0
    """Share of the prompts, relative to the sum of all weights and independent of the set's
    size."""

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: Any) -> Any:
        return {"source": value} if isinstance(value, str) else value


def _branch(value: object) -> str:
    # With a dash these are no identifiers, so an error's key does not name them.
    return "many-sources" if isinstance(value, list) else "one-source"


Sources = Annotated[
    Annotated[str, Tag("one-source")]
    | Annotated[list[WeightedSource], Field(min_length=1), Tag("many-sources")],
    Discriminator(_branch),
]


EVALUATION_SETS = {
    "gsm8k": "openai/gsm8k:main",
    "math500": "HuggingFaceH4/MATH-500",
    "aime2024": "math-ai/aime24",
    "aime2025": "math-ai/aime25",
    "humaneval+": "evalplus/humanevalplus",
    "mbpp+": "evalplus/mbppplus",
}
"""Evaluation sets by name, their test splits on the Hub."""
CODE_SETS = ("humaneval+", "mbpp+")
"""Those whose answers are programs."""


def evaluation_source(name: str, source: str) -> str:
    """The source of a set: of a known name its own, and of a folder that holds a copy of it the
    subset which counts."""
    known = EVALUATION_SETS.get(name, "")
    if Path(source).is_dir() and ":" in known:
        return f"{source}:{known.partition(':')[2]}"
    return EVALUATION_SETS.get(source, source)


def share_of(source: str | None) -> float | None:
    """The share that ``5%`` asks for, 0.05; None for another source."""
    number = (source or "").removesuffix("%")
    is_share = number != source and number.replace(".", "", 1).isdecimal()
    return float(number) / 100 if is_share else None


def leaving_both(source: str) -> str:
    """Return the source; raise ValueError for a share of no rows, or of all."""
    share = share_of(source)
    if share is not None and not 0 < share < 1:
        raise ValueError("leaves no rows on one side; set it to a share such as 5%")
    return source


HeldOut = Annotated[str, AfterValidator(leaving_both)]
"""Source of held-out rows: a file, a folder, a Hub id, or a share of the training rows."""


class DataSection(Section):
    """Training and evaluation sets, filters, prompts."""

    train: Sources
    """Training set: a .jsonl, .json, .csv or .parquet file, a Hub id, or a list of {source,
    weight}."""
    form: Literal["problems", "prompts", "demonstrations", "texts", "preferences", "labels"] = (
        "problems"
    )
    """Form of the training rows. problems: a prompt and a gold answer (or tests). prompts: only a
    prompt, for rewards that need no gold answer. demonstrations: {prompt, completion},
    {messages} or {conversations}. texts: {text}. preferences: {prompt, chosen, rejected}, or
    {chosen, rejected} with a common start. labels: {prompt, completion, label}."""
    split: str = "train"
    """Split of a Hub data set for training; evaluation uses the test split."""
    columns: ColumnsSection = ColumnsSection()
    """Column names."""
    preprocess: str | None = None
    """Function applied to each row of every set, path/to/file.py:function. It takes the row as a
    dict and returns a dict, or None to drop the row."""
    limit: Count | None = None
    """Number of rows to use from the start of each training set. null: all."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Treatment of invalid training rows. error: the first one ends the run before it starts. skip:
    they are dropped and counted, and the first ones are shown. In a held-out set they are always an
    error."""
    system_prompt: str = "auto"
    """System prompt. auto: chosen by the first reward (none if no completions are scored); a name
    in reason_llm/data/templates.yaml (boxed, think_answer_tags, think_boxed, code); none; or the
    text of the prompt."""
    template: str = "auto"
    """Chat template. auto: the model's own. For models without one: a name in
    reason_llm/data/templates.yaml (plain_chat, r1_zero, question_only) or a .jinja file."""
    template_arguments: dict[str, bool | int | float | str] = {}  # noqa: RUF012
    """Keyword arguments of the chat template, such as {enable_thinking: false}."""
    date: str | None = None
    """Date for templates that call strftime_now (Llama 3.2, gpt-oss), such as 2026-11-27; the time
    is 00:00. null: the day of the run's first start."""
    eval: HeldOut | None = None
    """Held-out set of problems, or a share of the rows of data.train, such as 5%, on which the run
    does not train; the rows' content alone chooses them. null: only those of eval.sets."""
    max_prompt_tokens: Count | None = None
    """Max tokens of a prompt; training rows with a longer one are dropped and counted. null: a
    prompt that does not fit into the context is an error."""
    max_tokens: Count | None = None
    """Max tokens of a training row, including the completion: longer demonstrations, preferences
    and labels are dropped and counted, texts are split into rows of this length. null: a row that
    does not fit into the context is an error, and texts are split at the context length."""
    deduplicate: bool = False
    """Drop training rows whose question already occurred in a training set, ignoring case, white
    space, punctuation and LaTeX layout."""
    contamination: Literal["warn", "drop", "ignore"] = "warn"
    """Treatment of training rows whose question is in an evaluation set, compared as in
    deduplicate. warn: count them; drop: drop and count them; ignore: keep them."""

    _given: Mapping[str, RowSequence] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> Mapping[str, RowSequence]:
        """Rows passed from Python, by the name of their source."""
        return self._given

    def with_rows(self, given: Mapping[str, RowSequence]) -> Self:
        """Return the section with additional rows passed from Python."""
        section = self.model_copy()
        section._given = {**self._given, **given}
        return section

    @property
    def sources(self) -> list[WeightedSource]:
        """Training sets."""
        return [WeightedSource(source=self.train)] if isinstance(self.train, str) else self.train

    @property
    def is_offline(self) -> bool:
        """Whether the rows hold completions, so that nothing is sampled."""
        return self.form not in ("problems", "prompts")

    @field_validator("template_arguments")
    @classmethod
    def _arguments_are_the_template_s(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if not name.isidentifier() or name in RESERVED_ARGUMENTS:
                raise ValueError(f"has {name!r:.60}, which is not an identifier or is reserved")
        return given

    @field_validator("date")
    @classmethod
    def _is_a_date(cls, given: str | None) -> str | None:
        if given is not None and given != str(datetime.date.fromisoformat(given)):
            raise ValueError("is not a date; write it as 2026-11-27")
        return given

    @model_validator(mode="after")
    def _sources_differ(self) -> Self:
        names = [source.source for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"data.train names {name} twice; give it one weight")
        return self
