"""Steps that are sampled by an earlier policy (run.max_staleness), and ahead by samplers: the same
adapter whoever samples and whatever happens."""

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from local_cluster import LocalCluster
from peer_processes import file_digest

from conftest import ROOT, until
from reason_llm.config import Config
from reason_llm.errors import RewardError, Stopped, TrainingError
from reason_llm.loop import train
from reason_llm.replicas import cluster, many
from reason_llm.replicas.cluster import Member, alive
from reason_llm.replicas.errors import PeersLost
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.document import read_document
from reason_llm.sample import TransformersSampler
from reason_llm.score import Scorer
from reason_llm.train.learner import Learner, Learners

Make = Callable[..., Config]
SOME_DIGIT = {"name": "regex", "options": {"pattern": "[3-6]"}}


@pytest.fixture
def make(small_run: Make, tmp_path: Path) -> Make:
    """A run of 5 steps in 4 shards, in a folder of its own."""

    def made(folder: str, staleness: int = 1, **options: Any) -> Config:
        return small_run(
            run__directory=str(tmp_path / folder), run__buffer=str(tmp_path / folder / "b.json"),
            run__steps=5, run__shards=2, run__max_staleness=staleness, data__limit=40,
            sample__max_new_tokens=14, score__rewards=[SOME_DIGIT],
            data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"),
            eval__limit=2, eval__every=3, **options,
        )  # fmt: skip

    return made


@pytest.fixture
def local_cluster(monkeypatch: pytest.MonkeyPatch) -> type[LocalCluster]:
    """Have the replicas be threads of the test."""
    monkeypatch.setattr(LocalCluster, "before", lambda number, method, arguments: None)
    monkeypatch.setattr(many, "Cluster", LocalCluster)
    return LocalCluster


@pytest.fixture(scope="module")
def finished() -> dict[int, Config]:
    """Runs by one process from their start to their end, by staleness."""
    return {}


@pytest.fixture
def alone(
    make: Make, finished: dict[int, Config], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Config]:
    """Such a run, made once."""

    def run(staleness: int = 1) -> Config:
        if staleness not in finished:
            place = tmp_path_factory.mktemp("alone")
            config = make(str(place), staleness)
            train(config)
            finished[staleness] = config
        return finished[staleness]

    return run


def adapter(config: Config) -> str:
    return file_digest(folder(config) / "adapter" / "adapter_model.safetensors")


def folder(config: Config) -> Path:
    return config.run.directory / str(config.run.name)


def versions(config: Config) -> list[int | None]:
    """Which version sampled each step, by the archived rollouts."""
    paths = sorted((folder(config) / "buffers").glob("step-*.json.gz"))
    return [read_document(path).weight_version for path in paths]


def records(config: Config) -> list[dict[str, float]]:
    lines = (folder(config) / "metrics.jsonl").read_bytes().splitlines()
    left_out = ("time/", "memory/", "replicas/", "sample/tokens_", "sha256")
    return [
        {key: value for key, value in orjson.loads(line).items() if not key.startswith(left_out)}
        for line in lines
    ]


class Killed(BaseException):
    """The process is gone: nothing of the program handles it."""


def kill_at(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, call: int, error: BaseException
) -> None:
    """Raise in place of the n-th call."""
    original, calls = getattr(owner, name), 0

    def dying(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            raise error
        return original(*args, **options)

    monkeypatch.setattr(owner, name, dying)


@pytest.mark.parametrize(
    ("staleness", "sampled_by"), [(0, [0, 1, 2, 3, 4]), (1, [0, 0, 1, 2, 3]), (3, [0, 0, 0, 0, 1])]
)
def test_a_step_is_sampled_so_many_versions_before_it(
    staleness: int, sampled_by: list[int], alone: Callable[..., Config]
) -> None:
    config = alone(staleness)
    assert versions(config) == sampled_by
    lag = [record.get("sample/staleness_steps") for record in records(config)[1:]]
    expected = [step - version for step, version in enumerate(sampled_by)]
    assert lag == (expected if staleness else [None] * 5)


def test_stale_rollouts_are_weighed_and_the_policy_is_another(alone: Callable[..., Config]) -> None:
    stale, fresh = alone(), alone(0)
    assert adapter(stale) != adapter(fresh)
    weights = [r["train/importance_weight"] for r in records(stale) if r.get("train/loss")]
    assert weights[0] == 1  # the first step's rollouts are the newest policy's
    assert weights[1:]
    assert all(abs(weight - 1) > 1e-6 for weight in weights[1:])
    assert not any("train/importance_weight" in record for record in records(fresh))


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "call", "staleness", "save_every"),
    [
        (TransformersSampler, "sample", 9, 2, 1),
        (Learners, "learn", 3, 1, 1),
        (Learner, "_update", 4, 1, 3),
        (Learner, "_update", 5, 2, 3),
        (RolloutBuffer, "write", 9, 2, 3),
        (RolloutBuffer, "finish", 1, 1, 1),
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    owner: Any, name: str, call: int, staleness: int, save_every: int, make: Make,
    alone: Callable[..., Config], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Without rollouts in an archive each is sampled again, by the adapter in the checkpoint."""
    options = {"run__save_every": save_every, "run__keep_buffers_gib": 0}
    whole, killed = alone(staleness), make("killed", staleness, **options)
    with monkeypatch.context() as struck, pytest.raises(Killed):
        kill_at(struck, owner, name, call, Killed())
        train(killed)
    train(killed)
    assert adapter(killed) == adapter(whole)
    assert records(killed) == records(whole)


@pytest.mark.long
def test_a_run_goes_on_from_an_older_checkpoint(make: Make, alone: Callable[..., Config]) -> None:
    whole, damaged = alone(2), make("damaged", 2, run__keep_checkpoints=3)
    train(damaged.model_copy(update={"run": damaged.run.model_copy(update={"steps": 4})}))
    checkpoints = sorted((folder(damaged) / "checkpoints").iterdir())
    assert sorted(each.name for each in checkpoints[-1].glob("version-*")) == [
        "version-00000002.safetensors", "version-00000003.safetensors"
    ]  # fmt: skip
    for each in checkpoints[1:]:
        (each / "version-00000002.safetensors").write_bytes(b"")
    train(damaged)
    assert adapter(damaged) == adapter(whole)


# --- samplers ---------------------------------------------------------------------------------


@pytest.mark.long
def test_samplers_do_the_next_step_while_one_is_learned(
    make: Make,
    alone: Callable[..., Config],
    local_cluster: type[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits as by one process, the rollouts of the next step are on disk when a step is
    learned, and nothing is left in their folder."""
    whole, helped = alone(), make("helped", run__samplers=2)
    sampled: list[tuple[int, int]] = []
    there: list[list[str]] = []
    original = Learners.learn

    def watched(self: Learners, step: int, *given: Any) -> Any:
        found = original(self, step, *given)
        until(lambda: step == 4 or bool(complete()))
        there.append(complete() if step < 4 else [])
        return found

    def complete() -> list[str]:
        files = sorted((folder(helped) / "ahead").glob("step-*.json"))
        return [each.name for each in files if read_document(each).complete]

    def before(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "sample":
            sampled.extend((number, part.shard) for part in arguments[0])

    monkeypatch.setattr(Learners, "learn", watched)
    monkeypatch.setattr(local_cluster, "before", before)
    train(helped)
    assert there == [[f"step-{step:08d}.json"] for step in range(1, 5)] + [[]]
    assert {number for number, _ in sampled} == {1, 2}
    assert adapter(helped) == adapter(whole)
    assert records(helped) == records(whole)
    assert versions(helped) == versions(whole)
    assert list((folder(helped) / "ahead").iterdir()) == []


def all_alive(members: Sequence[Member]) -> list[Member]:
    """``cluster.alive`` when those that were started again have loaded their models, too."""
    for member in members:
        if member.opened is not None:
            member.opened.result()
    return alive(members)


@pytest.mark.long
@pytest.mark.parametrize("staleness", [0, 1])
def test_samplers_that_die(
    staleness: int, make: Make, alone: Callable[..., Config], local_cluster: type[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    whole, struck = alone(staleness), make("struck", staleness, run__samplers=2)
    calls = 0

    def before(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += method == "sample"
        if method == "sample" and calls in (2, 3, 7):
            raise PeersLost("died")

    monkeypatch.setattr(local_cluster, "before", before)
    monkeypatch.setattr(cluster, "alive", all_alive)
    train(struck)
    assert calls > 7
    assert adapter(struck) == adapter(whole)
    assert records(struck) == records(whole)


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "call"),
    [(Learners, "learn", 2), (Learner, "_update", 3), (RolloutBuffer, "finish", 1)],
)
def test_the_head_is_killed_while_samplers_sample(
    owner: Any, name: str, call: int, make: Make, alone: Callable[..., Config],
    local_cluster: type[LocalCluster], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One process goes on, from what the samplers had done."""
    whole, killed = alone(), make("killed", run__samplers=2)
    with monkeypatch.context() as struck, pytest.raises(Killed):
        kill_at(struck, owner, name, call, Killed())
        train(killed)
    train(make("killed"))
    assert adapter(killed) == adapter(whole)
    assert records(killed) == records(whole)


@pytest.mark.long
def test_what_fails_ahead_is_tried_again_at_its_turn(
    make: Make, alone: Callable[..., Config], local_cluster: type[LocalCluster],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """A reward that fails while step 2 is learned: step 2 is saved, and the run ends where it fails
    again, or goes on where it does not."""
    whole, failing = alone(), make("failing", run__samplers=1)
    with monkeypatch.context() as struck, caplog.at_level(logging.WARNING):
        kill_at(struck, Scorer, "score_as_they_come", 4, RewardError("the reward is broken"))
        train(failing)
    assert "sampling step 3 ahead failed (the reward is broken)" in caplog.text
    assert adapter(failing) == adapter(whole)


@pytest.mark.long
def test_an_error_of_a_sampler_ends_the_run_in_one_line(
    make: Make,
    alone: Callable[..., Config],
    local_cluster: type[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was learned is saved, and one process goes on to the same bits."""
    whole, failing = alone(), make("failing", run__samplers=1)
    calls = 0

    def before(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        nonlocal calls
        calls += method == "sample"
        if method == "sample" and calls > 6:
            raise TrainingError("the model's logits are not finite")

    monkeypatch.setattr(local_cluster, "before", before)
    with pytest.raises(TrainingError, match="not finite"):
        train(failing)
    monkeypatch.setattr(local_cluster, "before", lambda *given: None)
    train(failing)
    assert adapter(failing) == adapter(whole)


@pytest.mark.long
def test_a_signal_while_samplers_sample(
    make: Make,
    alone: Callable[..., Config],
    local_cluster: type[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is learned and saved, the wave under way is on disk, and the run goes on."""
    whole, stopped = alone(), make("stopped", run__samplers=1)
    signals: list[StopSignal] = []
    original = StopSignal.__enter__

    def entered(self: StopSignal) -> StopSignal:
        signals.append(self)
        return original(self)

    def before(number: int, method: str, arguments: tuple[Any, ...]) -> None:
        if method == "sample" and arguments[2] == 1:
            signals[0]._received = signal.SIGINT

    with monkeypatch.context() as struck, pytest.raises(Stopped):
        struck.setattr(StopSignal, "__enter__", entered)
        struck.setattr(local_cluster, "before", before)
        train(stopped)
    assert (folder(stopped) / "checkpoints" / "step-00000002").exists()
    train(make("stopped"))
    assert adapter(stopped) == adapter(whole)
    assert records(stopped) == records(whole)
