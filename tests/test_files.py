"""Files: reading within a bound, digests, locks; and what the system refuses."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from reason_llm import files
from reason_llm.app.cli import run_command
from reason_llm.errors import ConfigError, DataError, NotAsWritten, WriteError, raise_all, shown
from reason_llm.files import (
    FileLock,
    Panic,
    check_digests,
    check_nesting,
    check_seal,
    check_writable,
    large_digest,
    move_aside,
    open_to_append,
    read_bounded,
    read_object,
    replacing_folder,
    restrict_umask,
    sealed,
    sha256,
    without_panics,
    write_atomically,
)


def test_a_bound_takes_no_memory(tmp_path: Path) -> None:
    """Of a small file under a bound that is larger than any machine's memory."""
    path = tmp_path / "small"
    path.write_bytes(b"abc")
    assert read_bounded(path, 1 << 45) == b"abc"
    assert read_bounded(Path("/proc/self/stat"), 1 << 45)  # whose size is 0
    assert read_bounded(path, 3) == b"abc"
    for large, most in ((path, 2), (Path("/proc/self/stat"), 3)):
        with pytest.raises(OSError, match="it is larger than"):
            read_bounded(large, most)
    with pytest.raises(OSError, match="a NUL character"):
        read_bounded(Path("a\0b"), 3)


def test_only_a_regular_file_is_appended_to(tmp_path: Path) -> None:
    for content in (b"a", b"b"):
        with open_to_append(tmp_path / "x") as file:
            file.write(content)
    assert (tmp_path / "x").read_bytes() == b"ab"
    with pytest.raises(OSError, match="not a regular file"):
        open_to_append(Path("/dev/null"))


def test_a_link_is_not_replaced_by_a_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(WriteError, match="link is a link to"), replacing_folder(tmp_path / "link"):
        raise AssertionError
    assert (tmp_path / "link").is_symlink()


def test_what_cannot_be_moved_aside_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("x.json", "x.old-1.json"):
        (tmp_path / name).write_text(name)
    move_aside(tmp_path / "none")
    move_aside(tmp_path / "x.json")
    assert (tmp_path / "x.old-2.json").read_text() == "x.json"

    def refuse(*given: object) -> None:
        raise OSError(errno.EPERM, "Not permitted")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(WriteError, match=r"old-1\.json cannot be renamed to .*old-1\.old-1"):
        move_aside(tmp_path / "x.old-1.json")


def test_only_a_panic_of_a_rust_library_becomes_an_error() -> None:
    panic = type("PanicException", (BaseException,), {})
    with pytest.raises(Panic, match="it is gone"), without_panics():
        raise panic("it is gone")
    for error in (KeyboardInterrupt, ValueError):
        with pytest.raises(error), without_panics():
            raise error


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


def test_an_interrupt_as_a_lock_is_taken_leaves_it_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "ftruncate", interrupt)
        with pytest.raises(KeyboardInterrupt), FileLock(tmp_path / "lock", "it"):
            pass
    with FileLock(tmp_path / "lock", "it"):
        pass


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


def test_a_digest_is_of_a_file_of_at_most_so_many_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"x" * files.MIB)
    assert sha256(path, files.MIB) == hashlib.sha256(b"x" * files.MIB).hexdigest()
    with pytest.raises(OSError, match=r"it is larger than 0\.5 MiB"):
        sha256(path, files.MIB // 2)


def test_a_seal_that_must_be_there_is_missed() -> None:
    check_seal(b"{}")
    check_seal(sealed(b'{"a":1}'), must_carry=True)
    for content in (b"{}", sealed(b'{"a":1}').replace(b'",', b'" ,', 1)):
        with pytest.raises(NotAsWritten, match="does not begin with its SHA-256"):
            check_seal(content, must_carry=True)


def test_nesting_is_counted_through_lists_and_mappings() -> None:
    value: Any = 1
    for depth in range(64):
        value = [value, 2] if depth % 2 else {"a": value}
        assert check_nesting(value) is value
    for deeper in ([value], {"a": 1, "b": value}):
        with pytest.raises(ValueError, match="nested more than 64 levels deep"):
            check_nesting(deeper)


def test_a_folder_is_told_to_be_forbidden_before_it_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    for good in (tmp_path, tmp_path / "a" / "b"):
        check_writable(good)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(WriteError, match=r"file/a cannot be written: .*/file is a file; choose"):
        check_writable(tmp_path / "file" / "a")
    with pytest.raises(WriteError, match=r"cannot be written .*too long.*; choose another place"):
        check_writable(tmp_path / ("x" * 300))
    for right in (os.W_OK, os.X_OK):
        monkeypatch.setattr(os, "access", lambda path, asked, right=right: not asked & right)
        with pytest.raises(WriteError, match=f"a cannot be written: {tmp_path} forbids it"):
            check_writable(tmp_path / "a")


@pytest.mark.parametrize(("before", "after"), [(0, 0o022), (0o077, 0o077), (0o002, 0o022)])
def test_files_are_writable_by_their_user_only(before: int, after: int) -> None:
    old = os.umask(before)
    try:
        restrict_umask()
        found = os.umask(old)
    finally:
        os.umask(old)
    assert found == after


def test_a_file_takes_the_place_of_what_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("mine")
    (tmp_path / ".x.writing").symlink_to(tmp_path / "elsewhere")
    write_atomically(tmp_path / "x", b"new")
    names = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert names == {"elsewhere": "mine", "x": "new"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(WriteError, match=r"folder cannot be written \(.+\); free or choose"):
        write_atomically(tmp_path / "folder", b"new")
    assert not (tmp_path / ".folder.writing").exists()


def test_all_errors_are_told_once_and_the_first_is_raised() -> None:
    raise_all([])
    first = ConfigError("a")
    with pytest.raises(ConfigError) as told:
        raise_all([first, DataError("b"), DataError("b"), ConfigError("a")])
    assert told.value is first and first.__notes__ == ["b"]


def test_an_error_is_shown_within_a_bound_and_without_secrets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"MY_KEY": "abcdefgh", "API_TOKEN": "abcdefgh-longer", "PIN_KEY": "abcdefg",
                        "MONKEY": "12345678"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    told = shown("abcdefgh-longer abcdefgh abcdefg 12345678\n")
    assert told == "<API_TOKEN> <MY_KEY> abcdefg 12345678\\n"
    assert shown("x" * 2000) == "x" * 2000
    assert shown("x" * 2001) == "x" * 2000 + "…"
