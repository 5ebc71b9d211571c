"""Files: writing that survives a crash, and bounded reading of files from others.

Written: atomic replacement, locks that die with their process, moving aside. Read: regular files
only, no more of one than a bound, nothing nested deeper than any sane file; a FIFO would hang and
``/dev/zero`` would not end, so neither is opened. No content here.
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from io import BufferedReader, BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orjson
from safetensors import SafetensorError

from reason_llm.errors import BusyError, WriteError, one_line

logger = logging.getLogger(__name__)


class FileLock:
    """An exclusive lock that the kernel releases when the process ends in any way."""

    def __init__(
        self, path: Path, what: str, fix: str = "give this run its own --run.name and --run.buffer"
    ) -> None:
        self.path = path
        self.what = what
        self.fix = fix
        self._file: int | None = None

    def __enter__(self) -> Self:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = os.open(self.path, flags, 0o644)
            found = os.fstat(self._file)
            if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
                os.close(self._file)
                raise OSError(errno.EINVAL, f"{self.path.name} is a link or no regular file")
        except OSError as error:
            raise WriteError(
                f"{self.path.parent} cannot be written ({error.strerror}); choose a folder that can"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._file, 32).decode(errors="replace").strip()
            os.close(self._file)
            raise BusyError(
                f"process {holder} is using {self.what}; wait for it, end it, or {self.fix}"
            ) from error
        with suppress(OSError):  # a disk that is full holds the lock, if not our number
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()}\n".encode())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def write_for_oneself() -> None:
    """Make all later files of this process writable by its user alone, whatever the umask; a
    stricter umask stays."""
    os.umask(os.umask(0o077) | 0o022)


def discard_output() -> None:
    """Discard all later standard output after its reader went away, including Python's own flush at
    the end."""
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


CLOSED_OUTPUT = 128 + signal.SIGPIPE
"""Exit code of a program whose only work was to print, and whose reader went away."""


def check_writable(folder: Path) -> None:
    """Check that ``folder`` could be made and written, without trying.

    Raises:
        WriteError: with the part of the path that stands in the way.
    """
    try:
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    except OSError as error:  # such as a name that is too long
        raise WriteError(
            f"{folder} cannot be written ({error.strerror}); choose another place"
        ) from error
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} forbids it" if there.is_dir() else f"{there} is a file"
        raise WriteError(f"{folder} cannot be written: {problem}; choose another place")


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` with ``content`` such that a crash at any moment leaves the old or the new
    content whole.

    Raises:
        WriteError: the disk is full, read-only or forbidden; the old content is as it was.
    """
    beside = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Made anew: one that a kill left, or a link that somebody put there, is not written to.
        beside.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(beside, flags, 0o644), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):  # where nothing can be made, nothing can be removed
            beside.unlink()
        raise WriteError(
            f"{path} cannot be written ({error.strerror}); free or choose another place"
        ) from error


def open_to_append(path: Path) -> BufferedWriter:
    """The regular file at ``path``, created if needed, open for writing at its end.

    Raises:
        OSError: it cannot be opened, or is a FIFO or a device.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    handle = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is no regular file")
    return os.fdopen(handle, "ab")


@contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` to fill, which then takes its place: whole or not at all.

    Raises:
        WriteError: the disk is full, read-only or forbidden; ``target`` is as it was.
    """
    if target.is_symlink():
        raise WriteError(
            f"{target} is a link to {target.readlink()}, which a folder cannot replace; remove the "
            "link, or name the folder that it leads to"
        )
    beside = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir(parents=True)
        yield beside
        for file in beside.iterdir():
            sync(file)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise WriteError(
            f"{target} cannot be written ({one_line(error)}); free or choose another place"
        ) from error
    except BaseException:  # what is half done must not stay, whatever the reason
        shutil.rmtree(beside, ignore_errors=True)
        raise


def sync(path: Path) -> None:
    """Make a file's content, or the renames inside a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_aside(path: Path) -> None:
    """Rename ``path`` (a file or a folder), if it exists, to the first free
    ``<stem>.old-<n><suffix>``.

    Raises:
        WriteError: it cannot be renamed; it is as it was.
    """
    if not os.path.lexists(path):
        return
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    number = 1
    while os.path.lexists(target := path.with_name(f"{stem}.old-{number}{suffix}")):
        number += 1
    try:
        path.rename(target)
    except OSError as error:
        raise WriteError(
            f"{path} cannot be moved aside to {target} ({error.strerror}); move it by hand"
        ) from error
    logger.warning("%s was moved aside to %s", path, target)


MIB = 1 << 20


MOST_NESTING = 64
"""Lists in lists, and mappings in mappings."""


def open_regular(path: Path) -> BufferedReader:
    """The file at ``path``, open for reading, if it is a regular one (or a link to one).

    Raises:
        OSError: it cannot be opened, or is a folder, a FIFO, a socket or a device.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a NUL character") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise OSError(errno.EINVAL, f"it is {_kind(mode)}, not a regular file")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Content of the regular file at ``path``, refused beyond ``most_bytes``.

    Raises:
        OSError: as ``open_regular``, or it is larger than ``most_bytes``.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise too_large(most_bytes)
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:  # it grew meanwhile
        raise too_large(most_bytes)
    return content


def read_text(path: Path, most_bytes: int = MIB) -> str:
    """The UTF-8 text in the regular file at ``path``.

    Raises:
        OSError: as ``read_bounded``. UnicodeDecodeError: it is no UTF-8.
    """
    return read_bounded(path, most_bytes).decode()


def read_object(path: Path, most_bytes: int = 64 * MIB) -> dict[str, Any]:
    """The JSON object in the regular file at ``path``.

    Raises:
        OSError: as ``read_bounded``. ValueError: it is no JSON, no object, or nested too deep.
    """
    value = orjson.loads(read_bounded(path, most_bytes))
    check_nesting(value)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    return value


def sha256(path: Path, most_bytes: int) -> str:
    """Of the regular file at ``path``, which is read piece by piece.

    Raises:
        OSError: as ``read_bounded``.
    """
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most_bytes:
            raise too_large(most_bytes)
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular(path: Path) -> Path:
    """``path``, for a library that opens it by itself and would wait for a FIFO's other end.

    Raises:
        OSError: as ``open_regular``.
    """
    open_regular(path).close()
    return path


def too_large(most_bytes: int) -> OSError:
    """The error of a file that is larger than it may be."""
    return OSError(errno.EFBIG, f"it is larger than {most_bytes / MIB:,g} MiB")


def check_nesting(value: Any, most: int = MOST_NESTING) -> None:
    """Check that a parsed value is not nested too deep for recursion.

    Raises:
        ValueError: it is nested deeper than ``most``.
    """
    level = [value]
    for _ in range(most):
        level = [item for each in level for item in _items(each)]
        if not level:
            return
    raise ValueError(f"nested more than {most} levels deep")


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [item for item in value.values() if isinstance(item, list | Mapping)]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, list | Mapping)]
    return []


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for test, name in kinds.items() if test(mode)), "a device")
