"""Files of the data's cache: arrays behind a description, with a digest of both, so that a damaged
file is recognised. Each file is replaced as a whole and is mapped when it is read. Not here: which
data a file is for (``kept``, ``render.order``)."""

import hashlib
import mmap
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from reason_llm.files import MIB, open_regular, write_atomically

MOST_FILES, MOST_BYTES = 16, 8192 * MIB
"""Limits for the files of one kind; those that were read the longest ago are removed."""
FORMAT = b"reason_llm data 2\n"
UNFINISHED_SECONDS = 86400
"""Age from which a file that a killed process was writing is removed."""
_HEAD = len(FORMAT) + 32  # the format, and the digest of what follows
"""Place of the description: its length in 8 bytes, then JSON. The arrays follow, on multiples of 8
bytes from its end."""


def folder() -> Path:
    """The folder of the files: ``$XDG_CACHE_HOME/reason_llm/data``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "reason_llm" / "data"


def write(path: Path, described: Any, arrays: Sequence[Any]) -> None:
    """Write a description, JSON, and arrays, which need no copy; remove files beyond the limits.

    Raises:
        WriteError: the disk is full, read-only or forbidden.
    """
    views = [memoryview(each).cast("B") for each in arrays]
    head = orjson.dumps([described, [len(view) for view in views]])
    parts: list[Any] = [len(head).to_bytes(8, "little"), head]
    for view in views:
        parts += [view, bytes(-len(view) % 8)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    own = path.with_suffix(f"{path.suffix}.{os.getpid()}")  # another process may write the same
    write_atomically(own, (FORMAT, digest.digest(), *parts))
    own.replace(path)
    _keep_bounds(path)


def read(path: Path) -> tuple[Any, list[memoryview]]:
    """The description and the arrays, as bytes that are mapped.

    Raises:
        OSError: it cannot be read. ValueError: it is not what was written.
    """
    with open_regular(path) as file:
        start = file.read(_HEAD)
        digest = hashlib.file_digest(file, "sha256").digest()  # not through the map: no memory
        if start != FORMAT + digest:
            raise ValueError("its digest is another")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    with suppress(OSError):
        os.utime(path)
    place = _HEAD + 8 + int.from_bytes(mapped[_HEAD : _HEAD + 8], "little")
    described, sizes = orjson.loads(mapped[_HEAD + 8 : place])
    arrays = []
    for size in sizes:
        arrays.append(mapped[place : place + size])
        place += -(-size // 8) * 8
    return described, arrays


def _keep_bounds(written: Path) -> None:
    """Remove the files of one kind that were read the longest ago, until the rest is within the
    limits, and what killed processes left."""
    with suppress(OSError):  # another process removes them, too
        found = sorted(written.parent.glob(f"*{written.suffix}"), key=lambda f: -f.stat().st_mtime)
        total = 0
        for number, file in enumerate(found):
            total += file.stat().st_size
            if file != written and (number >= MOST_FILES or total > MOST_BYTES):
                file.unlink(missing_ok=True)
        for file in [*written.parent.glob(".*.writing"), *written.parent.glob("*.*.[0-9]*")]:
            if time.time() - file.stat().st_mtime > UNFINISHED_SECONDS:
                file.unlink(missing_ok=True)
