"""Rollouts over the real vLLM: requests come and go in one batch.

1. What joins a batch, and what leaves it.
2. Nobody waits for another, and who comes first changes no token.
3. With ``model.deterministic`` there is a barrier, and equal bits. An engine that fails ends the
   wave alone.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_sessions import AGENTS, END, TOKENIZER, a_prompt, play, sessions
from test_turns import check_logprobs, environments

from conftest import TINY
from families import SIZES, prompts_of, quiet, randomize
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.environments.playing import PlayedSampler
from reason_llm.environments.token_server import Ask, Branch, Session, TokenServer
from reason_llm.model.base import Model
from reason_llm.rollout import Completion, Group
from reason_llm.sample import (
    SamplingParams,
    VllmSampler,
    sampling,
)
from reason_llm.sample.protocol import ignore_ended
from reason_llm.sample.vllm_sampler import VllmBatch

pytestmark = pytest.mark.filterwarnings("default")  # vLLM warns of its own


@pytest.fixture(scope="module")
def shared() -> Iterator[Model]:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    section = ModelSection(path=str(TINY), adapter=AdapterSection(rank=8, alpha=16))
    with Model(section, TOKENIZER, 0, SIZES) as model:
        randomize(model, seed=1)
        yield model


@pytest.fixture
def sampler(shared: Model) -> Iterator[VllmSampler]:
    with sampling(shared, 0) as sampler:
        assert isinstance(sampler, VllmSampler)
        yield sampler


# 1. A batch


def test_requests_join_and_leave(sampler: VllmSampler) -> None:
    first, second, third = prompts_of(TOKENIZER, "2 + 3 = ?", "4 + 5 = ?", "6 + 7 = ?")
    params, seen = SamplingParams(1, 12), dict[str, Any]()
    with sampler.batch() as batch:
        batch.add("first", first, params, 1)
        batch.add("never", second, params, 2)
        batch.step(quiet)
        batch.keep(lambda key: key != "never")
        batch.add("third", third, params, 3)
        assert batch.keys.keys() == {"first", "third"}
        while batch.keys:
            seen |= dict(batch.step(quiet))
        batch.add("left", second, params, 2)
    assert not sampler.engine.llm.llm_engine.has_unfinished_requests()
    assert seen.keys() == {"first", "third"}
    for name, prompt, seed in (("first", first, 1), ("third", third, 3)):
        with sampler.batch() as batch:
            batch.add(name, prompt, params, seed)
            while batch.keys:
                for _, (completion,) in batch.step(quiet):
                    assert completion.token_ids == seen[name][0].token_ids


def test_what_waits_beside_what_is_under_way() -> None:
    own = sessions(f"agent:{AGENTS}:two_turns")
    first, second, third = (Session(a_prompt(n)) for n in range(3))
    loop = asyncio.new_event_loop()
    for each in (first, second):
        each.asks.append(Ask(Branch((1,)), (), 9, loop.create_future()))
    asked = [(first, first.asks[0]), (second, second.asks[0])]
    with TokenServer([first, second, third], own.section, own.renderer, 99, 50, [END]) as server:
        assert server.waiting(joins=True) == asked  # the third keeps nobody waiting
        assert server.waiting(asked[:1], joins=True) == asked[1:]
        assert server.waiting(asked, joins=True) == []
        assert server.wants(asked[0])
        server.end(third)
        assert server.waiting() == asked
        gone = asked[1]
        second.asks.clear()  # its client has gone
        assert not server.wants(gone)
        for each in (first, second):
            server.end(each)
        assert not server.wants(asked[0])
        assert server.waiting(joins=True) == server.waiting() == []
        server.answer(asked, [Completion((5,), "", (-1.0,), "stop")] * 2)
        assert first.branches == second.branches == []
    loop.close()


# 2. Order


class AfterAnother:
    """Two turns, of which the second comes when another row's rollout has ended."""

    ended: defaultdict[int, threading.Event]

    def reset(self, name: int, after: int | None) -> None:
        self.name, self.after, self.turns = name, after, 0

    def step(self, text: str) -> tuple[str, bool]:
        self.turns += 1
        if self.after is not None:
            assert self.ended[self.after].wait(300)
        if self.turns == 2:
            self.ended[self.name].set()
        return "3 + 4 = ?", self.turns == 2

    def get_reward(self) -> float:
        return 1.0


@pytest.fixture(params=["agent", "class"])
def own(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    if request.param == "agent":
        return sessions(f"agent:{AGENTS}:after_another")
    return environments(AfterAnother, monkeypatch, environment_seconds=600)


def in_order(
    own: Any, sampler: Any, *order: int, progress: Any = quiet, ended: Any = ignore_ended
) -> list[Group]:
    """Three rows' rollouts, each of which goes on when the one before has ended."""
    AfterAnother.ended = defaultdict(threading.Event)
    before = dict(zip(order, (None, *order), strict=False))
    rows = [a_prompt(n, name=n, after=before[n]) for n in range(3)]
    return PlayedSampler(own, sampler).sample(rows, SamplingParams(2, 200), 7, progress, ended)


def test_who_comes_first_changes_no_token(
    own: Any, sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a barrier the rollouts would wait for each other for ever."""
    seeds, real = list[int](), VllmBatch.add

    def add(
        batch: VllmBatch, key: Any, prompt: Any, params: Any, seed: int, fixed: bool = False
    ) -> None:
        seeds.append(seed)
        real(batch, key, prompt, params, seed, fixed)

    monkeypatch.setattr(VllmBatch, "add", add)
    forth, back = in_order(own, sampler, 0, 1, 2), in_order(own, sampler, 2, 1, 0)
    assert set(seeds[:12]) == set(seeds[12:]) and len(set(seeds)) == 12  # one for each turn
    drawn = set()
    for group, other in zip(forth, back, strict=True):
        assert group.prompt.token_ids == other.prompt.token_ids
        for one, two in zip(group.completions, other.completions, strict=True):
            assert one.environment == two.environment
            assert (one.environment["turns"], one.environment["reward"]) == (2, 1.0)
            assert (one.token_ids, one.spans) == (two.token_ids, two.spans)
            drawn.add(one.token_ids)
        for each in (group, other):
            check_logprobs(sampler.model, [each], 5e-5)
    assert len(drawn) > 3


def test_a_group_is_reported_when_its_rollouts_have_ended(own: Any, sampler: VllmSampler) -> None:
    """The first one while others are played, and each as it is returned."""
    events: list[Any] = []
    groups = in_order(
        own, sampler, 0, 1, 2,
        progress=lambda tokens, items: events.append(tokens),
        ended=lambda *ended: events.append(ended),
    )  # fmt: skip
    reported = [each for each in events if isinstance(each, tuple)]
    assert sorted(reported, key=lambda ended: ended[0]) == list(enumerate(groups))
    assert any(each for each in events[events.index(reported[0]) :] if isinstance(each, int))


# 3. The barrier, and faults


@pytest.mark.long
def test_deterministic_keeps_the_barrier(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    real = sampler.sample

    def counted(prompts: Any, *rest: Any) -> list[Group]:
        sizes.append(len(prompts))
        return real(prompts, *rest)

    monkeypatch.setattr(sampler, "sample", counted)
    monkeypatch.setattr(sampler.model, "deterministic", True)
    own = sessions(f"agent:{AGENTS}:two_turns", turn_tokens=20)
    twice = [play(own, sampler, [a_prompt(n) for n in range(2)], each=4) for _ in range(2)]
    assert twice[0] == twice[1]
    assert sizes == [8, 8, 8, 8]


@pytest.mark.long
def test_an_engine_that_fails_ends_the_wave(
    sampler: VllmSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = sampler.engine.llm.llm_engine
    real, calls = engine.step, 0

    def fails() -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("the card fell off the bus")
        return real()

    own = sessions(f"agent:{AGENTS}:two_turns", turn_tokens=20)
    with monkeypatch.context() as patched:
        patched.setattr(engine, "step", fails)
        with pytest.raises(RuntimeError, match="fell off"):
            play(own, sampler, [a_prompt()], each=2)
    assert not engine.has_unfinished_requests()
    (group,) = play(own, sampler, [a_prompt()], each=2)
    assert [c.environment["turns"] for c in group.completions] == [2, 2]


# 4. Members of a request


@pytest.mark.long
def test_stop_and_seed_of_a_request(sampler: VllmSampler) -> None:
    """``stop`` cuts the answer, and what is learned ends before it. Within a rollout the same seed
    and conversation give the same answer, another seed another one; rollouts differ."""
    own = sessions(f"agent:{AGENTS}:stops_and_seeds", turn_tokens=24)
    (group,) = play(own, sampler, [a_prompt()], each=3)
    seeded = set()
    for each in group.completions:
        assert (each.environment.get("reward"), each.environment.get("stops")) == (1.0, 1), each
        answers = [one.token_ids for one in (each, *each.others)]
        (whole,) = {ids for ids in answers if answers.count(ids) == 2}
        seeded.add(whole)
        ids = torch.tensor([[*a_prompt().token_ids, *whole]])
        with torch.no_grad():
            rows = sampler.model.policy(ids).logits[0].log_softmax(-1)[-1 - len(whole) : -1]
        found = rows.gather(-1, ids[0, -len(whole) :, None])[:, 0]
        (cut,) = [
            one for one in (each, *each.others)
            if one.token_ids != whole
            and one.token_ids[: sum(one.is_sampled)] == whole[: sum(one.is_sampled)]
        ]  # fmt: skip
        kept = sum(cut.is_sampled)  # before the string: the first tokens alone are learned
        assert 2 < kept < len(whole) and cut.is_sampled[:kept] == (True,) * kept
        assert cut.token_ids[:kept] == whole[:kept]
        assert torch.allclose(found[:kept], torch.tensor(cut.logprobs[:kept]), atol=5e-5)
    assert len(seeded) > 1
