"""data/buffer.json: the rollouts of one step, on disk between sampling and learning.

One valid JSON document, written whole beside itself and renamed, so that a reader (or a killed run)
finds the old document or the new one and never half of one. Held by a lock that dies with its
process. A document of another run is refused, moved aside, or overwritten if it is finished and in
its run's archive, too. Knows nothing of
models, rewards or tensors.

    {"sha256", "format": 2, "run": {"id", "name", "config"}, "step", "weight_version", "checkpoint",
    "complete", "trained", "drawn", "groups": [...], "counts": {}}

With ``run.max_staleness`` steps are sampled ahead of the one that is learned: ``<run>/ahead/``
holds such a document for each, until it is its turn.

``sha256`` is the digest of the file's bytes without that first member, ``{"format"...}`` to the
line's end; of an archived document, unpacked. Whoever reads a document compares it, so that a
changed number is told and not learned from.
"""

import gzip
import logging
import os
import shlex
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson

from reason_llm.config import command, file as config_file
from reason_llm.errors import NotAsWritten, RolloutBufferError, one_line
from reason_llm.files import (
    MIB,
    FileLock,
    check_nesting,
    check_seal,
    move_aside,
    open_regular,
    read_bounded,
    sealed,
    too_large,
    write_atomically,
)
from reason_llm.rollout import Group, group_from_json, group_to_json

FORMAT = 2
MAX_BYTES = 4 << 30
"""Of a document, unpacked."""
MAX_RATIO = 200
"""Of an archive's unpacked bytes to its own, beyond what fits into memory anywhere."""
NO_COUNTS: Mapping[str, float] = {}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Identity of the run that sampled the rollouts."""

    id: str
    name: str
    config: dict[str, Any] = field(repr=False)
    """The whole config as JSON-ready values."""


@dataclass(slots=True)
class Document:
    """Content of a buffer file."""

    run: RunIdentity
    step: int
    complete: bool
    trained: bool
    drawn: int
    """Prompts sampled so far, those of dropped groups included."""
    groups: list[Group]
    counts: dict[str, float] = field(default_factory=dict)
    """Of the rewards' errors and time limits while these were scored, by metric."""
    checkpoint: str | None = None
    """Path of the run's newest checkpoint when these were written; None: it had none."""
    weight_version: int | None = None
    """Learned steps of the policy that sampled these; None: it was not written."""


class RolloutBuffer:
    """The buffer of one run; ``with RolloutBuffer(path, run) as buffer`` holds its lock.

    Args:
        discard: whatever is there is to be moved aside, unread.
        settle: called before a step's rollouts give way to the next step's, to have what was
            learned from them on disk.
        elsewhere: the rollouts of a step that are on disk in another place, with advantages.
        is_archived: whether another, finished run's rollouts are in its own folder too: then they
            give way, and are not moved aside.
        ahead: folder of the steps that are sampled ahead; None: none are.

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
        elsewhere: Callable[[int], Document | None] = lambda step: None,
        is_archived: Callable[[Document], bool] = lambda document: False,
        ahead: Path | None = None,
    ) -> None:
        self.path = path
        self.run = run
        self._discard = discard
        self._settle = settle
        self._elsewhere = elsewhere
        self._is_archived = is_archived
        self._gives_way = False
        self._lock = lock(path)
        self._document: Document | None = None
        """What the file holds."""
        self.checkpoint: str | None = None
        """Path of the run's newest checkpoint between two steps, for what is written from here on;
        None: that which the document on disk names."""
        self.version_of: Callable[[int], int | None] = lambda step: step
        """Learned steps of the policy that samples a step, for what is written from here on."""
        self._taken: Document | None = None
        """What was taken from elsewhere, while the file holds a later step."""
        self._folder = ahead
        self._ahead: dict[int, Document] = {}
        """What the files of the folder hold, by step."""
        self._current: int | None = None
        """Step whose turn it is; later ones are ahead."""

    def __enter__(self) -> Self:
        with ExitStack() as until_checked:
            until_checked.enter_context(self._lock)
            document = self.check()
            until_checked.pop_all()  # from here on, __exit__ lets go of the lock
        if document is None or document.run.id == self.run.id:
            self._document = document
        else:
            self._gives_way = self._is_archived(document)
        if self._folder is not None and not self._discard:
            self._ahead = {each.step: each for _, each in read_ahead(self._folder, self.run)}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.__exit__(kind, error, trace)

    def check(self) -> Document | None:
        """The document on disk, if this run may continue from it or set it aside; writes nothing.

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

    def read(self, step: int) -> list[Group] | None:
        """All groups of this step with their advantages, from anywhere on disk; None if the step
        must be sampled or sampled to its end."""
        self._begin(step)
        if not self.holds(step) and (found := self._elsewhere(step)) is not None:
            self._take(step, found)
        return self.groups(step) if self.holds(step) else None

    def holds(self, step: int) -> bool:
        """Whether the buffer holds every group of this step."""
        document = self.document(step)
        return document is not None and document.complete

    def find(self, step: int) -> Document | None:
        """The document of this step, whole or not, from anywhere on disk; nothing is written."""
        found = self.document(step)
        if found is None or not found.complete:
            found = self._elsewhere(step) or found
        return found

    def groups(self, step: int) -> list[Group]:
        """Groups of this step that were saved so far, in the order they were drawn, including
        unscored ones."""
        document = self.document(step)
        return list(document.groups) if document is not None else []

    def document(self, step: int) -> Document | None:
        """The document of this step, if any."""
        held = (self._ahead.get(step), self._taken, self._document)
        return next((each for each in held if each and each.step == step), None)

    def drawn(self, step: int) -> int:
        """Number of prompts of this step that were sampled and saved, including those of dropped
        groups."""
        document = self.document(step)
        return document.drawn if document is not None else 0

    def write_part(
        self,
        step: int,
        groups: list[Group],
        drawn: int | None = None,
        counts: Mapping[str, float] = NO_COUNTS,
    ) -> None:
        """Write the groups of a step so far, scored or not; on disk on return.

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
        """Write all groups of a step, with their advantages; on disk on return.

        Args:
            drawn: prompts sampled in all; None: as many as there are groups.
            counts: as in ``Document``.
        """
        self._write(self._made(step, groups, drawn, counts, complete=True))

    def _take(self, step: int, found: Document) -> None:
        """Take over all groups of a step that are elsewhere on disk.

        They are written as by ``write``, but where the rollouts of a later step of this run are
        here: a run that goes on from an older checkpoint comes to those again, and needs them.
        """
        document = replace(
            self._made(step, found.groups, found.drawn, found.counts, complete=True),
            weight_version=found.weight_version,
        )
        if self._document is not None and self._document.step > step:
            self._taken = document
        else:
            self._write(document)

    def finish(self) -> None:
        """Mark the run as over, so that another run may set its rollouts aside. A step that was
        sampled in part, before ``run.steps`` was lowered, stays so."""
        self._current = None
        if self._document is not None and not self._document.trained:
            self._write(replace(self._document, trained=True))
        for step in list(self._ahead):
            self._drop_ahead(step)

    def _path_ahead(self, step: int) -> Path:
        assert self._folder is not None
        return self._folder / _ahead_name(step)

    def _drop_ahead(self, step: int) -> None:
        self._ahead.pop(step, None)
        self._path_ahead(step).unlink(missing_ok=True)

    def _begin(self, step: int) -> None:
        """Take over what was sampled ahead for this step, whose turn it is."""
        self._current = step
        if learned := [each for each in self._ahead if each < step]:
            self._settle()
        for before in learned:
            self._drop_ahead(before)
        if (found := self._ahead.get(step)) is None:
            return
        held = self._document
        if held is not None and held.step > step and found.complete:
            return  # from where it lies, as what the file holds is needed again
        if held is None or held.step != step or not held.complete:
            self._write(found)
        self._drop_ahead(step)

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
        held = self.document(step)
        named = self.checkpoint or (held.checkpoint if held is not None else None)
        version = self.version_of(step) if held is None else held.weight_version
        return Document(
            self.run, step, complete, False, count, groups, dict(counts), named, version
        )

    def _write(self, document: Document) -> None:
        if self._folder and self._current is not None and document.step > self._current:
            self._ahead[document.step] = document
            write_atomically(self._path_ahead(document.step), to_bytes(document))
            return
        if self._document is None or self._document.step != document.step:
            self._settle()
        if self._document is None or self._document.step > document.step:
            # Another run's, or sampled by later weights than the checkpoint's.
            if not self._gives_way:
                move_aside(self.path)
                if self._document is not None and self._document.run.id == self.run.id:
                    for step in list(self._ahead):  # sampled by such weights, too
                        self._drop_ahead(step)
            self._gives_way = False
        self._document = document
        write_atomically(self.path, to_bytes(document))


def read_ahead(folder: Path, run: RunIdentity) -> Iterator[tuple[Path, Document]]:
    """The run's rollouts of steps ahead, with their files. What is damaged is sampled again."""
    for path in sorted(folder.glob("step-????????.json")):
        try:
            document = read_document(path, "it is sampled again")
        except RolloutBufferError as error:
            _warn_once(str(error))
            continue
        if document.run.id == run.id and path.name == _ahead_name(document.step):
            yield path, document


def _ahead_name(step: int) -> str:
    return f"step-{step:08d}.json"


def lock(path: Path) -> FileLock:
    """The lock of the buffer at ``path``."""
    return FileLock(path.with_name(f".{path.name}.lock"), what=f"the rollout buffer {path}")


def to_bytes(document: Document, *, compressed: bool = False) -> bytes:
    """The document as JSON with its digest; ``compressed``: in gzip, the same bytes every time."""
    run = document.run
    value = {
        "format": FORMAT,
        "run": {"id": run.id, "name": run.name, "config": run.config},
        "step": document.step,
        "weight_version": document.weight_version,
        "checkpoint": document.checkpoint,
        "complete": document.complete,
        "trained": document.trained,
        "drawn": document.drawn,
        "groups": [group_to_json(group) for group in document.groups],
        "counts": document.counts,
    }
    content = sealed(orjson.dumps(value) + b"\n")
    return gzip.compress(content, compresslevel=6, mtime=0) if compressed else content


def read_document(
    path: Path, way_on: str = "restore it or name another file", *, accept_edited: bool = False
) -> Document:
    """The document in ``path``: data/buffer.json, a copy of it, or an archived one (.json.gz).

    Args:
        way_on: what to do about a damaged one, for the error.
        accept_edited: the digest may be wrong or missing.

    Raises:
        RolloutBufferError: it is not there, cannot be read, is damaged, or is not what was written.
    """
    content = _read(path, way_on)
    try:
        value = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise RolloutBufferError(
            f"{path} is cut short or damaged: not whole JSON ({error}); {way_on}"
        ) from error
    found = value.get("format") if isinstance(value, dict) else type(value).__name__
    if type(found) is not int or found != FORMAT:
        raise RolloutBufferError(
            f"{path} is of format {found!r:.60} and this version reads {FORMAT}; {way_on}"
        )
    try:
        if not accept_edited:
            check_seal(content, must_carry=True)
        return _document(value)
    except NotAsWritten as error:
        raise RolloutBufferError(
            f"{path} is not what was written ({error}); {way_on}, or, if it was edited on purpose, "
            f"accept it with: {command('rescore')} {shlex.quote(str(path))} --accept-edited"
        ) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RolloutBufferError(f"{path} is damaged: {error!r:.300}; {way_on}") from error


@cache
def _warn_once(text: str) -> None:
    """A document is read by the checks before a run and by the run."""
    logger.warning("%s", text)


def _read(path: Path, way_on: str) -> bytes:
    """The bytes of a document, unpacked."""
    try:
        if path.suffix != ".gz":
            return read_bounded(path, MAX_BYTES)
        with open_regular(path) as packed, gzip.open(packed) as file:
            most = min(MAX_BYTES, 64 * MIB + MAX_RATIO * path.stat().st_size)
            content = file.read(most + 1)
        if len(content) > most:
            raise too_large(most)
    except (OSError, EOFError, zlib.error) as error:
        raise RolloutBufferError(f"{path} cannot be read ({one_line(error)}); {way_on}") from error
    return content


def _document(value: dict[str, Any]) -> Document:
    document = Document(
        run=identity_from_json(value["run"]),
        step=count_from_json(value, "step"),
        complete=value["complete"] is True,
        trained=value["trained"] is True,
        drawn=count_from_json(value, "drawn"),
        groups=[group_from_json(group) for group in value["groups"]],
        counts={str(name): float(count) for name, count in value["counts"].items()},
        checkpoint=value["checkpoint"],
        weight_version=None
        if value["weight_version"] is None
        else count_from_json(value, "weight_version"),
    )
    if not isinstance(document.checkpoint, str | None):
        raise ValueError(f"checkpoint is {document.checkpoint!r:.60}, not a path")
    if document.complete and not document.groups:
        raise ValueError("a whole step without rollouts")
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
    """Run identity from the member ``run`` of a buffer or a checkpoint.

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
    """Non-negative integer from JSON.

    Raises:
        ValueError, KeyError: it is something else, or missing.
    """
    if type(value[name]) is not int or not 0 <= value[name] < 1 << 53:
        raise ValueError(f"{name} is {value[name]!r:.60}, not a count")
    count: int = value[name]
    return count
