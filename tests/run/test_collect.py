"""Dynamic sampling: groups without signal are dropped, others drawn, and a killed step goes on."""

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from reason_llm.config import Config
from reason_llm.config.algorithms import ALGORITHMS, resolve
from reason_llm.data.render import order
from reason_llm.errors import Stopped
from reason_llm.rollout import Completion, Group, Prompt, Span
from reason_llm.run import collect as collect_module
from reason_llm.run.collect import Step, collect, is_kept, sampled_before, with_reward_models
from reason_llm.run.start.prepare import Job, prepare
from reason_llm.run.stopping import StopSignal
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.document import Document, RunIdentity
from reason_llm.run.team import ahead
from reason_llm.run.watch import SILENT, Watch

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

    def sample(self, prompts: Any, params: Any, seed: int, progress: Any) -> list[Group]:
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


def test_waves_are_of_the_size_that_is_set_and_what_was_sampled_before_is_shown(
    small_run: Callable[..., Config],
) -> None:
    """Of a step of seven prompts, two of which were sampled before a kill: 5 = 4 + 1."""
    config = small_run(sample__prompts_per_step=7, sample__prompts_per_wave=4)
    job, sampler, told = prepare(config, SILENT), Scripted(lambda number: False), list[Any]()

    class Shown(Watch):
        @contextmanager
        def phase(self, name: str, total: int) -> Iterator[Any]:
            told.append((name, total))
            yield lambda tokens, items: told.append((tokens, items))

    with RolloutBuffer(job.config.run.buffer, job.state.run) as buffer:
        first = sampler.sample(job.data.prompts[:2], SimpleNamespace(num_completions=4), 0, None)
        buffer.write(2, first, whole=False)
        sampler.asked.clear()
        groups = collect(replace(step_of(job, buffer, StopSignal(), 0, 2), watch=Shown()), sampler)
    assert (len(groups), sampler.asked) == (7, [(4, seed_of(2, 2)), (1, seed_of(2, 6))])
    assert told == [("sampling", 28), (0, 8)]


def test_the_bounds_of_success_are_in_range_and_a_reward_of_0_is_none() -> None:
    row = resolve("dapo", {"success_range": (0.25, 0.75)})
    kept = {n: is_kept(group(*[1.0] * n, *[0.0] * (8 - n)), row, BOXED) for n in range(1, 8)}
    assert kept == {n: 2 <= n <= 6 for n in range(1, 8)}


def test_a_step_that_waits_for_reward_models_alone_is_not_sampled_again(job: Job) -> None:
    run = replace(job.run, reward_models=["a model"])  # type: ignore[list-item]
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


def test_what_is_counted_of_a_step_in_three_waves(
    small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Errors, those before a kill too; and of the tokens those that the model wrote."""

    @contextmanager
    def timed(record: dict[str, float], name: str) -> Iterator[None]:
        yield
        record[f"time/{name}_seconds"] = record.get(f"time/{name}_seconds", 0.0) + 2.0

    monkeypatch.setattr(collect_module, "timed", timed)
    job = prepare(small_run(sample__prompts_per_step=7), SILENT)
    sampler, scorer = Scripted(lambda number: False), job.scorer
    counting: Any = SimpleNamespace(
        score=scorer.score, weights=scorer.weights, take_counts=lambda: {"score/errors": 1.0}
    )

    def sample(*given: Any, **named: Any) -> list[Group]:
        groups = Scripted.sample(sampler, *given, **named)
        spans = (Span(0, 1),)
        return [
            replace(g, completions=tuple(replace(c, spans=spans) for c in g.completions))
            for g in groups
        ]

    sampler.sample = sample  # type: ignore[method-assign]
    with RolloutBuffer(job.config.run.buffer, job.state.run) as buffer:
        buffer.write(2, [], whole=False, counts={"score/errors": 5.0})
        step = step_of(replace(job, scorer=counting), buffer, StopSignal(), 0, 2)
        collect(step, sampler)
        document = buffer.find(2)
    assert document is not None and document.counts == {"score/errors": 8.0}
    assert step.record["sample/tokens_per_second"] == 7 * 4 * 1 / 6.0


def test_after_a_kill_only_the_other_reward_models_are_asked(
    small_run: Callable[..., Config],
) -> None:
    config, saved, asked = small_run(), list[Any](), list[str]()
    models = [SimpleNamespace(key=key, rewards=lambda scores: scores) for key in ("a", "b", "c")]

    def with_model_reward(groups: list[Group], key: str, rewards: list[float]) -> list[Group]:
        one = replace(
            groups[0].completions[0], rewards={**groups[0].completions[0].rewards, key: 2.0}
        )
        assert rewards == [2.0]
        return [replace(groups[0], completions=(replace(one, reward=2.0),))]

    scorer = SimpleNamespace(
        weights={"a": 1.0}, with_model_reward=with_model_reward, take_counts=lambda: {"x": 1.0}
    )
    document = Document(RunIdentity("a", "b", {}), 0, False, False, 9, [], {"x": 1.0})
    step: Any = SimpleNamespace(
        job=SimpleNamespace(run=SimpleNamespace(reward_models=models), scorer=scorer),
        buffer=SimpleNamespace(find={3: document}.get), number=3, config=config,
        save=lambda groups, drawn, counts, whole=False: saved.append(
            (list(groups[0].completions[0].rewards), drawn, counts["x"], whole)
        ),
    )  # fmt: skip
    completion = Completion((1,), "", (-1.0,), "stop", {"a": 1.0})
    groups = [Group(Prompt("p", "", (1,), ""), (completion,))]

    def scores(model: Any, groups: Any) -> list[float]:
        asked.append(model.key)
        return [2.0]

    (found,) = with_reward_models(step, groups, scores)
    assert asked == ["b", "c"]
    assert saved == [
        (["a", "b"], 9, 2.0, False),
        (["a", "b", "c"], 9, 3.0, False),
        (["a", "b", "c"], 9, 3.0, True),
    ]
    assert found.completions[0].advantage == 0.0
    models.clear()
    assert with_reward_models(step, groups, scores) is groups


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


def test_each_step_ahead_begins_where_the_one_before_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the order of the prompts."""
    identity = RunIdentity("a", "run", {})
    documents = {3: Document(identity, 3, True, False, 4, [])}
    drawn = {}

    def collected(later: Step, sampler: object) -> None:
        drawn[later.number] = later.drawn
        documents[later.number] = Document(identity, later.number, True, False, 5, [])

    monkeypatch.setattr(ahead, "collect", collected)
    monkeypatch.setattr(ahead, "sampler_of", lambda model, tokens: None)
    named = SimpleNamespace
    job: Any = named(
        config=named(run=named(shards=2, max_staleness=3, steps=9)), plan=named(cache_tokens=0)
    )
    crew: Any = named(
        learners=named(policy=named(model=None)), version_of=lambda number: number - 3
    )
    buffer: Any = named(find=documents.get)
    stop: Any = named(requested=False)
    step = Step(3, 10, 3, None, job, buffer, stop, SILENT, {})
    sampling: Any = None
    ahead.Ahead(crew, step, sampling, {})._work()
    assert drawn == {4: 14, 5: 19, 6: 24}


@pytest.mark.parametrize(
    ("ahead_of", "staleness", "steps", "sampled"),
    [(3, 2, 9, [4, 5]), (3, 2, 5, [4]), (8, 2, 9, []), (3, 1, 9, [4])],
)
def test_how_far_ahead_is_sampled(
    ahead_of: int, staleness: int, steps: int, sampled: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not past the last step; by the version of each; what is whole already stays."""
    documents = {
        ahead_of: Document(RunIdentity("a", "b", {}), ahead_of, True, False, 4, []),
        3: Document(RunIdentity("a", "b", {}), 3, True, False, 4, []),
    }
    later: list[Step] = []

    def collected(step: Step, sampler: object) -> None:
        later.append(step)
        step.record["x"] = float(step.number)
        documents[step.number] = replace(documents[ahead_of], step=step.number)

    monkeypatch.setattr(ahead, "collect", collected)
    monkeypatch.setattr(ahead, "sampler_of", lambda model, tokens: None)
    named = SimpleNamespace
    section = named(shards=2, max_staleness=staleness, steps=steps)
    job: Any = named(config=named(run=section), plan=named(cache_tokens=0))
    crew: Any = named(learners=named(policy=named(model=None)), version_of=lambda step: step - 2)
    stop, buffer, nothing = named(requested=False), named(find=documents.get), None
    records: dict[int, Any] = {}
    step: Any = Step(ahead_of, 10, 3, "there", job, buffer, stop, nothing, {"own": 1.0})
    made: Any = ahead.Ahead(crew, step, nothing, records)
    made._work()
    assert [(each.number, each.version, each.stop, each.watch) for each in later] == [
        (number, number - 2, made, SILENT) for number in sampled
    ]
    assert records == {number: {"x": float(number)} for number in sampled}
    assert (made._next_is_sampled, made.requested) == (bool(sampled), False)
    made._is_enough = True
    with pytest.raises(Stopped):
        made.check()
    made._is_enough, stop.requested = False, True
    assert made.requested
