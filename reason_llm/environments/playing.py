"""Rollouts that are played in an environment, in the form of ``Episodes``."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reason_llm.config import Config
from reason_llm.data import Renderer
from reason_llm.environments.batches import Wave
from reason_llm.environments.data_side import (
    environment_class,
    environments_by_name,
    own_session,
    tool_methods,
)
from reason_llm.environments.rollout_side import failed_steps
from reason_llm.environments.turns import Environments
from reason_llm.errors import ConfigError, TrainingError, printable
from reason_llm.rollout import Group, Prompt
from reason_llm.sample import Ended, Episodes, Progress, Sampler, SamplingParams, ignore_ended

if TYPE_CHECKING:
    from reason_llm.environments.sessions import Sessions

MAX_FAILED_STEPS = 3
"""Steps in a row whose rollouts all failed, at which a run ends."""


@dataclass(frozen=True, slots=True)
class Played(Episodes):
    """Rollouts of a ``sample.environment``."""

    game: "Environments | Sessions"
    named: str | Mapping[str, str] | None

    def over(self, sampler: Sampler) -> Sampler:
        """The sampler of whole rollouts."""
        return PlayedSampler(self.game, sampler)

    def check(
        self, groups: Sequence[Group], earlier: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Raise TrainingError at the third step in a row in which all rollouts failed."""
        completions = [completion for group in groups for completion in group.completions]
        if not all(completion.finish_reason == "error" for completion in completions):
            return
        if failed_steps(earlier()) + 1 < MAX_FAILED_STEPS:
            return
        problems = Counter(str(c.environment.get("problem")) for c in completions)
        ((problem, _),) = problems.most_common(1)
        raise TrainingError(
            f"the environment failed in all rollouts of the last {MAX_FAILED_STEPS} steps: "
            f"{printable(problem)[:300]}; fix sample.environment={self.named}, "
            "and give the same command again, which resumes the run"
        )

    def close(self) -> None:
        """Release everything held between waves; another wave creates it again."""
        self.game.close()


@dataclass(frozen=True, slots=True)
class PlayedSampler:
    """The Sampler of whole rollouts."""

    game: "Environments | Sessions"
    sampler: Sampler

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[Group]:
        """See ``Sampler``."""
        return self.game.play(Wave(prompts, params, seed, progress, self.sampler, ended))

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """See ``Sampler``."""
        return self.sampler.prompts_at_once(prompts, params)


def open_episodes(config: Config, renderer: Renderer, context_tokens: int) -> Episodes:
    """The rollouts of ``sample.environment``; raises ConfigError."""
    named = config.sample.environment
    asks_itself = own_session(named)[0]
    kinds = [] if asks_itself else map(environment_class, environments_by_name(named).values())
    if config.turn_weight and all(map(tool_methods, kinds)):
        raise ConfigError(
            f"algorithm.credit=turn contradicts sample.environment={named}, which rewards no "
            "turns; name a class with step, or set credit to rollout"
        )
    if not asks_itself:
        return Played(Environments(config, renderer, context_tokens), named)
    from reason_llm.environments.sessions import Sessions  # aiohttp is for those that need it

    return Played(Sessions(config, renderer, context_tokens), named)
