"""Packed prompts and rows, and the files of the cache."""

import multiprocessing
import os
import pickle
import random
import time
from pathlib import Path

import pytest

from reason_llm.data import cache, render
from reason_llm.data.packed import Joined, Prompts, Units
from reason_llm.rollout import Attachment, Prompt, TokenRow

PROMPTS = [
    Prompt(f"a:{n}", "é" * n, tuple(range(n + 1)), str(n), {"level": [n, None]}) for n in range(5)
]
IMAGE = Attachment("images", "ab", 0, 1, {"path": "", "grid": [1, 2, 2]})
UNITS = [
    (TokenRow("b:1", (7, 8, 2**31 - 1), (False, True, True), 0, 0.1, (IMAGE,)),),
    (
        TokenRow("b:2", (1, 2), (False, True), 1, 2.5),
        TokenRow("b:2", (1, 2, 3, 4), (False, False, False, True), 1),
    ),
]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache.folder()


def packed() -> tuple[Prompts, Units]:
    prompts, units = Prompts(), Units()
    for prompt in PROMPTS:
        prompts.append(prompt)
    for unit in UNITS:
        units.append(unit)
    return prompts, units


def test_items_are_those_that_were_added() -> None:
    prompts, units = packed()
    for one, other in (packed(), pickle.loads(pickle.dumps((prompts, units)))):
        assert ([*one], [*other]) == (PROMPTS, UNITS)
        assert (one[-1], one[1:5:2], other[1]) == (PROMPTS[-1], PROMPTS[1:5:2], UNITS[1])
    joined = Joined([prompts, [], prompts])
    assert [*joined] == PROMPTS * 2
    assert joined[-6] == PROMPTS[4]
    with pytest.raises(IndexError):
        joined[10]


def test_lengths_and_values_are_those_of_the_rows() -> None:
    prompts, units = packed()
    assert prompts.lengths.tolist() == [1, 2, 3, 4, 5]
    assert (units.lengths.tolist(), units.asked.tolist()) == ([3, 2, 4], [1, 1, 3])
    assert units.values.tolist() == [0.1, 2.5, 0.0]
    assert Prompts().lengths.max(initial=0) == 0


def shuffled(size: int, seed: str) -> list[int]:
    numbers = list(range(size))
    random.Random(seed).shuffle(numbers)
    return numbers


def no_shuffle(seed: object) -> None:
    raise AssertionError("shuffled again")


def test_the_order_of_a_large_set_is_kept(
    monkeypatch: pytest.MonkeyPatch, home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    size = render.LEAST_CACHED
    expected = shuffled(size, "5/0")

    def order() -> list[int]:
        render._permutation.cache_clear()  # as a later process
        return render.order([size], [1.0], 5, 0, size)

    assert order() == expected
    (file,) = home.iterdir()
    with monkeypatch.context() as without:
        without.setattr(random, "Random", no_shuffle)
        assert order() == expected
    other = render.order([size], [1.0], 6, 0, size)
    assert other == shuffled(size, "6/0")
    (second,) = {*home.iterdir()} - {file}
    file.write_bytes(second.read_bytes())  # whole, and of another seed
    assert order() == expected
    file.write_bytes(file.read_bytes()[:-1])
    assert order() == expected
    assert "is damaged (its digest is another) and is written again" in caplog.text
    render._permutation.cache_clear()


def write_often(path: Path) -> None:
    for _ in range(20):
        cache.write(path, ["one"], [b"x" * 100_000])


def test_two_processes_may_write_one_file(home: Path) -> None:
    path = home / "a.rows"
    write_often(path)
    processes = [
        multiprocessing.get_context("fork").Process(target=write_often, args=(path,))
        for _ in range(2)
    ]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        described, (content,) = cache.read(path)
        assert (described, bytes(content)) == (["one"], b"x" * 100_000)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [*home.iterdir()] == [path]


def test_what_a_killed_process_left_is_removed(home: Path) -> None:
    home.mkdir(parents=True)
    left = [home / ".a.rows.7.writing", home / "a.rows.7", home / ".b.rows.8.writing"]
    for file in left:
        file.write_bytes(b"half")
    long_ago = time.time() - cache.UNFINISHED_SECONDS - 60
    for file in left[:2]:
        os.utime(file, (long_ago, long_ago))
    cache.write(home / "c.order", [], [])
    assert sorted(file.name for file in home.iterdir()) == [".b.rows.8.writing", "c.order"]
