"""A role of the base that reads a step's rows, within their learning, and gives them a column."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from reason_llm.model import Datum, Role
from reason_llm.train.objectives import Output


class Measures(Protocol):
    """The methods of the learner that a reader calls."""

    def lacking(self, data: Sequence[Datum], column: str) -> list[int]:
        """See ``Learner``."""

    def measure_step(
        self, data: Sequence[Datum], role: Role, output: Output | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """See ``Learner``."""


class ColumnReader(Protocol):
    """A model that adds a column to the rows that the learner's objective wants it of."""

    @property
    def column(self) -> str:
        """Name of the column."""

    @property
    def role(self) -> Role:
        """Role that gives it."""

    def read(self, data: Sequence[Datum], learner: Measures) -> list[Datum]:
        """The rows, with the column where it is wanted; shared between all who learn the step."""


def as_it_is(datum: Datum) -> Datum:
    """The row."""
    return datum


@dataclass(frozen=True, slots=True)
class RoleReader:
    """Reader of a column by one pass of a role, without dropout."""

    column: str
    role: Role
    output: Output | None = None
    """Output that is read; None: the objective's."""
    asked: Callable[[Datum], Datum] = as_it_is
    """The row as the role reads it; its trained tokens are the same."""

    def read(self, data: Sequence[Datum], learner: Measures) -> list[Datum]:
        """See ``ColumnReader``."""
        rows, wanted = list(data), learner.lacking(data, self.column)
        if not wanted:
            return rows
        asked = [self.asked(rows[i]) for i in wanted]
        values, _ = learner.measure_step(asked, self.role, self.output)
        for i, value in zip(wanted, values, strict=True):
            rows[i] = rows[i].with_trained(self.column, value)
        return rows


BASE = RoleReader("ref_logprobs", "reference")
"""The base without an adapter as the reference."""
