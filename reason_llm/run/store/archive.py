"""The rollouts of past steps: ``<run>/buffers/step-00000012.json.gz``, with an index.

Each is the document of data/buffer.json as it was learned from, compressed. The oldest go when all
together are more than the bound, but for those that a checkpoint may need. ``index.jsonl`` has a
line for each that is there:

    {"step", "file", "rollouts", "tokens", "bytes"}
"""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import orjson

from reason_llm.config import changes
from reason_llm.errors import RolloutBufferError, WriteError
from reason_llm.files import (
    open_to_append,
    parsed_object,
    read_bounded,
    sealed,
    write_atomically,
)
from reason_llm.run.store.buffer import (
    Document,
    RunIdentity,
    read_document,
    to_bytes,
)

MAX_INDEX_BYTES = 64 << 20
FILES = "step-????????.json.gz"
"""What an archive holds; ``step-00000003.rescored.json.gz`` beside it is the user's."""
Keep = Literal["none", "all"] | int

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Entry:
    """One archived buffer."""

    step: int
    file: str
    rollouts: int
    tokens: int
    """Of the completions."""
    bytes: int
    """Compressed."""


class Archive:
    """The archived buffers of one run.

    Args:
        keep: ``none``; ``all``; or n: those of steps 0, n, 2n and so on.
        most_bytes: of all together; the newest is kept whatever its size.
    """

    def __init__(self, run_folder: Path, keep: Keep, most_bytes: int) -> None:
        self.folder = run_folder / "buffers"
        self.keep = keep
        self.most_bytes = most_bytes
        self._entries: dict[int, Entry] | None = None

    def wants(self, step: int) -> bool:
        """Whether this step's buffer is to be kept."""
        return self.keep == "all" or (self.keep != "none" and step % self.keep == 0)

    def read(self, step: int, run: RunIdentity) -> Document | None:
        """This step's document, if it exists and this run sampled it with this config. A damaged
        one, or one of another step, is skipped with a warning."""
        file = self._file(step)
        if not file.exists():
            return None
        document = self._read(file)
        if document is None or document.run.id != run.id:
            return None
        if document.step != step:
            logger.warning("%s holds step %d; it is passed over", file, document.step)
            return None
        changed = changes(document.run.config, run.config)
        return None if changed.refused or changed.warned else document

    def add(self, document: Document, needed_from: int | None = None) -> None:
        """Keep this document, replacing one of the same step.

        Args:
            needed_from: the step of the oldest checkpoint that the run may go on from; the
                rollouts since are kept whatever the bound. None: this document alone.

        Raises:
            WriteError: the disk is full or read-only; the others are as they were.
        """
        is_first = self._entries is None
        if self._entries is None:
            self._entries = {entry.step: entry for entry in self._find()}
        content = to_bytes(document, compressed=True)
        file = self._file(document.step)
        write_atomically(file, content)
        is_next = not is_first and document.step > max(self._entries, default=-1)
        entry = _entry(document, file.name, len(content))
        self._entries[entry.step] = entry
        total = sum(each.bytes for each in self._entries.values())
        needed = document.step if needed_from is None else min(needed_from, document.step)
        for old in sorted(self._entries.values(), key=lambda each: each.step):
            if total <= self.most_bytes or old.step >= needed:
                break
            (self.folder / old.file).unlink(missing_ok=True)
            del self._entries[old.step]
            total -= old.bytes
            is_next = False
        if is_next:
            self._append(entry)
        else:
            self._write_index()

    def _file(self, step: int) -> Path:
        return self.folder / _name(step)

    def _read(self, file: Path) -> Document | None:
        try:
            return read_document(file, "it is passed over")
        except RolloutBufferError as error:
            logger.warning("%s", error)
            return None

    def _find(self) -> list[Entry]:
        """Archived buffers in the folder, including those that a kill kept out of the index."""
        known = {entry.file: entry for entry in read_index(self.folder)}
        found = []
        for file in filter(Path.is_file, sorted(self.folder.glob(FILES))):
            entry = known.get(file.name)
            is_known = entry is not None and file == self._file(entry.step)
            if entry is None or not is_known or entry.bytes != file.stat().st_size:
                document = self._read(file)
                if document is None:
                    continue
                entry = _entry(document, file.name, file.stat().st_size)
            found.append(entry)
        return found

    def _append(self, entry: Entry) -> None:
        path = self.folder / "index.jsonl"
        try:
            with open_to_append(path) as file:
                file.write(_line(entry))
        except OSError as error:
            raise WriteError(
                f"{path} cannot be written ({error.strerror}); free the disk and run again"
            ) from error

    def _write_index(self) -> None:
        entries = sorted((self._entries or {}).values(), key=lambda each: each.step)
        write_atomically(self.folder / "index.jsonl", b"".join(map(_line, entries)))


def is_archived(document: Document) -> bool:
    """Whether the archive of the document's own run holds this step, and not another run's of the
    same name."""
    section = document.run.config.get("run")
    directory = section.get("directory") if isinstance(section, dict) else None
    if not isinstance(directory, str) or "\0" in directory:
        return False
    file = Path(directory) / document.run.name / "buffers" / _name(document.step)
    try:
        kept = read_document(file)
    except RolloutBufferError:
        return False
    return (kept.run.id, kept.step) == (document.run.id, document.step)


def _name(step: int) -> str:
    return f"step-{step:08d}.json.gz"


def read_index(folder: Path) -> list[Entry]:
    """The entries of ``<run>/buffers/index.jsonl`` whose lines are whole; none without an index."""
    path = folder / "index.jsonl"
    found = []
    try:
        content = read_bounded(path, MAX_INDEX_BYTES)
    except OSError:  # none yet; the next ``add`` finds the files themselves
        return []
    for line in content.splitlines():
        try:
            entry = Entry(**parsed_object(line))
        except (ValueError, TypeError):
            continue  # cut off by a kill; the next ``add`` finds the file itself
        counts = (entry.step, entry.rollouts, entry.tokens, entry.bytes)
        if set(map(type, counts)) == {int} and isinstance(entry.file, str):
            found.append(entry)
    return found


def _entry(document: Document, file: str, size: int) -> Entry:
    completions = [c for group in document.groups for c in group.completions]
    tokens = sum(len(c.token_ids) for c in completions)
    return Entry(document.step, file, len(completions), tokens, size)


def _line(entry: Entry) -> bytes:
    return sealed(orjson.dumps(asdict(entry))) + b"\n"
