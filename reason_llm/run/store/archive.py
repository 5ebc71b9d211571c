"""The rollouts of past steps: ``<run>/buffers/step-00000012.json.gz``, the document of
data/buffer.json as it was learned from, compressed."""

import logging
from pathlib import Path

from reason_llm.config import changes
from reason_llm.errors import RolloutBufferError
from reason_llm.files import write_atomically
from reason_llm.run.store.document import Document, RunIdentity, read_document, to_bytes

FILES = "step-????????.json.gz"
"""Pattern of the archive's files; ``step-00000003.rescored.json.gz`` is the user's."""

logger = logging.getLogger(__name__)


class Archive:
    """The archived buffers of one run.

    Args:
        max_bytes: of all together; the newest is kept whatever its size. 0: none is kept.
    """

    def __init__(self, run_folder: Path, max_bytes: int) -> None:
        self.folder = run_folder / "buffers"
        self.max_bytes = max_bytes

    def read(self, step: int, run: RunIdentity) -> Document | None:
        """This step's document before it was trained on, if it exists and this run sampled it with
        this config. A damaged document, or one of another step, is skipped with a warning."""
        file = self.folder / _name(step)
        if not file.exists():
            return None
        try:
            document = read_document(file, "it is skipped")
        except RolloutBufferError as error:
            logger.warning("%s", error)
            return None
        if document.run.id != run.id:
            return None
        if document.step != step:
            logger.warning("%s holds step %d; it is skipped", file, document.step)
            return None
        changed = changes(document.run.config, run.config)
        return None if changed.refused or changed.warned else document

    def add(self, document: Document, needed_from: int | None = None) -> None:
        """Keep this document, replacing one of the same step; the oldest go beyond the bound.
        Raises WriteError, and the others are as they were.

        Args:
            needed_from: the step of the oldest checkpoint that the run may resume from; the
                rollouts since are kept whatever the bound. None: this document alone.
        """
        newest = self.folder / _name(document.step)
        write_atomically(newest, to_bytes(document, compressed=True))
        files = [file for file in sorted(self.folder.glob(FILES)) if file.is_file()]
        sizes = {file: file.stat().st_size for file in files}
        needed = document.step if needed_from is None else min(needed_from, document.step)
        total = sum(sizes.values())
        for file, size in sizes.items():
            if total <= self.max_bytes or file.name >= _name(needed):
                break
            file.unlink(missing_ok=True)
            total -= size


def _name(step: int) -> str:
    return f"step-{step:08d}.json.gz"
