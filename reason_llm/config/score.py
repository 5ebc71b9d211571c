"""The score section: how completions become rewards."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from reason_llm.config.types import Section

TAKEN = frozenset({"reward", "errors", "timeouts", "groups_without_signal_fraction"})
"""What stands in the metrics beside the rewards."""


class RewardSpec(Section):
    """One reward, its weight and its options."""

    name: str | None = None
    """boxed, think_answer_tags, code_tests, code_tests_fraction, format, tag_count, regex,
    reasoning_steps, soft_overlong, cosine, length or repetition_penalty."""
    custom: str | None = None
    """A function of your own in the name's place: path/to/file.py:function."""
    weight: Annotated[float, Field(ge=-1e9, le=1e9, allow_inf_nan=False)] = 1.0
    """Factor in the sum."""
    options: dict[str, Any] = {}  # noqa: RUF012
    """What the reward of that name takes."""

    @property
    def label(self) -> str:
        """Name in the buffer and the metrics: the reward's or the function's."""
        return self.name if self.name is not None else str(self.custom).rpartition(":")[2]

    @model_validator(mode="after")
    def _is_one_reward(self) -> Self:
        if (self.name is None) == (self.custom is None):
            raise ValueError("needs either name or custom: path/to/file.py:function")
        if self.custom is not None and self.options:
            raise ValueError(f"custom={self.custom} takes no options; leave them out")
        return self


class ScoreSection(Section):
    """How completions become rewards."""

    rewards: Annotated[list[RewardSpec], Field(min_length=1)] = [RewardSpec(name="boxed")]  # noqa: RUF012
    """List of {name, weight, options}; the total is the weighted sum. The first one also scores
    evaluation."""
    on_error: Literal["stop", "zero"] = "stop"
    """When a reward raises: stop with the rollout's id, or count 0 for it and warn."""
    timeout_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Of one comparison of answers, of the CPU time of one test, of one call of a custom reward.
    null: 5, 6 and 60."""
    sandbox: Literal["auto", "limits_only"] = "auto"
    """Where the code rewards run programs. auto: isolated from files, network and processes, or not
    at all. limits_only: no isolation, only limits on time and memory; for programs you trust."""

    @field_validator("rewards")
    @classmethod
    def _names_are_unique(cls, rewards: list[RewardSpec]) -> list[RewardSpec]:
        names = [reward.label for reward in rewards]
        if len(set(names)) < len(names):
            raise ValueError(f"names a reward twice: {', '.join(names)}")
        if taken := TAKEN.intersection(names):
            name = min(taken)
            raise ValueError(f"score/{name} is a metric of its own; rename the function {name}")
        return rewards
