"""The prompts of a config's data section, read and filtered: the training sets in order, and the
held-out sets by name. Rows of the offline stages are in ``load_rows``.

Filters are for training rows only: a held-out set is judged whole. They act in this order: pass
rate, length, duplicates, contamination. What they leave out is counted; everything else that cannot
be used goes to ``fault``.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

import orjson

from reason_llm.config import ColumnsSection, Config, DataSection
from reason_llm.data.conditioning import Conditioning
from reason_llm.data.forms import Messages, Problem, read_problem
from reason_llm.data.own_code import load_function
from reason_llm.data.render import Renderer
from reason_llm.data.rows import Fault, Row, raise_fault
from reason_llm.data.sets import (
    Preprocess,
    Questions,
    ReadSet,
    check_columns_of,
    contamination_warning,
    fault_of_rows,
    read_examples,
)
from reason_llm.data.templates import chat_template, system_prompt
from reason_llm.errors import ConfigError, DataError
from reason_llm.rollout import CHAT, ROW, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CODE_REWARDS = ("code_tests", "code_tests_fraction")
"""With one of these first, a row's answer is its tests."""


@dataclass(slots=True)
class LoadedSet(ReadSet):
    """One file or Hub set of problems or prompts."""

    prompts: list[Prompt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Data:
    """Training and evaluation prompts of a run."""

    training: list[LoadedSet]
    weights: list[float]
    """Of the training sets."""
    held_out: list[LoadedSet]
    contamination: list[tuple[str, str]]
    """(training row, evaluation row) with the same question, those left out included."""
    teacher_prompts: Mapping[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """With teacher.prompt, what the teacher is asked in the place of each training prompt; both as
    token ids."""

    @property
    def prompts(self) -> list[Prompt]:
        """Prompts of all training sets, one set after the other."""
        return [prompt for each in self.training for prompt in each.prompts]

    @property
    def sizes(self) -> list[int]:
        """Prompts in each training set."""
        return [len(each.prompts) for each in self.training]

    @property
    def held_out_prompts(self) -> list[Prompt]:
        """Prompts of all held-out sets."""
        return [prompt for each in self.held_out for prompt in each.prompts]

    def notes(self) -> list[str]:
        """Lines for each training set from which rows were dropped."""
        return [line for each in self.training for line in each.notes]

    def contamination_warning(self) -> str | None:
        """Warning about evaluation problems in the training sets; None without any."""
        return contamination_warning(self.contamination, self.training)


def load_data(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    fault: Fault = raise_fault,
    extra_columns: Collection[str] = (),
) -> Data:
    """Read and render everything.

    Args:
        context_tokens: longest prompt plus completion.
        extra_columns: further columns that custom rewards ask for.
        fault: is given each row and each file that cannot be used.

    Raises:
        ConfigError: options that leave no room for a prompt, or name no template.
        DataError: from ``fault``.
    """
    section = config.data
    evaluated = config.evaluation_sets
    sources = [each.source for each in section.sources]
    check_columns_of(section, [*sources, *evaluated.values(), *evaluated])
    loader = _loader(config, tokenizer, fault, extra_columns)
    held_out = _held_out(loader, config, context_tokens)
    room = _room(context_tokens, "sample.max_new_tokens", config.sample.max_new_tokens)
    if (most := section.max_prompt_tokens) is not None and most > room:
        raise ConfigError(
            f"data.max_prompt_tokens={most} is more than the {room} that the context leaves for a "
            f"prompt; set it to {room} or less"
        )
    training = [loader.training(each.source, room) for each in section.sources]
    weights = [each.weight for each in section.sources]
    asked = {student: teacher for student, (_, teacher) in loader.teacher_prompts.items()}
    return Data(training, weights, held_out, loader.questions.contamination, asked)


def load_evaluation(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    extra_columns: Collection[str] = (),
    with_answers: bool = True,
    conditioning: Conditioning | None = None,
) -> list[LoadedSet]:
    """The held-out sets alone, read as by ``load_data``.

    Args:
        with_answers: False for rows that need no more than a prompt.
        conditioning: whose target is written into the prompts; None for none.

    Raises:
        ConfigError, DataError: as ``load_data``.
    """
    loader = _loader(config, tokenizer, raise_fault, extra_columns)
    loader.with_answers = with_answers
    loader.conditioning = conditioning
    return _held_out(loader, config, context_tokens)


def read_evaluation(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    fault: Fault,
    extra_columns: Collection[str],
) -> tuple[list[LoadedSet], Questions, Callable[[Conditioning], list[LoadedSet]]]:
    """The held-out sets, read as by ``load_data``, their questions, and what makes the sets again
    with a target in their prompts.

    Raises:
        ConfigError, DataError: as ``load_data``.
    """
    if not config.evaluation_sets:
        return [], Questions(), lambda conditioning: []
    loader = _loader(config, tokenizer, fault, extra_columns)
    sets = _held_out(loader, config, context_tokens)
    room = _room(context_tokens, "eval.max_new_tokens", config.eval_max_new_tokens)

    def again(conditioning: Conditioning) -> list[LoadedSet]:
        loader.conditioning = conditioning
        for each, problems in zip(sets, loader.problems, strict=True):
            prompts = [loader.prompt(problem, room) for problem in problems]
            each.prompts = [prompt for prompt in prompts if prompt is not None]
        return sets

    return sets, loader.questions, again


def _loader(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    fault: Fault,
    extra_columns: Collection[str],
) -> "_Loader":
    section, first_reward = config.data, config.score.rewards[0].kind
    renderer = Renderer(
        tokenizer,
        chat_template(
            section.template,
            config.model.path,
            tokenizer.chat_template is not None,
            section.template_arguments,
        ),
        system_prompt(section.system_prompt, config.prompting_reward),
    )
    with_tests = first_reward in CODE_REWARDS
    columns, hint = tuple(sorted(extra_columns)), config.teacher.prompt
    return _Loader(
        section, renderer, fault, with_tests, columns, teacher_prompt=hint,
        preprocess=preprocess_of(section),
    )  # fmt: skip


def preprocess_of(section: DataSection) -> Preprocess | None:
    """The function that ``data.preprocess`` names.

    Raises:
        ConfigError: there is none.
    """
    name = section.preprocess
    return None if name is None else load_function(name, "data.preprocess")


def _held_out(loader: "_Loader", config: Config, context_tokens: int) -> list[LoadedSet]:
    if not config.evaluation_sets:
        return []
    room = _room(context_tokens, "eval.max_new_tokens", config.eval_max_new_tokens)
    return [
        loader.held_out(name, source, room, config.eval.limit)
        for name, source in config.evaluation_sets.items()
    ]


@dataclass(slots=True)
class _Loader:
    """State of one reading of all sets: what is known of the sets before."""

    section: DataSection
    renderer: Renderer
    fault: Fault
    with_tests: bool
    extra_columns: tuple[str, ...]
    with_answers: bool = True
    """Whether a held-out problem must have a gold answer."""
    questions: Questions = field(default_factory=Questions)
    conditioning: Conditioning | None = None
    """Whose target is written into the prompts."""
    problems: list[list[Problem]] = field(default_factory=list)
    """Of each held-out set, those that have a prompt."""
    teacher_prompt: str | None = None
    """As ``teacher.prompt``."""
    preprocess: Preprocess | None = None
    """What each row goes through first."""
    teacher_prompts: dict[tuple[int, ...], tuple[str, tuple[int, ...]]] = field(
        default_factory=dict
    )
    """By a training prompt's ids: its row, and what the teacher is asked in its place."""
    left_out: set[str] = field(default_factory=set)
    """Columns that rewards in TRL's form are not given, of which the user knows."""

    def held_out(self, name: str, source: str, room: int, limit: int | None) -> LoadedSet:
        """The first ``limit`` rows of a held-out set."""
        loaded, problems = LoadedSet(name, source), list[Problem]()
        read = partial(self._problem, self.section.columns_for(name, source))
        for problem in read_examples(
            loaded, self.section, read, self.fault, is_training=False, limit=limit,
            preprocess=self.preprocess,
        ):  # fmt: skip
            self.questions.evaluate(problem)
            if (prompt := self.prompt(problem, room)) is not None:
                loaded.prompts.append(prompt)
                problems.append(problem)
        self.problems.append(problems)
        return loaded

    def training(self, source: str, room: int) -> LoadedSet:
        """Rows of a training set that pass the filters."""
        loaded, section = LoadedSet("", source), self.section
        fault = fault_of_rows(loaded, section, self.fault, is_training=True)
        read = partial(self._of_form, section.columns_for("", source))
        for problem in read_examples(
            loaded, section, read, self.fault, is_training=True, limit=section.limit,
            preprocess=self.preprocess,
        ):  # fmt: skip
            most = room if section.max_prompt_tokens is None else None
            prompt = self.prompt(problem, most, fault)
            if prompt is None:
                continue
            if len(prompt.token_ids) > (section.max_prompt_tokens or room):
                loaded.dropped["data.max_prompt_tokens"] += 1
            elif option := self.questions.dropped_by(problem, section):
                loaded.dropped[option] += 1
            elif self._ask_teacher(problem, prompt, room, fault):
                loaded.prompts.append(prompt)
        if loaded.dropped and not loaded.prompts:
            first = f"; the first: {loaded.skipped[0]}" if loaded.skipped else ""
            self.fault(
                DataError(f"{source}: no row is left; {loaded.left_out}; ask for less{first}")
            )
        return loaded

    def _problem(self, columns: ColumnsSection, where: str, row: Row) -> Problem:
        problem = read_problem(where, row, columns, tests=self.with_tests, answer=self.with_answers)
        return self._with_extra(problem, row)

    def _with_extra(self, problem: Problem, row: Row) -> Problem:
        talk = self.renderer.with_system_prompt(problem.messages)
        there = {**row, CHAT: talk}
        if ROW in self.extra_columns:
            kept = {name: value for name, value in row.items() if _is_kept_by_json(value)}
            self._warn_of_left_out(problem.where, row, kept)
            prompt = talk if problem.prompt is None else problem.prompt
            there[ROW] = {"prompt": prompt, "columns": kept}
        missing = [name for name in self.extra_columns if name not in there]
        if missing:
            raise DataError(
                f"{problem.where}: lacks column {missing[0]!r}, which a custom reward asks for; it "
                f"has {', '.join(map(str, row))}; add it, or fix the reward"
            )
        extra = {name: there[name] for name in self.extra_columns}
        for name, value in extra.items():
            if not _is_kept_by_json(value):
                raise DataError(
                    f"{problem.where}: column {name!r}, which a custom reward asks for, holds "
                    f"{value!r:.60}, which the rollout buffer, JSON, cannot keep; write it as text"
                )
        return replace(problem, extra=extra)

    def _warn_of_left_out(self, where: str, row: Row, kept: Collection[str]) -> None:
        """Warn once of each column that a reward in TRL's form is not given."""
        for name in row.keys() - kept - self.left_out:
            self.left_out.add(name)
            logger.warning(
                "%s: column %r holds %.60r, which the rollout buffer, JSON, cannot keep: rewards "
                "of TRL's form do not get it; write it as text, a number or a list",
                where, name, row[name],
            )  # fmt: skip

    def _of_form(self, columns: ColumnsSection, where: str, row: Row) -> Problem:
        if self.section.form == "problems":
            return self._problem(columns, where, row)
        return self._with_extra(read_problem(where, row, columns, answer=False), row)

    def _ask_teacher(self, problem: Problem, prompt: Prompt, room: int, fault: Fault) -> bool:
        """Note what the teacher is asked in this prompt's place, if it is asked something else;
        False after a fault."""
        if self.teacher_prompt is None:
            return True
        try:
            told = _told_to_teacher(problem, self.teacher_prompt)
            asked = self.renderer.prompt(problem.where, told, problem.answer).token_ids
            if len(asked) > room:
                raise DataError(
                    f"{problem.where}: with teacher.prompt the prompt has {len(asked)} tokens and "
                    f"the context leaves {room} for it; shorten teacher.prompt, lower "
                    "sample.max_new_tokens or raise model.context_tokens"
                )
            where, known = self.teacher_prompts.setdefault(prompt.token_ids, (problem.where, asked))
            if known != asked:
                raise DataError(
                    f"{problem.where}: asks what {where} asks and has another answer, so "
                    "teacher.prompt would give one of them away wrongly; remove one of the two, or "
                    "set data.deduplicate=true"
                )
        except DataError as error:
            fault(error)
            return False
        return True

    def prompt(
        self, problem: Problem, room: int | None, fault: Fault | None = None
    ) -> Prompt | None:
        """Prompt of the problem; None after a fault, such as more tokens than ``room``."""
        fault = fault or self.fault
        try:
            messages = problem.messages
            if self.conditioning is not None:
                messages = self.conditioning.asking(problem.where, messages)
            prompt = self.renderer.prompt(problem.where, messages, problem.answer)
        except DataError as error:
            fault(error)
            return None
        if room is not None and len(prompt.token_ids) > room:
            fault(
                DataError(
                    f"{problem.where}: the prompt has {len(prompt.token_ids)} tokens and the "
                    f"context leaves {room} for it; shorten or remove the row (for training rows, "
                    "data.max_prompt_tokens leaves out long ones), lower sample.max_new_tokens or "
                    "raise model.context_tokens"
                )
            )
            return None
        return replace(prompt, extra=dict(problem.extra))


def _told_to_teacher(problem: Problem, text: str) -> Messages:
    """The messages with ``teacher.prompt``, filled in, in the place of the last of the user.

    Raises:
        DataError: it wants an answer that the row does not have.
    """
    if "{answer}" in text and not problem.answer:
        raise DataError(
            f"{problem.where}: has no gold answer for the {{answer}} of teacher.prompt; give it "
            "one, or leave {answer} out"
        )
    users = [i for i, message in enumerate(problem.messages) if message["role"] == "user"]
    if not users:
        raise DataError(
            f"{problem.where}: has no message of the user, in whose place teacher.prompt is put; "
            "give it one"
        )
    last = problem.messages[users[-1]]
    filled = {"prompt": last["content"], "answer": problem.answer}
    # In one pass, so that a question that holds {answer} stays as it is.
    content = re.sub(r"\{(prompt|answer)\}", lambda found: filled[found[1]], text)
    told = list(problem.messages)
    told[users[-1]] = {**last, "content": content}
    return told


def _room(context_tokens: int, option: str, completion_tokens: int) -> int:
    if completion_tokens >= context_tokens:
        raise ConfigError(
            f"{option}={completion_tokens} leaves no prompt room in the context of "
            f"{context_tokens} tokens; lower it"
        )
    return context_tokens - completion_tokens


def _is_kept_by_json(value: object) -> bool:
    """Whether JSON returns the value unchanged: no date, bytes, NaN or integer beyond 64 bits."""
    try:
        return bool(orjson.loads(orjson.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
