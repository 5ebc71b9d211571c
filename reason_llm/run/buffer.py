"""data/buffer.json: the rollouts of one step, on disk between sampling and learning.

One valid JSON document, written whole beside itself and renamed, so that a reader (or a killed run)
finds the old document or the new one and never half of one. Held by a lock that dies with its
process. A document of another run is refused or moved aside, never overwritten. Knows nothing of
models, rewards or tensors.

    {"format": 1, "run": {"id", "name", "config"}, "step", "weight_version", "complete", "trained",
    "drawn", "groups": [...], "counts": {}}
"""

import gzip
import os
import zlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from reason_llm.config import file as config_file
from reason_llm.errors import RolloutBufferError, one_line
from reason_llm.files import FileLock, move_aside, write_atomically
from reason_llm.reading import MIB, check_nesting, open_regular, read_bounded, too_large
from reason_llm.rollout import Group, group_from_json, group_to_json

FORMAT = 1
MAX_BYTES = 4 << 30
"""Of a document, unpacked."""
MAX_RATIO = 200
"""Of an archive's unpacked bytes to its own, beyond what fits into memory anywhere."""
NO_COUNTS: Mapping[str, float] = {}


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Whose rollouts these are."""

    id: str
    name: str
    config: dict[str, Any] = field(repr=False)
    """The whole config as JSON-ready values."""


@dataclass(slots=True)
class Document:
    """What a buffer file holds."""

    run: RunIdentity
    step: int
    weight_version: int
    complete: bool
    trained: bool
    drawn: int
    """Prompts sampled so far, those of dropped groups included."""
    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)
    """Of the rewards' errors and time limits while these were scored, by metric."""


class RolloutBuffer:
    """The buffer of one run; ``with RolloutBuffer(path, run) as buffer`` holds its lock.

    Args:
        discard: whatever is there is to be moved aside, unread.
        settle: called before a step's rollouts give way to the next step's, to have what was
            learned from them on disk.

    Raises (on entry):
        BusyError: another process holds it.
        RolloutBufferError: it is damaged or belongs to another run that is not finished.
    """

    def __init__(
        self,
        path: Path,
        run: RunIdentity,
        *,
        discard: bool = False,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.path = path
        self.run = run
        self._discard = discard
        self._settle = settle
        self._lock = lock(path)
        self._document: Document | None = None
        """What the file holds."""
        self._taken: Document | None = None
        """What was taken from elsewhere, while the file holds a later step."""

    def __enter__(self) -> Self:
        with ExitStack() as until_checked:
            until_checked.enter_context(self._lock)
            document = self.check()
            until_checked.pop_all()  # from here on, __exit__ lets go of the lock
        self._document = document if document and document.run.id == self.run.id else None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)

    def check(self) -> Document | None:
        """What is on disk, if this run may go on from it or set it aside; writes nothing.

        Raises:
            RolloutBufferError: damaged, or of another, unfinished run or config.
        """
        if self._discard:
            return None
        if not os.path.lexists(self.path):
            return None
        document = read_document(
            self.path, "restore it, or start with --run.resume never, which moves it aside"
        )
        if document.run.id != self.run.id and document.trained:
            return document
        if document.run.id == self.run.id and document.complete and not document.groups:
            raise RolloutBufferError(
                f"{self.path} is damaged: a whole step without rollouts; restore it, or start with "
                "--run.resume never, which moves it aside"
            )
        ways_on = (
            f"go on with that run, give this one --run.buffer of its own, "
            f"or start with --run.resume never, which moves {self.path} aside"
        )
        if document.run.id != self.run.id:
            raise RolloutBufferError(
                f"{self.path} holds step {document.step} of the unfinished run "
                f"{document.run.name!r} "
                f"({document.run.id}), not of {self.run.name!r} ({self.run.id}); {ways_on}"
            )
        changed = config_file.changes(document.run.config, self.run.config).refused
        if changed:
            raise RolloutBufferError(
                f"{self.path} was sampled with another config ({'; '.join(changed)}); {ways_on}"
            )
        return document

    def holds(self, step: int) -> bool:
        """Whether every group of this step is here."""
        document = self.document(step)
        return document is not None and document.complete

    def groups(self, step: int) -> list[Group]:
        """The groups of this step that were saved so far, in the order they were drawn; those that
        are not scored yet, too."""
        document = self.document(step)
        return list(document.groups) if document is not None else []

    def document(self, step: int) -> Document | None:
        """What there is of this step."""
        found = (each for each in (self._taken, self._document) if each and each.step == step)
        return next(found, None)

    def drawn(self, step: int) -> int:
        """How many prompts of this step were sampled and saved, dropped ones included."""
        document = self.document(step)
        return document.drawn if document is not None else 0

    def write_part(
        self,
        step: int,
        groups: list[Group],
        drawn: int | None = None,
        counts: Mapping[str, float] = NO_COUNTS,
    ) -> None:
        """The groups of a step so far, scored or not; on disk when it returns.

        Args:
            drawn: prompts sampled so far; None: as many as there are groups.
            counts: as in ``Document``.
        """
        self._write(self._made(step, groups, drawn, counts, complete=False))

    def write(
        self,
        step: int,
        groups: list[Group],
        drawn: int | None = None,
        counts: Mapping[str, float] = NO_COUNTS,
    ) -> None:
        """All groups of a step, with their advantages; on disk when it returns.

        Args:
            drawn: prompts sampled in all; None: as many as there are groups.
            counts: as in ``Document``.
        """
        self._write(self._made(step, groups, drawn, counts, complete=True))

    def take(
        self, step: int, groups: list[Group], drawn: int, counts: Mapping[str, float] = NO_COUNTS
    ) -> None:
        """All groups of a step, with their advantages, which are elsewhere on disk as well.

        They are written as by ``write``, but where the rollouts of a later step of this run are
        here: a run that goes on from an older checkpoint comes to those again, and needs them.
        """
        document = self._made(step, groups, drawn, counts, complete=True)
        if self._document is not None and self._document.step > step:
            self._taken = document
        else:
            self._write(document)

    def finish(self) -> None:
        """Say that the run is over and nobody waits for these rollouts, so that another run may set
        them aside. A step that was sampled in part, before ``run.steps`` was lowered, stays so."""
        if self._document is not None and not self._document.trained:
            self._write(replace(self._document, trained=True))

    def _made(
        self,
        step: int,
        groups: list[Group],
        drawn: int | None,
        counts: Mapping[str, float],
        *,
        complete: bool,
    ) -> Document:
        count = len(groups) if drawn is None else drawn
        return Document(self.run, step, step, complete, False, count, groups, dict(counts))

    def _write(self, document: Document) -> None:
        if self._document is None or self._document.step != document.step:
            self._settle()
        if self._document is None or self._document.step > document.step:
            # Another run's, or sampled by later weights than the checkpoint's.
            move_aside(self.path)
        self._document = document
        write_atomically(self.path, to_bytes(document))


def lock(path: Path) -> FileLock:
    """The lock of the buffer at ``path``."""
    return FileLock(path.with_name(f".{path.name}.lock"), what=f"the rollout buffer {path}")


def to_bytes(document: Document, *, compressed: bool = False) -> bytes:
    """The document as JSON; ``compressed``: in gzip, the same bytes every time."""
    run = document.run
    value = {
        "format": FORMAT,
        "run": {"id": run.id, "name": run.name, "config": run.config},
        "step": document.step,
        "weight_version": document.weight_version,
        "complete": document.complete,
        "trained": document.trained,
        "drawn": document.drawn,
        "groups": [group_to_json(group) for group in document.groups],
        "counts": document.counts,
    }
    content = orjson.dumps(value) + b"\n"
    return gzip.compress(content, compresslevel=6, mtime=0) if compressed else content


def read_document(path: Path, way_on: str = "restore it or name another file") -> Document:
    """The document in ``path``: data/buffer.json, a copy of it, or an archived one (.json.gz).

    Args:
        way_on: what to do about a damaged one, for the error.

    Raises:
        RolloutBufferError: it is not there, cannot be read, or is damaged.
    """
    try:
        if path.suffix == ".gz":
            with open_regular(path) as packed, gzip.open(packed) as file:
                most = min(MAX_BYTES, 64 * MIB + MAX_RATIO * path.stat().st_size)
                content = file.read(most + 1)
                if len(content) > most:
                    raise too_large(most)
        else:
            content = read_bounded(path, MAX_BYTES)
    except (OSError, EOFError, zlib.error) as error:
        raise RolloutBufferError(f"{path} cannot be read ({one_line(error)}); {way_on}") from error
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RolloutBufferError(
            f"{path} is cut short or damaged: not whole JSON ({error}); {way_on}"
        ) from error
    if not isinstance(value, dict) or value.get("format") != FORMAT:
        found = value.get("format") if isinstance(value, dict) else type(value).__name__
        raise RolloutBufferError(
            f"{path} is of format {found!r:.60} and this version reads {FORMAT}; {way_on}"
        )
    try:
        return _document(value)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RolloutBufferError(f"{path} is damaged: {error!r:.300}; {way_on}") from error


def _document(value: dict[str, Any]) -> Document:
    document = Document(
        run=identity_from_json(value["run"]),
        step=count_from_json(value, "step"),
        weight_version=count_from_json(value, "weight_version"),
        complete=value["complete"] is True,
        trained=value["trained"] is True,
        drawn=count_from_json(value, "drawn"),
        groups=[group_from_json(group) for group in value["groups"]],
        counts={str(name): float(count) for name, count in value.get("counts", {}).items()},
    )
    completions = [c for group in document.groups for c in group.completions]
    if document.complete and any(c.reward is None or c.advantage is None for c in completions):
        raise ValueError("a completion without reward or advantage")
    scored = [completion for completion in completions if completion.reward is not None]
    if len({frozenset(completion.rewards) for completion in scored}) > 1:
        raise ValueError("completions with different rewards")
    for group in document.groups:
        if len({completion.reward is None for completion in group.completions}) > 1:
            raise ValueError(f"{group.prompt.id!r} is scored in part")
    return document


def identity_from_json(value: Any) -> RunIdentity:
    """What stands at ``run`` in a buffer or a checkpoint.

    Raises:
        ValueError, KeyError, TypeError: something is missing or of another kind.
    """
    run = RunIdentity(value["id"], value["name"], value["config"])
    if not isinstance(run.id, str) or not isinstance(run.name, str):
        raise ValueError("its run has no id or no name")
    if not isinstance(run.config, dict):
        raise ValueError("its run has no config")
    check_nesting(run.config)
    return run


def count_from_json(value: dict[str, Any], name: str) -> int:
    """A whole number of 0 or more.

    Raises:
        ValueError, KeyError: it is something else, or missing.
    """
    if type(value[name]) is not int or not 0 <= value[name] < 1 << 53:
        raise ValueError(f"{name} is {value[name]!r:.60}, not a count")
    count: int = value[name]
    return count
