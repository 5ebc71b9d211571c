"""The core's knowledge of rollouts of several turns: its protocols, and the names under which their
folder, ``reason_llm/environments``, is imported when a config, a source of rows or a record asks
for it. Without the folder there are rollouts of one answer alone."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from reason_llm.config import Config, Section, installation
from reason_llm.rollout import Completion, Group

_PARTS = {
    "player": "environments.data_side",
    "episodes": "environments.playing",
    "rows": "environments.task_rows",
    "rollouts": "environments.rollout_side",
}
"""Modules of the folder that are asked for."""
_REWARD = "environment"
"""Name of the reward that a player pays itself, known without the folder for the error alone."""


class Player(Protocol):
    """Interface of ``sample.environment``: what replies to the model's turns."""

    @property
    def option(self) -> str:
        """Option that asks for it, with its value, for messages."""

    @property
    def needs_prompt(self) -> bool:
        """Whether each row must have a prompt, since no ``reset`` can give it."""

    @property
    def needs_tools(self) -> bool:
        """Whether the chat template must write tools."""

    @property
    def tools(self) -> Mapping[str, tuple[dict[str, Any], ...]]:
        """JSON schemas of the tools, by the name in a row; a single one has the empty name."""

    @property
    def chat_note(self) -> str:
        """A note for the user of a chat with a model that was trained with it."""

    def needed_columns(self, name: str) -> Mapping[str, str]:
        """Columns without which a row of this name cannot be played, and who asks for each."""

    def columns_of(self, row: Mapping[str, Any]) -> set[str]:
        """Columns of this row that are read."""

    def name(self, where: str, row: Mapping[str, Any]) -> str:
        """The name of the one that plays a row; DataError if there is none."""

    def sources(self, data: Iterable[str]) -> dict[str, str]:
        """Digests of the user's own code in it, and in these sources of rows."""


class RolloutSide(Protocol):
    """Interface of what is read from the records of played rollouts: their reward, an argument of
    reward functions, metrics, the part of a report's page, and an alarm, which is raised by a
    metric's mean over a limit."""

    WHO: str
    """The player in messages."""
    REWARD: str
    """Name of the reward that it pays itself."""
    RewardOptions: type[Section]
    ARGUMENT: str
    """Argument of reward functions in TRL's form."""
    ARGUMENT_LACKS: str
    """Why a function does not get it."""
    ALARM: str
    ADVICE: str
    LIMITS: Mapping[str, tuple[float, str]]
    """The largest mean of the last steps by metric, and what it is."""
    FAILED: str
    """The metric that raises the alarm by one step with the value 1."""
    FAILED_TEXT: str
    """Text of that alarm."""
    PLAYED: str
    """The metric that only records of played rollouts have."""

    def reward(self, options: Any, completion: Completion) -> float:
        """Reward that it paid for a rollout; NaN if it paid none."""

    def argument(self, group: Group) -> list[Any] | None:
        """The argument of reward functions, an object of each completion; None of one answer."""

    def problem(self, completion: Completion) -> str | None:
        """Why a rollout failed; None where it did not."""

    def metrics(self, completions: Sequence[Completion]) -> dict[str, float]:
        """Statistics of a step's rollouts; empty where none was played."""

    def page_entry(self, completion: Completion) -> dict[str, Any] | None:
        """Return the entry of a rollout in the report's page; None if it was not played."""


def player_of(config: Config) -> Player | None:
    """The player of ``sample.environment``; None without."""
    if (named := config.sample.environment) is None:
        return None
    module = installation.slice_for(_PARTS["player"], f"sample.environment={named}")
    made: Player = module.DataSide(named)
    return made


def open_played(config: Config, renderer: Any, context_tokens: int) -> Any:
    """The ``Episodes`` of ``sample.environment``, None without; raises ConfigError."""
    if (player := player_of(config)) is None:
        return None
    module = installation.slice_for(_PARTS["episodes"], player.option)
    return module.open_episodes(config, renderer, context_tokens)


def is_played(source: str) -> bool:
    """Whether the rows of a source are made by the slice: ``environment?size=64``, whose prompts
    ``reset`` gives, or the tasks ``verifiers:NAME``."""
    return source.partition("?")[0] == "environment" or source.startswith("verifiers:")


def played_rows(source: str) -> Iterator[dict[str, Any]]:
    """Rows of such a source."""
    found: Iterator[dict[str, Any]] = installation.slice_for(_PARTS["rows"], source).rows(source)
    return found


def rollout_sides() -> list[RolloutSide]:
    """The reader of played rollouts; none where the folder is not installed."""
    found = installation.slice_if_there(_PARTS["rollouts"])
    return [] if found is None else [found]


def check_reward(name: str | None) -> None:
    """Raise ConfigError if the reward is a player's and the folder is not installed."""
    if name == _REWARD:
        installation.slice_for(_PARTS["rollouts"], f"score.rewards={name}")
