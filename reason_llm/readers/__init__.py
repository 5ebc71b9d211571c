"""Models other than the policy that read a step's rollouts: each gives a column or a reward.

``KINDS`` opens them, and ``config.READERS`` says what the rest of the package has to know of each.
To add one, write a file and a row of both.
"""

from reason_llm.config import Config
from reason_llm.model.plan import Subject
from reason_llm.readers import critic, reference, reward_models, teacher
from reason_llm.readers.reader import Base, Opened, OutsideReader, Reader, RewardReader
from reason_llm.readers.reward_models import SCALE, description

KINDS: dict[str, Opened] = {
    "reference": reference.opened,
    "reward_model": reward_models.opened,
    "teacher": teacher.opened,
    "critic": critic.opened,
}
"""By the names of ``config.READERS``, in the order in which their roles are added to the model."""


def open_readers(config: Config, subject: Subject, base: Base) -> list[Reader]:
    """All readers of a run, checked, before a weight is read; raises ReasonError."""
    return [reader for opened in KINDS.values() for reader in opened(config, subject, base)]
