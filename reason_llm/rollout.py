"""The records that flow between the stages: Prompt, Completion, Group; orjson writes them.

Token ids are the record; text is kept for the reader. The stages meet here and on disk, and nowhere
else. The types of the fields are checked where a record is read from JSON.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, compress
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from reason_llm.files import check_nesting

T = TypeVar("T")
FinishReason = Literal["stop", "length", "turns", "environment", "error"]
CHAT = "@chat"
"""Member of ``Prompt.extra``, where a reward asks for it: the messages that the prompt was rendered
from. No column has such a name."""
ROW = "@row"
"""Member of ``Prompt.extra``, where a reward in TRL's form asks for it: ``{"prompt": text or
messages, "columns": {...}}``, the columns of the row by name."""
ATTACHMENTS = "@attachments"
"""Member of ``Prompt.extra`` with the records of the prompt's attachments."""
MAY_LACK = "?"
"""End of the name of a column that a reward asks for and a row may lack."""
ALL = f"*{MAY_LACK}"
"""Stands for every column of a row, where a reward takes ``**kwargs``."""
LOGGED, SUM, COUNT = "logged/", "/sum", "/count"
"""Key of a metric that a reward logs; behind the name, what its mean is made of."""
Text = Annotated[str, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=1 << 53)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
TokenIds = Annotated[
    tuple[Annotated[int, Field(strict=True, ge=0, lt=1 << 31)], ...],
    Field(min_length=1, fail_fast=True),
]
Numbers = Annotated[tuple[Number, ...], Field(min_length=1, fail_fast=True)]
Score = Annotated[
    float, Field(strict=True), BeforeValidator(lambda value: math.nan if value is None else value)
]
"""NaN is null in JSON."""
KNOWN_FIELDS_ONLY = {"extra": "forbid"}
"""For pydantic, as ``__pydantic_config__`` of a record."""


NOT_TOO_DEEP = BeforeValidator(check_nesting)
"""A validator for fields with any JSON."""
_OPENED = re.compile(r"<([A-Za-z][\w-]{0,31}+)>\s{0,8}+\Z")
_ROLES = {"assistant", "bot", "model", "user", "human", "system"}
"""Tags by which templates begin a turn."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """Data behind some tokens of a prompt, such as an image; no record holds it."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    kind: Text
    """The folder of the package that reads it (``data.attachments``)."""
    sha256: Text
    """Digest of its content: prompts with equal ids and other digests are different prompts."""
    start: Count
    """The first of its tokens in the prompt."""
    length: Count
    about: Annotated[Mapping[str, Any], NOT_TOO_DEEP]
    """Data with which that folder reads it again; nothing else looks into it."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, rendered with the chat template."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    id: Text
    """Its origin, unique in its set: ``data/arithmetic_train.jsonl:17``."""
    text: Text
    token_ids: TokenIds
    answer: Text
    """The gold answer as text; for code rewards, the tests as JSON."""
    extra: Annotated[Mapping[str, Any], NOT_TOO_DEEP] = field(default_factory=dict)
    """Columns of the row that a custom reward asks for by name."""

    @property
    def attachments(self) -> tuple[Attachment, ...]:
        """The prompt's attachments, in order. Raises ValueError: they do not lie within it."""
        if ATTACHMENTS not in self.extra:
            return ()
        attachments = record_from_json(tuple[Attachment, ...], self.extra[ATTACHMENTS])
        ends = [0, *(n for a in attachments for n in (a.start, a.start + a.length))]
        if ends != sorted(ends) or ends[-1] > len(self.token_ids):
            raise ValueError(f"prompt {self.id!r}: its attachments do not lie within its tokens")
        return attachments

    @property
    def opened(self) -> str:
        """The tag that the prompt ends with and the model continues, such as ``<think>\\n`` of the
        templates of thinking models; empty for none."""
        match = _OPENED.search(self.text, max(0, len(self.text) - 64))
        return "" if match is None or match[1].lower() in _ROLES else match[0]

    def continued_by(self, completion: "Completion") -> str:
        """The text that rewards of form and answers judge: the opened tag and the completion."""
        return self.opened + completion.answer


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start .. end`` of a completion that the model did not write: an environment's reply,
    with the chat template's tokens around it."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    start: Count
    end: Count


def _is_sampled(tokens: int, spans: Sequence[Span]) -> tuple[bool, ...]:
    flags = [True] * tokens
    for span in spans:
        flags[span.start : span.end] = [False] * (span.end - span.start)
    return tuple(flags)


@dataclass(frozen=True, slots=True)
class Conversation:
    """One more conversation of a rollout, from an agent that shortens, forks or rewrites its
    messages. Tokens of its prompt are trained elsewhere or were not sampled."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    prompt_ids: TokenIds
    token_ids: TokenIds
    """T ids, all that came after the prompt."""
    text: Text
    logprobs: Numbers
    """T log-probs, as of a completion."""
    spans: tuple[Span, ...] = ()

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """T flags: whether the model wrote the token."""
        return _is_sampled(len(self.token_ids), self.spans)


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer of T tokens, later with its rewards and its advantage. In an environment
    it is all that came after the prompt: the model's turns and the answers to them."""

    __pydantic_config__ = KNOWN_FIELDS_ONLY
    token_ids: TokenIds
    """T ids, the end-of-sequence token included when it was sampled."""
    text: Text
    logprobs: Numbers
    """T log-probs in nats, each under the very distribution its token was drawn from; 0 for a token
    that was not."""
    finish_reason: FinishReason
    """``stop``: an end-of-sequence token was sampled; ``length``: the token limit came first. In an
    environment, ``environment``: it said that it is over; ``turns``: the model had all its turns;
    ``error``: the environment failed."""
    rewards: Mapping[str, Score] = field(default_factory=dict)
    """Each reward by name, before weights; NaN (null in JSON) where the reward gave none."""
    reward: Number | None = None
    """The weighted sum of the rewards that were given; None until scored."""
    advantage: Number | None = None
    """Advantage of the whole completion; None until the whole step is scored."""
    turn_advantages: tuple[Number, ...] = ()
    """Advantage of each turn of the model, with ``algorithm.credit: turn``."""
    spans: tuple[Span, ...] = ()
    """Tokens that the model did not write, in order."""
    environment: Annotated[Mapping[str, Any], NOT_TOO_DEEP] = field(default_factory=dict)
    """Record of an environment: the model's ``turns``, its ``calls`` of tools and ``failed_calls``,
    the ``reward`` it gave, of which the ``turn_rewards`` are a part, the ``problem`` it had."""
    last_turn: Text | None = None
    """Text of the model's last turn; None for a single answer."""
    others: tuple[Conversation, ...] = ()
    """Conversations other than the one in which the model wrote most. Each is a separate row for
    the learner, with the rollout's one advantage."""
    logged: Annotated[Mapping[str, Any], NOT_TOO_DEEP] = field(default_factory=dict)
    """Values that reward functions gave ``log_extra``, by column."""

    @property
    def answer(self) -> str:
        """The text that rewards judge: not what tools or an environment wrote."""
        return self.text if self.last_turn is None else self.last_turn

    @property
    def is_sampled(self) -> tuple[bool, ...]:
        """T flags: whether the model wrote the token."""
        return _is_sampled(len(self.token_ids), self.spans)

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The ids of the tokens that the model wrote."""
        return tuple(compress(self.token_ids, self.is_sampled)) if self.spans else self.token_ids

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Rewards of an environment before weights: its values for each turn of the model;
        empty where it gave nothing. Raises ValueError for other things than finite numbers."""
        return record_from_json(tuple[Number, ...], self.environment.get("turn_rewards", ()))

    @property
    def num_turns(self) -> int:
        """Number of the model's turns: the runs of tokens around the spans."""
        return len(self.spans) + (not self.spans or self.spans[0].start > 0)

    @property
    def earned(self) -> list[float]:
        """The sum of the turns' rewards before each turn; only a 0 where turns have none."""
        return list(accumulate(self.turn_rewards[:-1], initial=0.0))

    def of_turns(self, values: Sequence[float]) -> NDArray[np.float64]:
        """For each of the T tokens the number of its turn; 0 if the model did not write it."""
        of_tokens = np.zeros(len(self.token_ids))
        starts = [0, *(span.end for span in self.spans)]
        ends = [*(span.start for span in self.spans), len(of_tokens)]
        if len(starts) > self.num_turns:  # it begins with the end of its prompt
            starts, ends = starts[1:], ends[1:]
        for value, start, end in zip(values, starts, ends, strict=True):
            of_tokens[start:end] = value
        return of_tokens

    @property
    def has_reward(self) -> bool:
        """Whether it is scored and at least one reward gave it a number."""
        known = [value for value in self.rewards.values() if not math.isnan(value)]
        return self.reward is not None and bool(known or not self.rewards)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    completions: Annotated[tuple[Completion, ...], Field(min_length=1, fail_fast=True)]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row of an offline stage (sft, pretrain, reward, preference), T tokens. A pair is two
    consecutive rows with the same group and the same prompt: chosen, then rejected."""

    name: str
    """File and line: ``my_rows.jsonl:17``."""
    ids: tuple[int, ...]
    """T token ids: prompt, completion and end token."""
    trained: tuple[bool, ...]
    """T flags: whether the loss counts the token. The first is False: nothing predicts it."""
    group: int = 0
    """Rows with the same number belong together: the two sides of a pair."""
    value: float = 0.0
    """Margin of a pair, on the chosen row; label of a labelled row: +1 for true, -1 for
    false, or the number that it has."""
    attachments: tuple[Attachment, ...] = ()


def check_lengths(group: Group) -> None:
    """Check that log-probs, spans, turns' rewards and advantages fit the tokens of a group."""
    group.prompt.attachments  # noqa: B018, it is checked
    for number, completion in enumerate(group.completions):
        where = f"prompt {group.prompt.id!r}, completion {number}"
        conversations: list[Completion | Conversation] = [completion, *completion.others]
        for conversation in conversations:
            ends = [0, *(n for span in conversation.spans for n in (span.start, span.end))]
            tokens = len(conversation.token_ids)
            if ends != sorted(ends) or ends[-1] > tokens:
                raise ValueError(f"{where}: its spans do not follow each other within its tokens")
            if (numbers := len(conversation.logprobs)) != tokens:
                raise ValueError(f"{where}: {tokens} token_ids but {numbers} log-probs")
        turns = completion.num_turns
        for of_turns in (completion.turn_rewards, completion.turn_advantages):
            if len(of_turns) not in (0, turns):
                raise ValueError(f"{where}: {len(of_turns)} numbers for {turns} turns")


def record_from_json(kind: type[T], value: Any) -> T:
    """A record from its JSON; raises ValueError, in one line, with the path to the field."""
    try:
        record: T = _reader(kind).validate_python(value)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']:.200}") from None
    return record


@cache
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def shortest_decimals(values: Any) -> Any:
    """Float32 numbers of an array of any shape as nested lists of their shortest exact decimals."""
    array = np.asarray(values, dtype=np.float32)
    return orjson.loads(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))
