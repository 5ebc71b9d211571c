"""Dynamic sampling: groups without signal are dropped, others drawn, and a killed step goes on."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.config.algorithms import ALGORITHMS, resolve
from reason_llm.data.render import order
from reason_llm.errors import Stopped
from reason_llm.readers import RewardReader
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run.collect import Step, collect, is_kept, sampled_before
from reason_llm.run.start.prepare import Job, prepare
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.watch import SILENT

BOXED = {"boxed": 1.0}


def group(*rewards: float) -> Group:
    made = tuple(Completion((1,), "", (-1.0,), "stop", {"boxed": r}, r) for r in rewards)
    return Group(Prompt("p", "", (1,), ""), made)


def test_only_groups_with_signal_and_in_range_are_kept() -> None:
    dapo, plain = ALGORITHMS["dapo"], ALGORITHMS["grpo"]
    assert is_kept(group(1, 0, 0, 0), dapo, BOXED)
    assert not is_kept(group(1, 1, 1, 1), dapo, BOXED)
    assert is_kept(group(1, 1, 1, 1), plain, BOXED)
    ranged = resolve("dapo", {"success_range": (0.5, 0.75)})
    assert not is_kept(group(1, 0, 0, 0), ranged, BOXED)
    assert is_kept(group(1, 1, 0, 0), ranged, BOXED)
    assert is_kept(group(1, 1, 1, 0), ranged, BOXED)


def test_success_is_told_by_the_first_reward_and_not_by_the_total() -> None:
    row = resolve("dapo", {"success_range": (0.2, 0.6)})

    def judged(*rewards: tuple[float, float]) -> Group:
        made = tuple(
            Completion((1,), "", (-1.0,), "stop", {"boxed": a, "tag_count": b}, a + b)
            for a, b in rewards
        )
        return Group(Prompt("p", "", (1,), ""), made)

    helped = judged((1, 0.5), (0, 0.5), (0, 1), (0, 0.25))  # every total is positive, one is right
    assert is_kept(helped, row, BOXED)
    assert not is_kept(helped, row, {"tag_count": 1.0, "boxed": 1.0})
    costly = judged((1, -2), (1, -1), (0, 0), (0, 0))  # no total is positive, two are right
    assert is_kept(costly, row, BOXED)


def test_each_reward_s_signal_is_one_where_each_is_normalised_by_itself() -> None:
    """The totals tie: GDPO tells the completions apart, and DAPO does not."""
    made = tuple(
        Completion((1,), "", (-1.0,), "stop", {"boxed": a, "format": b}, a + b)
        for a, b in ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5), (0.5, 0.5))
    )
    tied = Group(Prompt("p", "", (1,), ""), made)
    gdpo, weights = resolve("gdpo", {"dynamic_sampling": 3}), {"boxed": 1.0, "format": 1.0}
    assert is_kept(tied, gdpo, weights)
    assert not is_kept(tied, ALGORITHMS["dapo"], weights)
    assert not is_kept(tied, gdpo, {"boxed": 0.0, "format": 0.0})


class Scripted:
    """A sampler whose completions are right by the prompt's number: some groups have no signal."""

    def __init__(self, flat: Callable[[int], bool]) -> None:
        self.flat = flat
        self.asked: list[tuple[int, int]] = []
        self.numbers: list[int] = []

    def sample(
        self, prompts: Any, params: Any, seed: int, progress: Any, ended: Any
    ) -> list[Group]:
        self.asked.append((len(prompts), seed))
        made = []
        for prompt in prompts:
            number = int(prompt.id.rpartition(":")[2])
            self.numbers.append(number)
            right = f"<think></think><answer>{prompt.answer}</answer>"
            texts = [right] * params.num_completions
            if not self.flat(number):
                texts[0] = "no"
            completions = tuple(Completion((3, 2), t, (-1.0, -1.0), "stop") for t in texts)
            made.append(Group(prompt, completions))
        return made

    def prompts_at_once(self, prompts: Any, params: Any) -> int:
        return 3


def seed_of(step: int, place: int) -> int:
    """What the sampler is given, by the run's seed (0), the step and the prompt's place in it."""
    return random.Random(f"0/sample/{step}/{place}").getrandbits(63)


def collected(
    job: Job, sampler: Scripted, stop_after: int | None = None, start: int = 32, step: int = 2
) -> Any:
    """Collect a step; with ``stop_after``, die when the sampler is asked once more."""
    original = sampler.sample

    def sample(*args: Any, **kwargs: Any) -> list[Group]:
        if stop_after is not None and len(sampler.asked) == stop_after:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    sampler.sample = sample  # type: ignore[method-assign]
    with RolloutBuffer(job.config.run.buffer, job.state.run) as buffer:
        groups = collect(step_of(job, buffer, StopSignal(), start, step), sampler)
        return groups, drawn_of(buffer, step)


def drawn_of(buffer: RolloutBuffer, step: int) -> int:
    document = buffer.find(step)
    assert document is not None
    return document.drawn


def step_of(job: Job, buffer: RolloutBuffer, stop: StopSignal, drawn: int, number: int) -> Step:
    return Step(number, drawn, number, None, job, buffer, stop, SILENT, {})


@pytest.fixture
def job(small_run: Callable[..., Config]) -> Job:
    config = small_run(algorithm__name="dapo", algorithm__kl=None, algorithm__dynamic_sampling=4)
    return prepare(config, SILENT)


def test_the_step_is_filled_with_groups_that_have_signal(job: Job) -> None:
    sampler = Scripted(flat=lambda number: number % 2 == 0)
    groups, drawn = collected(job, sampler)
    assert len(groups) == 4
    assert all(len({c.reward for c in g.completions}) == 2 for g in groups)
    assert len({g.prompt.id for g in groups}) == 4
    assert 4 < drawn <= 16
    assert drawn == sum(count for count, _ in sampler.asked)
    places = [sum(count for count, _ in sampler.asked[:n]) for n in range(len(sampler.asked))]
    assert [seed for _, seed in sampler.asked] == [seed_of(2, place) for place in places]
    assert collected(job, again := Scripted(sampler.flat), step=3)[1] == drawn
    assert again.asked[0] == (3, seed_of(3, 0))


def test_the_bound_holds_and_a_step_without_any_signal_is_taken_as_it_is(job: Job) -> None:
    sampler = Scripted(flat=lambda number: True)
    groups, drawn = collected(job, sampler)
    assert drawn == 16
    assert groups
    assert all(len({c.reward for c in g.completions}) == 1 for g in groups)


@pytest.mark.parametrize("name", ["dapo", "grpo"])
@pytest.mark.parametrize("stop_after", [1, 2, 3])
def test_a_killed_step_draws_on_as_if_it_had_not_been(
    name: str, stop_after: int, small_run: Callable[..., Config]
) -> None:
    def flat(number: int) -> bool:
        return number % 4 != 0

    row = {"name": name, "kl": None, "dynamic_sampling": 4 if name == "dapo" else 1}
    size = 4 if name == "dapo" else 11  # of waves of 3
    job = prepare(small_run(algorithm=row, sample__prompts_per_step=size), SILENT)
    whole, drawn = collected(job, Scripted(flat))
    job.config.run.buffer.unlink()
    with pytest.raises(KeyboardInterrupt):
        collected(job, Scripted(flat), stop_after)
    resumed = Scripted(flat)
    assert collected(job, resumed) == (whole, drawn)
    assert sum(count for count, _ in resumed.asked) < drawn


def test_the_bounds_of_success_are_in_range_and_a_reward_of_0_is_none() -> None:
    row = resolve("dapo", {"success_range": (0.25, 0.75)})
    kept = {n: is_kept(group(*[1.0] * n, *[0.0] * (8 - n)), row, BOXED) for n in range(1, 8)}
    assert kept == {n: 2 <= n <= 6 for n in range(1, 8)}


class Pays(RewardReader):
    """A reward model that nobody asks."""

    key = "a model"

    def rewards(self, groups: Sequence[Group], learner: Any, progress: Any) -> list[float]:
        raise AssertionError("it is asked in a phase of its own")


def test_a_step_that_waits_for_reward_models_alone_is_not_sampled_again(job: Job) -> None:
    run = replace(job.run, readers=[Pays()])
    job = replace(job, run=run)
    groups, _ = collected(job, Scripted(lambda number: False))
    with RolloutBuffer(job.config.run.buffer, job.state.run) as buffer:
        second, third = (step_of(job, buffer, StopSignal(), 32, number) for number in (2, 3))
        assert sampled_before(second) == groups
        assert sampled_before(third) is None
        buffer.write(2, groups[1:], whole=False)
        assert sampled_before(second) is None


def test_no_prompt_is_passed_over_between_steps(job: Job) -> None:
    first, second = Scripted(lambda number: number % 2 == 0), Scripted(lambda number: False)
    _, drawn = collected(job, first, start=0, step=0)
    collected(job, second, start=drawn, step=1)
    length = len(job.data.prompts)
    expected = order([length], [1.0], job.config.run.seed, 0, drawn + 4)
    assert first.numbers + second.numbers == [x + 1 for x in expected]


def test_a_signal_is_obeyed_when_the_wave_is_saved(job: Job) -> None:
    sampler = Scripted(flat=lambda number: number % 2 == 0)
    buffer = RolloutBuffer(job.config.run.buffer, job.state.run)
    with StopSignal() as stop, buffer, pytest.raises(Stopped) as stopped:
        os.kill(os.getpid(), signal.SIGTERM)
        collect(step_of(job, buffer, stop, 32, 2), sampler)
    assert stopped.value.exit_code == 143
    assert len(sampler.asked) == 1
    assert drawn_of(buffer, 2) == sampler.asked[0][0]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert collected(job, Scripted(sampler.flat)) == collected_afresh(job, sampler.flat)


def collected_afresh(job: Job, flat: Callable[[int], bool]) -> Any:
    job.config.run.buffer.unlink()
    return collected(job, Scripted(flat))
