"""Memory that a run on several processes, or with an earlier policy's samples, takes beyond that of
one process that does one thing after the other."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from reason_llm.config import Config


@dataclass(frozen=True, slots=True)
class TeamSizes:
    """Memory of the processes of a run; the values here are those of a single process."""

    cards: int = 1
    """Number of cards that share a step."""
    samplers: int = 0
    """Number of further cards, which only sample."""
    samples_ahead: bool = False
    """The samplers sample the next step while the others learn."""
    host_parts: int = 1
    """Parts of the host's memory on a machine without a GPU; each process has one."""
    gpu_bytes: Mapping[str, int] = field(default_factory=dict)
    """Further lines of the ledger on a GPU."""
    gradients: int = 1
    """Sums of gradients that exist at once."""
    earlier_adapters: int = 0
    """Adapters of earlier steps in a checkpoint."""
    host_adapters: int = 0
    """Adapters of the policy that host memory holds."""
    host_states: int = 0
    """States of the learners that host memory holds."""

    @property
    def processes(self) -> int:
        """Number of processes, each with a card."""
        return self.cards + self.samplers


ALONE = TeamSizes()


def team_sizes(config: Config) -> TeamSizes:
    """The sizes of the run's processes; raises ConfigError, see ``RunSection.several``."""
    if (several := config.run.several()) is None:
        return ALONE
    found: TeamSizes = several.team_sizes(config)
    return found
