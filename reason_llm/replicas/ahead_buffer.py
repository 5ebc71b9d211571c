"""The buffer of a run that samples steps ahead of the one that is learned: a folder holds a
document for each of them until its turn, when the buffer's file takes it."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from reason_llm.errors import RolloutBufferError
from reason_llm.files import write_atomically
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.document import Document, RunIdentity, read_document, to_bytes

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class AheadBuffer(RolloutBuffer):
    """A ``RolloutBuffer`` that also holds rollouts of later steps."""

    folder: Path = field(kw_only=True)
    """Folder of the steps that are sampled ahead."""
    _ahead: dict[int, Document] = field(default_factory=dict)
    """Rollouts in the files of the folder, by step."""
    _current: int | None = None
    """Step whose turn it is; later ones are ahead."""

    def __enter__(self) -> Self:
        super().__enter__()
        if not self.discard:
            self._ahead = _read_ahead(self.folder, self.run)
        return self

    def read(self, step: int, checkpoint: str | None = None) -> Document | None:
        """See ``RolloutBuffer``; it is this step's turn."""
        if any(before < step for before in self._ahead):
            self._settle()
            self._drop(step)
        self._current = step
        document = super().read(step, checkpoint)
        if document is self._document:
            self._drop(step + 1)
        return document

    def finish(self) -> None:
        """See ``RolloutBuffer``."""
        super().finish()
        self._drop()

    def _held(self, step: int) -> Document | None:
        return self._ahead.get(step) or super()._held(step)

    def _as_own(self, document: Document, checkpoint: str | None) -> Document:
        if document is self._ahead.get(document.step):
            return document  # it names the checkpoint of the policy that sampled it
        return super()._as_own(document, checkpoint)

    def _keep(self, document: Document) -> None:
        if self._current is None or document.step <= self._current:
            super()._keep(document)
            return
        self._ahead[document.step] = document
        write_atomically(self.folder / _name(document.step), to_bytes(document))

    def _set_aside(self) -> None:
        super()._set_aside()
        if self._document is not None:  # what is ahead was sampled by later weights, too
            self._drop()

    def _drop(self, before: int | None = None) -> None:
        """Remove the steps ahead that are before this one; None: all."""
        for step in [step for step in self._ahead if before is None or step < before]:
            del self._ahead[step]
            (self.folder / _name(step)).unlink(missing_ok=True)


def _read_ahead(folder: Path, run: RunIdentity) -> dict[int, Document]:
    """The run's rollouts of steps ahead, by step. What is damaged is sampled again."""
    documents = dict[int, Document]()
    for path in sorted(folder.glob("step-????????.json")):
        try:
            document = read_document(path, "it is sampled again")
        except RolloutBufferError as error:
            logger.warning("%s", error)
            continue
        if document.run.id == run.id and path.name == _name(document.step):
            documents[document.step] = document
    return documents


def _name(step: int) -> str:
    return f"step-{step:08d}.json"
