"""The table of rewards: a name, its options, and the function that they make."""

import logging
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import regex
from pydantic import Field, ValidationError

from reason_llm.config import (
    REWARD_MODEL,
    Count,
    RewardModelOptions,
    RewardSpec,
    ScoreSection,
    Section,
    nearest,
    wrong,
)
from reason_llm.errors import ConfigError
from reason_llm.rollout import CHAT, Completion, Group, Prompt
from reason_llm.score import shaping, tags
from reason_llm.score.code.code_tests import TIMEOUT_SECONDS as TEST_SECONDS, CodeTests
from reason_llm.score.custom import CustomReward
from reason_llm.score.llm_judge import JudgeOptions, LanguageModelJudge
from reason_llm.score.math.boxed_math import Equality, matches
from reason_llm.score.math.extraction import final_boxed, last_answer_tags
from reason_llm.score.math.judge import TIMEOUT_SECONDS as COMPARISON_SECONDS

log = logging.getLogger(__name__)
CUSTOM_SECONDS = 60.0
PATTERN_SECONDS = 1.0
"""Of one search of the regex reward, whose pattern and text are others'."""
Number = Annotated[float, Field(allow_inf_nan=False)]

OfOne = Callable[[Prompt, Completion], float]
OfGroup = Callable[[Group, list[float]], list[float]]
"""Of a group and the first reward's value of each of its completions."""


class NoOptions(Section):
    """This reward has none."""


class AnswerOptions(Section):
    """How an answer is compared with the gold one."""

    equality: Equality = "form"
    """form: worked out as far as the gold answer is, and not copied from the question; value: any
    expression of the same value."""


MOST_CACHE_TOKENS = 1024
"""Of soft_overlong, by default."""


class SoftOverlongOptions(Section):
    """DAPO's soft overlong punishment."""

    cache_tokens: Count | None = None
    """Over so many tokens before sample.max_new_tokens it falls from 0 to -1. null: a quarter of
    that limit, and at most 1024."""


class CosineOptions(Section):
    """The cosine length reward; right is what the first reward gives more than 0."""

    correct: tuple[Number, Number] = (1.0, 0.5)
    """For a right answer of length 0, and of sample.max_new_tokens."""
    wrong: tuple[Number, Number] = (-1.0, -0.5)
    """For a wrong one."""


class RepetitionOptions(Section):
    """The repetition penalty."""

    ngram: Count = 3
    """Tokens of what counts as repeated."""
    penalty: Annotated[float, Field(le=0, allow_inf_nan=False)] = -1.0
    """For a text that only repeats."""


class StepsOptions(Section):
    """The reasoning steps reward."""

    wanted: Count = 3
    """Steps for the full reward."""


class RegexOptions(Section):
    """The regular expression reward."""

    pattern: str
    """1 where it is found in the completion, else 0."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the functions are made with."""

    score: ScoreSection
    max_new_tokens: int
    resources: ExitStack
    """Closes what a reward holds."""
    runs_programs: bool = True
    """False: the rewards are looked at, and none is asked for; no sandbox is started."""
    answers: Path | None = None
    """File that keeps what judges answered; None: memory alone."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A row: exactly one of the two functions is there, or a model is asked."""

    of_one: OfOne | None = None
    of_group: OfGroup | None = None
    of_model: bool = False
    """Whether a reward model gives it, when all of the step is sampled."""
    answer: Callable[[str], str | None] | None = None
    """Finds the answer in a completion that a majority can be taken of; None: there is none."""
    columns: tuple[str, ...] = ()
    """Extra columns of the data that it asks for."""
    description: str | None = None
    """What the user should know of it at the start."""


def make_reward(spec: RewardSpec, context: Context) -> Reward:
    """The function that the config names, with its options.

    Raises:
        ConfigError: an unknown name or option, or what the reward needs is not there.
    """
    if spec.custom is not None:
        return _custom(spec, context)
    if spec.name not in REWARDS:
        near = nearest(spec.name, REWARDS)
        raise ConfigError(
            f"score.rewards names {spec.name!r}, which is none of {', '.join(REWARDS)}; "
            + (f"did you mean {near}?" if near else "name one of these, or ")
            + ("" if near else "custom: path/to/file.py:function")
        )
    model, make = REWARDS[str(spec.name)]
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


def _answer(find: Callable[[str], str | None], options: AnswerOptions, context: Context) -> Reward:
    seconds = context.score.timeout_seconds or COMPARISON_SECONDS

    def of_one(prompt: Prompt, completion: Completion) -> float:
        found = find(completion.text)
        return matches(prompt.answer, found, seconds, prompt.text, options.equality)

    return Reward(of_one, answer=find)


def _code(context: Context) -> CodeTests:
    seconds = context.score.timeout_seconds or TEST_SECONDS
    code = CodeTests(mode=context.score.sandbox, timeout_seconds=seconds)
    return context.resources.enter_context(code)


def _not_run(prompt: Prompt, completion: Completion) -> float:
    raise RuntimeError("this Scorer was made without programs; it cannot score")


def _code_tests(options: Section, context: Context) -> Reward:
    if not context.runs_programs:
        return Reward(_not_run)
    code = _code(context)
    return Reward(code.all_pass, description=code.sandbox.description)


def _code_tests_fraction(options: Section, context: Context) -> Reward:
    if not context.runs_programs:
        return Reward(_not_run)
    code = _code(context)
    return Reward(code.fraction, description=code.sandbox.description)


def _soft_overlong(options: SoftOverlongOptions, context: Context) -> Reward:
    most = context.max_new_tokens
    cache = options.cache_tokens or max(1, min(MOST_CACHE_TOKENS, most // 4))
    if cache > most:
        raise ConfigError(
            f"score.rewards: soft_overlong's cache_tokens={cache} is more than "
            f"sample.max_new_tokens={most}; lower it"
        )
    return Reward(lambda p, c: shaping.soft_overlong(len(c.token_ids), most, cache))


def _cosine(options: CosineOptions, context: Context) -> Reward:
    def of_group(group: Group, first: list[float]) -> list[float]:
        return [
            shaping.cosine(len(c.token_ids), value > 0, context.max_new_tokens, options.correct,
                           options.wrong)
            if not math.isnan(value) else math.nan
            for c, value in zip(group.completions, first, strict=True)
        ]  # fmt: skip

    return Reward(of_group=of_group)


def _length(options: Section, context: Context) -> Reward:
    def of_group(group: Group, first: list[float]) -> list[float]:
        lengths = [len(c.token_ids) for c in group.completions]
        found = shaping.length_in_group(lengths, [value > 0 for value in first])
        return [math.nan if math.isnan(v) else f for f, v in zip(found, first, strict=True)]

    return Reward(of_group=of_group)


def _repetition(options: RepetitionOptions, context: Context) -> Reward:
    return Reward(
        lambda p, c: shaping.repetition_penalty(c.token_ids, options.ngram, options.penalty)
    )


def _steps(options: StepsOptions, context: Context) -> Reward:
    return Reward(lambda p, c: shaping.reasoning_steps(c.text, options.wanted))


def _regex(options: RegexOptions, context: Context) -> Reward:
    seconds = context.score.timeout_seconds or PATTERN_SECONDS
    try:
        pattern = regex.compile(options.pattern, regex.DOTALL)
    except regex.error as error:
        raise ConfigError(
            f"score.rewards: regex's pattern {options.pattern!r} is no regular expression "
            f"({error}); fix it"
        ) from error

    def of_one(prompt: Prompt, completion: Completion) -> float:
        try:
            return float(
                pattern.search(completion.text, timeout=seconds, concurrent=True) is not None
            )
        except TimeoutError:
            log.warning(
                "the pattern %r took more than %g seconds on a completion of %d characters, which "
                "counts 0; write one that does not backtrack",
                options.pattern, seconds, len(completion.text),
            )  # fmt: skip
            return 0.0

    return Reward(of_one)


def _model(options: RewardModelOptions, context: Context) -> Reward:
    # A model of its own has a template of its own, which takes messages.
    return Reward(of_model=True, columns=(CHAT,) if options.is_outside else ())


def _judge(options: JudgeOptions, context: Context) -> Reward:
    judge = LanguageModelJudge(options, context.answers)
    context.resources.callback(judge.close)
    if options.mode == "pairwise":
        return Reward(of_group=lambda group, _: judge.compare(group), columns=(CHAT,))
    return Reward(judge.score, columns=(CHAT,))


def _custom(spec: RewardSpec, context: Context) -> Reward:
    seconds = context.score.timeout_seconds or CUSTOM_SECONDS
    function = CustomReward(str(spec.custom), seconds, spec.function)
    if function.takes_group:
        return Reward(of_group=lambda group, _: function.group(group), columns=function.columns)
    return Reward(of_one=function.one, columns=function.columns)


REWARDS: dict[str, tuple[type[Section], Callable[[Any, Context], Reward]]] = {
    "boxed": (AnswerOptions, lambda o, c: _answer(final_boxed, o, c)),
    "think_answer_tags": (AnswerOptions, lambda o, c: _answer(last_answer_tags, o, c)),
    "code_tests": (NoOptions, _code_tests),
    "code_tests_fraction": (NoOptions, _code_tests_fraction),
    "format": (NoOptions, lambda o, c: Reward(tags.think_answer_format)),
    "tag_count": (NoOptions, lambda o, c: Reward(tags.tag_count)),
    "regex": (RegexOptions, _regex),
    "reasoning_steps": (StepsOptions, _steps),
    "soft_overlong": (SoftOverlongOptions, _soft_overlong),
    "cosine": (CosineOptions, _cosine),
    "length": (NoOptions, _length),
    "repetition_penalty": (RepetitionOptions, _repetition),
    REWARD_MODEL: (RewardModelOptions, _model),
    "judge": (JudgeOptions, _judge),
}
