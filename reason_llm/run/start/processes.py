"""The processes of a run before they start: this one, or those of the package ``replicas``."""

from collections.abc import Callable
from pathlib import Path

from reason_llm.config import Config
from reason_llm.run.store.buffer import RolloutBuffer


class Processes:
    """This process alone, which does one thing after the other."""

    is_alone = True

    def buffer_class(self, folder: Path) -> Callable[..., RolloutBuffer]:
        """What makes the run's buffer, as ``RolloutBuffer``; ``folder`` is the run's."""
        return RolloutBuffer


def processes_of(config: Config) -> Processes:
    """The processes that the config asks for."""
    if (several := config.run.several()) is None:
        return Processes()
    found: Processes = several.processes_of(config)
    return found
