"""The table of rewards: a name, its options, and the function that they make. A further one is a
row of ``REWARDS`` with its function here, a test, and its line in ``docs/rewards.md``.

Functions of numbers and text alone stand first.
"""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import regex
from pydantic import Field, ValidationError

from reason_llm.config import (
    READER_REWARDS,
    Count,
    RewardSpec,
    ScoreSection,
    Section,
    is_right,
    nearest,
    wrong,
)
from reason_llm.data import (
    GYM,
    RolloutSide,
    check_reward,
    gym_maker,
    gym_tasks,
    is_published,
    rollout_sides,
)
from reason_llm.errors import ConfigError, DataError, one_line
from reason_llm.rollout import CHAT, ROW, Completion, Group, Prompt
from reason_llm.score.code import (
    CHECK_SECONDS,
    TIMEOUT_SECONDS as TEST_SECONDS,
    CodeTests,
    Subject,
    checkers_of,
    finite,
    last_code_block,
)
from reason_llm.score.custom import CustomReward, load_reward
from reason_llm.score.llm_judge import JudgeOptions, LanguageModelJudge
from reason_llm.score.math import (
    TIMEOUT_SECONDS as COMPARISON_SECONDS,
    Equality,
    final_boxed,
    is_same_label,
    last_answer_tags,
    majority,
    matches,
    most_frequent_label,
    stated_label,
)

log = logging.getLogger(__name__)
CUSTOM_SECONDS = 60.0
MAX_WAITING_SECONDS = 3600.0
"""Limit of a call that has its own limit of processor time."""
PATTERN_SECONDS = 1.0
"""Seconds of one search of the regex reward, whose pattern and text are not trusted."""
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_ANY_TAG = re.compile(f"({'|'.join(TAGS)})")
_EMPTY_PAIR = re.compile(r"<([A-Za-z][\w-]*+)>\s*+</\1>")
_WRITTEN_EMPTY = re.compile(r"<([A-Za-z][\w-]*+)>(?:\\s[*+?]?|\\n[*+?]?|\s)*+</\1>")
"""A pair of tags with no text between them: in a text, and in a pattern that asks for it."""
_STEP = re.compile(
    r"(?:step\s{1,9}+\d{1,9}+\b|\d{1,9}+[.)]\s|[-*]\s|first(?:ly)?\b|second(?:ly)?\b|third(?:ly)?\b"
    r"|next\b|then\b|finally\b)",
    re.IGNORECASE,
)
"""Start of a line that begins a step."""

Number = Annotated[float, Field(allow_inf_nan=False)]

CompletionFunction = Callable[[Prompt, Completion], float]
GroupFunction = Callable[[Group, list[float]], list[float]]
"""Takes a group and, if ``after_first``, the first reward's values of its completions."""


def soft_overlong(length: int, max_tokens: int, cache_tokens: int) -> float:
    """0 up to ``max_tokens - cache_tokens``, from there down to -1 at ``max_tokens``.

    Source: DAPO, arXiv:2503.14476 eq. 13.
    """
    over = length - (max_tokens - cache_tokens)
    return -min(1.0, max(0.0, over / cache_tokens))


def cosine(
    length: int,
    is_correct: bool,
    max_tokens: int,
    correct: tuple[float, float],
    wrong: tuple[float, float],
) -> float:
    """Falls from the first value at length 0 to the second at ``max_tokens``, along half a cosine.

    Args:
        correct: values of a right answer, short and long: short ones earn more.
        wrong: of a wrong one: long ones lose less.

    Source: arXiv:2502.03373 appendix C.1.
    """
    short, long = correct if is_correct else wrong
    place = min(length / max_tokens, 1.0)
    return long + (short - long) * (1 + math.cos(math.pi * place)) / 2


def length_in_group(lengths: Sequence[int], are_correct: Sequence[bool]) -> list[float]:
    """0.5 for the group's shortest to -0.5 for its longest; a wrong answer never gains by it.

    Source: Kimi k1.5, arXiv:2501.12599 section 2.3.3.
    """
    shortest, longest = min(lengths), max(lengths)
    if shortest == longest:
        return [0.0] * len(lengths)
    values = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
    return [v if right else min(0.0, v) for v, right in zip(values, are_correct, strict=True)]


def repetition_penalty(token_ids: Sequence[int], ngram: int, penalty: float) -> float:
    """``penalty`` times the part of n-grams that stood there before.

    Source: arXiv:2502.03373 appendix C.2, over token ids.
    """
    total = len(token_ids) - ngram + 1
    if total < 1:
        return 0.0
    unique = set(zip(*(token_ids[i : i + total] for i in range(ngram)), strict=True))
    return (1 - len(unique) / total) * penalty


def reasoning_steps(text: str, wanted: int) -> float:
    """The part of ``wanted`` marked steps (numbered, listed, "First", "Next") that are there. A
    step has a letter or a digit behind its mark, before the next one."""
    steps, is_open = 0, False
    for line in _ANY_TAG.sub("\n", text).split("\n"):
        line = f"{line.lstrip()}\n"
        mark = _STEP.match(line)
        is_open = is_open or mark is not None
        if is_open and any(map(str.isalnum, line[mark.end() if mark else 0 :])):
            steps, is_open = steps + 1, False
    return min(1.0, steps / wanted)


def think_answer_format(text: str) -> float:
    """1 if the whole text is ``<think>…</think><answer>…</answer>``, each tag once, in this order,
    with any text between them; else 0."""
    text = text.strip()
    whole = r"<think>.*</think>\s*<answer>.*</answer>"
    return float(tag_count(text) == 1 and re.fullmatch(whole, text, re.DOTALL) is not None)


def tag_count(text: str) -> float:
    """0.25 for each of the four tags that occurs exactly once and has text at its inner side:
    easier to learn than ``format``."""
    before, *parts = _ANY_TAG.split(text)
    filled = []
    for tag, after in zip(parts[::2], parts[1::2], strict=True):
        inner, before = before if tag.startswith("</") else after, after
        if inner.strip():
            filled.append(tag)
    return sum(text.count(tag) == 1 and tag in filled for tag in TAGS) / len(TAGS)


# options of each reward in the config


class NoOptions(Section):
    """A reward without options."""


class AnswerOptions(Section):
    """Comparison of an answer with the gold one."""

    equality: Equality = "form"
    """form: worked out as far as the gold answer is, and not copied from the question; value: any
    expression of the same value."""


class SoftOverlongOptions(Section):
    """DAPO's soft overlong punishment."""

    cache_tokens: Count | None = None
    """Over so many tokens before sample.max_new_tokens it falls from 0 to -1. null: a quarter of
    that limit, and at most 1024."""


class CosineOptions(Section):
    """The cosine length reward; what is right is said by the first reward (``is_right``)."""

    correct: tuple[Number, Number] = (1.0, 0.5)
    """For a right answer of length 0, and of sample.max_new_tokens."""
    wrong: tuple[Number, Number] = (-1.0, -0.5)
    """For a wrong one."""


class RepetitionOptions(Section):
    """The repetition penalty."""

    ngram: Count = 3
    """Length of the repeated sequences, in tokens."""
    penalty: Annotated[float, Field(le=0, allow_inf_nan=False)] = -1.0
    """The reward of a text that only repeats."""


class StepsOptions(Section):
    """The reasoning steps reward."""

    wanted: Count = 3
    """Steps for the full reward."""


class RegexOptions(Section):
    """The regular expression reward."""

    pattern: str
    """1 where it is found in the completion, with text between the tags of each pair in it; else
    0."""


Finder = Callable[[str], str | None]
Vote = Callable[[Sequence[str | None]], str | None]


@dataclass(frozen=True, slots=True)
class Context:
    """Values that the functions are made with."""

    score: ScoreSection
    max_new_tokens: int
    resources: ExitStack
    """Closes the resources of a reward."""
    runs_programs: bool = True
    """False: the rewards are looked at, and none is asked for; no sandbox is started."""
    answers: Path | None = None
    """File that keeps the answers of judges; None: memory only."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A row: one of the two functions is there, or a model is asked, or no program may be run."""

    of_one: CompletionFunction | None = None
    of_group: GroupFunction | None = None
    after_first: bool = False
    """Whether ``of_group`` needs the first reward's values, which the others do not wait for."""
    threads: ThreadPoolExecutor | None = None
    """Threads in which the function is called; None: the scorer's."""
    of_model: bool = False
    """Whether a reward model gives it, after all of the step is sampled."""
    is_custom: bool = False
    """Whether it is a function of the user's."""
    answer: Finder | None = None
    """Finds the answer in a completion for a majority vote; None: there is none."""
    vote: Vote = majority
    """Finds the most frequent of such answers."""
    program: Finder | None = None
    """Finds the program in a completion; None for rewards that run none."""
    columns: tuple[str, ...] = ()
    """Extra columns of the data that the reward reads."""
    take_logged: Callable[[], Mapping[str, Sequence[float]]] = dict
    """Values of metrics that a function logged since the last call, by name."""
    take_extra: Callable[[Group], Mapping[str, Sequence[Any]]] = lambda group: {}
    """Columns that a function logged for a group which it has just judged."""
    description: str | None = None
    """A note for the user at the start."""


Row = tuple[type[Section], Callable[[Any, Context], Reward]]
"""The options of a reward, and what makes it."""


def make_reward(spec: RewardSpec, context: Context) -> Reward:
    """The function that the config names, with its options.

    Raises:
        ConfigError: an unknown name or option, or what the reward needs is not there.
    """
    if spec.custom is not None:
        return _custom(spec, context)
    if spec.name not in REWARDS:
        check_reward(spec.name)
        near, other = nearest(spec.name, REWARDS), "name one of these, or path/to/file.py:function"
        module, _, function = str(spec.name).rpartition(".")
        if module.replace(".", "_").isidentifier() and function.isidentifier():  # as in Python
            near = f"{module.replace('.', '/')}.py:{function}"
        raise ConfigError(
            f"score.rewards names {spec.name!r}, which is not one of {', '.join(REWARDS)}; "
            + (f"did you mean {near}?" if near else other)
        )
    model, make = REWARDS[str(spec.name)]
    # pydantic's message names a class of ours and not the option in the config.
    try:
        options = model.model_validate(spec.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        known = ", ".join(model.model_fields) or "none"
        raise ConfigError(
            f"score.rewards: option {key!r} of {spec.name} {wrong(first)} (its options: "
            f"{known}); fix score.rewards"
        ) from error
    return make(options, context)


def _answer_reward(find: Finder, options: AnswerOptions, context: Context) -> Reward:
    seconds = context.score.timeout_seconds or COMPARISON_SECONDS

    def of_one(prompt: Prompt, completion: Completion) -> float:
        answer = find(prompt.continued_by(completion))
        return matches(prompt.answer, answer, seconds, prompt.text, options.equality)

    return Reward(of_one, answer=find)


def _exact(prompt: Prompt, completion: Completion) -> float:
    return float(is_same_label(prompt.answer, stated_label(prompt.continued_by(completion))))


def _gym(options: Section, context: Context) -> Reward:
    seconds, subjects = context.score.timeout_seconds or CHECK_SECONDS, dict[str, Subject]()
    if context.runs_programs:
        checkers_of(context.score.sandbox)

    def find(text: str) -> str | None:
        return last_answer_tags(text) if "<answer>" in text else final_boxed(text)

    def of_one(prompt: Prompt, completion: Completion) -> float:
        """Return the score of the row's own task; 0 if its program takes too long or fails."""
        source, _, number = prompt.id.rpartition(":row ")
        if not source.startswith(GYM):
            raise ValueError("the reward gym judges rows of data.train=gym:NAME alone")
        subject = subjects.get(source) or Subject(gym_maker(source), is_maker=True)
        subjects[source] = subject
        arguments = find(prompt.continued_by(completion)), gym_tasks(source)[int(number) - 1]
        checkers = checkers_of(context.score.sandbox)
        reward = checkers.call(
            subject, arguments, method="score_answer", seconds=seconds, read=finite
        )
        return 0.0 if reward is None else reward

    return Reward(of_one, answer=find)


def _code(context: Context, is_fraction: bool) -> Reward:
    if not context.runs_programs:
        return Reward()
    seconds = context.score.timeout_seconds or TEST_SECONDS
    code = context.resources.enter_context(CodeTests(context.score.sandbox, seconds))

    def of_one(prompt: Prompt, completion: Completion) -> float:
        try:
            outcome = code.outcome(prompt.answer, completion.answer, stop_early=not is_fraction)
        except ValueError as error:
            raise DataError(f"{prompt.id}: {error}; fix the row's tests") from error
        if outcome is None:
            return 0.0
        return outcome.fraction if is_fraction else float(outcome.problem is None)

    return Reward(of_one, program=last_code_block, description=code.sandbox.description)


def _text_reward(value: Callable[..., float], *options: Any) -> Reward:
    return Reward(lambda prompt, completion: value(prompt.continued_by(completion), *options))


def _soft_overlong(options: SoftOverlongOptions, context: Context) -> Reward:
    max_tokens = context.max_new_tokens
    cache = options.cache_tokens or max(1, min(1024, max_tokens // 4))
    if cache > max_tokens:
        raise ConfigError(
            f"score.rewards: soft_overlong's cache_tokens={cache} is more than "
            f"sample.max_new_tokens={max_tokens}; lower it"
        )
    return Reward(lambda p, c: soft_overlong(len(c.sampled_ids), max_tokens, cache))


def _by_lengths(values: Callable[[list[int], list[bool]], list[float]], context: Context) -> Reward:
    """Rewards from the lengths of a group and its right answers; none without a first reward."""
    kind = context.score.rewards[0].kind

    def of_group(group: Group, first: list[float]) -> list[float]:
        lengths = [len(completion.sampled_ids) for completion in group.completions]
        rewards = values(lengths, [is_right(kind, value) for value in first])
        return [math.nan if math.isnan(v) else f for f, v in zip(rewards, first, strict=True)]

    return Reward(of_group=of_group, after_first=True)


def _cosine(options: CosineOptions, context: Context) -> Reward:
    ends = (context.max_new_tokens, options.correct, options.wrong)

    def values(lengths: list[int], are_right: list[bool]) -> list[float]:
        pairs = zip(lengths, are_right, strict=True)
        return [cosine(length, is_right, *ends) for length, is_right in pairs]

    return _by_lengths(values, context)


def _regex(options: RegexOptions, context: Context) -> Reward:
    seconds = context.score.timeout_seconds or PATTERN_SECONDS
    try:
        pattern = regex.compile(options.pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigError(
            f"score.rewards: regex's pattern {options.pattern!r} is not a regular expression "
            f"({error}); fix it"
        ) from error

    # A pattern that matches nothing, or an empty pair of tags, would pay for every text.
    may_be_empty = {pair[1] for pair in _WRITTEN_EMPTY.finditer(options.pattern)}
    finds_nothing = pattern.search("", timeout=seconds) is not None

    def of_one(prompt: Prompt, completion: Completion) -> float:
        text = prompt.continued_by(completion)
        try:
            hits = pattern.finditer(text, timeout=seconds, concurrent=True)
            texts = (match[0] for match in hits if match[0] or not finds_nothing)
            return float(
                any({pair[1] for pair in _EMPTY_PAIR.finditer(t)} <= may_be_empty for t in texts)
            )
        except TimeoutError:
            size = f"a completion of {len(text)} characters, which counts 0"
            log.warning(
                f"the pattern {options.pattern!r} took more than {seconds:g} seconds on {size}; "
                "write one that does not backtrack"
            )
            return 0.0

    return Reward(of_one)


def _judge(options: JudgeOptions, context: Context) -> Reward:
    judge = LanguageModelJudge(options, context.answers)
    context.resources.callback(judge.close)
    if options.mode == "pairwise":
        return Reward(
            of_group=lambda group, _: judge.compare(group), threads=judge.threads, columns=(CHAT,)
        )
    return Reward(judge.score, threads=judge.threads, columns=(CHAT,))


def _player_row(side: RolloutSide) -> Row:
    """The row of the reward that a player pays itself."""
    return side.RewardOptions, lambda options, context: Reward(
        lambda prompt, completion: side.reward(options, completion), columns=(ROW,)
    )


def _custom(spec: RewardSpec, context: Context) -> Reward:
    where, seconds = str(spec.custom), context.score.timeout_seconds or CUSTOM_SECONDS
    user_function = load_reward(where) if spec.function is None else spec.function
    if is_published(user_function):
        user_function, seconds = _sandboxed(where, user_function, context), MAX_WAITING_SECONDS
    function = CustomReward(where, seconds, user_function)
    columns = function.columns
    if function.takes_group:
        return Reward(
            of_group=lambda group, _: function.group(group),
            is_custom=True,
            columns=columns,
            take_logged=function.take_logged,
            take_extra=function.take_extra,
        )
    return Reward(function.one, is_custom=True, columns=columns)


def _sandboxed(where: str, function: Callable[..., Any], context: Context) -> Callable[..., Any]:
    """A function of an installed package, called in the sandbox. A group on which it fails is asked
    of it one by one, and what it fails on earns 0."""
    try:
        subject = Subject(function)
    except Exception as error:  # of pickle, or of the object's own
        raise ConfigError(
            f"score.rewards: {where} is of an installed package, and cannot be sent to the sandbox "
            f"in which such functions are called ({one_line(error)[:200]}); write a function of "
            "your own that calls it"
        ) from error
    if context.runs_programs:
        checkers_of(context.score.sandbox)

    def ask(named: dict[str, Any], count: int) -> list[float | None] | None:
        """Return the function's rewards of ``count`` completions, None for one that it gives none;
        None for all if the call fails."""

        def read(value: Any) -> list[float | None]:
            values = value if isinstance(value, list) else [value]
            if len(values) != count:
                raise ValueError(f"{len(values)} numbers for {count} completions")
            return [None if item is None else finite(item) for item in values]

        return checkers_of(context.score.sandbox).call(
            subject,
            named=named,
            read=read,
            seconds=context.score.timeout_seconds or count * CHECK_SECONDS,
        )

    @wraps(function)
    def asked(**named: Any) -> Any:
        named = {name: value for name, value in named.items() if not callable(value)}
        texts = named.get("completions", named.get("completion_ids", named.get("all_token_ids")))
        if texts is None:
            (reward,) = ask(named, 1) or [0.0]
            return reward
        count = len(texts)
        if count == 1 or (values := ask(named, count)) is None:
            values = []
            columns = {n for n, v in named.items() if isinstance(v, list) and len(v) == count}
            for i in range(count):
                one = {n: v[i : i + 1] if n in columns else v for n, v in named.items()}
                values += ask(one, 1) or [0.0]
        return values

    return asked


REWARDS: dict[str, Row] = {
    "boxed": (AnswerOptions, lambda o, c: _answer_reward(final_boxed, o, c)),
    "think_answer_tags": (AnswerOptions, lambda o, c: _answer_reward(last_answer_tags, o, c)),
    "exact": (
        NoOptions,
        lambda o, c: Reward(_exact, answer=stated_label, vote=most_frequent_label),
    ),
    "code_tests": (NoOptions, lambda o, c: _code(c, is_fraction=False)),
    "code_tests_fraction": (NoOptions, lambda o, c: _code(c, is_fraction=True)),
    "format": (NoOptions, lambda o, c: _text_reward(think_answer_format)),
    "tag_count": (NoOptions, lambda o, c: _text_reward(tag_count)),
    "regex": (RegexOptions, _regex),
    "reasoning_steps": (StepsOptions, lambda o, c: _text_reward(reasoning_steps, o.wanted)),
    "soft_overlong": (SoftOverlongOptions, _soft_overlong),
    "cosine": (CosineOptions, _cosine),
    "length": (NoOptions, lambda o, c: _by_lengths(length_in_group, c)),
    "repetition_penalty": (
        RepetitionOptions,
        lambda o, c: Reward(lambda p, c: repetition_penalty(c.sampled_ids, o.ngram, o.penalty)),
    ),
    "gym": (NoOptions, _gym),
    **{side.REWARD: _player_row(side) for side in rollout_sides()},
    **{  # a separate model has its own template, which takes messages
        name: (options, lambda o, c: Reward(of_model=True, columns=(CHAT,) if o.is_outside else ()))
        for name, options in READER_REWARDS.items()
    },
    "judge": (JudgeOptions, _judge),
}
