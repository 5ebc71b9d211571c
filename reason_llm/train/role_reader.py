"""A role of the base that reads a step's rows, within their learning, and gives them a column."""

from collections.abc import Callable
from dataclasses import dataclass

from reason_llm.model import Datum, Role
from reason_llm.train.objectives import Output


@dataclass(frozen=True, slots=True)
class RoleReader:
    """Reader of a column by one pass of a role, without dropout, of the rows that the learner's
    objective wants it of."""

    column: str
    role: Role
    output: Output | None = None
    """Output that is read; None: the objective's."""
    transform: Callable[[Datum], Datum] | None = None
    """The row as the role reads it, with the same trained tokens; None: as the policy reads it."""


BASE = RoleReader("ref_logprobs", "reference")
"""The base without an adapter as the reference."""
