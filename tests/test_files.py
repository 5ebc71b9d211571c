"""Files: reading within a bound, digests, locks; and what the system refuses."""

import errno
import fcntl
import os
from pathlib import Path

import pytest

from reason_llm.app.cli import run_command
from reason_llm.errors import NotAsWritten, WriteError
from reason_llm.files import (
    FileLock,
    check_digests,
    large_digest,
    read_bounded,
    read_object,
    replacing_folder,
    sealed,
)


def test_a_bound_takes_no_memory(tmp_path: Path) -> None:
    """Of a small file under a bound that is larger than any machine's memory."""
    path = tmp_path / "small"
    path.write_bytes(b"abc")
    assert read_bounded(path, 1 << 45) == b"abc"
    assert read_bounded(Path("/proc/self/stat"), 1 << 45)  # whose size is 0
    assert read_bounded(path, 3) == b"abc"
    with pytest.raises(OSError, match="it is larger than"):
        read_bounded(path, 2)


def test_a_file_system_without_locks_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(WriteError, match=r"No locks available.*put run\.directory") as told,
        FileLock(tmp_path / "lock", "it"),
    ):
        pass
    assert "\n" not in str(told.value)


def test_no_further_thread_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> None:
        raise RuntimeError("can't start new thread")

    assert run_command(body) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: can't start new thread: ") and "ulimit -u" in told
    assert told.count("\n") == 1

    def other() -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        run_command(other)


def test_a_sealed_object_is_compared(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(sealed(b'{"a": 1}'))
    assert read_object(path) == {"a": 1}
    whole = path.read_bytes()
    for place in range(len(b'{"sha256":"'), len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ValueError):
            read_object(path)
    path.write_bytes(b'{"a": 1}')  # others' files carry none
    assert read_object(path) == {"a": 1}


@pytest.mark.parametrize("damage", ["flipped", "cut", "gone", "a link", "another list"])
def test_a_folder_that_was_written_whole_is_compared(damage: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    with replacing_folder(folder) as beside:
        (beside / "weights").write_bytes(b"x" * 99)
        (beside / "README.md").write_text("for a reader")
    assert list(check_digests(folder)) == ["weights"]
    (folder / "README.md").write_text("edited")
    assert check_digests(folder)
    file = folder / "weights"
    if damage == "flipped":
        file.write_bytes(b"x" * 98 + b"y")
    elif damage == "cut":
        file.write_bytes(b"x" * 98)
    elif damage == "gone":
        file.unlink()
    elif damage == "a link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    else:
        manifest = folder / "digests.json"
        manifest.write_bytes(manifest.read_bytes().replace(b"weights", b"weighty"))
    with pytest.raises(NotAsWritten):
        check_digests(folder)


def test_the_digest_of_large_files_is_of_all_bytes_and_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reason_llm.files.PIECE_BYTES", 7)
    file = tmp_path / "weights"
    contents = (b"0123456789" * 10, b"0123456789" * 9 + b"0123456788", b"1" + b"0123456789" * 9)
    found = []
    for content in contents:
        file.write_bytes(content)
        os.utime(file, ns=(10**18, 10**18))
        found += [large_digest([file])] * 2
    found += [large_digest([file.rename(tmp_path / "other")])] * 2
    assert len(set(found)) == 4
