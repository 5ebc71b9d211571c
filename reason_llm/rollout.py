"""The records that flow between the stages: Prompt, Completion, Group; to and from JSON.

No library. Token ids are the record; text is derived from them and kept for the reader.
The three stages sample, score and train meet here and on disk, and nowhere else.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeVar

import numpy as np
import orjson

from reason_llm.files import check_nesting

T = TypeVar("T")
FinishReason = Literal["stop", "length"]
CHAT = "@chat"
"""Member of ``Prompt.extra``, where a reward asks for it: the messages that the prompt was rendered
from. No column that a custom reward could ask for has such a name."""
ROW = "@row"
"""Member of ``Prompt.extra``, where a reward in TRL's form asks for it: ``{"prompt": text or
messages, "columns": {...}}``, the columns of the row by name."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data, rendered with the chat template."""

    id: str
    """Where it came from, unique in its set: ``data/arithmetic_train.jsonl:17``."""
    text: str
    token_ids: tuple[int, ...]
    answer: str
    """The gold answer as text; for code rewards, the tests as JSON."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Columns of the row that a custom reward asks for by name."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled answer of T tokens, later with its rewards and its advantage."""

    token_ids: tuple[int, ...]
    """T ids, the end-of-sequence token included when it was sampled."""
    text: str
    logprobs: tuple[float, ...]
    """T log-probs in nats, each under the very distribution its token was drawn from."""
    finish_reason: FinishReason
    """``stop``: an end-of-sequence token was sampled; ``length``: the token limit came first."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Each reward by name, before weights; NaN (null in JSON) where the reward gave none."""
    reward: float | None = None
    """The weighted sum of the rewards that were given; None until scored."""
    advantage: float | None = None
    """None until the whole step is scored."""
    learner_logprobs: tuple[float, ...] | None = None
    """T log-probs in nats by the learner before the step's first update; None before learning and
    for completions that it had no need to pass through the model."""

    @property
    def has_reward(self) -> bool:
        """Whether it is scored and at least one reward gave it a number."""
        known = [value for value in self.rewards.values() if not math.isnan(value)]
        return self.reward is not None and bool(known or not self.rewards)


@dataclass(frozen=True, slots=True)
class Group:
    """The G completions of one prompt."""

    prompt: Prompt
    completions: tuple[Completion, ...]


@dataclass(frozen=True, slots=True)
class TokenRow:
    """One row of an offline stage (sft, pretrain, reward, preference), T tokens.

    A pair is two consecutive rows with the same group and the same prompt: chosen, then rejected.
    """

    name: str
    """File and line: ``my_rows.jsonl:17``."""
    ids: tuple[int, ...]
    """T token ids: prompt, completion and end token."""
    trained: tuple[bool, ...]
    """T flags: whether the loss counts the token. The first is False: nothing predicts it."""
    group: int = 0
    """Rows with the same number belong together: the two sides of a pair."""
    value: float = 0.0
    """Of a pair the margin, on the chosen row; of a labelled row its label: +1 for true, -1 for
    false, or the number that it has; of a conditioned demonstration its score."""


def group_to_json(group: Group) -> dict[str, Any]:
    """A JSON-ready dict that ``group_from_json`` turns back into an equal Group."""
    # Not dataclasses.asdict, which copies every number: half a minute for a million tokens.
    return {
        "prompt": _shallow(group.prompt),
        "completions": [_shallow(completion) for completion in group.completions],
    }


def group_from_json(value: Any) -> Group:
    """The Group that ``group_to_json`` made.

    Raises:
        ValueError: naming the field that is missing, unknown, of the wrong kind or length.
    """
    prompt = _record(Prompt, _member(value, "prompt"), ("token_ids",))
    completions = tuple(
        _record(Completion, _with_nan(item), ("token_ids", "logprobs"), ("learner_logprobs",))
        for item in _member(value, "completions")
    )
    if not completions:
        raise ValueError(f"prompt {prompt.id!r} has no completions")
    _check_prompt(prompt)
    for index, completion in enumerate(completions):
        where = f"{prompt.id}#{index}"
        _check_completion(where, completion)
        for name in ("logprobs", "learner_logprobs"):
            values = completion.logprobs if name == "logprobs" else completion.learner_logprobs
            if values is None:
                continue
            _check_numbers(where, values, float)
            if len(values) != len(completion.token_ids):
                raise ValueError(
                    f"prompt {prompt.id!r}, completion {index}: {len(completion.token_ids)} "
                    f"token_ids but {len(values)} {name}"
                )
    return Group(prompt, completions)


def _check_prompt(prompt: Prompt) -> None:
    if not all(isinstance(text, str) for text in (prompt.id, prompt.text, prompt.answer)):
        raise ValueError(f"prompt {prompt.id!r:.60} has an id, text or answer that is no text")
    if not isinstance(prompt.extra, dict):
        raise ValueError(f"{prompt.id!r} has 'extra' that is no object")
    check_nesting(prompt.extra)
    _check_numbers(prompt.id, prompt.token_ids, int)
    _check_ids(prompt.id, prompt.token_ids)


def _check_completion(where: str, completion: Completion) -> None:
    _check_numbers(where, completion.token_ids, int)
    _check_ids(where, completion.token_ids)
    if not isinstance(completion.text, str) or completion.finish_reason not in ("stop", "length"):
        raise ValueError(f"{where!r} has no text, or another finish_reason than stop and length")
    rewards = completion.rewards.values() if isinstance(completion.rewards, dict) else [None]
    scores = [value for value in (completion.reward, completion.advantage) if value is not None]
    if not all(type(value) in (int, float) for value in (*rewards, *scores)):
        raise ValueError(f"{where!r} has a reward or an advantage that is no number")


def _check_ids(where: str, token_ids: tuple[int, ...]) -> None:
    if min(token_ids) < 0 or max(token_ids) >= 1 << 31:
        raise ValueError(f"{where!r} has a token id that is negative or beyond any vocabulary")


def _check_numbers(where: str, values: tuple[Any, ...], kind: type) -> None:
    if not values or not set(map(type, values)) <= {int, kind} or any(map(math.isnan, values)):
        raise ValueError(
            f"{where!r} has a list that is empty or holds something but {kind.__name__}"
        )


def _member(value: Any, name: str) -> Any:
    if not isinstance(value, dict) or name not in value:
        raise ValueError(f"a group without {name!r}")
    return value[name]


def _with_nan(completion: Any) -> Any:
    """The completion's JSON with NaN for the rewards that are null."""
    rewards = completion.get("rewards") if isinstance(completion, dict) else None
    if not isinstance(rewards, dict) or None not in rewards.values():
        return completion
    named = {name: math.nan if value is None else value for name, value in rewards.items()}
    return {**completion, "rewards": named}


def _shallow(record: Any) -> dict[str, Any]:
    return {each.name: getattr(record, each.name) for each in fields(record)}


def _record(cls: type[T], value: Any, tuples: tuple[str, ...], maybe: tuple[str, ...] = ()) -> T:
    """
    Args:
        tuples: members that are lists in JSON.
        maybe: members that are lists if they are there.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a {cls.__name__.lower()} that is not an object")
    tuples += tuple(name for name in maybe if value.get(name) is not None)
    for name in tuples:
        if not isinstance(value.get(name), list):
            raise ValueError(f"a {cls.__name__.lower()} without the list {name!r}")
    try:
        return cls(**{**value, **{name: tuple(value[name]) for name in tuples}})
    except TypeError as error:
        raise ValueError(f"a {cls.__name__.lower()} with the wrong fields: {error}") from error


def shortest_decimals(values: Any) -> Any:
    """Float32 numbers of an array of any shape as nested lists of their shortest exact decimals."""
    array = np.asarray(values, dtype=np.float32)
    return orjson.loads(orjson.dumps(array, option=orjson.OPT_SERIALIZE_NUMPY))
