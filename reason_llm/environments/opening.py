"""The rollouts that a ``sample.environment`` asks for."""

from reason_llm.config import Config
from reason_llm.data import Renderer
from reason_llm.environments.data_side import (
    environment_class,
    environments_by_name,
    own_session,
    tool_methods,
)
from reason_llm.environments.playing import Played
from reason_llm.environments.turns import Environments
from reason_llm.errors import ConfigError
from reason_llm.sample import Episodes


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
