"""Collection of a step's scored groups: prompts drawn, sampled and scored wave by wave. A wave is
saved when it is sampled and scored while the next is sampled, so that nothing sampled is lost.

With ``algorithm.dynamic_sampling`` a group whose rewards do not vary is dropped, and further
prompts are drawn until the step is full or the bound is reached. Source: arXiv:2503.14476 eq. 11.
"""

import math
import random
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from types import TracebackType
from typing import Protocol, Self

from reason_llm.config import Algorithm, Config
from reason_llm.data import order
from reason_llm.rollout import Group, Prompt
from reason_llm.run import metrics
from reason_llm.run.buffer import RolloutBuffer
from reason_llm.run.metrics import Record, timed
from reason_llm.run.prepare import Job
from reason_llm.run.run import Run
from reason_llm.run.watch import Watch
from reason_llm.sample import Sampler, SamplingParams
from reason_llm.train import varies_enough, with_advantages


class Stop(Protocol):
    """Tells when sampling is to end early."""

    @property
    def requested(self) -> bool:
        """Whether it is."""
        ...

    def check(self) -> None:
        """Raises Stopped: it is."""
        ...


class Collects(Protocol):
    """Run that a step is collected for, or its view from another thread."""

    @property
    def job(self) -> Job: ...  # noqa: D102
    @property
    def config(self) -> Config: ...  # noqa: D102
    @property
    def buffer(self) -> RolloutBuffer: ...  # noqa: D102
    @property
    def record(self) -> Record: ...  # noqa: D102
    @property
    def watch(self) -> Watch: ...  # noqa: D102
    @property
    def stop(self) -> Stop: ...  # noqa: D102
    @property
    def drawn(self) -> int:
        """Prompts taken from the order before the step."""
        ...


def collect(run: Collects, sampler: Sampler, step: int) -> list[Group]:
    """Scored groups to train on, with their advantages where no reward model is still to be asked;
    all of them are in the buffer on return.

    Raises:
        Stopped: a signal asked for the end; the waves so far are in the buffer, scored.
        RewardError: a reward failed; the waves so far are in the buffer.

    Where no group has a signal, or too few have within the bound, the step is taken with what
    there is; with none at all, with the last wave as it was sampled. That teaches nothing where its
    rewards do not vary; groups that only ``success_range`` dropped are then trained.
    """
    job, record, sample = run.job, run.record, run.config.sample
    params, state = sampling_params(run.config), _Collected.of(run.buffer, step)
    num_prompts = sample.prompts_per_step * run.config.algorithm.row().dynamic_sampling
    prompts = _prompts(job, run.drawn, num_prompts)
    wave = sample.prompts_per_wave or sampler.prompts_at_once(prompts, params)
    fresh_tokens = 0  # without those of an interrupted run
    total = sample.prompts_per_step * sample.completions_per_prompt
    with run.watch.phase("sampling", total) as progress, _Scoring(run, state) as scoring:
        progress(0, len(state.together()[0]) * sample.completions_per_prompt)
        scoring.begin(list(state.waiting))  # sampled before a kill
        for part in _waves(run, step, state, scoring, wave):
            seed = random.Random(f"{run.config.run.seed}/sample/{step}/{part.start}")
            with timed(record, "sampling"):
                sampled = sampler.sample(
                    prompts[part], params, seed=seed.getrandbits(63), progress=progress
                )
            fresh_tokens += sum(len(c.token_ids) for group in sampled for c in group.completions)
            state.add(sampled)
            _save(run, step, state)
            scoring.begin(sampled)
    if seconds := record.get("time/sampling_seconds"):
        record["sample/tokens_per_second"] = fresh_tokens / seconds
    scored = state.groups or state.last
    if job.reward_models:
        _save(run, step, state)
        return scored
    return _finished(run, step, scored, state.drawn, state.counts)


def collected_before(run: Run, step: int) -> list[Group] | None:
    """The groups of a step that wait for reward models alone, sampled ahead or before a kill; None
    if some are still to be sampled."""
    state, sample = _Collected.of(run.buffer, step), run.config.sample
    is_full = not state.waiting and len(state.groups) >= sample.prompts_per_step
    return state.groups if run.job.reward_models and is_full else None


def with_reward_models(run: Run, step: int, groups: list[Group]) -> list[Group]:
    """The collected groups with the rewards of models and with their advantages; all of them are in
    the buffer on return. After each model the buffer is saved, so that a run that is killed here
    asks the others alone.

    Raises:
        Stopped: a signal asked for the end; what was scored is in the buffer.
        RewardError: a score is not finite.
    """
    job, scorer, drawn = run.job, run.job.scorer, run.buffer.drawn(step)
    if not job.reward_models:
        return groups
    document = run.buffer.document(step)
    counts = dict(document.counts) if document else {}
    count = sum(len(group.completions) for group in groups)
    for each in job.reward_models:
        if each.key in groups[0].completions[0].rewards:
            continue  # before a kill
        with run.scoring(count) as progress:
            scores = run.reward_models.scores(
                each, groups, run.learners.policy, lambda rows: progress(0, rows)
            )
        groups = scorer.with_model_reward(groups, each.key, each.rewards(scores))
        counts = metrics.added(counts, scorer.take_counts())
        with timed(run.record, "buffer"):
            run.buffer.write_part(step, groups, drawn, counts)
    return _finished(run, step, groups, drawn, counts)


def _finished(
    run: Collects, step: int, scored: list[Group], drawn: int, counts: dict[str, float]
) -> list[Group]:
    groups = with_advantages(scored, run.config.learned_row, run.job.scorer.weights)
    with timed(run.record, "buffer"):
        run.buffer.write(step, groups, drawn, counts)
    return groups


def _waves(
    run: Collects, step: int, state: "_Collected", scoring: "_Scoring", wave: int
) -> Iterator[slice]:
    """Which of the step's prompts to sample next, until it is full or its bound is reached.

    With dynamic sampling the scores decide how many more, so each wave is scored first; else it is
    scored while the next one is sampled.

    Raises:
        Stopped: a signal came and another wave would follow; those so far are saved, scored.
    """
    row, wanted = run.config.algorithm.row(), run.config.sample.prompts_per_step
    bound = wanted * row.dynamic_sampling
    if row.dynamic_sampling > 1:
        scoring.settle()
    groups, drawn, _ = state.together()
    kept = len(groups)
    while kept < wanted and drawn < bound:
        size = min(wave, wanted - kept, bound - drawn)
        yield slice(drawn, drawn + size)
        kept, drawn = kept + size, drawn + size
        if row.dynamic_sampling > 1:
            scoring.settle()
            kept, drawn = len(state.groups), state.drawn
        if run.stop.requested and kept < wanted and drawn < bound:
            scoring.settle()
            _save(run, step, state)
            run.stop.check()


def _save(run: Collects, step: int, state: "_Collected") -> None:
    with timed(run.record, "buffer"):
        run.buffer.write_part(step, *state.together())


class _Scoring:
    """A thread that scores one wave at a time; at the end of the block the last one is scored."""

    def __init__(self, run: Collects, state: "_Collected") -> None:
        self._run = run
        self._state = state
        self._row = run.config.algorithm.row()
        self._thread = ThreadPoolExecutor(1)
        self._under_way: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            self._thread.shutdown()

    def begin(self, sampled: list[Group]) -> None:
        """Score these groups, once those before are scored."""
        self.settle()
        if sampled:
            self._under_way = self._thread.submit(self._score, sampled)

    def settle(self) -> None:
        """Wait until everything that was begun is scored.

        Raises:
            RewardError: a reward failed.
        """
        if self._under_way is not None:
            under_way, self._under_way = self._under_way, None
            under_way.result()

    def _score(self, sampled: list[Group]) -> None:
        scorer = self._run.job.scorer
        with timed(self._run.record, "scoring"):
            scored = scorer.score(sampled)
        kept = [group for group in scored if is_kept(group, self._row, scorer.weights)]
        self._state.take(scored, kept, scorer.take_counts())


def _prompts(job: Job, start: int, count: int) -> list[Prompt]:
    data = job.data
    indices = order(data.sizes, data.weights, job.config.run.seed, start, count)
    all_prompts = data.prompts
    return [all_prompts[index] for index in indices]


@dataclass(slots=True)
class _Collected:
    """Groups of a step so far: one thread samples them, another scores them."""

    groups: list[Group]
    """Scored and kept."""
    drawn: int
    """Prompts that were sampled and scored, those of dropped groups included."""
    waiting: list[Group]
    """Sampled and not scored."""
    counts: dict[str, float]
    """Of errors and time limits in scoring, by metric."""
    last: list[Group] = field(default_factory=list)
    """The last wave as it was scored."""
    lock: Lock = field(default_factory=Lock)

    @classmethod
    def of(cls, buffer: RolloutBuffer, step: int) -> Self:
        """State that was saved before."""
        saved = buffer.groups(step)
        # Without the total where reward models are still to be asked.
        waiting = [group for group in saved if not group.completions[0].rewards]
        scored = [group for group in saved if group.completions[0].rewards]
        document = buffer.document(step)
        counts = dict(document.counts) if document else {}
        return cls(scored, buffer.drawn(step) - len(waiting), waiting, counts)

    def add(self, sampled: list[Group]) -> None:
        """Add a sampled wave."""
        with self.lock:
            self.waiting = self.waiting + sampled

    def take(self, scored: list[Group], kept: list[Group], counts: dict[str, float]) -> None:
        """Move the oldest waiting groups to the scored ones and keep some of them."""
        with self.lock:
            self.groups, self.drawn = self.groups + kept, self.drawn + len(scored)
            self.waiting, self.last = self.waiting[len(scored) :], scored
            self.counts = metrics.added(self.counts, counts)

    def together(self) -> tuple[list[Group], int, dict[str, float]]:
        """All groups in the order they were drawn, the number of prompts sampled for them, and the
        counts."""
        with self.lock:
            return self.groups + self.waiting, self.drawn + len(self.waiting), self.counts


def sampling_params(config: Config) -> SamplingParams:
    """Sampling parameters of training."""
    sample = config.sample
    return SamplingParams(
        sample.completions_per_prompt,
        sample.max_new_tokens,
        sample.temperature,
        sample.top_k,
        sample.top_p,
        sample.min_p,
        tuple(sample.stop),
    )


def is_kept(group: Group, algorithm: Algorithm, weights: Mapping[str, float]) -> bool:
    """Whether dynamic sampling keeps the group: its rewards vary enough, and its success rate is in
    range.

    Args:
        weights: of each reward; positive values of the first one are successes.
    """
    if algorithm.dynamic_sampling == 1:
        return True
    scored = [completion for completion in group.completions if completion.has_reward]
    totals: list[object] = [completion.reward for completion in scored]
    if algorithm.normalization == "per_reward":  # totals may tie where each reward has a signal
        counted = [name for name, weight in weights.items() if weight]
        # NaN, which is no reward, is not equal to itself, and None is.
        numbers = [[c.rewards[name] for name in counted] for c in scored]
        totals = [[None if math.isnan(n) else n for n in each] for each in numbers]
    if all(total == totals[0] for total in totals):
        return False
    if not varies_enough(group, algorithm):
        return False
    if algorithm.success_range is None:
        return True
    low, high = algorithm.success_range
    first = next(iter(weights))
    successes = sum(completion.rewards[first] > 0 for completion in group.completions)
    return low <= successes / len(group.completions) <= high
