"""Completions become rewards: the table of rewards and the weighted sum. Meets the other stages in
``rollout.py`` only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from reason_llm.config import RewardSpec
from reason_llm.errors import ConfigError
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.score.boxed_math import boxed, think_answer_tags
from reason_llm.score.tags import tag_count, think_answer_format

Reward = Callable[[Prompt, Completion], float]

REWARDS: dict[str, Reward] = {
    "boxed": boxed,
    "think_answer_tags": think_answer_tags,
    "format": think_answer_format,
    "tag_count": tag_count,
}


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One row of ``score.rewards``, its function found."""

    name: str
    weight: float
    function: Reward


def find_rewards(specs: Sequence[RewardSpec]) -> list[WeightedReward]:
    """The functions that the config names.

    Raises:
        ConfigError: a name that is not in the table.
    """
    for spec in specs:
        if spec.name not in REWARDS:
            raise ConfigError(
                f"score.rewards names {spec.name!r}, which is none of {', '.join(REWARDS)}; name "
                f"one of these"
            )
    return [WeightedReward(spec.name, spec.weight, REWARDS[spec.name]) for spec in specs]


def score(groups: Sequence[Group], rewards: Sequence[WeightedReward]) -> list[Group]:
    """The same groups with every completion's rewards by name and their weighted sum."""
    return [
        replace(
            group,
            completions=tuple(
                _scored(group.prompt, completion, rewards) for completion in group.completions
            ),
        )
        for group in groups
    ]


def _scored(
    prompt: Prompt, completion: Completion, rewards: Sequence[WeightedReward]
) -> Completion:
    values = {reward.name: float(reward.function(prompt, completion)) for reward in rewards}
    return replace(
        completion,
        rewards=values,
        reward=sum(reward.weight * values[reward.name] for reward in rewards),
    )
