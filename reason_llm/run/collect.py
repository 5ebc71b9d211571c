"""Collection of a step's scored groups: prompts drawn, sampled and scored wave by wave. A group is
scored from when it ends, while others are sampled. A wave is saved when it is sampled, before an
error of its rewards is raised, so that no sample is lost.

With ``algorithm.dynamic_sampling`` a group whose rewards do not vary is dropped, and further
prompts are drawn until the step is full or the bound is reached. Source: arXiv:2503.14476 eq. 11.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from typing import Self

from reason_llm.config import Algorithm, Config, is_right
from reason_llm.data import order
from reason_llm.readers import RewardReader, StopRequest
from reason_llm.rollout import Group, Prompt
from reason_llm.run.start.prepare import Job
from reason_llm.run.store import metrics
from reason_llm.run.store.buffer import RolloutBuffer
from reason_llm.run.store.document import Document
from reason_llm.run.store.metrics import Record, timed
from reason_llm.run.watch import Watch
from reason_llm.sample import Ended, Sampler, SamplingParams
from reason_llm.train import with_advantages

RewardsOf = Callable[[RewardReader, Sequence[Group]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be collected, and what this needs of the run."""

    number: int
    drawn: int
    """Prompts that earlier steps took from the order."""
    version: int
    """The version of the policy that samples it, in learned steps."""
    checkpoint: str | None
    job: Job
    buffer: RolloutBuffer
    stop: StopRequest
    watch: Watch
    record: Record
    """The step's record, to which collecting adds."""
    earlier: Callable[[], Sequence[Record]] = list
    """Reads the records of the steps before it."""

    @property
    def config(self) -> Config:
        """The run's config."""
        return self.job.config

    def begin(self) -> Document | None:
        """The step's rollouts so far, at the start of its turn; they are moved into the buffer."""
        return self.buffer.read(self.number, self.checkpoint)

    def prompts(self, count: int) -> list[Prompt]:
        """The first prompts of the step."""
        data, seed = self.job.data, self.config.run.seed
        indices = order(data.sizes, data.weights, seed, self.drawn, count)
        return [data.prompts[index] for index in indices]

    def save(
        self, groups: list[Group], drawn: int, counts: Mapping[str, float], *, whole: bool = False
    ) -> None:
        """Write its rollouts so far; arguments as of ``RolloutBuffer.write``."""
        with timed(self.record, "buffer"):
            self.buffer.write(
                self.number,
                groups,
                whole=whole,
                drawn=drawn,
                counts=counts,
                checkpoint=self.checkpoint,
                version=self.version,
            )


def collect(step: Step, sampler: Sampler) -> list[Group]:
    """Scored groups to train on, with their advantages where no reward model is still to be asked;
    all of them are in the buffer on return. Raises Stopped and RewardError, when the waves so far
    are in the buffer.

    If too few groups within the bound have a signal, the step has fewer groups; if none has, it is
    the last wave as it was sampled. Groups of that wave with equal rewards teach nothing; groups
    that only ``success_range`` dropped are trained.
    """
    job, record, sample = step.job, step.record, step.config.sample
    params = sampling_params(step.config)
    num_prompts = sample.prompts_per_step * step.config.algorithm.row().dynamic_sampling
    prompts = step.prompts(num_prompts)
    wave = sampler.prompts_at_once(prompts, params)
    fresh_tokens = 0  # without those of an interrupted run
    total = sample.prompts_per_step * sample.completions_per_prompt
    with step.watch.phase("sampling", total) as progress, _Collected(step) as collected:
        progress(0, len(collected.snapshot()[0]) * sample.completions_per_prompt)
        for part in _waves(step, collected, wave):
            seed = random.Random(f"{step.config.run.seed}/sample/{step.number}/{part.start}")
            ended = collected.begin()
            with timed(record, "sampling"):
                sampled = sampler.sample(
                    prompts[part], params, seed=seed.getrandbits(63), progress=progress, ended=ended
                )
            so_far = [*collected.snapshot()[0], *sampled]
            if len(so_far) >= sample.prompts_per_step:
                # Before the wave is saved: after an error the same command samples it again.
                job.run.episodes.check(so_far, step.earlier)
            fresh_tokens += sum(len(c.sampled_ids) for group in sampled for c in group.completions)
            collected.add(sampled)
            step.save(*collected.snapshot())
            collected.settle(but=1)
    if seconds := record.get("time/sampling_seconds"):
        record["sample/tokens_per_second"] = fresh_tokens / seconds
    scored = collected.groups or collected.last
    if job.run.reward_readers:
        step.save(*collected.snapshot())
        return scored
    return _finished(step, scored, collected.drawn, collected.counts)


def sampled_before(step: Step) -> list[Group] | None:
    """The groups of a step that wait for reward models alone, sampled ahead or before a kill; None
    if some are still to be sampled."""
    saved = step.buffer.find(step.number)
    if not step.job.run.reward_readers or saved is None:
        return None
    is_full = len(saved.groups) >= step.config.sample.prompts_per_step
    return saved.groups if is_full and all(map(_is_scored, saved.groups)) else None


def with_model_rewards(step: Step, groups: list[Group], rewards_of: RewardsOf) -> list[Group]:
    """The collected groups with the rewards of models and with their advantages; all of them are in
    the buffer on return, and after each model, so that a run that is killed here asks the others
    alone."""
    if not step.job.run.reward_readers:
        return groups
    saved, scorer = step.buffer.find(step.number), step.job.scorer
    assert saved is not None
    counts = saved.counts
    for reader in step.job.run.reward_readers:
        if reader.key in groups[0].completions[0].rewards:
            continue  # before a kill
        groups = scorer.with_model_reward(groups, reader.key, rewards_of(reader, groups))
        counts = metrics.added(counts, scorer.take_counts())
        step.save(groups, saved.drawn, counts)
    return _finished(step, groups, saved.drawn, counts)


def _finished(step: Step, scored: list[Group], drawn: int, counts: dict[str, float]) -> list[Group]:
    weights = step.job.scorer.weights, step.config.turn_weight
    groups = with_advantages(scored, step.config.learned_row, *weights)
    step.save(groups, drawn, counts, whole=True)
    return groups


def _waves(step: Step, collected: "_Collected", wave: int) -> Iterator[slice]:
    """Which of the step's prompts to sample next, until it is full or its bound is reached. With
    dynamic sampling the scores decide how many more, so each wave is scored first."""
    row, wanted = step.config.algorithm.row(), step.config.sample.prompts_per_step
    bound = wanted * row.dynamic_sampling
    if row.dynamic_sampling > 1:
        collected.settle()
    groups, drawn, _ = collected.snapshot()
    num_groups = len(groups)
    while num_groups < wanted and drawn < bound:
        size = min(wave, wanted - num_groups, bound - drawn)
        yield slice(drawn, drawn + size)
        num_groups, drawn = num_groups + size, drawn + size
        if row.dynamic_sampling > 1:
            collected.settle()
            num_groups, drawn = len(collected.groups), collected.drawn
        if step.stop.requested and num_groups < wanted and drawn < bound:
            collected.settle()
            step.save(*collected.snapshot())
            step.stop.check()


def _is_scored(group: Group) -> bool:
    """Whether the group is scored; its total is missing while reward models are still to score."""
    return bool(group.completions[0].rewards)


class _EndedGroups:
    """The groups of a wave with their places, in the order in which they end."""

    def __init__(self) -> None:
        self._queue = SimpleQueue[tuple[int, Group] | None]()
        self._ended = set[int]()
        self._is_whole = False

    def ended(self, place: int, group: Group) -> None:
        """Add a group."""
        self._ended.add(place)
        self._queue.put((place, group))

    def close(self, sampled: Sequence[Group] | None) -> None:
        """Add those that are missing of all of its groups; None: some will never come."""
        self._is_whole = sampled is not None
        for place, group in enumerate(sampled or []):
            if place not in self._ended:
                self.ended(place, group)
        self._queue.put(None)

    def __iter__(self) -> Iterator[tuple[int, Group]]:
        yield from iter(self._queue.get, None)
        if not self._is_whole:
            raise InterruptedError("the wave was not sampled to its end")


class _Collected:
    """Groups of a step so far. The caller samples them, and a thread scores one wave after the
    other, each from its first group on; at the end of the block the last one is scored."""

    def __init__(self, step: Step) -> None:
        saved = step.buffer.find(step.number)
        groups = [] if saved is None else saved.groups
        self._step = step
        self.groups = [group for group in groups if _is_scored(group)]
        """Groups that are scored and kept."""
        self.waiting = [group for group in groups if not _is_scored(group)]
        """Groups that are sampled and not yet scored."""
        self.drawn = 0 if saved is None else saved.drawn - len(self.waiting)
        """Number of prompts that were sampled and scored, dropped groups included."""
        self.counts = {} if saved is None else dict(saved.counts)
        """Number of errors and timeouts in scoring, by metric."""
        self.last: list[Group] = []
        """The last scored wave."""
        self._lock = Lock()
        self._thread = ThreadPoolExecutor(1)
        self._under_way = deque[Future[None]]()
        self._wave = _EndedGroups()
        """The wave that is being sampled."""

    def __enter__(self) -> Self:
        if self.waiting:  # sampled before a kill
            self.begin()
            self._wave.close(self.waiting)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            if error is None:
                self.settle()
        finally:
            self._wave.close(None)
            self._thread.shutdown()

    def begin(self) -> Ended:
        """Begin a wave, whose groups are scored as they end, once the earlier waves are scored."""
        self._wave = _EndedGroups()
        self._under_way.append(self._thread.submit(self._score, self._wave))
        return self._wave.ended

    def add(self, sampled: list[Group]) -> None:
        """Add the wave, which is sampled."""
        with self._lock:
            self.waiting = self.waiting + sampled
        self._wave.close(sampled)

    def settle(self, but: int = 0) -> None:
        """Wait until all waves are scored, except the last ``but``."""
        with timed(self._step.record, "scoring"):
            while len(self._under_way) > but:
                self._under_way.popleft().result()

    def snapshot(self) -> tuple[list[Group], int, dict[str, float]]:
        """All groups in drawing order, the number of prompts sampled for them, and the counts."""
        with self._lock:
            return self.groups + self.waiting, self.drawn + len(self.waiting), self.counts

    def _score(self, wave: _EndedGroups) -> None:
        scorer, row = self._step.job.scorer, self._step.config.algorithm.row()
        scored = scorer.score_as_they_come(wave)
        kind = self._step.config.score.rewards[0].kind
        groups = [group for group in scored if is_kept(group, row, scorer.weights, kind)]
        with self._lock:
            self.groups, self.drawn = self.groups + groups, self.drawn + len(scored)
            self.waiting, self.last = self.waiting[len(scored) :], scored
            self.counts = metrics.added(self.counts, scorer.take_counts())


def sampling_params(config: Config) -> SamplingParams:
    """Sampling parameters for training rollouts."""
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


def is_kept(
    group: Group, algorithm: Algorithm, weights: Mapping[str, float], kind: str = ""
) -> bool:
    """Whether dynamic sampling keeps the group: its rewards vary, and the fraction of right
    completions by the first reward, which is of this kind, is in range."""
    if algorithm.dynamic_sampling == 1:
        return True
    scored = [completion for completion in group.completions if completion.has_reward]
    totals: list[object] = [completion.reward for completion in scored]
    if algorithm.normalization == "per_reward":  # totals may tie where each reward has a signal
        counted = [name for name, weight in weights.items() if weight]
        # NaN, which is no reward, is not equal to itself, and None is.
        numbers = [[c.rewards[name] for name in counted] for c in scored]
        totals = [[None if math.isnan(n) else n for n in row] for row in numbers]
    if all(total == totals[0] for total in totals):
        return False
    if algorithm.success_range is None:
        return True
    low, high = algorithm.success_range
    first = next(iter(weights))
    successes = sum(is_right(kind or first, c.rewards[first]) for c in group.completions)
    return low <= successes / len(group.completions) <= high
