"""The rows of a run, in a stage that learns from a set of rows."""

from dataclasses import replace

from reason_llm.data import order
from reason_llm.model import Datum
from reason_llm.run.start.prepare import Job


class Rows:
    """The rows of a run's steps, and those held out."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def drawn(self, start: int, count: int) -> list[Datum]:
        """The rows of the units (pairs, or rows) from ``start`` on in the run's order."""
        data, seed = self._job.data, self._job.config.run.seed
        return [
            replace(Datum.of_row(row), group=number)
            for number, index in enumerate(order(data.sizes, data.weights, seed, start, count))
            for row in data.units[index]
        ]

    def held_out(self) -> list[Datum]:
        """The held-out rows for evaluation."""
        data_set = self._job.data.held_out_rows
        return [] if data_set is None else [Datum.of_row(row) for row in data_set.rows]
