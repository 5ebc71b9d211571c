"""Writing that survives a crash: atomic replacement, locks that die with their process, moving
aside. No content here."""

import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import SafetensorError

from reason_llm.errors import BusyError, WriteError, one_line

logger = logging.getLogger(__name__)


class FileLock:
    """An exclusive lock that the kernel drops with the process, however that ends."""

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
    """From here on, what this process makes can be written by its user alone, whatever the umask;
    a stricter umask stays as it is."""
    os.umask(os.umask(0o077) | 0o022)


def discard_output() -> None:
    """From here on, what is written to standard output, whose reader went away, goes nowhere; not
    even Python's own flush at the end fails."""
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


CLOSED_OUTPUT = 128 + signal.SIGPIPE
"""Exit code of a program whose only work was to print, and whose reader went away."""


def check_writable(folder: Path) -> None:
    """Whether ``folder`` could be made and written, without trying.

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
    """Replace ``path`` with ``content`` such that a crash at any moment leaves the old or the new,
    whole.

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
    """The regular file at ``path``, made if it is not there, open for writing at its end.

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
    """Make a file's content, or the renames inside a folder, last through a power cut."""
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
