"""Each run has a rollout buffer of its own unless it is told another."""

from collections.abc import Callable
from pathlib import Path

import pytest

from reason_llm.config import Config
from reason_llm.errors import RewardError
from reason_llm.loop import train
from reason_llm.run import read_document

REWARD = """
from pathlib import Path

def brief(completion):
    if Path(__file__).with_name("broken").exists():
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


def test_only_the_quick_start_has_the_shared_buffer(named: Callable[..., Config]) -> None:
    assert named("quickstart").run.buffer_path == Path("data/buffer.json")
    assert named("mine").run.buffer_path == Path("runs/mine/buffer.json")
    assert named("mine", run__buffer="mine.json").run.buffer_path == Path("mine.json")


def test_unfinished_runs_lie_side_by_side_and_go_on(named: Callable[..., Config]) -> None:
    names = ("quickstart", "one", "two")
    for name in names:
        interrupted(named(name))
    before = {name: read_document(named(name).run.buffer_path) for name in names}
    assert len({each.run.id for each in before.values()}) == 3
    for name in names:
        train(named(name))
        now = read_document(named(name).run.buffer_path)
        assert (now.run.id, now.trained) == (before[name].run.id, True)
        assert [g.prompt.id for g in now.groups] == [g.prompt.id for g in before[name].groups]
        texts = [[c.token_ids for c in g.completions] for g in now.groups]
        assert texts == [[c.token_ids for c in g.completions] for g in before[name].groups]
    assert [path.name for path in Path("data").glob("[!.]*")] == ["buffer.json"]
    assert not list(Path("runs").rglob("*.old-*"))


def test_a_run_of_before_goes_on_from_the_shared_buffer(named: Callable[..., Config]) -> None:
    shared = Path("data/buffer.json")
    interrupted(named("mine", run__buffer=str(shared)))
    waiting = read_document(shared)
    interrupted(named("other"))  # which does not touch it
    assert read_document(shared) == waiting
    train(named("mine"))
    now = read_document(shared)
    assert (now.run.id, now.trained) == (waiting.run.id, True)
    assert not Path("runs/mine/buffer.json").exists()


def test_starting_afresh_keeps_the_old_buffer_with_the_old_run(
    named: Callable[..., Config],
) -> None:
    interrupted(named("mine"))
    train(named("mine", run__resume="never"))
    assert read_document(Path("runs/mine/buffer.json")).trained
    assert not read_document(Path("runs/mine.old-1/buffer.json")).trained
