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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import pstdev
from typing import Any

import orjson

from reason_llm.config import Config
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
from reason_llm.rollout import COUNT, LOGGED, SUM, Group
from reason_llm.run.store.document import Document

Record = dict[str, float]
MAX_BYTES = 1 << 30
"""Largest size of metrics.jsonl: half a million records."""
PEAKS = ("peak", "planned")
LARGEST = 1e100
"""Largest number that is read."""

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

    Args:
        step: of the checkpoint that the run resumes from; None for a run without one.
        started: ``time.perf_counter()`` from which the next record's seconds count.
        noted: ``sha256`` when that checkpoint was saved; other records raise a warning.
    """

    def __init__(
        self, run_folder: Path, step: int | None, started: float, expected: str | None = None
    ) -> None:
        self.path = run_folder / "metrics.jsonl"
        last = -1 if step is None else step
        content = b"".join(line for line, record in _lines(self.path) if record["step"] <= last)
        write_atomically(self.path, content)
        self._digest = hashlib.sha256(content)
        self._since = started
        if expected is not None:
            try:
                compare(f"{self.path} up to step {last}", self.sha256, expected)
            except NotAsWritten as error:
                logger.warning("%s; curves, alarms and the summary show what is left", error)

    @property
    def sha256(self) -> str:
        """SHA-256 of metrics.jsonl."""
        return self._digest.hexdigest()

    def write(self, step: int, values: Record) -> Record:
        """Append the record of ``step``, with the seconds since the one before; raises
        WriteError."""
        now = time.perf_counter()
        record = {"step": step, **values, "time/total_seconds": now - self._since}
        self._since = now
        line = sealed(orjson.dumps(record) + b"\n")
        with self._reporting_failure(), open_to_append(self.path) as file:
            file.write(line)
        self._digest.update(line)
        return record

    def sync(self) -> None:
        """Make the records survive a power cut; raises WriteError."""
        with self._reporting_failure():
            sync(self.path)

    @contextmanager
    def _reporting_failure(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise WriteError(
                f"{self.path} cannot be written ({error.strerror}); free the disk and run again"
            ) from error

    def records(self) -> list[Record]:
        """All records on disk."""
        return read(self.path.parent)

    def seconds_since(self) -> float:
        """Seconds since the last record."""
        return time.perf_counter() - self._since


def read(run_folder: Path) -> list[Record]:
    """The records of a run, oldest first; none where there is no metrics.jsonl. A last line without
    its end is an unfinished write and is ignored. A null (a number that was not finite) is ignored,
    and so is a number so large that sums of it are not finite.

    Raises:
        DataError: another line is no record, or the file cannot be read.
    """
    return [record for _, record in _lines(run_folder / "metrics.jsonl")]


def _lines(path: Path) -> list[tuple[bytes, Record]]:
    """The lines of the records, each with its parsed value."""
    if not path.exists():
        return []
    try:
        content = read_bounded(path, MAX_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}); restore it") from error
    records = []
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            record = {k: v for k, v in parsed_object(line).items() if v is not None}
            if not all(isinstance(value, int | float) for value in record.values()):
                raise ValueError("a record with a value that is not a number")
            step = record.get("step")
            if not isinstance(step, int) or not 0 <= step < 2**63:
                raise ValueError("no record with a step")
        except ValueError as error:
            raise DataError(f"{path}:{number}: {error}; restore or remove the line") from error
        records.append((line, {k: value for k, value in record.items() if abs(value) < LARGEST}))
    return records


def of_rollouts(
    document: Document, config: Config, finds: Callable[[str], str | None] | None
) -> Record:
    """Statistics of a step's rollouts and of how they were collected.

    Args:
        finds: see ``describe``.
    """
    record = describe(document.groups, config.score.rewards[0].key, finds)
    record |= with_means(document.counts)
    record["sample/groups_dropped"] = document.drawn - len(document.groups)
    return record


def describe(
    groups: list[Group],
    first: str | None = None,
    finds: Callable[[str], str | None] | None = None,
) -> Record:
    """Statistics of a step's rollouts. Means of rewards are over the completions that have them; a
    reward that none has is left out.

    Args:
        first: name of the reward that judges; saved rollouts may lack it.
        finds: finds what that reward judges in a completion; None where it judges all of it.
    """
    from reason_llm.data import rollout_sides  # slow to import; records are read without it

    completions = [completion for group in groups for completion in group.completions]
    tokens = sum(len(completion.sampled_ids) for completion in completions)
    truncated = sum(completion.finish_reason == "length" for completion in completions)
    flat = sum(
        len({c.reward for c in group.completions if c.has_reward}) < 2
        or not any(c.advantage != 0 for c in group.completions)
        for group in groups
    )
    rewards = {
        f"score/{name}": [c.rewards[name] for c in completions if not math.isnan(c.rewards[name])]
        for name in completions[0].rewards
    }
    rewards["score/reward"] = [c.reward or 0.0 for c in completions if c.has_reward]
    record = {
        "sample/tokens": tokens,
        "sample/completion_tokens": tokens / len(completions),
        "sample/truncated_fraction": truncated / len(completions),
        "score/groups_without_signal_fraction": flat / len(groups),
    }
    record |= {name: sum(values) / len(values) for name, values in rewards.items() if values}
    for side in rollout_sides():
        record |= side.metrics(completions)
    if judged := rewards.get(f"score/{first}"):
        record["score/first_reward_std"] = pstdev(judged)
        if not any(judged):
            record |= _of_unpaid(groups, finds)
    return record


def _of_unpaid(groups: Sequence[Group], finds: Callable[[str], str | None] | None) -> Record:
    """Reasons why the first reward may be 0 for every completion: how many hold an answer to judge,
    how many never close their thought, how many prompts open one."""
    texts = [group.prompt.continued_by(c) for group in groups for c in group.completions]
    open_thoughts = sum("<think>" in text.rpartition("</think>")[2] for text in texts)
    record = {
        "sample/open_thoughts_fraction": open_thoughts / len(texts),
        "sample/opening_prompts_fraction": sum(bool(g.prompt.opened) for g in groups) / len(groups),
    }
    if finds is not None:
        answers = sum(finds(text) is not None for text in texts)
        record["sample/answers_found_fraction"] = answers / len(texts)
    return record


def added(one: Record, other: Record) -> Record:
    """The sums of two records of counts."""
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one | other}


def with_means(counts: Record) -> Record:
    """The counts, with the mean of each metric that a reward logged instead of its sum and
    number."""
    record = {name: value for name, value in counts.items() if not name.startswith(LOGGED)}
    for name, total in counts.items():
        metric = name.removesuffix(SUM)
        if name.startswith(LOGGED) and metric != name and counts.get(f"{metric}{COUNT}"):
            record[metric] = total / counts[f"{metric}{COUNT}"]
    return record


def by_name(values: Record, name: str) -> Record:
    """The metrics of a named set: ``eval/<name>/accuracy`` for ``eval/accuracy``."""
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

    def values(key: str) -> list[float]:
        return [record[key] for record in records if key in record]

    def ends(key: str) -> list[float] | None:
        """The first and the last value of a metric."""
        series = values(key)
        return [series[0], series[-1]] if series else None

    def largest(key: str, digits: int) -> float:
        return round(max(values(key), default=0.0), digits)

    accuracy = ends("eval/accuracy")
    # A resumed run may have other sets: only those of its first and last evaluation are compared.
    named = [accuracies(record) for record in records if "eval/accuracy" in record]
    phases = ("sampling", "scoring", "learning", "evaluation", "saving", "buffer")
    seconds = {f"{name}_seconds": sum(values(f"time/{name}_seconds"), 0.0) for name in phases}
    seconds["total_seconds"] = sum(values("time/total_seconds"), since_last)
    peaks = [f"{phase}_{kind}_gib" for phase in ("sampling", "learning") for kind in PEAKS]
    return {
        "accuracy_before": accuracy[0] if accuracy else None,
        "accuracy_after": accuracy[1] if accuracy else None,
        "accuracy_problems": int(values("eval/problems")[-1]) if values("eval/problems") else 0,
        "accuracy_samples": int(values("eval/samples")[-1]) if values("eval/samples") else 0,
        "accuracy_of_sets": {
            name: [named[0][name], named[-1][name]]
            for name in (named[0] if named else {})
            if name in named[-1]
        },
        "problems_of_sets": {
            name: int(values(key)[-1])
            for name in (named[0] if named else {})
            if values(key := f"eval/{name}/problems")
        },
        "held_out_loss": ends("eval/loss"),
        "held_out_pair_accuracy": ends("eval/pair_accuracy"),
        "held_out_pairs": ends("eval/pairs"),
        "steps": int(records[-1]["step"]),
        **{name: round(value, 3) for name, value in seconds.items()},
        "sampled_tokens": int(sum(values("sample/tokens"))),
        **{name: largest(f"memory/{name}", 2) for name in peaks},
        "peak_rss_mib": largest("memory/peak_rss_mib", 1),
        "adapter": str(adapter),
    }


def write_summary(run_folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json, which marks the run as finished."""
    content = orjson.dumps(summary, option=orjson.OPT_INDENT_2)
    write_atomically(run_folder / "summary.json", sealed(content))
