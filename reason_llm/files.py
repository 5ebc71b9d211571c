"""Files: writing that survives a crash, and bounded reading of files from others.

Files that a later stage or command reads carry their SHA-256: a JSON object as its first member
(``sealed``), a folder in ``digests.json``; files without one are read as they are. Regular files
alone are opened, as a FIFO would hang and ``/dev/zero`` would not end.
"""

import difflib
import errno
import fcntl
import hashlib
import logging
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from io import BufferedReader, BufferedWriter
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import orjson
from safetensors import SafetensorError

from reason_llm.errors import BusyError, NotAsWritten, WriteError, one_line

T = TypeVar("T")
MAX_NEIGHBORS = 10_000
"""Files of a folder among which a similar name is looked for."""

logger = logging.getLogger(__name__)


@dataclass
class FileLock:
    """An exclusive lock that the kernel releases when the process ends in any way."""

    path: Path
    what: str
    fix: str = "give this run its own --run.name and --run.buffer"
    _file: int | None = None

    def __enter__(self) -> Self:
        try:
            self._take()
        except BaseException:  # an interrupt, too
            self.__exit__()
            raise
        return self

    def _take(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            self._file = os.open(self.path, flags, 0o600)  # who can read it can lock it
            status = os.fstat(self._file)
            if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
                raise OSError(errno.EINVAL, f"{self.path.name} is a link or no regular file")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if isinstance(error, BlockingIOError) and self._file is not None:
                raise self._busy(self._file) from error
            raise WriteError(  # ENOLCK: of some network file systems
                f"{self.path} cannot be written and locked ({error.strerror}); put run.directory "
                "and run.buffer into a folder that can be written, on a disk with locks"
            ) from error
        with suppress(OSError):  # a disk that is full holds the lock, if not our number
            os.ftruncate(self._file, 0)
            os.write(self._file, f"{os.getpid()}\n".encode())

    def check_free(self) -> None:
        """Raise a BusyError if another process holds it; write nothing."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return  # taking it says what is wrong
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise self._busy(file) from error
        except OSError:
            return
        finally:
            os.close(file)

    def _busy(self, file: int) -> BusyError:
        holder = os.read(file, 32).decode(errors="replace").strip()
        return BusyError(
            f"process {holder} is using {self.what}; wait for it, end it, or {self.fix}"
        )

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def restrict_umask() -> None:
    """Make all later files of this process writable by its user only; a stricter umask stays."""
    os.umask(os.umask(0o077) | 0o022)


def discard_output() -> None:
    """After the reader of standard output is gone, discard all output, also Python's last flush."""
    nothing = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(nothing, sys.stdout.fileno())
    os.close(nothing)


CLOSED_OUTPUT = 128 + signal.SIGPIPE
"""Exit code of a program whose output was closed by its reader."""


def check_writable(folder: Path) -> None:
    """Check that ``folder`` could be made and written; nothing is tried."""
    try:
        there = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    except OSError as error:  # for example, the name is too long
        raise WriteError(
            f"{folder} cannot be written ({error.strerror}); choose another place"
        ) from error
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        problem = f"{there} forbids it" if there.is_dir() else f"{there} is a file"
        raise WriteError(f"{folder} cannot be written: {problem}; choose another place")


def write_atomically(path: Path, content: bytes | Sequence[Any]) -> None:
    """Replace ``path`` with ``content``, bytes or parts of them, such that a crash at any moment
    leaves the old or the new content whole; after a WriteError it is the old one."""
    temporary = path.with_name(f".{path.name}.writing")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A new file: not one that a kill left, and not a link that somebody put there.
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with os.fdopen(os.open(temporary, flags, 0o644), "wb") as file:
            parts: Sequence[Any] = [content] if isinstance(content, bytes) else content
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        sync(path.parent)
    except OSError as error:
        with suppress(OSError):  # a folder without write access: nothing can be removed, either
            temporary.unlink()
        raise WriteError(
            f"{path} cannot be written ({error.strerror}); free or choose another place"
        ) from error


def open_to_append(path: Path) -> BufferedWriter:
    """The regular file at ``path``, created if needed, open for writing at its end."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
    handle = os.open(path, flags, 0o644)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return os.fdopen(handle, "ab")


@contextmanager
def replacing_folder(
    target: Path, *, is_noted: bool = True, known: Mapping[str, str] = {}
) -> Iterator[Path]:
    """A temporary folder to fill, which then replaces ``target``: whole or not at all.
    ``digests.json`` is added if it ``is_noted``; ``known`` digests of files, by name, are not
    computed again. After a WriteError ``target`` is unchanged."""
    if target.is_symlink():
        raise WriteError(
            f"{target} is a link to {target.readlink()}, which a folder cannot replace; remove the "
            "link, or name the folder that it leads to"
        )
    temporary = target.with_name(f".{target.name}.writing")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if is_noted:  # except texts for users, who may edit them
            entries = {
                file.name: {
                    "bytes": file.stat().st_size,
                    "sha256": known.get(file.name) or sha256_of_pieces(file),
                }
                for file in sorted(temporary.iterdir())
                if file.suffix != ".md"
            }
            content = orjson.dumps({"files": entries}, option=orjson.OPT_INDENT_2)
            (temporary / MANIFEST).write_bytes(sealed(content))
        for file in temporary.iterdir():
            sync(file)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError) as error:
        raise WriteError(
            f"{target} cannot be written ({one_line(error)}); free or choose another place"
        ) from error
    finally:  # a half-made folder must never stay
        shutil.rmtree(temporary, ignore_errors=True)


def sync(path: Path) -> None:
    """Make a file's content, or the renames in a folder, survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def move_aside(path: Path) -> None:
    """Rename a file or a folder, if it exists, to the first free ``<stem>.old-<n><suffix>``."""
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
            f"{path} cannot be renamed to {target} ({error.strerror}); rename it by hand"
        ) from error
    logger.warning("%s was renamed to %s", path, target)


MIB = 1 << 20
MAX_NESTING = 64


def open_regular(path: Path) -> BufferedReader:
    """The regular file at ``path`` (or a link to one), open for reading; raises OSError."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:
        raise OSError(errno.EINVAL, "its name holds a NUL character") from error
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket"}
        kind = next((name for test, name in kinds.items() if test(mode)), "a device")
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
    return os.fdopen(handle, "rb")


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Content of the regular file at ``path``; raises OSError above ``max_bytes``."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise too_large(max_bytes)
        content = file.read(size + 1)  # Python allocates as much memory as it is asked to read
        while len(content) <= max_bytes and (more := file.read(MIB)):
            content += more  # it grew meanwhile, or has no size, as in /proc
    if len(content) > max_bytes:
        raise too_large(max_bytes)
    return content


def read_text(path: Path, max_bytes: int = MIB) -> str:
    """The UTF-8 text in the regular file at ``path``."""
    return read_bounded(path, max_bytes).decode()


def read_object(path: Path, max_bytes: int = 64 * MIB) -> dict[str, Any]:
    """The JSON object in the regular file at ``path``."""
    return parsed_object(read_bounded(path, max_bytes))


def parsed_object(content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``, whose SHA-256, if it carries one, is right."""
    check_seal(content)
    value = orjson.loads(content)
    check_nesting(value)
    if not isinstance(value, dict):
        raise ValueError(f"it holds {type(value).__name__}, not an object")
    if content.startswith(_SEAL_BEGINS):
        del value["sha256"]
    return value


_SEAL_BEGINS, _SEAL_ENDS = b'{"sha256":"', b'",'
"""Text around the 64 hexadecimal digits that a JSON object begins with."""
MANIFEST = "digests.json"
"""File of a folder that was written whole, with size and SHA-256 of the others."""


def sealed(content: bytes) -> bytes:
    """A JSON object's bytes with their SHA-256 as its first member."""
    digest = hashlib.sha256(content).hexdigest().encode()
    return b"".join((_SEAL_BEGINS, digest, _SEAL_ENDS, memoryview(content)[1:]))


def check_seal(content: bytes, *, must_carry: bool = False) -> None:
    """Compare the SHA-256 that a JSON object begins with, or that it ``must_carry``."""
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


def compare(what: str, actual: str, expected: str) -> None:
    """Raises NotAsWritten where a SHA-256 differs from the one that was noted."""
    if actual != expected:
        raise NotAsWritten(
            f"{what} is not what was written: its SHA-256 is {actual:.12}..., and "
            f"{expected:.12}... was noted"
        )


def recorded_digest(file: Path) -> str:
    """SHA-256 of a file by the ``digests.json`` of its folder, without reading the file."""
    return str(read_object(file.parent / MANIFEST, MIB)["files"][file.name]["sha256"])


def check_digests(
    folder: Path, is_read: Callable[[str], bool] = lambda name: True
) -> dict[str, str]:
    """Compare the files of a folder that the caller reads with its ``digests.json``; return their
    SHA-256 by name, empty where the folder carries none."""
    if not os.path.lexists(folder / MANIFEST):
        return {}
    recorded = read_object(folder / MANIFEST, MIB).get("files")
    digests = {}
    for name, entry in recorded.items() if isinstance(recorded, dict) else ():
        file = folder / name
        if not is_read(name):
            continue
        if Path(name).name != name or not isinstance(entry, dict) or not os.path.lexists(file):
            raise NotAsWritten(f"{name!r:.100} is missing")
        if file.is_symlink():
            raise NotAsWritten(f"{name} is a link")
        status = file.stat()
        # The size comes first: it is known without reading the file.
        if status.st_size != entry.get("bytes"):
            raise NotAsWritten(
                f"{name} is not what was written: it has {status.st_size} bytes, and "
                f"{entry.get('bytes')!s:.20} were noted"
            )
        digests[name] = _known(file, status.st_size, status.st_mtime_ns, status.st_ino)
        compare(name, digests[name], str(entry.get("sha256")))
    return digests


@lru_cache(1024)
def _known(file: Path, *state: int) -> str:
    """SHA-256 of a file, which this process reads once in each ``state``."""
    return sha256_of_pieces(file)


MAX_BYTES = 1 << 40
PIECE_BYTES = 16 * MIB


def large_digest(files: Sequence[Path], known: Mapping[str, str] = {}) -> str:
    """SHA-256 over the names, the sizes and all bytes of files such as a model's weights; files
    whose SHA-256 is ``known``, from ``check_digests``, are not read again."""
    lines = [
        f"{file.name} {file.stat().st_size} {known.get(file.name) or sha256_of_pieces(file)}\n"
        for file in files
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def sha256_of_pieces(file: Path) -> str:
    """SHA-256 of a file of up to 16 MiB; of a larger one that of the SHA-256 of its pieces of 16
    MiB, which several cores compute; raises as ``open_regular``."""
    with open_regular(file) as opened, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        handle = opened.fileno()
        places = range(0, max(1, os.fstat(handle).st_size), PIECE_BYTES)
        pieces = list(
            pool.map(lambda place: hashlib.sha256(os.pread(handle, PIECE_BYTES, place)), places)
        )
    if len(pieces) == 1:
        return pieces[0].hexdigest()
    return hashlib.sha256(b"".join(piece.digest() for piece in pieces)).hexdigest()


def sha256(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """SHA-256 of the regular file at ``path``, read piece by piece; raises as ``read_bounded``."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > max_bytes:
            raise too_large(max_bytes)
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular(path: Path) -> Path:
    """``path``, for a library that opens it and would wait for a FIFO's other end."""
    open_regular(path).close()
    return path


def too_large(max_bytes: int) -> OSError:
    """The error of a file that is larger than it may be."""
    return OSError(errno.EFBIG, f"it is larger than {max_bytes / MIB:,g} MiB")


_FLAT = frozenset({str, int, float, bool, type(None)})


def check_nesting(value: T) -> T:
    """The parsed value; raises ValueError where it is nested deeper than ``MAX_NESTING``."""
    level: list[Any] = [value] if isinstance(value, list | Mapping) else []
    for _ in range(MAX_NESTING):
        parts = [
            node if type(node) is list or not isinstance(node, Mapping) else node.values()
            for node in level
        ]
        level = [
            item
            for part in parts
            if not _FLAT.issuperset(map(type, part))
            for item in part
            if isinstance(item, list | Mapping)
        ]
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_NESTING} levels deep")


class Panic(RuntimeError):
    """A Rust library panicked."""


@contextmanager
def without_panics() -> Iterator[None]:
    """Within: a panic of a Rust library, which is no Exception and has no class to name, is a
    ``Panic`` with the cause in one line."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise Panic(one_line(error)) from None


def similar(name: str, known: Iterable[str] = ()) -> str:
    """Return `` (did you mean model/tiny?)`` with the most similar name of ``known``, or of the
    files next to a path; empty if there is none."""
    neighbors: Iterable[Path] = (
        islice(Path(name).parent.glob("*"), MAX_NEIGHBORS) if not Path(name).exists() else ()
    )
    candidates = [other for other in (*known, *map(str, neighbors)) if other != name]
    names = {Path(other).name.partition(":")[0].casefold(): other for other in candidates}
    last = Path(name).name[:200].partition(":")[0].casefold()
    near = difflib.get_close_matches(last, names, n=1, cutoff=0.8)
    return f" (did you mean {names[near[0]]}?)" if near else ""


@cache
def _ask_hub(repository: str, name: str, kind: str) -> None:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    get_hf_file_metadata(hf_hub_url(repository, name, repo_type=kind))


def hub_refusal(repository: str, name: str, kind: str = "model") -> tuple[str, str] | None:
    """Ask the Hub once for a file of a model or a ``dataset``, as a download repeats a request that
    fails for half a minute. Return the problem and the fix; None: the repository can be read."""
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        _ask_hub(repository, name, kind)
    except GatedRepoError:
        return "is gated on the Hub", "ask for access on its page, and log in by hf auth login"
    except RepositoryNotFoundError:
        return (
            f"is neither a folder here nor a {kind} on the Hub",
            "correct the name, or for a private one log in by hf auth login",
        )
    except HfHubHTTPError:
        return None  # of a server that answers: the download repeats what is worth it
    except Exception as error:  # noqa: BLE001, of a wrong id, or of httpx2 (older: httpx)
        return (
            f"is not a folder here, and the Hub cannot be asked for it ({one_line(error)[:200]})",
            "check the name and the network, or give a folder",
        )
    return None


def cached_repositories(kind: str = "model") -> list[str]:
    """Return the ids of the models or ``dataset``s in the Hub's cache."""
    from huggingface_hub import constants

    folders = islice(Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*"), MAX_NEIGHBORS)
    return [folder.name.partition("--")[2].replace("--", "/") for folder in folders]


def cached(repository: str, name: str) -> Path | None:
    """A file of a model on the Hub that was downloaded before, in the folder of its commit."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(repository, name)
    except HFValidationError:  # it is no name of a repository
        return None
    return Path(path) if isinstance(path, str) else None
