"""The score section: how completions become rewards."""

from collections.abc import Callable
from pathlib import Path
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
from reason_llm.config.types import ONE_IS_A_LIST, MayBeText, Positive, Section
from reason_llm.config.wrong_values import wrong

TAKEN = frozenset(
    {"reward", "errors", "timeouts", "groups_without_signal_fraction", "first_reward_std"}
)
"""Names in the metrics that no reward may have."""


RIGHTNESS = ("boxed", "think_answer_tags", "code_tests", "code_tests_fraction", "gym")
"""Rewards that judge whether an answer is right."""
GO_BY_FIRST = ("cosine", "length")
"""Rewards that depend on whether the first reward says right, and give none if it gave none."""
SAYS_RIGHT = (*RIGHTNESS, "regex")
"""Built-in rewards by which those may go; the others pay wrong answers, too."""
REWARD_MODEL = "reward_model"
"""Name of the reward that a model gives after the step's sampling."""


def is_right(kind: str, value: float) -> bool:
    """Whether an answer is right by the first reward: by a built-in one that judges answers only
    its full value, 1, since ``code_tests_fraction`` and ``gym`` give parts; by another one, whose
    range is its author's, above 0.

    Args:
        kind: of the first reward, as ``RewardSpec.kind``.
    """
    return value >= 1 if kind in SAYS_RIGHT else value > 0


class RewardModelOptions(Section):
    """A reward model."""

    path: Path
    """A reward run's folder adapter/ over the same base, or a folder with a sequence-classification
    model of one label."""
    normalize: Literal["fixed", "none"] = "fixed"
    """fixed: less the mean and over the deviation that the folder's reward.json holds, cut off at
    -10 and 10. none: as the model gives it."""

    @property
    def is_outside(self) -> bool:
        """Whether the folder holds a whole model and no adapter over the run's base."""
        has_model = (self.path / "config.json").is_file()
        return has_model and not (self.path / "adapter_config.json").is_file()


class RewardSpec(MayBeText):
    """One reward, its weight and its options."""

    name: str | None = None
    """Of a built-in reward, such as boxed; docs/rewards.md has the table."""
    label: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")] | None = Field(
        default=None, exclude_if=lambda label: label is None
    )
    """Name in the buffer and the metrics, to tell two of one name apart. null: the reward's own."""
    custom: str | None = None
    """A function of your own in the name's place: path/to/file.py:function. One that was given in
    Python and is in no module's file is called python:module.function."""
    weight: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] = 1.0
    """Factor in the sum."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """What the reward of that name takes."""
    _function: Callable[..., Any] | None = PrivateAttr(default=None)
    _source_sha256: str | None = PrivateAttr(default=None)

    @property
    def function(self) -> Callable[..., Any] | None:
        """The function that was given in Python; None for one that ``custom`` names."""
        return self._function

    @property
    def source_sha256(self) -> str | None:
        """Digest of that function's source."""
        return self._source_sha256

    @property
    def key(self) -> str:
        """Name in the buffer and the metrics: the label, or else the reward's or the function's."""
        return self.kind if self.label is None else self.label

    @property
    def kind(self) -> str:
        """The reward's or the function's name, whatever its label."""
        if self.name is not None:
            return self.name
        return str(self.custom).rpartition(":")[2].rpartition(".")[2]

    @property
    def reward_model(self) -> RewardModelOptions | None:
        """Options of a reward model; None for another reward."""
        if self.name != REWARD_MODEL:
            return None
        return RewardModelOptions.model_validate(self.options)

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
            _ = self.reward_model
        except ValidationError as error:
            first = error.errors()[0]
            option = ".".join(map(str, first["loc"]))
            raise ValueError(
                f"option {option!r} of {self.name} {wrong(first)} (its options: "
                f"{', '.join(RewardModelOptions.model_fields)}); fix score.rewards"
            ) from error
        return self


class ScoreSection(Section):
    """How completions become rewards."""

    rewards: Annotated[list[RewardSpec], Field(min_length=1), ONE_IS_A_LIST] = [  # noqa: RUF012
        RewardSpec(name="boxed")
    ]
    """List of {name, weight, options}, or one of them; the total is the weighted sum. The first one
    also scores evaluation."""
    on_error: Literal["stop", "zero"] = "stop"
    """When a reward raises: stop with the rollout's id, or count 0 for it and warn."""
    timeout_seconds: Positive | None = None
    """Of one comparison of answers, of the CPU time of one test, of one call of a custom reward.
    null: 5, 6 and 60."""
    sandbox: Literal["auto", "limits_only"] = "auto"
    """Where the code rewards run programs. auto: isolated from files, network and processes, or not
    at all. limits_only: no isolation, only limits on time and memory; for programs you trust."""

    @field_validator("rewards")
    @classmethod
    def _names_are_unique(cls, rewards: list[RewardSpec]) -> list[RewardSpec]:
        names = [reward.key for reward in rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"names a reward twice: {', '.join(names)}; give each a label")
        if rewards[0].name == REWARD_MODEL:
            raise ValueError(
                f"begins with the reward model {names[0]}, and the first reward judges evaluation; "
                "put a reward that judges answers first, with weight 0 if it only evaluates"
            )
        first, names_of = rewards[0].name, [reward.name for reward in rewards]
        is_form = first is not None and first not in SAYS_RIGHT
        if first in GO_BY_FIRST or (is_form and set(GO_BY_FIRST) & set(names_of)):
            by_first = (
                first if first in GO_BY_FIRST else next(n for n in names_of if n in GO_BY_FIRST)
            )
            raise ValueError(
                f"begins with {first}, and {by_first} takes answers as right if the first reward "
                "is 1; put a reward first that judges what is right, such as boxed"
            )
        if taken := TAKEN.intersection(names):
            name = min(taken)
            raise ValueError(f"score/{name} is a metric of its own; rename the function {name}")
        return rewards

    @property
    def judged_by(self) -> str:
        """Name of what evaluation measures: ``accuracy`` where the first reward tells which answers
        are right, else that reward's."""
        first = self.rewards[0]
        return "accuracy" if first.kind in RIGHTNESS else first.key

    @property
    def reward_models(self) -> dict[str, RewardModelOptions]:
        """Options of the reward models by the key of their reward."""
        found = {reward.key: reward.reward_model for reward in self.rewards}
        return {key: options for key, options in found.items() if options is not None}
