"""The rows of a run, in a stage that learns from a set of rows."""

from dataclasses import replace
from functools import partial

from reason_llm.data import order
from reason_llm.model import Datum
from reason_llm.readers import reference
from reason_llm.run.start.prepare import Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store.metrics import Record, timed
from reason_llm.run.watch import Watch
from reason_llm.train import Learner, learning


class Rows:
    """The rows of a run's steps, and those held out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._references = reference.References()

    def drawn(self, start: int, count: int) -> list[Datum]:
        """The rows of the units (pairs, or rows) from ``start`` on in the run's order."""
        data, seed = self._job.data, self._job.config.run.seed
        drawn = order(data.sizes, data.weights, seed, start, count)
        return self._references.of(
            [
                replace(Datum.of_row(row), group=number)
                for number, index in enumerate(drawn)
                for row in data.units[index]
            ]
        )

    def held_out(self) -> list[Datum]:
        """The held-out rows for evaluation."""
        data_set = self._job.data.held_out_rows
        rows = [] if data_set is None else data_set.rows
        return self._references.of([Datum.of_row(row) for row in rows])

    def measure(self, learner: Learner, record: Record, watch: Watch, stop: StopSignal) -> None:
        """Measure the reference's log-probs of all rows of the run, or read those on disk, where
        the loss compares with a frozen reference."""
        config = self._job.config
        if config.stage != "preference" or not config.preference.row().needs_reference:
            return
        folder, count = self._job.folder, config.train.rows_per_step
        size = 2 if config.learns_pairs else 1
        rows = self.drawn(0, config.run.steps * count)
        steps = [rows[n : n + count * size] for n in range(0, len(rows), count * size)]
        steps.append(self.held_out())
        path = reference.path_of(config, folder, folder / reference.START)
        self._references = reference.References(path)
        self._references.read(reference.max_bytes(steps))
        if missing := self._references.missing(steps):
            with (
                timed(record, "reference"),
                learning(learner),
                watch.phase("reference", sum(count for _, count in missing)) as progress,
            ):
                done = partial(progress, 0)
                self._references.measure(missing, learner, done, stop)
