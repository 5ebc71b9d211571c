"""data/buffer.json: the rollouts of one step, on disk between sampling and learning.

One document (``document``), written to a temporary file and renamed, so that a reader never finds
half of one, even after a kill. A lock that ends with its process protects it. A document of another
run is refused, moved aside, or overwritten if it is finished and in its run's archive, too.

With ``run.max_staleness`` steps are sampled ahead of the one that is learned: ``<run>/ahead/``
holds a document for each of them until its turn.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Self

from reason_llm.config import file as config_file
from reason_llm.errors import RolloutBufferError
from reason_llm.files import FileLock, move_aside, write_atomically
from reason_llm.rollout import Group
from reason_llm.run.store.archive import is_archived
from reason_llm.run.store.document import Document, RunIdentity, read_document, to_bytes
from reason_llm.run.store.writer import BackgroundWriter

AHEAD = "ahead"
"""Folder in the run's with the rollouts of steps that are sampled ahead."""

logger = logging.getLogger(__name__)


Source = Callable[[int, RunIdentity], Document | None]
"""A further place that may hold all rollouts of this step of the run, with advantages."""


@dataclass(eq=False)
class RolloutBuffer:
    """The buffer of one run; ``with RolloutBuffer(path, run) as buffer`` holds its lock.

    Args:
        sources: asked in this order for a step that is not whole in the buffer.
        ahead: folder of the steps that are sampled ahead; None: none are.
        writer: waited for before a step's rollouts give way to the next step's, to have what was
            learned from them on disk.
        discard: whatever is there is to be moved aside, unread.

    Raises (on entry):
        BusyError: another process holds it.
        RolloutBufferError: it is damaged or belongs to another run that is not finished.
    """

    path: Path
    run: RunIdentity
    sources: Sequence[Source] = ()
    ahead: Path | None = None
    writer: BackgroundWriter | None = None
    discard: bool = False
    _gives_way: bool = False
    """Whether the file holds another run's rollouts that are also in that run's archive."""
    _document: Document | None = None
    """This run's rollouts in the file."""
    _ahead: dict[int, Document] = field(default_factory=dict)
    """Rollouts in the files of the folder ``ahead``, by step."""
    _beside: Document | None = None
    """The current step's rollouts from elsewhere, if the file holds a later step."""
    _current: int | None = None
    """Step whose turn it is; later ones are ahead."""

    def __enter__(self) -> Self:
        self._lock = lock(self.path)
        with ExitStack() as until_checked:
            until_checked.enter_context(self._lock)
            document = None if self.discard else check(self.path, self.run)
            until_checked.pop_all()  # from here on, __exit__ lets go of the lock
        if document is None or document.run.id == self.run.id:
            self._document = document
        else:
            self._gives_way = is_archived(document)
        if self.ahead is not None and not self.discard:
            self._ahead = {each.step: each for _, each in read_ahead(self.ahead, self.run)}
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)

    def find(self, step: int) -> Document | None:
        """The rollouts of a step anywhere on disk, perhaps not ``complete``; None without any."""
        held = self._held(step)
        if held is None or not held.complete:
            for source in self.sources:
                if (document := source(step, self.run)) is not None:
                    return document
        return held

    def read(self, step: int, checkpoint: str | None = None) -> Document | None:
        """``find``, for the step that is next; rollouts found elsewhere are moved here.

        It is written to the file, but where that holds a later step of this run: a run that resumes
        from an older checkpoint comes to those rollouts again, and needs them.

        Args:
            checkpoint: path of the run's newest checkpoint.
        """
        if any(before < step for before in self._ahead):
            self._settle()
            self._drop_ahead(step)
        self._current = step
        document = self.find(step)
        if document is None or document is self._document or document is self._beside:
            return document
        if document is not self._ahead.get(step):
            document = replace(document, run=self.run, trained=False, checkpoint=checkpoint)
        if document.complete and self._document is not None and self._document.step > step:
            self._beside = document
        else:
            self._write(document)
            self._drop_ahead(step + 1)
        return document

    def write(
        self,
        step: int,
        groups: list[Group],
        *,
        whole: bool,
        drawn: int | None = None,
        counts: Mapping[str, float] = {},
        checkpoint: str | None = None,
        version: int | None = None,
    ) -> None:
        """Write the groups of a step so far, scored or not; on disk on return.

        Args:
            whole: they are all, with their advantages.
            drawn: prompts sampled so far; None: as many as there are groups.
            counts, checkpoint: as in ``Document``.
            version: learned steps of the policy that samples the step.
        """
        held = self._held(step)
        document = Document(
            self.run, step, whole, False, len(groups) if drawn is None else drawn, groups,
            dict(counts), checkpoint, version if held is None else held.weight_version,
        )  # fmt: skip
        if self.ahead and self._current is not None and step > self._current:
            self._ahead[step] = document
            write_atomically(self.ahead / _name(step), to_bytes(document))
        else:
            self._write(document)

    def finish(self) -> None:
        """Mark the run as over, so that another run may set its rollouts aside. A step that was
        sampled in part, before ``run.steps`` was lowered, stays so."""
        if self._document is not None and not self._document.trained:
            self._write(replace(self._document, trained=True))
        self._drop_ahead()

    def _held(self, step: int) -> Document | None:
        held = (self._ahead.get(step), self._beside, self._document)
        return next((each for each in held if each and each.step == step), None)

    def _write(self, document: Document) -> None:
        held = self._document
        if held is None or held.step != document.step:
            self._settle()
        if held is None or held.step > document.step:
            # Another run's, or sampled by later weights than the checkpoint's.
            if not self._gives_way:
                move_aside(self.path)
                if held is not None:
                    self._drop_ahead()  # sampled by such weights, too
            self._gives_way = False
        self._document = document
        write_atomically(self.path, to_bytes(document))

    def _settle(self) -> None:
        if self.writer is not None:
            self.writer.wait()

    def _drop_ahead(self, before: int | None = None) -> None:
        """Remove the steps ahead that are before this one; None: all."""
        for step in [each for each in self._ahead if before is None or each < before]:
            assert self.ahead is not None
            del self._ahead[step]
            (self.ahead / _name(step)).unlink(missing_ok=True)


def check(path: Path, run: RunIdentity) -> Document | None:
    """The document in ``path``, if this run may continue from it or set it aside; writes nothing.

    Raises:
        RolloutBufferError: damaged, or of another, unfinished run or config.
    """
    if not os.path.lexists(path):
        return None
    document = read_document(
        path, "restore it, or start with --run.resume never, which moves it aside"
    )
    ways_on = (
        "resume that run, give this one another --run.buffer, "
        f"or start with --run.resume never, which moves {path} aside"
    )
    if document.run.id != run.id:
        if document.trained:
            return document
        raise RolloutBufferError(
            f"{path} holds step {document.step} of the unfinished run {document.run.name!r} "
            f"({document.run.id}), not of {run.name!r} ({run.id}); {ways_on}"
        )
    if changed := config_file.changes(document.run.config, run.config).refused:
        raise RolloutBufferError(
            f"{path} was sampled with another config ({'; '.join(changed)}); {ways_on}"
        )
    return document


def read_ahead(folder: Path, run: RunIdentity) -> Iterator[tuple[Path, Document]]:
    """The run's rollouts of steps ahead, with their files. What is damaged is sampled again."""
    for path in sorted(folder.glob("step-????????.json")):
        try:
            document = read_document(path, "it is sampled again")
        except RolloutBufferError as error:
            _warn_once(str(error))
            continue
        if document.run.id == run.id and path.name == _name(document.step):
            yield path, document


@cache  # both the checks before a run and the run read it
def _warn_once(text: str) -> None:
    logger.warning("%s", text)


def _name(step: int) -> str:
    return f"step-{step:08d}.json"


def lock(path: Path) -> FileLock:
    """The lock of the buffer at ``path``."""
    return FileLock(path.with_name(f".{path.name}.lock"), what=f"the rollout buffer {path}")
