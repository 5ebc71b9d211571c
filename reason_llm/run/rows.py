"""The rows of a run, in a stage that learns from a set of rows."""

import gzip
from dataclasses import replace
from functools import partial

import orjson

from reason_llm.data import SIDES, order, prompt_tokens
from reason_llm.files import write_atomically
from reason_llm.model import Datum
from reason_llm.run.start.prepare import Job
from reason_llm.run.store import folder as run_folder

MAX_UNITS = 200
"""Units whose text is written."""


class Rows:
    """The rows of a run's steps, and those held out."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def drawn(self, start: int, count: int) -> list[Datum]:
        """The rows of the units (pairs, or rows) from ``start`` on in the run's order."""
        units = self._job.data.units
        return [
            replace(Datum.of_row(row), group=number)
            for number, index in enumerate(self._drawn(start, count))
            for row in units[index]
        ]

    def write_texts(self) -> None:
        """Write an even sample of the training rows, as lines like those of an evaluation."""
        config, units = self._job.config, self._job.data.units
        count = config.train.rows_per_step
        drawn = self._drawn(0, config.run.steps * count)
        decode = partial(self._job.run.subject.tokenizer.decode, clean_up_tokenization_spaces=False)
        content = b""
        for n in range(0, len(drawn), 1 + len(drawn) // MAX_UNITS):
            for side, row in zip(SIDES, units[drawn[n]], strict=False):
                start, step = prompt_tokens(row), n // count + 1
                line = {"step": step, "id": f"step {step} · {row.name}"}
                line |= {"prompt": decode(row.ids[:start]), "completion": decode(row.ids[start:])}
                one = {"set": "", "score": row.value}
                line |= {"set": side} if config.learns_pairs else one
                content += orjson.dumps(line) + b"\n"
        write_atomically(self._job.folder / run_folder.ROWS, gzip.compress(content, mtime=0))

    def _drawn(self, start: int, count: int) -> list[int]:
        data, seed = self._job.data, self._job.config.run.seed
        return order(data.sizes, data.weights, seed, start, count)

    def held_out(self) -> list[Datum]:
        """The held-out rows for evaluation."""
        data_set = self._job.data.held_out_rows
        return [] if data_set is None else [Datum.of_row(row) for row in data_set.rows]
