"""What the head asks of the processes beside it: who samples and learns what, by which adapter, and
what becomes of it when one is lost. In the place of Ray stands a cluster that answers at once."""

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from queue import Queue
from types import SimpleNamespace as Named
from typing import Any

import orjson
import pytest
import torch

from reason_llm.config import Config
from reason_llm.errors import PeersLost, ReplicaError
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.start.prepare import prepare
from reason_llm.run.team import crew, many, peers
from reason_llm.run.team.cluster import Member
from reason_llm.run.team.crew import Crew, Deal
from reason_llm.run.team.many import Many
from reason_llm.run.team.peers import GroupPeers
from reason_llm.run.team.replica import Replica, Work, costs
from reason_llm.run.watch import SILENT
from reason_llm.sample import Part, SamplingParams, TransformersSampler

PARAMS = SamplingParams(1, 4)
LOST = PeersLost("it is gone")


class Answers:
    """A cluster whose members answer each call at once: with ``None``, or as ``given`` says."""

    def __init__(self, replicas: int = 1, samplers: int = 0) -> None:
        self.count, self.samplers, self.total = 1 + replicas, samplers, 1 + replicas + samplers
        self.folder, self.address = Path("folder"), "here"
        self.calls: list[tuple[Any, ...]] = []
        self.given: dict[tuple[int, str], Any] = {}
        self.members = [self.made(number) for number in range(1, self.total)]

    def made(self, number: int) -> Member:
        member = Member(number, None, "m", "here", number >= self.count, version=5)
        member.opened = self.call(member, "opened")
        return member

    def call(self, member: Member, method: str, *arguments: Any) -> Any:
        self.calls.append((member.number, method, *arguments))
        answer = self.given.get((member.number, method))

        def result() -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return Named(member=member, result=result, is_done=lambda seconds=0.0: True)

    def shared(self, value: Any) -> Any:
        return ("shared", value)

    def start_again(self, member: Member) -> Member:
        self.members[member.number - 1] = self.made(member.number)
        return self.members[member.number - 1]

    def asked(self) -> list[tuple[Any, ...]]:
        """The calls since the last time."""
        calls, self.calls = self.calls, []
        return calls


def team_of(kind: Callable[..., Any], answers: Answers | None, **run: Any) -> Any:
    """The head's, at version 5, with ``learners`` that note what they load."""
    section = Named(**{"shards": 8, "max_staleness": 0} | run)
    config = Named(run=section, sample=Named(engine="transformers"), learns=True, as_written="c")
    job = Named(config=config, folder=Path("run"), state=Named(step=5), plan="p",
                data=Named(teacher_prompts={}))  # fmt: skip
    lines: list[str] = []
    team = kind(job, Named(line=lines.append), answers)
    loaded: list[Any] = []
    model = Named(
        adapter_of=lambda role: f"adapter {team.version}",
        load_adapter=lambda role, adapter: loaded.append(adapter),
    )
    policy = Named(model=model, micro_batches=Named(tokens=64))
    team._learners = Named(policy=policy, state=lambda: "state", load=loaded.append)
    team.lines, team.loaded = lines, loaded
    if answers is not None:
        answers.asked()
    return team


def test_a_lost_member_is_told_once_and_another_one_started() -> None:
    answers = Answers(replicas=2)
    team = team_of(Crew, answers)
    answers.members[0].lost = "died"
    assert (team.tell_of_losses(), team.tell_of_losses()) == (1, 0)
    told = "replica 1 (m) died while sampling: what it had of the wave is sampled again; 2 of 3"
    assert team.lines == [f"{told} replicas are left and another one is started"]
    _, (number, method, work) = answers.asked()
    assert (number, method) == (1, "open")
    assert work == Work("c", Path("run"), Path.cwd(), team._job.state, "p", {}, 1, False)
    for _ in range(crew.MOST_STARTS):
        answers.members[1].lost = "died"
        team.tell_of_losses("late")
    assert team.lines[-1] == (
        "replica 2 (m) died late; 2 of 3 replicas are left and no further one is started"
    )


def test_who_samples_is_given_the_adapter_that_it_lacks() -> None:
    answers = Answers(replicas=2, samplers=1)
    team = team_of(Crew, answers, max_staleness=2)
    one, two, sampler = answers.members
    two.version = 4
    sampler.version = None
    answers.given[2, "load"] = LOST
    team.adapters = {4: "adapter 4"}
    assert team.who_samples(4) == [one, sampler]  # the other one could not load the state
    held = ("hold", 4, ("shared", "adapter 4"))
    load = (2, "load", ("shared", "state"), 64)
    assert answers.asked() == [load, (1, *held), (3, *held)]
    assert team.who_samples(4, learners=False) == [sampler]
    assert answers.asked() == []  # it holds it
    answers.given.clear()
    team.sampled_by = 4
    assert team.ready() == [one]  # the head's own adapter is away
    team.sampled_by = None
    assert (team.ready(), two.version) == ([one, two], 5)
    assert answers.asked() == [load]
    sampler.lost = "died"
    assert team.who_samples(5) == [one, two]  # by their own
    assert answers.asked() == []


def test_adapters_of_steps_to_come_are_kept() -> None:
    team = team_of(Crew, None, max_staleness=2)
    assert team.version_of(7) == 7
    team.adapters = {version: f"adapter {version}" for version in (2, 3, 4)}
    team.keep_adapter()
    assert list(team.adapters) == [3, 4, 5]
    assert [team.version_of(step) for step in (4, 5, 6, 7)] == [3, 3, 4, 5]
    with team.at(5):
        assert (team.loaded, team.sampled_by) == ([], None)
    with team.at(3):
        assert (team.loaded, team.sampled_by) == (["adapter 3"], 3)
    assert (team.loaded, team.sampled_by) == (["adapter 3", "adapter 5"], None)


def parts(*sizes: int) -> list[Part]:
    """Shards of so many prompts."""
    return [
        Part(shard, tuple(Prompt(f"{shard}.{n}", "", (1,), "") for n in range(size)), shard)
        for shard, size in enumerate(sizes)
    ]


def sampled(prompt: Prompt) -> Group:
    return Group(prompt, (Completion((7,), prompt.id, (-1.0,), "stop"),))


def answer(lot: tuple[Part, ...], *others: Any) -> tuple[bytes, float]:
    """Of a replica, which knows the prompts by their tokens alone."""
    groups = [replace(sampled(p), prompt=replace(p, id="x")) for part in lot for p in part.prompts]
    return orjson.dumps(groups), 2.0


def test_lots_of_a_lost_member_are_sampled_by_others_and_all_come_in_order() -> None:
    answers, wave = Answers(replicas=2), parts(2, 1, 3, 1)
    team = team_of(Crew, answers)
    answers.given = {(1, "sample"): answer, (2, "sample"): LOST}
    deal = Deal(team, wave, PARAMS, 4, 3)
    deal.hand_out(answers.members, 1)
    calls = [(1, "sample", (wave[0],), PARAMS, 4), (2, "sample", (wave[1],), PARAMS, 4)]
    assert answers.asked() == calls
    assert [g.prompt.id for g in deal.gather()] == ["0.0", "0.1"]
    answers.members[0].version = 4  # by what it has learned
    deal.hand_out(answers.members[:1], 2)
    assert answers.asked() == [(1, "sample", (wave[n],), PARAMS, None) for n in (1, 2)]
    deal.gather(wait=True)
    assert not deal.is_done
    lot = deal.take()
    assert (lot, deal.take()) == ((wave[3],), None)
    deal.keep(lot, [[sampled(p) for p in wave[3].prompts]])
    assert deal.is_done
    assert deal.groups() == [[sampled(p) for p in part.prompts] for part in wave]
    assert team._record == {"replicas/1/sampling_seconds": 6.0}


def test_the_head_samples_beside_the_others() -> None:
    answers, wave, told, own = Answers(), parts(1, 2, 1, 1), [], []
    team = team_of(Many, answers)
    answers.given[1, "sample"] = answer

    def draw(lot: Any) -> list[list[Group]]:
        own.append(lot[0].shard)
        return [[sampled(p) for p in part.prompts] for part in lot]

    groups = team.sample(wave, PARAMS, draw, lambda *given: told.append(given))
    assert groups == [[sampled(p) for p in part.prompts] for part in wave]
    assert own == [0, 3]
    assert told == [(3, 3), (0, 0)]  # its own are told by ``draw``
    assert team.take_record(0).keys() == {
        "replicas/0/sampling_seconds",
        "replicas/1/sampling_seconds",
    }
    team._sampled_ahead[3] = {"time/sampling_seconds": 1.0, "sample/tokens_per_second": 2.0}
    assert team.take_record(3) == {
        "time/ahead_sampling_seconds": 1.0,
        "sample/tokens_per_second": 2.0,
    }
    assert team.take_record(3) == {}


@pytest.mark.parametrize(("replicas", "takers"), [(0, 0), (1, 1), (2, 1), (3, 3), (4, 3), (7, 7)])
def test_a_power_of_two_of_them_learns_and_a_step_that_one_leaves_is_learned_again(
    replicas: int, takers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, passed, tried = Answers(replicas), [], []
    team = team_of(Many, answers)
    monkeypatch.setattr(many, "deal", lambda *given: None)

    def learn(*given: Any) -> dict[str, float]:
        members = given[0] if replicas else []
        tried.append(len(members))
        *_, progress, kl = given
        assert kl == 0.25
        progress(3)
        if replicas and len(tried) == 1:
            raise LOST
        return {"x": 1.0}

    team._learn_with, team.learners.learn = learn, learn
    record = team.learn(5, [], passed.append, 0.25)
    count = {"replicas/count": 1.0 + takers} if replicas else {}
    assert (record, tried) == ({"x": 1.0} | count, [takers] * (2 if replicas else 1))
    assert passed == ([3, -3, 3] if replicas else [3])
    assert team.loaded == (["state"] if replicas else [])
    assert [m.version for m in answers.members] == [6] * takers + [5] * (replicas - takers)
    assert team.version == 6
    if replicas:
        tried.clear()
        monkeypatch.setattr(team, "_learn_with", lambda *given: (_ for _ in ()).throw(LOST))
        with pytest.raises(ReplicaError, match="step 7: the replicas keep losing each other"):
            team.learn(6, [], passed.append, 0.25)


@pytest.mark.parametrize("fails", [False, True])
def test_each_member_is_given_its_seat(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, dealt, closed = Answers(replicas=3), [], []
    team = team_of(Many, answers)
    made = Named(waited_seconds=1.0, sent_bytes=2, close=lambda: closed.append(None))
    monkeypatch.setattr(many, "deal", lambda own, shards: dealt.append(shards.peers))
    monkeypatch.setattr(many, "GroupPeers", lambda *given: made)
    monkeypatch.setattr(team.learners.policy.model, "device", "cpu", raising=False)
    for number in (1, 2, 3):
        answers.given[number, "learn"] = {"sent_bytes": float(number)}
    if fails:
        answers.given[3, "learn"] = LOST
    team.learners.learn = lambda *given: {"learned": given}
    record = team._learn_with(answers.members, 4, ["row"], print, 0.5)
    assert record == {"learned": (4, ["row"], print, 0.5)}
    seats = [arguments[-1] for (*arguments,) in answers.asked()]
    assert [(seat.rank, seat.size, seat.address) for seat in seats] == [
        (rank, 4, "here") for rank in (1, 2, 3)
    ]
    assert len({(seat.name, seat.secret, seat.head) for seat in seats}) == 1
    sent = {k: v for k, v in team._record.items() if k.endswith("sent_bytes")}
    told = {1: 1.0, 2: 2.0} if fails else {1: 1.0, 2: 2.0, 3: 3.0}
    assert sent == {"replicas/0/sent_bytes": 0.0} | {
        f"replicas/{n}/sent_bytes": value for n, value in told.items()
    }
    assert (len(closed), dealt[-1] is made) == ((1, False) if fails else (0, True))


@pytest.mark.parametrize(
    ("replicas", "samplers", "told"),
    [
        (2, 0, ["3 replicas on 2 machines"]),
        (1, 1, ["2 replicas and 1 that sample only on 2 machines"]),
        (0, 1, ["1 replica and 1 that sample only on 1 machine"]),
    ],
)
def test_who_takes_part_is_told(replicas: int, samplers: int, told: list[str]) -> None:
    """The first one is on another machine, if there are two replicas."""
    answers = Answers(replicas, samplers)
    team = team_of(Crew, answers, max_staleness=2)
    if replicas:
        answers.members[0].address = "there"
    team.begin(team._learners, {3: "three", 1: "one"})
    assert [call[:2] for call in answers.asked()] == [
        (number, "open") for number in range(1, 1 + replicas + samplers)
    ]
    assert team.adapters == {3: "three", 5: "adapter 5"}
    assert len(team.lines) == len(told)
    for line, start in zip(team.lines, told, strict=True):
        assert line.startswith(start + (", 8 shards; the others" if "machine" in start else ""))


def test_what_one_of_the_others_failed_with_is_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = Answers(replicas=3)
    team = team_of(Many, answers)
    answers.given = {(1, "x"): LOST, (2, "x"): PeersLost("another")}
    calls = [answers.call(member, "x") for member in answers.members]
    assert team._find_out(calls) == "replica 1 (m): it is gone"
    assert [member.version for member in answers.members] == [None] * 3
    answers.given[2, "x"], answers.given[3, "x"] = KeyError("first"), KeyError("second")
    with pytest.raises(KeyError, match="first"):
        team._find_out([answers.call(member, "x") for member in answers.members])
    now, ended = iter([0.0, 89.0, 91.0]), []
    monkeypatch.setattr(many, "time", Named(monotonic=lambda: next(now)))
    answers.end = ended.append  # type: ignore[attr-defined]
    silent, (first, *_) = answers.call(answers.members[0], "y"), answers.members
    silent.is_done = lambda seconds: bool(first.lost)
    team._find_out([silent])
    assert (first.lost, ended) == ("did not come back", [first])


class Together(GroupPeers):
    """Peers in threads of one process, whose tensors go through queues."""

    def __init__(self, rank: int, size: int, queues: dict[Any, Queue[Any]]) -> None:
        self.rank, self.size, self.sent_bytes, self.waited_seconds = rank, size, 0, 0.0
        self.acts: list[tuple[str, int]] = []
        self._device, self._lost = torch.device("cpu"), threading.Event()
        self._queues, self._gloo, self._tensors = queues, Named(allgather=self._allgather), None

    def _pass(self, act: str, tensor: torch.Tensor, peer: int) -> None:
        self.acts.append((act, peer))
        if act == "send":
            self._queues[self.rank, peer].put(tensor.clone())
        else:
            tensor.copy_(self._queues[peer, self.rank].get(timeout=60))

    def _allgather(self, out: Any, own: Any) -> Any:
        for peer in range(self.size):
            self._queues[self.rank, peer].put(own[0].clone())
        for peer in range(self.size):
            out[0][peer].copy_(self._queues[peer, self.rank].get(timeout=60))
        return Named(wait=lambda: None)


def test_gradients_are_added_as_a_tree_and_texts_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of four is (a + b) + (c + d) on each, in pieces of 8 bytes."""
    monkeypatch.setattr(peers, "CHUNK_BYTES", 8)
    queues: dict[Any, Queue[Any]] = {(a, b): Queue() for a in range(4) for b in range(4)}
    generator = torch.Generator().manual_seed(0)
    given = 1e4 * torch.randn(4, 5, generator=generator)
    team = [Together(rank, 4, queues) for rank in range(4)]
    totals, texts = [row.clone() for row in given], [b"", b"ab", b"c", b"defg"]
    found: dict[int, Any] = {}

    def work(rank: int) -> None:
        team[rank].add(totals[rank])
        sent = team[rank].sent_bytes
        found[rank] = team[rank].gather(texts[rank]), sent, team[rank].sent_bytes - sent

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
    [thread.start() for thread in threads]
    [thread.join(60) for thread in threads]
    firsts = [each.acts[0] for each in team]  # or two that send would wait for each other
    assert firsts == [("send", 1), ("recv", 0), ("send", 3), ("recv", 2)]
    tree = (given[0] + given[1]) + (given[2] + given[3])
    assert all(torch.equal(total, tree) for total in totals)
    assert not torch.equal(tree, ((given[0] + given[1]) + given[2]) + given[3])
    assert found == dict.fromkeys(range(4), (texts, 2 * 5 * 4, 3 * 4))
    team[0].waited_seconds = 1.0
    with costs(team[0]) as measured:
        team[0].sent_bytes += 7
        team[0].waited_seconds += 1.5
    assert measured == {"waiting_seconds": 1.5, "sent_bytes": 7.0}
    team[0].lose()
    with pytest.raises(PeersLost):
        team[0].gather(b"")


def test_a_replica_samples_by_what_it_learned_or_by_what_it_holds(
    small_run: Callable[..., Config],
) -> None:
    job = prepare(small_run(run__shards=2, run__steps=1), SILENT)
    work = Work(job.config.as_written, job.folder, Path.cwd(), job.state, job.plan, {}, 1, False)
    replica, lot = Replica(work), (Part(0, tuple(job.data.prompts[:2]), 3),)
    model = replica._model
    adapter = {
        name: torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0))
        for name, tensor in model.adapter_of("policy").items()
    }

    def drawn(version: int | None) -> list[list[int]]:
        content, _ = replica.sample(lot, PARAMS, version)
        groups = orjson.loads(content)
        assert [g["prompt"]["id"] for g in groups] == [p.id for p in lot[0].prompts]
        return [g["completions"][0]["token_ids"] for g in groups]

    own = drawn(None)
    sampler = TransformersSampler(model, job.plan.cache_tokens)
    groups = sampler.sample(lot[0].prompts, PARAMS, 3, lambda *told: None)
    assert own == [[*g.completions[0].token_ids] for g in groups]
    replica.hold(7, adapter)
    with pytest.raises(ReplicaError, match="version 8 is asked for and 7 is held"):
        drawn(8)
    other = drawn(7)
    assert drawn(None) == own != other
    model.load_adapter("policy", adapter)
    assert drawn(None) == other
    replica.load(replica._learners.state(), 48)
    assert replica._learners.policy.micro_batches.tokens == 48


def test_the_threads_of_torch_are_a_run_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(many, "Many", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    numbers = [5]  # vLLM puts another function in the place of torch's
    monkeypatch.setattr(torch, "get_num_threads", lambda: numbers[-1])
    monkeypatch.setattr(torch, "set_num_threads", numbers.append)
    job: Any = Named(config=Named(run=Named(shards=2, samplers=0)))
    watch: Any = None
    with pytest.raises(KeyError), many.start(job, watch, 1):
        assert numbers == [5, 3]
        raise KeyError
    assert numbers == [5, 3, 5]
