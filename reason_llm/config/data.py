"""The data section: training and evaluation sets, filters, prompts."""

import datetime
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Protocol, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag, field_validator, model_validator

from reason_llm.config.types import Count, MayBeText, Positive, Section

RESERVED_ARGUMENTS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation"),
        *("documents", "max_length", "messages", "padding", "return_assistant_tokens_mask"),
        *("return_dict", "return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools"),
        "truncation",
    }
)
"""Names that arguments of a chat template may not have."""


class Rows(Protocol):
    """Rows that can be counted and read more than once: a list of dicts, a ``datasets.Dataset``."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class ColumnsSection(Section):
    """Column names of the data. null: found by their usual names."""

    prompt: str | None = None
    """Column of the question: text, one message or a list of messages; of rows of the form texts,
    of the text. null: messages, question, problem, prompt, instruction, query or conversations;
    text."""
    answer: str | None = None
    """Column of the gold answer; for a code reward, of the tests; of demonstrations and labels, of
    the completion. null: gt_answer, answer, final_answer, expected_answer, answerKey, ground_truth,
    solution or reward_model, of which what follows #### counts where there is one, else the last
    \\boxed{}; completion, response or output."""
    ignore: tuple[str, ...] = ()
    """Columns that the rows are read without."""


class WeightedSource(MayBeText):
    """One of several training sets."""

    source: str
    """A file or a Hub id."""
    weight: Positive = 1.0
    """Its share of the prompts is this over the sum of all weights, whatever its size."""

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


class DataSection(Section):
    """Training and evaluation sets, filters, prompts."""

    train: Sources
    """A .jsonl, .json, .csv or .parquet file, a Hub id, or a list of {source, weight}."""
    form: Literal["problems", "prompts", "demonstrations", "texts", "preferences", "labels"] = (
        "problems"
    )
    """What the training rows are. problems: a prompt and a gold answer (or tests). prompts: a
    prompt alone, for rewards that need no gold answer. demonstrations: {prompt, completion},
    {messages} or {conversations}. texts: {text}. preferences: {prompt, chosen, rejected}, or
    {chosen, rejected} that begin alike. labels: {prompt, completion, label}."""
    split: str = "train"
    """Split of a Hub data set to train on; evaluation takes its test split."""
    columns: ColumnsSection = ColumnsSection()
    """Column names."""
    preprocess: str | None = None
    """A function of your own that each row of every set goes through as it is read,
    path/to/file.py:function: it takes the row as a dict and returns one, or None to drop it."""
    limit: Count | None = None
    """Take only this many rows from the start of each training set. null: all."""
    on_bad_row: Literal["error", "skip"] = "error"
    """Training rows that cannot be used. error: the first one ends the run before it begins. skip:
    they are dropped and counted, and the first ones are shown. In a held-out set they are always an
    error."""
    system_prompt: str = "auto"
    """auto (by the first reward; none where no completion is judged), a name in
    reason_llm/data/templates.yaml (boxed, think_answer_tags, think_boxed, code), none, or any other
    text, which is taken as it is."""
    template: str = "auto"
    """Chat template. auto: the model's own. A name in reason_llm/data/templates.yaml (plain_chat,
    r1_zero, question_only), for models that have none. Or a .jinja file."""
    template_arguments: dict[str, bool | int | float | str] = {}  # noqa: RUF012
    """What the chat template is given by name, such as {enable_thinking: false}."""
    date: str | None = None
    """The date that a template reads with strftime_now (Llama 3.2, gpt-oss), as 2026-11-27, and
    there 00:00 as the time. null: where a template reads it, the day of the run's first start."""
    eval: str | None = None
    """Held-out set of problems. null: none but those of eval.sets."""
    max_prompt_tokens: Count | None = None
    """Training rows with a longer prompt are dropped and counted. null: a prompt that does not fit
    into the context is an error."""
    max_tokens: Count | None = None
    """Training rows of demonstrations, preferences and labels with more tokens, completion
    included, are dropped and counted; texts are cut into rows of so many. null: a row that does not
    fit into the context is an error, and texts are cut into rows of the context's length."""
    deduplicate: bool = False
    """Drop training rows whose question came before in any of the training sets, ignoring letter
    case, white space, punctuation and LaTeX's layout."""
    contamination: Literal["warn", "drop", "ignore"] = "warn"
    """Treatment of training rows whose question is in an evaluation set, compared as for
    deduplicate. warn: count them; drop: drop and count them; ignore: keep them."""

    _given: Mapping[str, Rows] = PrivateAttr(default_factory=dict)

    @property
    def given(self) -> Mapping[str, Rows]:
        """Rows that were given in Python, by the source's name that stands for them."""
        return self._given

    def with_rows(self, given: Mapping[str, Rows]) -> Self:
        """This section with rows that were given in Python, beside those that it has."""
        section = self.model_copy()
        section._given = {**self._given, **given}
        return section

    @property
    def sources(self) -> list[WeightedSource]:
        """The training sets."""
        return [WeightedSource(source=self.train)] if isinstance(self.train, str) else self.train

    @property
    def is_offline(self) -> bool:
        """Whether the rows hold what is learned, so that nothing is sampled."""
        return self.form not in ("problems", "prompts")

    @field_validator("template_arguments")
    @classmethod
    def _arguments_are_the_template_s(cls, given: dict[str, Any]) -> dict[str, Any]:
        for name in given:
            if not name.isidentifier() or name in RESERVED_ARGUMENTS:
                raise ValueError(f"has {name!r:.60}, which is no name or is set otherwise")
        return given

    @field_validator("date")
    @classmethod
    def _is_a_date(cls, given: str | None) -> str | None:
        if given is not None and given != str(datetime.date.fromisoformat(given)):
            raise ValueError("is no date; write it as 2026-11-27")
        return given

    @model_validator(mode="after")
    def _sources_differ(self) -> Self:
        names = [source.source for source in self.sources]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"data.train names {name} twice; give it one weight")
        return self
