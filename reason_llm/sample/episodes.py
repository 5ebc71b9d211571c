"""The form of a run's rollouts: one answer of the model, unless a player replies to it."""

from reason_llm.config import Config
from reason_llm.data import Renderer, open_played
from reason_llm.sample.protocol import Episodes


def episodes_of(config: Config, renderer: Renderer, context_tokens: int) -> Episodes:
    """The form of the rollouts that a config asks for; raises ConfigError."""
    episodes = open_played(config, renderer, context_tokens) if config.judges_answers else None
    return episodes or Episodes()
