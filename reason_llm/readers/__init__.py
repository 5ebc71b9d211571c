"""Models other than the policy that read a step's rollouts: each gives a column or a reward.

``KINDS`` is the one table of them; to add one, write a file and a row.
"""

from reason_llm.config import Config
from reason_llm.model.plan import Subject
from reason_llm.readers import critic, reference, reward_models, teacher
from reason_llm.readers.reader import (
    Base,
    OutsideReader,
    Progress,
    Reader,
    ReaderKind,
    RewardReader,
    StopRequest,
)

KINDS = {
    "reference": reference.KIND,
    "reward model": reward_models.KIND,
    "teacher": teacher.KIND,
    "critic": critic.KIND,
}
"""In the order in which their roles are added to the model."""


def open_readers(config: Config, subject: Subject, base: Base) -> list[Reader]:
    """All readers of a run, checked, before a weight is read; raises ReasonError."""
    return [reader for kind in KINDS.values() for reader in kind.made(config, subject, base)]


__all__ = [
    "KINDS",
    "Base",
    "OutsideReader",
    "Progress",
    "Reader",
    "ReaderKind",
    "RewardReader",
    "StopRequest",
    "critic",
    "open_readers",
    "reference",
    "reward_models",
]
