"""Completions become rewards: the weighted sum of what the config names. Meets the other stages in
``rollout.py`` only.

Completions are scored at once in as many threads as there are cores and more: the slow rewards
(comparisons, programs, judges) wait for other processes. An error or a time limit is one rollout's
own.
"""

import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from reason_llm.config import ScoreSection
from reason_llm.data import place_of, rollout_sides
from reason_llm.errors import ConfigError, DataError, ReasonError, RewardError, one_line
from reason_llm.rollout import COUNT, LOGGED, SUM, Completion, Group, Prompt
from reason_llm.score.code import checker_faults
from reason_llm.score.math import default_judge
from reason_llm.score.rewards import Context, Reward, make_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)
T = TypeVar("T")
Calls = list[Future[Any]]
"""Calls of one reward for one group: one of each completion, or one of the whole group."""
MAX_THREADS = 32
MAX_ERROR_CHARACTERS = 500
"""Longest text of a reward's own error that a message quotes."""
MAX_ANSWER_CHARACTERS = 1000
"""Longest gold answer in a made-up completion: the tests of a code row may be long."""
NO_SIGNALS = "signal only works in main thread"
"""Python's error if a thread sets a signal's handler, as time limits of math_verify do."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One row of ``score.rewards`` with its function."""

    name: str
    weight: float
    reward: Reward


class Scorer:
    """The rewards of a run and what they hold: threads, a sandbox; closed on leaving the ``with``.

    Args:
        max_new_tokens: of a completion, for rewards of length.
        runs_programs: False to look at the rewards alone: no sandbox is started or needed.
        answers: file that keeps what judges answered; None keeps it in memory.
        mistakes: collects the errors of rewards, which the scorer then leaves out.

    Raises:
        ConfigError: a reward that the config names wrongly, or that cannot run here.
    """

    def __init__(
        self,
        config: ScoreSection,
        max_new_tokens: int,
        runs_programs: bool = True,
        answers: Path | None = None,
        mistakes: list[ReasonError] | None = None,
    ) -> None:
        self.config = config
        self.rewards: list[WeightedReward] = []
        # Rewards hold sandboxes and connections: these are closed if a later reward cannot be made.
        with ExitStack() as until_made:
            context = Context(config, max_new_tokens, until_made, runs_programs, answers)
            for number, spec in enumerate(config.rewards):
                try:
                    reward = make_reward(spec, context)
                    if not number and spec.name == "judge" and reward.of_group is not None:
                        raise ConfigError(
                            "score.rewards begins with a judge of pairs, and evaluation has one "
                            "completion of each problem; put a reward that judges answers first, "
                            "with weight 0 if it only evaluates"
                        )
                    self.rewards.append(WeightedReward(spec.key, spec.weight, reward))
                except ConfigError as error:
                    if mistakes is None:
                        raise
                    mistakes.append(error)
            self._resources = until_made.pop_all()
        threads = min(MAX_THREADS, 4 * (os.cpu_count() or 1))
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="score")
        self._errors = 0
        self._before = _num_faults()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        self._resources.close()

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each reward by name."""
        return {reward.name: reward.weight for reward in self.rewards}

    @property
    def columns(self) -> set[str]:
        """Extra columns of the data that the rewards ask for."""
        return {column for reward in self.rewards for column in reward.reward.columns}

    @property
    def finds(self) -> Callable[[str], str | None] | None:
        """Finds the answer or the program that the first reward judges; None for other rewards."""
        first = self.rewards[0].reward
        return first.answer or first.program

    @property
    def descriptions(self) -> list[str]:
        """Notes for the user about the rewards, once each."""
        descriptions = [reward.reward.description for reward in self.rewards]
        return list(dict.fromkeys(text for text in descriptions if text is not None))

    def score(self, groups: Sequence[Group], only_first: bool = False) -> list[Group]:
        """The same groups with every completion's rewards by name and their weighted sum; without
        the sum where reward models are still to be asked. A reward that gave None is NaN, and the
        sum is over the others. Of a completion whose environment failed all are NaN.

        Args:
            only_first: leave out all rewards but the first, which judges in evaluation; its None
                counts 0.

        Raises:
            RewardError: a reward raised, unless ``score.on_error`` is zero.
        """
        return self.score_as_they_come(enumerate(groups), only_first)

    def score_as_they_come(
        self, coming: Iterable[tuple[int, Group]], only_first: bool = False
    ) -> list[Group]:
        """Like ``score``, for groups that come with their places and are returned in that order.
        Rewards begin as soon as a group comes. If ``coming`` or a reward raises, waiting calls are
        dropped."""
        rewards = [weighted for weighted in self.rewards if not weighted.reward.of_model]
        rewards = rewards[:1] if only_first else rewards
        came: dict[int, tuple[Group, list[Calls]]] = {}
        try:
            for place, group in coming:
                came[place] = group, [self._begin(weighted.reward, group) for weighted in rewards]
            return self._scored(rewards, [came[place] for place in sorted(came)], only_first)
        except BaseException:
            for group, calls in came.values():
                for call in chain(*calls):
                    call.cancel()
                for reward in rewards:
                    reward.reward.take_extra(group)
            self.take_counts()
            raise

    def _scored(
        self,
        rewards: Sequence[WeightedReward],
        begun: Sequence[tuple[Group, list[Calls]]],
        only_first: bool,
    ) -> list[Group]:
        """The groups with these rewards, from the calls that were begun for each of them."""
        groups = [group for group, _ in begun]
        is_whole = only_first or len(rewards) == len(self.rewards)
        first: list[list[float]] = []
        values: dict[str, list[list[float]]] = {}
        logged: list[dict[str, Sequence[object]]] = [{} for _ in groups]
        for number, reward in enumerate(rewards):
            of_groups = self._values(reward, groups, [calls[number] for _, calls in begun], first)
            of_reward = [
                [_nan_if_failed(c, v) for c, v in zip(group.completions, of_group, strict=True)]
                for group, of_group in zip(groups, of_groups, strict=True)
            ]
            if only_first:  # a missing judgement counts as wrong
                of_reward = [[0.0 if math.isnan(v) else v for v in row] for row in of_reward]
            first = first or of_reward
            values[reward.name] = of_reward
            for columns, group in zip(logged, groups, strict=True):
                columns |= reward.reward.take_extra(group)
        scored = []
        for g, group in enumerate(groups):
            completions = []
            for c, completion in enumerate(group.completions):
                by_name = {name: by_group[g][c] for name, by_group in values.items()}
                total = _total(rewards, by_name) if is_whole else None
                extra = {name: of_group[c] for name, of_group in logged[g].items()}
                completions.append(replace(completion, rewards=by_name, reward=total, logged=extra))
            scored.append(replace(group, completions=tuple(completions)))
        if is_whole:
            _warn_of_unscored(scored, only_first)
        return scored

    def try_custom(
        self,
        prompts: Sequence[Prompt],
        tokenizer: "PreTrainedTokenizerBase",
        only_first: bool = False,
    ) -> None:
        """Call the user's functions with two made-up completions of the first prompt, plain text
        and a marked gold answer, so that one that cannot work fails before a weight is read.
        Judges, reward models, programs and environments are not asked.

        Raises:
            RewardError: a function raised, unless ``score.on_error`` is zero.
        """
        if not any(weighted.reward.is_custom for weighted in self.rewards) or not prompts:
            return
        prompt = prompts[0]
        answer = prompt.answer[:MAX_ANSWER_CHARACTERS] or "42"
        texts = (
            "This is a completion without an answer.",
            f"<think>This is made up.</think>\n<answer>{answer}</answer>\n\\boxed{{{answer}}}",
        )
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        completions = []
        for text in texts:
            ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]
            completions.append(Completion(tuple(ids), text, (0.0,) * len(ids), "stop"))
        named = replace(prompt, id=f"a made-up completion of {prompt.id}")
        for weighted in self.rewards[:1] if only_first else self.rewards:
            if weighted.reward.is_custom:
                made_up = Group(named, tuple(completions))
                self._values(weighted, [made_up], [self._begin(weighted.reward, made_up)], [])
                weighted.reward.take_extra(made_up)
        self.take_counts()  # so that a failure here is in no step's record

    def with_model_reward(
        self, groups: Sequence[Group], name: str, values: Sequence[float]
    ) -> list[Group]:
        """Add a reward model's ``values`` of all completions in order, and the weighted sum with
        the last model; RewardError if a value is not finite, unless ``score.on_error`` is zero."""
        rest = iter(values)
        return [
            replace(
                group,
                completions=tuple(
                    self._completed(c, name, next(rest), f"{group.prompt.id}#{i}")
                    for i, c in enumerate(group.completions)
                ),
            )
            for group in groups
        ]

    def _completed(
        self, completion: Completion, name: str, value: float, rollout: str
    ) -> Completion:
        if not math.isfinite(value):
            problem = f"the reward model {name} gave {value} for {rollout}"
            if self.config.on_error == "stop":
                raise RewardError(
                    f"{problem}; train it again with a lower train.learning_rate, or set "
                    "score.on_error to zero"
                )
            self._errors, value = self._errors + 1, 0.0
            log.warning("%s, which counts 0", problem)
        rewards = {**completion.rewards, name: _nan_if_failed(completion, value)}
        if len(rewards) < len(self.rewards):
            return replace(completion, rewards=rewards)
        in_order = {reward.name: rewards[reward.name] for reward in self.rewards}
        return replace(completion, rewards=in_order, reward=_total(self.rewards, in_order))

    def take_counts(self) -> dict[str, float]:
        """Errors and time-outs since the last call, and for each logged metric the sum and the
        number of its values, from which ``metrics.with_means`` makes the mean."""
        (failed, late), (failed_before, late_before) = (now := _num_faults()), self._before
        counts = {
            "score/errors": float(self._errors + failed - failed_before),
            "score/timeouts": float(late - late_before),
        }
        self._errors, self._before = 0, now
        for reward in self.rewards:
            for name, values in reward.reward.take_logged().items():
                numbers = [value for value in values if not math.isnan(value)]
                for end, number in ((SUM, math.fsum(numbers)), (COUNT, len(numbers))):
                    key = f"{LOGGED}{name}{end}"
                    counts[key] = counts.get(key, 0.0) + number
        return counts

    def _begin(self, reward: Reward, group: Group) -> Calls:
        """Begin the calls of a reward for a group; none yet for one that is ``after_first``."""
        submit = (reward.threads or self._threads).submit
        if reward.of_one is not None:
            return [submit(reward.of_one, group.prompt, c) for c in group.completions]
        assert reward.of_group is not None
        return [] if reward.after_first else [submit(reward.of_group, group, [])]

    def _values(
        self,
        weighted: WeightedReward,
        groups: Sequence[Group],
        begun: Sequence[Calls],
        first: list[list[float]],
    ) -> list[list[float]]:
        """One reward of every completion, by group."""
        name, of_group = weighted.name, weighted.reward.of_group
        if of_group is None:
            ids = [group.prompt.id for group in groups]
            return [
                [self._result(call, name, f"{prompt}#{i}", 0.0) for i, call in enumerate(calls)]
                for calls, prompt in zip(begun, ids, strict=True)
            ]
        if weighted.reward.after_first:
            pairs = zip(groups, first, strict=True)
            begun = [[self._threads.submit(of_group, *pair)] for pair in pairs]
        return [
            self._result(call, name, group.prompt.id, [0.0] * len(group.completions))
            for (call,), group in zip(begun, groups, strict=True)
        ]

    def _result(self, future: Future[T], name: str, rollout: str, zero: T) -> T:
        """The reward's value; 0 if it fails and ``score.on_error`` is zero."""
        try:
            return future.result()
        except (DataError, RewardError):
            raise
        except Exception as error:  # whatever a reward does
            at = f" at {place}" if (place := place_of(error)) else ""  # in the user's own code
            problem, fix = _problem_and_fix(error)
            problem += at
            if self.config.on_error == "stop":
                raise RewardError(
                    f"the reward {name} failed on {rollout} ({problem}); {fix}, or set "
                    "score.on_error to zero"
                ) from error
            self._errors += 1
            log.warning(f"the reward {name} failed on {rollout} and counts 0 ({problem}); {fix}")
            return zero


def _num_faults() -> tuple[int, int]:
    """Numbers of checkers that failed, and of checkers and comparisons that timed out."""
    failed, late = checker_faults()
    return failed, late + default_judge().num_timed_out


def _problem_and_fix(error: Exception) -> tuple[str, str]:
    """Message for an error that a reward raised, with the fix."""
    problem = f"{type(error).__name__}: {one_line(error)}"
    if any(NO_SIGNALS in str(cause) for cause in (error, error.__cause__, error.__context__)):
        return f"{type(error).__name__}: {NO_SIGNALS}, and rewards are called in threads", (
            "pass parsing_timeout=None to math_verify's parse and timeout_seconds=None to its "
            "verify, or use no signal; score.timeout_seconds limits each call"
        )
    if len(problem) > MAX_ERROR_CHARACTERS:
        cut = problem[:MAX_ERROR_CHARACTERS]
        problem = f"{cut.rpartition(' ')[0] or cut} …"
    # Functions written for another trainer fail on the form of completions.
    if isinstance(error, TypeError | AttributeError | IndexError):
        return problem, (
            "fix it (completions are strings; as in TRL they are lists of messages, whose text is "
            "completion[0]['content'], if the row's prompt is a list of messages)"
        )
    return problem, "fix it"


def _nan_if_failed(completion: Completion, value: float) -> float:
    """The reward; NaN of a rollout that its environment broke off, which teaches nothing."""
    return math.nan if completion.finish_reason == "error" else value


def _total(rewards: Sequence[WeightedReward], values: Mapping[str, float]) -> float:
    """Weighted sum of the rewards that were given; 0 without any."""
    weighted = [r.weight * values[r.name] for r in rewards if not math.isnan(values[r.name])]
    return sum(weighted, start=0.0)


def _warn_of_unscored(groups: Sequence[Group], in_evaluation: bool) -> None:
    """Warn of completions to which every reward gave None; in evaluation, where that counts 0, of
    those whose player failed."""
    # One line with one example: a judge that fails would otherwise fill the log.
    rollouts = {
        f"{group.prompt.id}#{i}": completion
        for group in groups
        for i, completion in enumerate(group.completions)
    }
    unscored = [name for name, completion in rollouts.items() if not completion.has_reward]
    problems = {
        name: f"{side.WHO}: {problem}"
        for name, completion in rollouts.items()
        for side in rollout_sides()
        if (problem := side.problem(completion)) is not None
    }
    if in_evaluation and problems:
        ((problem, _),) = Counter(problems.values()).most_common(1)
        log.warning(
            f"{problem.partition(':')[0]} failed in {len(problems)} completions, such as "
            f"{next(iter(problems))}, which count as wrong; {problem:.500}"
        )
    elif unscored and not in_evaluation:
        known = Counter(problems[name] for name in unscored if name in problems)
        example = "".join(f"; {cause}" for cause, _ in known.most_common(1))
        log.warning(
            f"every reward gave None for {len(unscored)} completions, such as {unscored[0]}; their "
            f"advantage is 0, so they teach nothing{example:.500}"
        )
