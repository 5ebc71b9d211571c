"""The reference, whose log-probs are the column ``ref_logprobs``: the base without an adapter, or a
frozen copy of the adapter that the run began from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from reason_llm.config import Config
from reason_llm.model import Model, Role
from reason_llm.model.plan import Subject
from reason_llm.readers.reader import Base, Reader
from reason_llm.train import RoleReader

START = "start"
"""Folder in the run's with a copy of the adapter that the run began from."""


@dataclass(frozen=True)
class Reference(Reader):
    """The base, or the role ``start``."""

    role: Role

    def add_roles(self, model: Model, run: Path) -> None:
        """See ``Reader``."""
        if self.role == "start":
            model.add_role("start", run / START)

    def column(self) -> RoleReader:
        """See ``Reader``."""
        return RoleReader("ref_logprobs", self.role)


def opened(config: Config, subject: Subject, base: Base) -> Sequence[Reference]:
    """The reference, of every run."""
    return (Reference("start" if config.compares_with_start else "reference"),)
