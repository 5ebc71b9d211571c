"""Shards: what is learned depends on their number alone.

1. The sum is a fixed tree.     2. The rows of a group stay together.
3. One, two and four processes learn the same adapter, to the last bit, with the same metrics.
4. As many shards as one likes give the same gradient up to rounding.
5. Another adapter in one of them ends the step.
"""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_processes import digest, together

from conftest import TINY
from learners import ROW, groups
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection, TrainSection
from reason_llm.config.algorithms import ALGORITHMS
from reason_llm.config.preferences import PREFERENCES
from reason_llm.errors import TrainingError
from reason_llm.model import Datum
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.datum import to_data
from reason_llm.replicas.errors import PeersLost
from reason_llm.replicas.peers import GroupPeers, Seat
from reason_llm.replicas.sharded_learner import (
    Alone,
    GradientSum,
    Peers,
    ShardedLearner,
    Shards,
    _from_json,
    _to_json,
    deal,
)
from reason_llm.train import (
    BASE,
    Learners,
    LearningSettings,
    PolicyGradient,
    RoleReader,
    Values,
    learning,
    with_advantages,
)
from reason_llm.train.objectives import Objective
from reason_llm.train.stages import Labels, PairLoss, Supervised
from reason_llm.train.step_metrics import Tally

COUNT = 4


def parameters(count: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(count)
    return [torch.nn.Parameter(torch.randn(n, generator=generator)) for n in (3, 5)]


def leaves(count: int) -> list[list[torch.Tensor]]:
    """Gradients whose sum depends on the order."""
    generator = torch.Generator().manual_seed(7)
    scales = [10.0 ** (3 * (i % 4)) for i in range(count)]
    return [[s * torch.randn(n, generator=generator) for n in (3, 5)] for s in scales]


def summed(shards: Shards) -> list[torch.Tensor]:
    owned = parameters(2)
    gradient = GradientSum(owned, shards)
    given = leaves(shards.count)
    for shard in shards.own:
        gradient.begin()
        for parameter, value in zip(owned, given[shard], strict=True):
            assert parameter.grad is not None
            parameter.grad += value
        gradient.end()
    gradient.finish()
    return [parameter.grad for parameter in owned if parameter.grad is not None]


def test_the_sum_is_a_binary_tree() -> None:
    a, b, c, d, e, f, g, h = leaves(8)
    expected = [((a[i] + b[i]) + (c[i] + d[i])) + ((e[i] + f[i]) + (g[i] + h[i])) for i in range(2)]
    found = summed(Shards(8))
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))
    in_a_row = [sum(leaf[i] for leaf in leaves(8)) for i in range(2)]
    assert any(not torch.equal(x, y) for x, y in zip(found, in_a_row, strict=True))


def test_a_second_batch_begins_from_zero() -> None:
    owned = parameters(2)
    gradient = GradientSum(owned, Shards(4))
    for factor in (1.0, 2.0):
        for _ in range(4):
            gradient.begin()
            owned[0].grad += factor  # type: ignore[operator]
            gradient.end()
        gradient.finish()
        assert torch.equal(owned[0].grad, torch.full((3,), 4 * factor))  # type: ignore[arg-type]
        assert not owned[1].grad.any()  # type: ignore[union-attr]


@pytest.mark.parametrize("size", [2, 4, 8])
def test_processes_add_up_the_same_tree(size: int) -> None:
    expected = digest(summed(Shards(8)))
    assert set(together(size, lambda peers: digest(summed(Shards(8, peers))))) == {expected}


def test_a_gradient_travels_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reason_llm.replicas.peers.CHUNK_BYTES", 8)
    expected = digest(summed(Shards(4)))
    assert set(together(4, lambda peers: digest(summed(Shards(4, peers))))) == {expected}


def test_bytes_of_any_length_are_gathered_in_order() -> None:
    given = [b"", b"abc", bytes(range(256)) * 9]

    def work(peers: Peers) -> list[bytes]:
        peers.gather(b"first")
        return peers.gather(given[peers.rank]) if peers.rank < 3 else peers.gather(b"\x00")

    assert together(4, work) == [[*given, b"\x00"]] * 4


def test_who_waits_for_a_peer_that_will_not_come_is_told(tmp_path: Path) -> None:
    """Of three one died before they met: the head knows, and the other need not wait."""

    def met(rank: int, is_off: Any) -> str:
        try:
            seat = Seat("test", rank, 3, tmp_path, "", "127.0.0.1")
            GroupPeers(seat, torch.device("cpu"), is_off=is_off)
        except PeersLost as error:
            return str(error)
        return "met"

    is_known = threading.Event()
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(met, 1, lambda: is_known.set() or False)
        assert is_known.wait(300)
        assert met(0, lambda: True) == "a replica was lost"
        assert waits.result(timeout=240) == "a replica was lost"


def test_a_peer_that_is_gone_ends_the_wait() -> None:
    def work(peers: Peers) -> str:
        if peers.rank == 1:
            return "gone"  # and its process ends
        try:
            peers.gather(b"")
        except PeersLost as error:
            return str(error)
        return "nothing"

    assert together(2, work)[0].startswith("a replica was lost (")


def test_groups_stay_together_and_the_long_ones_are_dealt_first() -> None:
    lengths = [2, 9, 3, 3, 8, 1]
    data = [
        Datum.of((1,), (5,) * length, group=group)
        for group, length in enumerate(lengths)
        for _ in range(2)
    ]
    dealt = Shards(2).deal(data)
    assert dealt == [[2, 3, 6, 7, 10, 11], [0, 1, 4, 5, 8, 9]]  # 20 + 8 + 4 and 18 + 8 + 6 tokens
    assert Shards(1).deal(data) == [list(range(12))]
    assert sorted(i for rows in Shards(16).deal(data) for i in rows) == list(range(12))


class Third(Alone):
    rank, size = 2, 4


def test_processes_hold_runs_of_shards() -> None:
    assert list(Shards(8, Third()).own) == [4, 5]


def test_what_a_peer_alone_has_seen_is_told_to_all() -> None:
    class Two(Alone):
        size = 2

        def gather(self, content: bytes) -> list[bytes]:
            other = {"micro_batch_tokens": 7, "replays": 2}
            return [content, json.dumps(json.loads(content) | other).encode()]

    learner: Any = make(Supervised()).policy
    learner.shards = Shards(2, Two())
    learner.micro_batches._replays = 1
    tallies, replays = learner._of_all(0, [[Tally(tokens=3)], [Tally(tokens=4)]])
    assert [[each.tokens for each in of_update] for of_update in tallies] == [[3, 3], [4, 4]]
    assert (replays, learner.micro_batches.tokens) == (3, 7)


def test_one_process_judges_all_rows_alone() -> None:
    objective, data = CASES["kto"]
    learner = make(objective).policy
    with learning(learner):
        expected = learner.judge(data)
        learner.shards = shards = Shards(4, Third())
        assert learner.judge(data) == expected
    assert learner.shards is shards


# --- learning ---------------------------------------------------------------------------------


def rows_of_pairs() -> list[Datum]:
    """Nine pairs of random rows, with what the reference says of them."""
    generator = torch.Generator().manual_seed(11)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 250, (count,), generator=generator).tolist())

    made = []
    for pair in range(9):
        prompt = ids(4 + pair % 3)
        for side in range(2):
            completion = ids(3 + (5 * pair + side) % 11)
            columns = {"ref_logprobs": [-4.0 - 0.1 * side] * len(completion)}
            made.append(Datum.of(prompt, completion, f"{pair}.{side}", group=pair, columns=columns))
    return made


def labelled() -> list[Datum]:
    return [
        replace(datum, group=number, reward=1.0 if number % 3 else -1.0, columns={})
        for number, datum in enumerate(rows_of_pairs())
    ]


def rollouts(name: str) -> list[Datum]:
    return to_data(with_advantages(groups(), ALGORITHMS[name]))


CASES: dict[str, tuple[Objective, list[Datum]]] = {
    "grpo with a KL": (PolicyGradient(ALGORITHMS["grpo"], 32), rollouts("grpo")),
    "reinforce_pp": (PolicyGradient(ALGORITHMS["reinforce_pp"], 32), rollouts("reinforce_pp")),
    "top entropies": (
        PolicyGradient(replace(ROW, top_entropy_fraction=0.5), 32),
        rollouts("grpo"),
    ),
    "ppo": (PolicyGradient(ALGORITHMS["ppo"], 32), rollouts("ppo")),
    "dpo": (PairLoss(row=PREFERENCES["dpo"]), rows_of_pairs()),
    "kto": (Labels(row=PREFERENCES["kto"]), labelled()),
    "sft": (Supervised(), labelled()),
}


def make(objective: Objective, dropout: float = 0.1) -> Learners:
    section = ModelSection(
        path=str(TINY), dtype="float32", adapter=AdapterSection(rank=4, dropout=dropout)
    )
    model = Model(section, load_tokenizer(str(TINY)), seed=0)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters_of("policy"):
        parameter.data.copy_(0.05 * torch.randn(parameter.shape, generator=generator))
    train = TrainSection(
        learning_rate=1e-3, gradient_checkpointing=False, optimizer_steps=2, max_grad_norm=0.5
    )
    readers = (BASE, RoleReader("old_values", "critic", "values"))
    settings = LearningSettings(objective, train, 1.0, 64, 0, 8, readers=readers)
    policy = ShardedLearner(model, settings, Shards())
    if not (isinstance(objective, PolicyGradient) and objective.row.critic):
        return Learners(policy)
    model.add_role("critic", head="value")
    of_critic = train.model_copy(update={"optimizer_steps": 1})
    critic = replace(settings, objective=Values(), train=of_critic, role="critic")
    return Learners(policy, ShardedLearner(model, critic, Shards()))


def learned(case: str, learners: Learners, shards: Shards) -> dict[str, Any]:
    """The digest of all that was learned in a step, and the metrics."""
    _, data = CASES[case]
    deal(learners, shards)
    passed: list[int] = []
    with learning(learners.policy):
        metrics = learners.learn(1, data, passed.append)
    moved = [p for each in learners.optimizers.values() for p in each.param_groups[0]["params"]]
    states = [state for each in learners.optimizers.values() for state in each.state.values()]
    moments = [value for state in states for value in state.values()]
    return {
        "digest": digest([*moved, *moments]),
        "metrics": metrics,
        "passed": sum(passed),
    }


def learned_by(size: int, case: str, count: int, dropout: float = 0.1) -> list[dict[str, Any]]:
    """What each of ``size`` processes learned in a step, from the same start."""
    learners = make(CASES[case][0], dropout)
    return together(size, lambda peers: learned(case, learners, Shards(count, peers)))


@pytest.mark.parametrize("case", most_are_long(CASES, ["grpo with a KL"]))
def test_any_number_of_processes_learns_the_same_bits(case: str) -> None:
    (expected,) = learned_by(1, case, COUNT)
    for size in (2, 4) if case in ("grpo with a KL", "ppo") else (2,):
        assert learned_by(size, case, COUNT) == [expected] * size
    (other,) = learned_by(1, case, 2)
    assert other["digest"] != expected["digest"]


@pytest.mark.parametrize("case", most_are_long(["grpo with a KL", "kto", "ppo"], ["ppo"]))
def test_shards_change_the_gradient_by_rounding_alone(case: str) -> None:
    """Without dropout, whose masks are a shard's own."""
    (whole,) = learned_by(1, case, 1, dropout=0.0)
    (dealt,) = learned_by(1, case, 8, dropout=0.0)
    for name, value in whole["metrics"].items():
        if not name.endswith("padding_fraction"):
            assert dealt["metrics"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_a_tally_reaches_the_peers_whole() -> None:
    """But for what an optimizer step adds to it afterwards."""
    told = Tally(
        tokens=1, passed=2, padding=3, left_out=4, sums={"loss": 0.5}, mismatch_max=0.25,
        log_ratios=[torch.tensor([0.5])], unit_sums={"kl": 6.0}, units={"kl": 7},
    )  # fmt: skip
    fresh = asdict(Tally())
    same = [name for name, value in asdict(told).items() if value == fresh[name]]
    assert same == ["updates", "rate"]
    assert _from_json(json.loads(json.dumps(_to_json(told)))) == told


def test_another_adapter_in_one_process_ends_the_step() -> None:
    objective, data = CASES["sft"]
    learners = make(objective)

    def work(peers: Peers) -> str:
        deal(learners, Shards(COUNT, peers))
        if peers.rank == 1:
            learners.policy.parameters[0].data[0, 0] += 1e-6
        try:
            with learning(learners.policy):
                learners.learn(3, data, lambda rows: None)
        except TrainingError as error:
            return str(error)
        return "nothing"

    for told in together(2, work):
        assert told.startswith("step 3: the replicas learned different adapters (0: ")
        assert "\n" not in told


def test_a_process_without_rows_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups in four shards."""
    few = (PolicyGradient(ROW, 32), to_data(with_advantages(groups()[:2], ROW)))
    monkeypatch.setitem(CASES, "few", few)
    (expected,) = learned_by(1, "few", COUNT)
    assert learned_by(4, "few", COUNT) == [expected] * 4
