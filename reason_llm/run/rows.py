"""The rows of a run, in a stage that learns from a set of rows, with the log-probs of a frozen
reference, which are measured once before the first step.

    <run>/reference-<digest>.safetensors: keys (N, 16) uint8, lengths (N,) int64,
                                          logprobs (sum of lengths,) float32, sha256 (32,) uint8

The digest in the name is that of the reference: the base's weights and config, its dtype, and the
start adapter if it is the reference. A row's key is the digest of its ids and of which are trained.
``logprobs`` are those of the trained tokens, in nats. The rows of a step are measured together, as
the step itself would, so that a row has the bits that the first step with it would measure.
"""

import gzip
import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import orjson
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reason_llm.config import Config
from reason_llm.data import SIDES, order, prompt_tokens
from reason_llm.errors import one_line
from reason_llm.files import MIB, read_bounded, write_atomically
from reason_llm.model import Datum
from reason_llm.run.start.prepare import START, Job
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store import folder as run_folder
from reason_llm.run.store.metrics import Record, timed
from reason_llm.run.watch import Watch
from reason_llm.train import Learner, learning

MOST_UNITS = 200
COLUMN = "ref_logprobs"
KEY_BYTES = 16
SAVE_SECONDS = 30.0
"""Seconds between two writes while log-probs are measured."""

logger = logging.getLogger(__name__)


class References:
    """Log-probs of one reference by row, in memory and in a file, if there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._logprobs: dict[bytes, Tensor] = {}

    def of(self, data: Sequence[Datum]) -> list[Datum]:
        """The rows, with the column ``ref_logprobs`` where it is known."""
        known = [self._logprobs.get(_key(datum)) for datum in data]
        return [
            datum if logprobs is None else datum.with_trained(COLUMN, logprobs)
            for datum, logprobs in zip(data, known, strict=True)
        ]

    def read(self, most_bytes: int) -> None:
        """Take what the file holds; a damaged one is told in a warning and counts as empty."""
        assert self.path is not None
        if not self.path.exists():
            return
        try:
            self._logprobs = _from_bytes(read_bounded(self.path, most_bytes))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            logger.warning("%s is damaged (%s); it is measured again", self.path, one_line(error))

    def missing(self, steps: Sequence[Sequence[Datum]]) -> list[tuple[Sequence[Datum], int]]:
        """The steps with a row that is in no earlier one and not known, and how many there are."""
        seen, new_steps = set(self._logprobs), []
        for data in steps:
            new = {_key(datum) for datum in data} - seen
            seen |= new
            if new:
                new_steps.append((data, len(new)))
        return new_steps

    def measure(
        self,
        steps: Sequence[tuple[Sequence[Datum], int]],
        learner: Learner,
        watch: Watch,
        stop: StopSignal,
    ) -> None:
        """Measure the rows of steps from ``missing`` and write them; raises WriteError, and Stopped
        when what was measured is written. Of a row that was known, the known ones stay."""
        written = time.monotonic()
        with watch.phase("reference", sum(count for _, count in steps)) as progress:
            for data, count in steps:
                logprobs, _ = learner.measure(data, learner.settings.reference)
                for datum, values in zip(data, logprobs, strict=True):
                    self._logprobs.setdefault(_key(datum), values.float().cpu())
                progress(0, count)
                if stop.requested or time.monotonic() - written >= SAVE_SECONDS:
                    self.write()
                    written = time.monotonic()
                stop.check()
        self.write()

    def write(self) -> None:
        """Write all of them in the place of every older reference's file; raises WriteError."""
        assert self.path is not None
        write_atomically(self.path, _to_bytes(self._logprobs))
        for other in self.path.parent.glob("reference-*.safetensors"):
            if other != self.path:
                other.unlink(missing_ok=True)


class Rows:
    """The rows of a run's steps, and those held out."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._references = References()

    def drawn(self, start: int, count: int) -> list[Datum]:
        """The rows of the units (pairs, or rows) from ``start`` on in the run's order."""
        units = self._job.data.units
        return self._references.of(
            [
                replace(Datum.of_row(row), group=number)
                for number, index in enumerate(self._drawn(start, count))
                for row in units[index]
            ]
        )

    def write_texts(self) -> None:
        """Write an even sample of the rows that the run learns from, as lines like those of an
        evaluation."""
        config, units = self._job.config, self._job.data.units
        count = config.train.rows_per_step
        drawn = self._drawn(0, config.run.steps * count)
        decode = partial(self._job.run.subject.tokenizer.decode, clean_up_tokenization_spaces=False)
        content = b""
        for n in range(0, len(drawn), 1 + len(drawn) // MOST_UNITS):
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
        self._references = References(path_of(config, folder, folder / START))
        self._references.read(most_bytes(steps))
        if missing := self._references.missing(steps):
            with timed(record, "reference"), learning(learner):
                self._references.measure(missing, learner, watch, stop)


def path_of(config: Config, folder: Path, start: Path) -> Path:
    """File of the reference's log-probs in the run's ``folder``.

    Args:
        start: the run's copy of the adapter that it began from.
    """
    model = config.model
    compared = start if config.compares_with_start else None
    digest = hashlib.sha256(run_folder.weights_digest(model.path, compared).encode())
    digest.update(f"{model.dtype} {model.quantize}".encode())
    return folder / f"reference-{digest.hexdigest()[:16]}.safetensors"


def most_bytes(steps: Iterable[Sequence[Datum]]) -> int:
    """Largest file that is read: twice the size of these rows, as it may hold others."""
    needed = sum(KEY_BYTES + 8 + 4 * datum.num_trained for data in steps for datum in data)
    return 2 * needed + MIB


def _key(datum: Datum) -> bytes:
    content: bytes = np.asarray(datum.ids, np.int64).tobytes() + bytes(datum.trained)
    return hashlib.blake2b(content, digest_size=KEY_BYTES).digest()


def _to_bytes(logprobs: dict[bytes, Tensor]) -> bytes:
    keys = np.frombuffer(b"".join(logprobs), np.uint8).reshape(-1, KEY_BYTES).copy()
    tensors = {
        "keys": torch.from_numpy(keys),
        "lengths": torch.tensor([len(values) for values in logprobs.values()]),
        "logprobs": torch.cat(list(logprobs.values())),
    }
    tensors["sha256"] = torch.tensor(list(_digest(tensors)), dtype=torch.uint8)
    content: bytes = save(tensors)
    return content


def _from_bytes(content: bytes) -> dict[bytes, Tensor]:
    tensors = load(content)
    expected = bytes(tensors.pop("sha256").tolist())
    keys, lengths, logprobs = (tensors[name] for name in ("keys", "lengths", "logprobs"))
    kinds = (keys.dtype, lengths.dtype, logprobs.dtype)
    if kinds != (torch.uint8, torch.int64, torch.float32) or _digest(tensors) != expected:
        raise ValueError("it is not what was written")
    names = [key.numpy().tobytes() for key in keys]
    return dict(zip(names, logprobs.split(lengths.tolist()), strict=True))


def _digest(tensors: dict[str, Tensor]) -> bytes:
    digest = hashlib.sha256()
    for name in ("keys", "lengths", "logprobs"):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.digest()
