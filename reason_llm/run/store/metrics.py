"""metrics.jsonl with one record per step, and summary.json made from it alone.

Record ``step: s`` tells what led to the policy of s learned steps; ``step: 0`` is the untrained
one. Keys are ``stage/name_unit``; the SHA-256 of the line comes before them. On resuming, records
after the checkpoint are cut off, so that each step stands there once, and the others are compared
with the SHA-256 in the checkpoint.
"""

import hashlib
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import pstdev
from typing import Any

import orjson

from reason_llm.errors import DataError, NotAsWritten, WriteError
from reason_llm.files import (
    compare,
    open_to_append,
    parsed_object,
    read_bounded,
    sealed,
    sync,
    write_atomically,
)
from reason_llm.rollout import Group

Record = dict[str, float]
MAX_BYTES = 64 << 20
"""Of metrics.jsonl, before a new one is begun."""
LARGEST = 1e100
"""Number that is read."""

logger = logging.getLogger(__name__)


@contextmanager
def timed(record: Record, name: str) -> Iterator[None]:
    """Add the seconds of the block to ``time/<name>_seconds``."""
    started = time.perf_counter()
    yield
    key = f"time/{name}_seconds"
    record[key] = record.get(key, 0.0) + time.perf_counter() - started


class MetricsLog:
    """The records of a run in ``<run>/metrics.jsonl``.

    Beyond ``MAX_BYTES`` the file becomes ``metrics.1.jsonl``, in the place of an older one, and a
    new one begins: a run of any length keeps at least its last 30,000 records or so.

    Args:
        step: of the checkpoint that the run goes on from; None for a run without one.
        started: ``time.perf_counter()`` from which the next record's seconds count.
        noted: ``sha256`` when that checkpoint was saved; other records are told in a warning.
    """

    def __init__(
        self, run_folder: Path, step: int | None, started: float, noted: str | None = None
    ) -> None:
        self.path = run_folder / "metrics.jsonl"
        last = -1 if step is None else step
        digests = []
        for path in (_older(self.path), self.path):
            lines = _lines(path) if path.exists() else []
            kept = b"".join(line for line, record in lines if record["step"] <= last)
            if kept or path == self.path:
                write_atomically(path, kept)
            else:
                path.unlink(missing_ok=True)
            self._digest = hashlib.sha256(kept)
            digests.append(self.sha256)
        self._since = started
        if noted is not None and noted not in digests:  # older: a new file was begun since then
            try:
                compare(f"{self.path} up to step {last}", self.sha256, noted)
            except NotAsWritten as error:
                logger.warning("%s; curves, alarms and the summary tell of what is there", error)

    @property
    def sha256(self) -> str:
        """SHA-256 of metrics.jsonl."""
        return self._digest.hexdigest()

    def write(self, step: int, values: Record) -> Record:
        """Append the record of ``step``, with the seconds since the one before."""
        now = time.perf_counter()
        record = {"step": step, **values, "time/total_seconds": now - self._since}
        self._since = now
        try:
            if self.path.stat().st_size > MAX_BYTES:
                self.path.replace(_older(self.path))
                self._digest = hashlib.sha256()
            line = sealed(orjson.dumps(record) + b"\n")
            with open_to_append(self.path) as file:
                file.write(line)
            self._digest.update(line)
        except OSError as error:
            raise self._cannot_be_written(error) from error
        return record

    def sync(self) -> None:
        """Make the records survive a power cut.

        Raises:
            WriteError: the disk is full or fails.
        """
        try:
            sync(self.path)
        except OSError as error:
            raise self._cannot_be_written(error) from error

    def _cannot_be_written(self, error: OSError) -> WriteError:
        return WriteError(
            f"{self.path} cannot be written ({error.strerror}); free the disk and run again"
        )

    def records(self) -> list[Record]:
        """All records on disk."""
        return read_all(self.path.parent)

    def seconds_since(self) -> float:
        """Seconds since the last record."""
        return time.perf_counter() - self._since


def read_all(run_folder: Path) -> list[Record]:
    """The records of a run, oldest first; none where there is no metrics.jsonl."""
    path, older = files(run_folder)
    return [record for file in (older, path) if file.exists() for record in read(file)]


def files(run_folder: Path) -> tuple[Path, Path]:
    """Files with the records of a run: the newer ones, and the older ones if there are many."""
    path = run_folder / "metrics.jsonl"
    return path, _older(path)


def read(path: Path) -> list[Record]:
    """Records in ``path``. A last line without its end is an unfinished write and is ignored. A
    null (a number that was not finite) is ignored, and so is a number so large that sums of it are
    not finite.

    Raises:
        DataError: another line is no record, or the file cannot be read.
    """
    return [record for _, record in _lines(path)]


def _lines(path: Path) -> list[tuple[bytes, Record]]:
    """The lines with a record, and what ``read`` takes of each."""
    try:
        content = read_bounded(path, 2 * MAX_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); restore it") from error
    found = []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = parsed_object(line)
            step = record.get("step")
            if not isinstance(step, int) or not 0 <= step < 2**63:
                raise ValueError("no record with a step")
            record = {key: value for key, value in record.items() if value is not None}
            if not all(isinstance(value, int | float) for value in record.values()):
                raise ValueError("a record with something that is no number")
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}; restore or remove the line") from error
        found.append((line, {k: value for k, value in record.items() if abs(value) < LARGEST}))
    return found


def _older(path: Path) -> Path:
    return path.with_name("metrics.1.jsonl")


def describe(groups: list[Group], first: str | None = None) -> Record:
    """Statistics of a step's rollouts, from the buffer alone. Means of rewards are over the
    completions that have them; a reward that none has is left out.

    Args:
        first: name of the reward that judges; None, or one that saved rollouts lack: its
            deviation is left out.
    """
    completions = [completion for group in groups for completion in group.completions]
    count = len(completions)
    tokens = sum(len(completion.token_ids) for completion in completions)
    flat = sum(
        len({c.reward for c in group.completions if c.has_reward}) < 2
        or not any(c.advantage != 0 for c in group.completions)
        for group in groups
    )
    given = {
        f"score/{name}": [c.rewards[name] for c in completions if not math.isnan(c.rewards[name])]
        for name in completions[0].rewards
    }
    given["score/reward"] = [c.reward or 0.0 for c in completions if c.has_reward]
    rewards = {name: sum(values) / len(values) for name, values in given.items() if values}
    return {
        "sample/tokens": tokens,
        "sample/completion_tokens": tokens / count,
        "sample/truncated_fraction": sum(
            completion.finish_reason == "length" for completion in completions
        )
        / count,
        "score/groups_without_signal_fraction": flat / len(groups),
        **rewards,
        **(
            {"score/first_reward_std": pstdev(judged)}
            if (judged := given.get(f"score/{first}"))
            else {}
        ),
    }


def added(one: Record, other: Record) -> Record:
    """The sums of two records of counts."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


def by_name(values: Record, name: str) -> Record:
    """The metrics of an evaluation with its set's name, ``eval/<name>/accuracy`` for
    ``eval/accuracy``."""
    return {f"eval/{name}/{key.removeprefix('eval/')}": value for key, value in values.items()}


def accuracies(record: Record) -> dict[str, float]:
    """The accuracy on each named evaluation set."""
    return {
        key.removeprefix("eval/").removesuffix("/accuracy"): value
        for key, value in record.items()
        if key.startswith("eval/") and key.endswith("/accuracy") and key != "eval/accuracy"
    }


def summarize(records: list[Record], adapter: Path, since_last: float) -> dict[str, Any]:
    """Summary of a run: accuracies, loss and accuracy of pairs on held-out rows (before, after),
    steps, seconds by phase, peak memory, path of the adapter."""

    def total(key: str) -> float:
        return round(sum(record.get(key, 0.0) for record in records), 3)

    def largest(key: str) -> float:
        return round(max(record.get(key, 0.0) for record in records), 2)

    def ends(key: str) -> list[float] | None:
        """The first and the last value."""
        values = [record[key] for record in records if key in record]
        return [values[0], values[-1]] if values else None

    evaluated = [record for record in records if "eval/accuracy" in record]
    named = [accuracies(record) for record in evaluated]
    return {
        "accuracy_before": evaluated[0]["eval/accuracy"] if evaluated else None,
        "accuracy_after": evaluated[-1]["eval/accuracy"] if evaluated else None,
        "accuracy_of_sets": {
            name: [named[0][name], named[-1][name]]
            for name in (named[0] if named else {})
            if name in named[-1]
        },
        "held_out_loss": ends("eval/loss"),
        "held_out_pair_accuracy": ends("eval/pair_accuracy"),
        "held_out_pairs": ends("eval/pairs"),
        "steps": int(records[-1]["step"]),
        "sampling_seconds": total("time/sampling_seconds"),
        "scoring_seconds": total("time/scoring_seconds"),
        "learning_seconds": total("time/learning_seconds"),
        "evaluation_seconds": total("time/evaluation_seconds"),
        "saving_seconds": total("time/saving_seconds"),
        "buffer_seconds": total("time/buffer_seconds"),
        "writing_seconds": total("time/writing_seconds"),
        "total_seconds": round(total("time/total_seconds") + since_last, 3),
        "sampled_tokens": int(total("sample/tokens")),
        "sampling_peak_gib": largest("memory/sampling_peak_gib"),
        "sampling_planned_gib": largest("memory/sampling_planned_gib"),
        "learning_peak_gib": largest("memory/learning_peak_gib"),
        "learning_planned_gib": largest("memory/learning_planned_gib"),
        "replicas": of_replicas(records),
        "peak_rss_mib": round(max(record.get("memory/peak_rss_mib", 0.0) for record in records), 1),
        "adapter": str(adapter),
    }


def of_replicas(records: list[Record]) -> dict[str, dict[str, float]]:
    """Sums of what each replica did, by its number: ``sampling_seconds``, ``learning_seconds``,
    ``waiting_seconds`` (of these) and ``sent_bytes``; none for a run by one process."""
    found: dict[str, dict[str, float]] = {}
    for record in records:
        for key, value in record.items():
            _, _, rest = key.partition("replicas/")
            number, _, name = rest.partition("/")
            if name:
                sums = found.setdefault(number, {})
                sums[name] = round(sums.get(name, 0.0) + value, 3)
    return dict(sorted(found.items(), key=lambda each: (len(each[0]), each[0])))
