"""Runs that share data/buffer.json neither stop nor lose each other."""

from collections.abc import Callable
from pathlib import Path

import pytest

from reason_llm.config import Config
from reason_llm.errors import RewardError
from reason_llm.loop import train
from reason_llm.run import Silent, lock, read_document

REWARD = """
from itertools import count
from pathlib import Path

asked = count()

def brief(completion):
    tried = next(asked) < 2  # the made-up completions of the start
    if not tried and Path(__file__).with_name("broken").exists():
        raise RuntimeError("its service is down")
    return len(completion) % 3
"""


@pytest.fixture
def named(
    small_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Config]:
    """A run of one step of this name in the working folder; its reward fails while ``broken`` is
    there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    rewards = [{"custom": f"{tmp_path / 'mine.py'}:brief"}]
    return lambda name, **options: small_run(
        run__name=name,
        run__directory="runs",
        run__steps=1,
        score__rewards=rewards,
        **{"run__buffer": None} | options,
    )


def interrupted(config: Config) -> None:
    Path("broken").touch()
    with pytest.raises(RewardError):
        train(config)
    Path("broken").unlink()


class Lines(Silent):
    """Keeps the lines of a run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(text)


SHARED = Path("data/buffer.json")


def test_the_buffer_is_where_users_look_for_it(named: Callable[..., Config]) -> None:
    assert named("mine").run.buffer_path == SHARED
    assert named("mine", run__buffer="mine.json").run.buffer_path == Path("mine.json")


@pytest.mark.long
def test_unfinished_runs_lie_side_by_side_and_go_on(named: Callable[..., Config]) -> None:
    places = {"one": SHARED, "two": Path("data/buffer.two.json"), "3": Path("data/buffer.3.json")}
    for name in places:
        interrupted(named(name))
    before = {name: read_document(path) for name, path in places.items()}
    assert len({each.run.id for each in before.values()}) == 3
    for name, path in places.items():
        train(named(name))
        now = read_document(path)
        assert (now.run.id, now.trained) == (before[name].run.id, True)
        assert [g.prompt.id for g in now.groups] == [g.prompt.id for g in before[name].groups]
        texts = [[c.token_ids for c in g.completions] for g in now.groups]
        assert texts == [[c.token_ids for c in g.completions] for g in before[name].groups]
    assert {path.name for path in Path("data").glob("[!.]*")} == {p.name for p in places.values()}


def test_a_run_beside_one_that_has_written_nothing_yet_has_a_buffer_of_its_own(
    named: Callable[..., Config],
) -> None:
    said = Lines()
    with lock(SHARED):
        train(named("two"), said)
    line = "data/buffer.json is another run's: rollouts are saved in data/buffer.two.json"
    assert line in said.lines
    assert read_document(Path("data/buffer.two.json")).run.name == "two"
    assert not SHARED.exists()


@pytest.mark.long
def test_finished_rollouts_do_not_pile_up(named: Callable[..., Config]) -> None:
    for name in ("one", "two", "three"):
        train(named(name))
        assert read_document(SHARED).run.name == name
        archived = read_document(Path("runs") / name / "buffers" / "step-00000000.json.gz")
        assert archived.run.name == name
    assert [path.name for path in Path("data").glob("[!.]*")] == ["buffer.json"]


@pytest.mark.long
def test_rollouts_of_its_own_come_before_a_file_of_its_own(named: Callable[..., Config]) -> None:
    interrupted(named("one"))
    train(named("two"))  # in a file of its own
    train(named("one"))
    interrupted(named("two", run__resume="never", run__buffer=str(SHARED)))
    waiting = read_document(SHARED)
    train(named("two"))
    assert (read_document(SHARED).run.id, read_document(SHARED).trained) == (waiting.run.id, True)


@pytest.mark.long
def test_starting_afresh_keeps_the_old_buffer(
    named: Callable[..., Config],
) -> None:
    interrupted(named("mine"))
    train(named("mine", run__resume="never"))
    assert read_document(SHARED).trained
    assert not read_document(Path("data/buffer.old-1.json")).trained
