"""The form of a run's rollouts: one answer of the model, unless a player replies to it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reason_llm.config import Config
from reason_llm.data import Renderer, open_played
from reason_llm.rollout import Group
from reason_llm.sample.protocol import Episodes, Sampler


class OneAnswer:
    """Rollouts of one answer."""

    def over(self, sampler: Sampler) -> Sampler:
        """The sampler itself."""
        return sampler

    def check(
        self, groups: Sequence[Group], earlier: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Nothing can fail."""

    def close(self) -> None:
        """Nothing is held."""


def episodes_of(config: Config, renderer: Renderer, context_tokens: int) -> Episodes:
    """The form of the rollouts that a config asks for; raises ConfigError."""
    episodes = open_played(config, renderer, context_tokens) if config.judges_answers else None
    return episodes or OneAnswer()
