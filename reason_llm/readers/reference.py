"""The reference, whose log-probs are the column ``ref_logprobs``: the base without an adapter, or a
frozen copy of the adapter that the run began from. A stage that learns from a set of rows has it
read all of them once, before the first step, into a file:

    <run>/reference-<digest>.safetensors: keys (N, 16) uint8, lengths (N,) int64,
                                          logprobs (sum of lengths,) float32, sha256 (32,) uint8

The digest in the name is that of the reference: the base's weights and config, its dtype, and the
start adapter if it is the reference. A row's key is the digest of its ids and of which are trained.
``logprobs`` are those of the trained tokens, in nats. The rows of a step are measured together, as
the step itself would, so that a row has the bits that the first step with it would measure.
"""

import hashlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from reason_llm.config import Config
from reason_llm.errors import one_line
from reason_llm.files import MIB, read_bounded, write_atomically
from reason_llm.model import Datum, Model, Role, digests
from reason_llm.model.plan import Subject
from reason_llm.readers.reader import Base, Progress, Reader, StopRequest
from reason_llm.train import Learner, RoleReader

START = "start"
"""Folder in the run's with a copy of the adapter that the run began from."""
COLUMN = "ref_logprobs"
KEY_BYTES = 16
SAVE_SECONDS = 30.0
"""Seconds between two writes while log-probs are measured."""

logger = logging.getLogger(__name__)


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
        return RoleReader(COLUMN, self.role)


def opened(config: Config, subject: Subject, base: Base) -> Sequence[Reference]:
    """The reference, of every run."""
    return (Reference("start" if config.compares_with_start else "reference"),)


class References:
    """Log-probs of one reference by row, in memory and optionally in a file."""

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

    def read(self, max_bytes: int) -> None:
        """Read the file; a damaged one raises a warning and counts as empty."""
        assert self.path is not None
        if not self.path.exists():
            return
        try:
            self._logprobs = _from_bytes(read_bounded(self.path, max_bytes))
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
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        """Measure the rows of the steps from ``missing`` on and write them; rows that are known
        keep their values. Raises WriteError, and Stopped after the measured rows are written."""
        written = time.monotonic()
        for data, count in steps:
            logprobs, _ = learner.measure(data, learner.settings.reference)
            for datum, values in zip(data, logprobs, strict=True):
                self._logprobs.setdefault(_key(datum), values.float().cpu())
            progress(count)
            if stop.requested or time.monotonic() - written >= SAVE_SECONDS:
                self.write()
                written = time.monotonic()
            stop.check()
        self.write()

    def write(self) -> None:
        """Write all of them and remove every older reference's file; raises WriteError."""
        assert self.path is not None
        write_atomically(self.path, _to_bytes(self._logprobs))
        for other in self.path.parent.glob("reference-*.safetensors"):
            if other != self.path:
                other.unlink(missing_ok=True)


def path_of(config: Config, folder: Path, start: Path) -> Path:
    """File of the reference's log-probs in the run's ``folder``; ``start`` is the run's copy of the
    adapter that it began from."""
    model = config.model
    compared = start if config.compares_with_start else None
    digest = hashlib.sha256(digests.weights_digest(model.path, compared).encode())
    digest.update(f"{model.dtype} {model.quantize}".encode())
    return folder / f"reference-{digest.hexdigest()[:16]}.safetensors"


def max_bytes(steps: Iterable[Sequence[Datum]]) -> int:
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
