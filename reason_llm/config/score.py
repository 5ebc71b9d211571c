"""Score section: rewards of completions."""

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from reason_llm.config.functions import name_of, source_digest
from reason_llm.config.readers import READER_REWARDS, ReaderReward
from reason_llm.config.types import ONE_IS_A_LIST, MayBeText, Positive, Section
from reason_llm.config.wrong_values import wrong

TAKEN = frozenset(
    {"reward", "errors", "timeouts", "groups_without_signal_fraction", "first_reward_std"}
)
"""Names of other metrics, which no reward may have."""


RIGHTNESS = ("boxed", "think_answer_tags", "exact", "code_tests", "code_tests_fraction", "gym")
"""Rewards that check whether an answer is correct."""
GO_BY_FIRST = ("cosine", "length")
"""Rewards that depend on whether the first reward says correct, and are missing if it is."""
SAYS_RIGHT = (*RIGHTNESS, "regex")
"""Built-in rewards that these may depend on; the others also reward wrong answers."""


def is_right(kind: str, value: float) -> bool:
    """Return whether the first reward says that an answer is correct: a built-in check at its full
    value, 1, because ``code_tests_fraction`` and ``gym`` give fractions; any other reward above 0.

    Args:
        kind: ``RewardSpec.kind`` of the first reward.
    """
    return value >= 1 if kind in SAYS_RIGHT else value > 0


class RewardSpec(MayBeText):
    """Reward with its weight and options."""

    name: str | None = None
    """Name of a built-in reward, such as boxed; docs/rewards.md lists them."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = Field(
        default=None, exclude_if=lambda label: label is None
    )
    """Name in the buffer and the metrics, to distinguish rewards of the same name. null: the
    reward's name."""
    custom: str | None = None
    """Your own function, instead of a name: path/to/file.py:function. A function passed from Python
    that is not in a module's file is called python:module.function."""
    weight: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] = 1.0
    """Weight in the sum."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """Options of the named reward."""
    _function: Callable[..., Any] | None = PrivateAttr(default=None)
    _source_sha256: str | None = PrivateAttr(default=None)

    @property
    def function(self) -> Callable[..., Any] | None:
        """Function passed from Python; None if ``custom`` names a file."""
        return self._function

    @property
    def source_sha256(self) -> str | None:
        """SHA-256 of that function's source."""
        return self._source_sha256

    @property
    def key(self) -> str:
        """Name in the buffer and the metrics: the label, or else ``kind``."""
        return self.kind if self.label is None else self.label

    @property
    def kind(self) -> str:
        """Name of the reward or the function, without the label."""
        if self.name is not None:
            return self.name
        return str(self.custom).rpartition(":")[2].rpartition(".")[2]

    @property
    def reader(self) -> ReaderReward | None:
        """Options of the reader that gives the reward; None for other rewards."""
        if self.name not in READER_REWARDS:
            return None
        return READER_REWARDS[self.name].model_validate(self.options)

    @model_validator(mode="wrap")
    @classmethod
    def _may_be_a_name_or_a_function(
        cls, value: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Self:
        """``boxed`` becomes ``{name: boxed}``; a Python function becomes ``{custom: its name}``."""
        if isinstance(value, str):
            return handler({"custom" if ".py:" in value else "name": value})
        function = value.get("custom") if isinstance(value, dict) else value
        if isinstance(function, str | RewardSpec) or not callable(function):
            return handler(value)
        given = value if isinstance(value, dict) else {}
        try:
            name, digest = name_of(function), source_digest(function)
        except ValueError as error:
            raise ValueError(f"score.rewards: one of them {error}") from error
        spec = handler({**given, "custom": name})
        spec._function, spec._source_sha256 = function, digest
        return spec

    @model_validator(mode="after")
    def _is_one_reward(self) -> Self:
        if (self.name is None) == (self.custom is None):
            raise ValueError("needs either name or custom: path/to/file.py:function")
        if self.custom is not None and self.options:
            raise ValueError(f"custom={self.custom} takes no options; leave them out")
        try:
            _ = self.reader
        except ValidationError as error:
            first = error.errors()[0]
            option = ".".join(map(str, first["loc"]))
            names = READER_REWARDS[str(self.name)].model_fields
            raise ValueError(
                f"option {option!r} of {self.name} {wrong(first)} (its options: "
                f"{', '.join(names)}); fix score.rewards"
            ) from error
        return self


class ScoreSection(Section):
    """Rewards of completions."""

    rewards: Annotated[list[RewardSpec], Field(min_length=1), ONE_IS_A_LIST] = [  # noqa: RUF012
        RewardSpec(name="boxed")
    ]
    """Rewards, a list of {name, weight, options} or one of them; the total is their weighted sum.
    The first one also scores evaluation."""
    on_error: Literal["stop", "zero"] = "stop"
    """What to do if a reward raises an error. stop: end the run and name the rollout; zero: use 0
    and warn."""
    timeout_seconds: Positive | None = None
    """Time limit of an answer comparison, of a test (CPU time) and of a call of a custom reward.
    null: 5, 6 and 60 seconds."""
    sandbox: Literal["auto", "limits_only"] = "auto"
    """Isolation of programs run by code rewards. auto: isolated from files, network and other
    processes; an error where that is impossible. limits_only: only limits on time and memory, for
    programs that you trust."""

    @field_validator("rewards")
    @classmethod
    def _names_are_unique(cls, rewards: list[RewardSpec]) -> list[RewardSpec]:
        names = [reward.key for reward in rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"names a reward twice: {', '.join(names)}; give each a label")
        if (reader := rewards[0].reader) is not None:
            raise ValueError(
                f"begins with the {reader.title} {names[0]}, and the first reward judges "
                "evaluation; put a reward that judges answers first, with weight 0 if it only "
                "evaluates"
            )
        first = rewards[0].name
        by_first = next((each.name for each in rewards if each.name in GO_BY_FIRST), None)
        if by_first is not None and first is not None and first not in SAYS_RIGHT:
            raise ValueError(
                f"begins with {first}, and {by_first} takes answers as right if the first reward "
                "is 1; put a reward first that judges what is right, such as boxed"
            )
        if taken := TAKEN.intersection(names):
            name = min(taken)
            raise ValueError(f"score/{name} is already a metric; rename the function {name}")
        return rewards

    @property
    def judged_by(self) -> str:
        """Name of what evaluation measures: ``accuracy`` if the first reward checks answers,
        otherwise that reward's name."""
        first = self.rewards[0]
        return "accuracy" if first.kind in RIGHTNESS else first.key

    @property
    def by_readers(self) -> dict[str, ReaderReward]:
        """Options of the rewards that readers give, by reward key."""
        found = {reward.key: reward.reader for reward in self.rewards}
        return {key: options for key, options in found.items() if options is not None}
