"""Files: writing that survives a crash, and bounded reading of files from others.

Written: atomic replacement, locks that die with their process, moving aside. What a later stage or
command reads carries its SHA-256, written with it in one act: a JSON object as its first member
(``sealed``), a folder in ``digests.json``. Readers compare it (``compare``). What carries none, as
others' files, is read as it is. Read: regular files
only, no more of one than a bound, nothing nested deeper than any sane file; a FIFO would hang and
``/dev/zero`` would not end, so neither is opened. Of what they hold, only what could fill the
memory of whoever uses it is looked at: here a ``tokenizer.json``, which a page without torch reads,
too. What its library prints when it panics is kept from the terminal. The Hub is asked only where
it can be reached: its libraries try again for most of a minute.
"""

import base64
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader, BufferedWriter
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import orjson
from safetensors import SafetensorError

from reason_llm.errors import BusyError, NotAsWritten, WriteError, one_line

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
        except OSError as error:  # ENOLCK, of some network file systems
            os.close(self._file)
            raise WriteError(
                f"{self.path} cannot be locked ({one_line(error)}): its file system has no locks, "
                "so two processes could write the same files; put run.directory and run.buffer on "
                "a local disk, or mount it with locks"
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
def replacing_folder(target: Path, *, is_noted: bool = True) -> Iterator[Path]:
    """A folder beside ``target`` to fill, which then takes its place: whole or not at all.

    Args:
        is_noted: with ``digests.json``, which ``check_digests`` reads.

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
        if is_noted:
            _note_digests(beside)
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
        size = os.fstat(file.fileno()).st_size
        if size > most_bytes:
            raise too_large(most_bytes)
        content = file.read(size + 1)  # Python takes as much memory as it is asked to read
        while len(content) <= most_bytes and (more := file.read(MIB)):
            content += more  # it grew meanwhile, or has no size, as in /proc
    if len(content) > most_bytes:
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
    return parsed_object(read_bounded(path, most_bytes))


def parsed_object(content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``, without the SHA-256 that it may carry.

    Raises:
        NotAsWritten: its SHA-256 is another. ValueError: it is no JSON, no object, or nested too
            deep.
    """
    check_seal(content)
    value = orjson.loads(content)
    check_nesting(value)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    if content.startswith(_SEAL_BEGINS):
        del value["sha256"]
    return value


_SEAL_BEGINS, _SEAL_ENDS = b'{"sha256":"', b'",'
"""Around the 64 hexadecimal digits that a JSON object begins with."""
MANIFEST = "digests.json"
"""File of a folder that was written whole, with size and SHA-256 of the others."""


def sealed(content: bytes) -> bytes:
    """A JSON object's bytes with their SHA-256 as its first member."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"".join((_SEAL_BEGINS, digest, _SEAL_ENDS, memoryview(content)[1:]))


def check_seal(content: bytes, *, must_carry: bool = False) -> None:
    """Compare the SHA-256 that a JSON object begins with.

    Args:
        must_carry: an object without one is an error, too.

    Raises:
        NotAsWritten: it is another.
    """
    start = len(_SEAL_BEGINS) + 64
    body = start + len(_SEAL_ENDS)
    if not content.startswith(_SEAL_BEGINS) or content[start:body] != _SEAL_ENDS:
        if must_carry:
            raise NotAsWritten("it does not begin with its SHA-256")
        return
    digest = hashlib.sha256(b"{")
    digest.update(memoryview(content)[body:])
    expected = content[len(_SEAL_BEGINS) : start].decode(errors="replace")
    compare("it", digest.hexdigest(), expected)


def compare(what: str, found: str, expected: str) -> None:
    """Compare a SHA-256 with the one that was noted when a thing was written.

    Raises:
        NotAsWritten: they differ.
    """
    if found != expected:
        raise NotAsWritten(
            f"{what} is not what was written: its SHA-256 is {found:.12}..., and "
            f"{expected:.12}... was noted"
        )


def _note_digests(folder: Path) -> None:
    """Write ``digests.json``, of all but texts for a reader, which may be edited."""
    files = [file for file in sorted(folder.iterdir()) if file.suffix != ".md"]
    entries = {file.name: _entry(file) for file in files}
    content = orjson.dumps({"files": entries}, option=orjson.OPT_INDENT_2)
    (folder / MANIFEST).write_bytes(sealed(content))


def check_digests(folder: Path) -> dict[str, str]:
    """Compare the files of a folder with its ``digests.json``.

    Returns:
        SHA-256 by the name of each file that is noted; empty where the folder carries no digests.

    Raises:
        NotAsWritten: one is missing or is not what was written. OSError: one cannot be read.
    """
    if not os.path.lexists(folder / MANIFEST):
        return {}
    noted = read_object(folder / MANIFEST, MIB).get("files")
    found = {}
    for name, entry in noted.items() if isinstance(noted, dict) else ():
        file = folder / name
        if Path(name).name != name or not isinstance(entry, dict) or not os.path.lexists(file):
            raise NotAsWritten(f"{name!r:.100} is missing")
        if file.is_symlink():
            raise NotAsWritten(f"{name} is a link")
        if file.stat().st_size != entry.get("bytes"):
            raise NotAsWritten(
                f"{name} is not what was written: it has {file.stat().st_size} bytes, and "
                f"{entry.get('bytes')!s:.20} were noted"
            )
        found[name] = _unless_known(file)
        compare(name, found[name], str(entry.get("sha256")))
    return found


_KNOWN: dict[Path, tuple[tuple[int, int, int], str]] = {}
"""SHA-256 of files that this process has read, by path, with size, time and inode."""


def _unless_known(file: Path) -> str:
    """The file's SHA-256, taken once by a process as long as the file is not written to."""
    now = _state_of(file)
    if file not in _KNOWN or _KNOWN[file][0] != now:
        _KNOWN[file] = now, sha256(file, MOST_BYTES)
    return _KNOWN[file][1]


def _state_of(file: Path) -> tuple[int, int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256(file, MOST_BYTES)}


MOST_BYTES = 1 << 40
"""Of a file whose digest is taken."""
PIECE_BYTES = 16 * MIB
KEPT_FROM_BYTES = 64 * MIB
"""Size of a file whose digest is kept on disk."""
MOST_KEPT = 10_000


def large_digest(files: Sequence[Path]) -> str:
    """SHA-256 over the names, the sizes and all bytes of files such as a model's weights.

    Each file is read by several threads, in pieces of 16 MiB whose SHA-256 are digested in turn.
    Those of large files are kept in the user's cache folder by path, size, time and inode, so that
    the same file costs nothing the next time.

    Raises:
        OSError: as ``open_regular``.
    """
    kept, digests = _kept_digests(), {}
    for file in files:
        place, state = str(file.resolve()), list(_state_of(file))
        if kept.get(place, [None])[:-1] == state:
            digests[place] = kept[place]
        else:
            digests[place] = [*state, _in_pieces(file)]
    # A file of this moment may be written once more without another time.
    old = time.time_ns() - 2 * 10**9
    new = {
        place: value
        for place, value in digests.items()
        if value[0] >= KEPT_FROM_BYTES and value[1] < old and kept.get(place) != value
    }
    if new:
        _keep_digests({**kept, **new})
    lines = [
        f"{file.name} {digests[str(file.resolve())][0]} {digests[str(file.resolve())][-1]}\n"
        for file in files
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _in_pieces(file: Path) -> str:
    with open_regular(file) as opened, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        handle = opened.fileno()
        places = range(0, os.fstat(handle).st_size, PIECE_BYTES)
        pieces = pool.map(
            lambda place: hashlib.sha256(os.pread(handle, PIECE_BYTES, place)).digest(), places
        )
        return hashlib.sha256(b"".join(pieces)).hexdigest()


def _digests_path() -> Path:
    cache_folder = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache_folder) / "reason_llm" / "digests.json"


def _kept_digests() -> dict[str, list[Any]]:
    """Size, time, inode and digest by path; empty where nothing that can be read was kept."""
    try:
        kept = read_object(_digests_path(), 16 * MIB)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home
        return {}
    return {place: value for place, value in kept.items() if isinstance(value, list)}


def _keep_digests(digests: Mapping[str, list[Any]]) -> None:
    newest = dict(list(digests.items())[-MOST_KEPT:])
    with suppress(WriteError, RuntimeError):  # it is taken again next time
        write_atomically(_digests_path(), sealed(orjson.dumps(newest)))


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


MOST_TEXT_CHARACTERS = 20_000
"""Of any one text in a tokenizer.json. The longest tokens of published ones have some hundreds."""
MOST_STEPS = 32
"""In a normalizer, a pre-tokenizer, a post-processor or a decoder."""
MOST_GROWTH = {("normalizer", "pre_tokenizer"): 512, ("post_processor",): 4, ("decoder",): 4}
"""Times that these may make a text longer together, as ``_growth`` counts it. The most of published
ones is 288 (SeamlessM4T: three patterns and a map with Unicode's compatibility forms, 18 for 1)."""
_DOUBLES = {"ByteLevel", "Metaspace", "CTC", "BPEDecoder", "WordPiece"}
"""Steps that may write two characters for one, by the options that a file can set."""


def check_tokenizer(value: Any) -> None:
    """Check that no text grows without bound in the tokenizer of a parsed tokenizer.json.

    Its steps run in Rust, which no time limit of ours ends: a step that writes ``aa`` for ``a``,
    forty times in a row, would fill any memory.

    Raises:
        ValueError: a step or a row of steps lets a text grow too much, or can take for ever.
    """
    steps = {part: list(_steps(value.get(part))) for parts in MOST_GROWTH for part in parts}
    for parts, most in MOST_GROWTH.items():
        growth = 1
        for part in parts:
            if len(steps[part]) > MOST_STEPS:
                raise ValueError(f"its {part} has {len(steps[part])} steps, over {MOST_STEPS}")
            for step in steps[part]:
                growth *= _growth(step)
                if growth > most:
                    raise ValueError(f"its {part} may make a text over {most} times as long")
    for step in steps["decoder"]:
        if isinstance(step.get("pattern"), dict) and "Regex" in step["pattern"]:
            raise ValueError("its decoder searches with a regular expression, which may not end")
    charsmaps = {id(step.get("precompiled_charsmap")) for step in steps["normalizer"]}
    for text in _texts(value):
        if len(text) > MOST_TEXT_CHARACTERS and id(text) not in charsmaps:
            raise ValueError(f"it holds a text of {len(text)} characters ({text[:20]!r}...)")


def _steps(value: Any) -> Iterator[dict[str, Any]]:
    """The steps of a part of a tokenizer, those of sequences in it one by one."""
    if isinstance(value, list):
        for each in value:
            yield from _steps(each)
    elif isinstance(value, dict):
        inner = [value[n] for n in ("normalizers", "pretokenizers", "processors", "decoders")
                 if n in value]  # fmt: skip
        yield from _steps(inner) if value.get("type") == "Sequence" else iter([value])


def _growth(step: dict[str, Any]) -> int:
    """Times that a step may make a text longer, rounded up."""
    kind = step.get("type")
    if kind == "Replace":
        pattern, written = step.get("pattern"), len(str(step.get("content", "")))
        literal = pattern.get("String") if isinstance(pattern, dict) else pattern
        if isinstance(literal, str) and literal:
            return max(1, -(-written // len(literal)))
        return 1 + written  # what it finds may be empty
    if kind == "Prepend":
        return 1 + len(str(step.get("prepend", "")))
    if kind == "Precompiled":
        return _longest_mapped(step.get("precompiled_charsmap"))
    if kind == "TemplateProcessing":
        single = step.get("single")
        pieces = single if isinstance(single, list) else []
        return max(1, sum(isinstance(each, dict) and "Sequence" in each for each in pieces))
    return 2 if kind in _DOUBLES else 1


def _longest_mapped(charsmap: Any) -> int:
    """Characters of the longest text that a precompiled map of SentencePiece may write for one.

    A map is a 32-bit size in bytes, a trie of that size, and texts that a NUL ends.
    """
    content = base64.b64decode(str(charsmap or ""), validate=True)
    size = int.from_bytes(content[:4], "little")
    if len(content) < 4 or size > len(content) - 4 or size % 4 or not size:
        raise ValueError("the map of characters in its normalizer is damaged")
    texts = content[4 + size :].decode()
    return max(1, *map(len, texts.split("\0")))


def _texts(value: Any) -> Iterator[str]:
    left = [value]
    while left:
        each = left.pop()
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each
            left += each.values()
        elif isinstance(each, list):
            left += each


_STDERR = threading.RLock()


class Panic(RuntimeError):
    """A library that is written in Rust gave up."""


@contextmanager
def without_panics() -> Iterator[None]:
    """Within: a panic of a Rust library is a ``Panic`` and prints nothing.

    Rust writes its message and its backtrace to standard error itself, so what is written there by
    anybody is held back for as long as this lasts, and written then. One thread at a time.

    Raises:
        Panic: one line with the cause.
    """
    with _STDERR, _held_back() as held:
        try:
            yield
        except Exception:
            raise
        except BaseException as error:  # a panic is no Exception, and has no class to name
            if type(error).__name__ != "PanicException":
                raise
            held.is_panic = True
            raise Panic(one_line(error)) from None


class _HeldBack:
    is_panic = False


@contextmanager
def _held_back() -> Iterator[_HeldBack]:
    """Within: standard error goes to memory. At the end it is written, but not Rust's message."""
    held = _HeldBack()
    try:
        own = os.dup(2)
    except OSError:  # closed: there is nothing to hold back
        yield held
        return
    memory = os.memfd_create("stderr")
    try:
        os.dup2(memory, 2)
        yield held
    finally:
        os.dup2(own, 2)
        text = os.pread(memory, os.fstat(memory).st_size, 0)
        os.close(memory)
        os.close(own)
        if held.is_panic:
            text = text[: max(0, text.find(b"\nthread '"))] if b"\nthread '" in text else b""
        if text:
            with suppress(OSError):  # its reader went away
                os.write(2, text)


def _items(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [item for item in value.values() if isinstance(item, list | Mapping)]
    if isinstance(value, list):
        return [item for item in value if isinstance(item, list | Mapping)]
    return []


def _kind(mode: int) -> str:
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
    return next((name for test, name in kinds.items() if test(mode)), "a device")


HUB_SECONDS = 2.0
"""Of opening a connection to the Hub, the look-up of its name included."""
_PORTS = {"http": 80, "https": 443}


def reach_hub() -> bool:
    """Whether the Hub, or the proxy before it, can be reached. If not, its libraries are told to
    take only what is in their cache, until ``hub_restored``."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        _connect(constants.ENDPOINT)
    except OSError:
        constants.HF_HUB_OFFLINE = True
        return False
    return True


@contextmanager
def hub_restored() -> Iterator[None]:
    """After the block, the Hub's libraries ask it again if they did before."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def hub_commit(repository: str) -> str:
    """Commit of a model on the Hub whose config is in the cache; empty without one."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(repository, "config.json")
    except HFValidationError:  # it is no name of a repository
        return ""
    return Path(found).parent.name if isinstance(found, str) else ""


def is_in_hub_cache(repository: str, name: str) -> bool:
    """Whether a file of a model on the Hub was downloaded before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(repository, name), str)
    except HFValidationError:  # it is no name of a repository
        return False


@cache
def _connect(endpoint: str) -> None:
    """Open a connection and close it; one that succeeded is not tried again.

    Raises:
        OSError: it took longer than ``HUB_SECONDS``, or failed.
    """
    url = urlsplit(endpoint)
    proxy = None if proxy_bypass(url.hostname or "") else getproxies().get(url.scheme)
    if proxy is not None:
        url = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
    place = (url.hostname or "", url.port or _PORTS.get(url.scheme, 1080))
    connected: list[bool] = []

    def connect() -> None:
        with suppress(OSError), socket.create_connection(place, timeout=HUB_SECONDS):
            connected.append(True)

    thread = threading.Thread(target=connect, daemon=True)  # the look-up of a name has no limit
    thread.start()
    thread.join(HUB_SECONDS)
    if not connected:
        raise OSError(errno.EHOSTUNREACH, f"{place[0]} cannot be reached")
