"""Rollouts that are played in an environment, in the form of ``Episodes``."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from reason_llm.environments.rollout_side import failed_steps
from reason_llm.errors import TrainingError, printable
from reason_llm.rollout import Group, Prompt
from reason_llm.sample import Ended, Progress, Sampler, SamplingParams, unheard

MOST_FAILED_STEPS = 3
"""Steps in a row whose rollouts all failed, at which a run ends."""


class Wave(NamedTuple):
    """Arguments of ``Sampler.sample``, and the sampler of the single turns."""

    prompts: Sequence[Prompt]
    params: SamplingParams
    seed: int
    progress: Progress
    sampler: Sampler
    ended: Ended


class Game(Protocol):
    """Interface of environments and of programs that ask for turns."""

    def play(self, wave: Wave) -> list[Group]:
        """Play a wave; the same seed gives the same tokens where the environments do the same."""

    def close(self) -> None:
        """Close what is held between waves; another wave makes it anew."""


@dataclass(frozen=True, slots=True)
class Played:
    """Rollouts of a ``sample.environment``."""

    game: Game
    named: str | Mapping[str, str] | None

    def over(self, sampler: Sampler) -> Sampler:
        """The sampler of whole rollouts."""
        return PlayedSampler(self.game, sampler)

    def check(
        self, groups: Sequence[Group], earlier: Callable[[], Sequence[Mapping[str, Any]]]
    ) -> None:
        """Raise TrainingError at the third step in a row in which all rollouts failed."""
        found = [completion for group in groups for completion in group.completions]
        if not all(each.finish_reason == "error" for each in found):
            return
        if failed_steps(earlier()) + 1 < MOST_FAILED_STEPS:
            return
        problems = Counter(str(each.environment.get("problem")) for each in found)
        ((problem, _),) = problems.most_common(1)
        raise TrainingError(
            f"the environment failed in all rollouts of the last {MOST_FAILED_STEPS} steps: "
            f"{printable(problem)[:300]}; fix sample.environment={self.named}, "
            "and give the same command again, which resumes the run"
        )

    def close(self) -> None:
        """Close the environments."""
        self.game.close()


@dataclass(frozen=True, slots=True)
class PlayedSampler:
    """The Sampler of whole rollouts."""

    game: Game
    sampler: Sampler

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = unheard,
    ) -> list[Group]:
        """See ``Sampler``."""
        return self.game.play(Wave(prompts, params, seed, progress, self.sampler, ended))

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """See ``Sampler``."""
        return self.sampler.prompts_at_once(prompts, params)
