"""data/buffer.json: the rollouts of one step, on disk between sampling and learning.

One document (``document``), written to a temporary file and renamed, so that a reader never finds
half of one, even after a kill. A lock that ends with its process protects it. A document of another
run is refused, or overwritten if that run is finished.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from reason_llm.config import file as config_file
from reason_llm.errors import RolloutBufferError
from reason_llm.files import FileLock, move_aside, write_atomically
from reason_llm.rollout import Group
from reason_llm.run.store.document import Document, RunIdentity, read_document, to_bytes
from reason_llm.run.store.writer import BackgroundWriter

Source = Callable[[int, RunIdentity], Document | None]
"""A further place that may hold all rollouts of this step of the run, with advantages."""


@dataclass(eq=False)
class RolloutBuffer:
    """The buffer of one run; ``with RolloutBuffer(path, run) as buffer`` holds its lock.

    Args:
        sources: asked in this order for a step that is not whole in the buffer.
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
    writer: BackgroundWriter | None = None
    discard: bool = False
    _gives_way: bool = False
    """Whether the file holds a finished run's rollouts."""
    _document: Document | None = None
    """This run's rollouts in the file."""
    _second: Document | None = None
    """The current step's rollouts from elsewhere, if the file holds a later step."""

    def __enter__(self) -> Self:
        self._lock = lock(self.path)
        with ExitStack() as until_checked:
            until_checked.enter_context(self._lock)
            document = None if self.discard else check(self.path, self.run)
            until_checked.pop_all()  # from here on, __exit__ lets go of the lock
        self._gives_way = document is not None and document.run.id != self.run.id
        self._document = None if self._gives_way else document
        return self

    def __exit__(self, *error: object) -> None:
        self._lock.__exit__(None, None, None)

    def find(self, step: int) -> Document | None:
        """The rollouts of a step anywhere on disk, possibly not ``complete``; None if there are
        none."""
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
        document = self.find(step)
        if document is None or document is self._document or document is self._second:
            return document
        document = self._as_own(document, checkpoint)
        if document.complete and self._document is not None and self._document.step > step:
            self._second = document
        else:
            self._write(document)
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
            self.run,
            step,
            whole,
            False,
            len(groups) if drawn is None else drawn,
            groups,
            dict(counts),
            checkpoint,
            version if held is None else held.weight_version,  # that of the step's first rollouts
        )
        self._keep(document)

    def finish(self) -> None:
        """Mark the run as over, so that another run may overwrite its rollouts. A step that was
        sampled in part, before ``run.steps`` was lowered, stays so."""
        if self._document is not None and not self._document.trained:
            self._write(replace(self._document, trained=True))

    def _held(self, step: int) -> Document | None:
        held = (self._second, self._document)
        return next((document for document in held if document and document.step == step), None)

    def _as_own(self, document: Document, checkpoint: str | None) -> Document:
        """Rollouts that were found elsewhere, as the file holds them."""
        return replace(document, run=self.run, trained=False, checkpoint=checkpoint)

    def _keep(self, document: Document) -> None:
        """Write newly sampled rollouts."""
        self._write(document)

    def _write(self, document: Document) -> None:
        held = self._document
        if held is None or held.step != document.step:
            self._settle()
        if held is None or held.step > document.step:
            if not self._gives_way:  # sampled by later weights than the checkpoint's
                self._set_aside()
            self._gives_way = False
        self._document = document
        write_atomically(self.path, to_bytes(document))

    def _set_aside(self) -> None:
        move_aside(self.path)

    def _settle(self) -> None:
        if self.writer is not None:
            self.writer.wait()


def check(path: Path, run: RunIdentity) -> Document | None:
    """The document in ``path``, if this run may continue from it or overwrite it; writes nothing.

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


def lock(path: Path) -> FileLock:
    """The lock of the buffer at ``path``."""
    return FileLock(path.with_name(f".{path.name}.lock"), what=f"the rollout buffer {path}")
