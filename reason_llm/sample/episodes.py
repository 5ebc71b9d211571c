"""Sampler of rollouts that are played in environments, through the protocol ``Episodes``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from reason_llm.config import Config, installation
from reason_llm.data import Renderer
from reason_llm.rollout import Group, Prompt
from reason_llm.sample.protocol import (
    Ended,
    Episodes,
    Progress,
    Sampler,
    SamplingParams,
    Wave,
    unheard,
)


def environments_of(config: Config, renderer: Renderer, context_tokens: int) -> Episodes | None:
    """The environments of ``sample.environment``, None without; raises ConfigError."""
    if config.sample.environment is None or not config.judges_answers:
        return None
    opened: Episodes = installation.slice_for(
        "environments", "sample.environment"
    ).open_environments(config, renderer, context_tokens)
    return opened


@dataclass(frozen=True, slots=True)
class _Playing:
    """The Sampler of whole rollouts."""

    episodes: Episodes
    sampler: Sampler

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = unheard,
    ) -> list[Group]:
        return self.episodes.play(Wave(prompts, params, seed, progress, self.sampler, ended))

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        return self.sampler.prompts_at_once(prompts, params)


@contextmanager
def closing(environments: Episodes | None) -> Iterator[None]:
    """Context at whose end the environments are closed."""
    try:
        yield
    finally:
        if environments is not None:
            environments.close()


def in_environment(sampler: Sampler, environments: Episodes | None) -> Sampler:
    """The Sampler of whole rollouts in these environments; without any, the sampler itself."""
    return sampler if environments is None else _Playing(environments, sampler)
