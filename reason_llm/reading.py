"""Reading what others wrote: regular files only, no more of one than a bound, nothing nested deeper
than any sane file. What a file means is its reader's matter.

A FIFO would hang and ``/dev/zero`` would not end, so neither is opened for reading.
"""

import errno
import hashlib
import os
import stat
from collections.abc import Mapping
from io import BufferedReader
from pathlib import Path
from typing import Any

import orjson

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
    """All that is in the regular file at ``path``.

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
    """Whether what a parser gave can be walked through by recursion.

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
