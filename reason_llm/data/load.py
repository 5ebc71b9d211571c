"""All sets of a config's data section, read and filtered: the training sets in order, and the
held-out sets by name.

Filters are for training rows only: a held-out set is judged whole. They act in this order: pass
rate, length, duplicates, contamination. What they leave out is counted; everything else that cannot
be used goes to ``fault``.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING

import orjson

from reason_llm.config import Config, DataSection, PassRateSection
from reason_llm.data.forms import (
    Demonstration,
    Example,
    Preference,
    Problem,
    read_demonstration,
    read_preference,
    read_problem,
)
from reason_llm.data.render import Renderer
from reason_llm.data.rows import Fault, Row, raise_fault, read_rows
from reason_llm.data.templates import chat_template, system_prompt
from reason_llm.errors import ConfigError, DataError, printable
from reason_llm.rollout import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CODE_REWARDS = ("code_tests", "code_tests_fraction")
"""With one of these first, a row's answer is its tests."""
_LAYOUT = re.compile(
    r"\\[\[\](),;: ]|\\(?:left|right|quad|qquad|displaystyle)(?![a-z])|[${}]"
    r"|(?<!\d)[.,;:?]|[.,;:?](?!\d)"
)


@dataclass(slots=True)
class LoadedSet:
    """One file or Hub set."""

    name: str
    """Of a held-out set; empty for that of ``data.eval`` and for training sets."""
    source: str
    prompts: list[Prompt] = field(default_factory=list)
    num_rows: int = 0
    """Rows that were read, those left out included."""
    dropped: Counter[str] = field(default_factory=Counter)
    """How many rows each option left out."""
    targets_tokens: list[int] = field(default_factory=list)
    """Lengths of the completions of demonstrations, and of both of preferences."""

    @property
    def left_out(self) -> str:
        """``left out: 3 by data.pass_rate, 1 by data.deduplicate``; empty if nothing is."""
        counts = ", ".join(f"{count} by {option}" for option, count in self.dropped.items())
        return counts and f"left out: {counts}"


@dataclass(frozen=True, slots=True)
class Data:
    """Training and evaluation prompts of a run."""

    training: list[LoadedSet]
    weights: list[float]
    """Of the training sets."""
    held_out: list[LoadedSet]
    contamination: list[tuple[str, str]]
    """(training row, evaluation row) with the same question, those left out included."""

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
        """A line for each training set from which the filters dropped rows."""
        return [f"{each.source}: {each.left_out}" for each in self.training if each.dropped]

    def contamination_warning(self) -> str | None:
        """Warning about evaluation problems in the training sets; None without any."""
        if not self.contamination or any(e.dropped["data.contamination"] for e in self.training):
            return None
        ours, theirs = self.contamination[0]
        return printable(
            f"training rows that ask what an evaluation set asks: {len(self.contamination)}, such "
            f"as {ours}, which is {theirs}; set data.contamination to drop or ignore"
        )


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
    return Data(training, weights, held_out, loader.contamination)


def load_evaluation(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    extra_columns: Collection[str] = (),
    with_answers: bool = True,
) -> list[LoadedSet]:
    """The held-out sets alone, read as by ``load_data``.

    Args:
        with_answers: False for rows that need no more than a prompt.

    Raises:
        ConfigError, DataError: as ``load_data``.
    """
    loader = _loader(config, tokenizer, raise_fault, extra_columns)
    loader.with_answers = with_answers
    return _held_out(loader, config, context_tokens)


def _loader(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    fault: Fault,
    extra_columns: Collection[str],
) -> "_Loader":
    section, first_reward = config.data, config.score.rewards[0].label
    renderer = Renderer(
        tokenizer,
        chat_template(section.template, config.model.path, tokenizer.chat_template is not None),
        system_prompt(section.system_prompt, first_reward),
    )
    with_tests = first_reward in CODE_REWARDS
    return _Loader(section, renderer, fault, with_tests, tuple(sorted(extra_columns)))


def _held_out(loader: "_Loader", config: Config, context_tokens: int) -> list[LoadedSet]:
    if not config.evaluation_sets:
        return []
    room = _room(context_tokens, "eval.max_new_tokens", config.eval_max_new_tokens)
    return [
        loader.held_out(name, source, room, config.eval.limit)
        for name, source in config.evaluation_sets.items()
    ]


def question_key(example: Example) -> str:
    """Key of a question, equal for two examples that ask the same: the text of their messages,
    without a system message, letter case, Unicode variants, and layout (white space, LaTeX's
    formula marks, braces, punctuation outside of numbers)."""
    text = "\n".join(
        message["content"] for message in example.messages if message["role"] != "system"
    )
    folded = _LAYOUT.sub("", unicodedata.normalize("NFKC", text).casefold())
    return "".join(folded.split()) or text


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
    evaluated: dict[str, str] = field(default_factory=dict)
    """Where each question of a held-out set stands, by its key."""
    trained: set[str] = field(default_factory=set)
    """Keys of the training questions so far."""
    contamination: list[tuple[str, str]] = field(default_factory=list)

    def held_out(self, name: str, source: str, room: int, limit: int | None) -> LoadedSet:
        """The first ``limit`` rows of a held-out set."""
        loaded = LoadedSet(name, source)
        for example in self._examples(loaded, "test", self._problem, limit):
            self.evaluated.setdefault(question_key(example), example.where)
            if (prompt := self._prompt(example, room)) is not None:
                loaded.prompts.append(prompt)
        return loaded

    def training(self, source: str, room: int) -> LoadedSet:
        """Rows of a training set that pass the filters."""
        loaded, section = LoadedSet("", source), self.section

        def read(where: str, row: Row) -> Example | None:
            if not _passes(where, row, section.pass_rate):
                loaded.dropped["data.pass_rate"] += 1
                return None
            return self._of_form(where, row)

        for example in self._examples(loaded, section.split, read):
            prompt = self._prompt(example, room if section.max_prompt_tokens is None else None)
            if prompt is None:
                continue
            if len(prompt.token_ids) > (section.max_prompt_tokens or room):
                loaded.dropped["data.max_prompt_tokens"] += 1
            elif (key := question_key(example)) in self.trained and section.deduplicate:
                loaded.dropped["data.deduplicate"] += 1
            elif self._is_contaminated(key, example.where) and section.contamination == "drop":
                loaded.dropped["data.contamination"] += 1
            else:
                self.trained.add(key)
                loaded.prompts.append(prompt)
                loaded.targets_tokens += self._targets_tokens(example)
        if loaded.dropped and not loaded.prompts:
            self.fault(DataError(f"{source}: no row is left; {loaded.left_out}; ask for less"))
        return loaded

    def _examples(
        self,
        loaded: LoadedSet,
        split: str,
        read: Callable[[str, Row], Example | None],
        limit: int | None = None,
    ) -> Iterator[Example]:
        """Rows of a set as examples, without those that ``read`` drops."""
        faults = 0

        def fault(error: DataError) -> None:
            nonlocal faults
            faults += 1
            self.fault(error)

        try:
            for where, row in islice(read_rows(loaded.source, split, fault), limit):
                loaded.num_rows += 1
                try:
                    example = read(where, row)
                except DataError as error:
                    fault(error)
                else:
                    if example is not None:
                        yield example
            if not loaded.num_rows and not faults:
                raise DataError(f"{loaded.source} holds no rows; give a file with at least one")
        except DataError as error:
            fault(error)

    def _problem(self, where: str, row: Row) -> Problem:
        problem = read_problem(
            where, row, self.section.columns, tests=self.with_tests, answer=self.with_answers
        )
        return self._with_extra(problem, row)

    def _with_extra(self, problem: Problem, row: Row) -> Problem:
        missing = [name for name in self.extra_columns if name not in row]
        if missing:
            raise DataError(
                f"{problem.where}: lacks column {missing[0]!r}, which a custom reward asks for; it "
                f"has {', '.join(map(str, row))}; add it, or fix the reward"
            )
        extra = {name: row[name] for name in self.extra_columns}
        for name, value in extra.items():
            if not _is_kept_by_json(value):
                raise DataError(
                    f"{problem.where}: column {name!r}, which a custom reward asks for, holds "
                    f"{value!r:.60}, which the rollout buffer, JSON, cannot keep; write it as text"
                )
        return replace(problem, extra=extra)

    def _of_form(self, where: str, row: Row) -> Example:
        columns = self.section.columns
        match self.section.form:
            case "problems":
                return self._problem(where, row)
            case "prompts":
                return self._with_extra(read_problem(where, row, columns, answer=False), row)
            case "demonstrations":
                return read_demonstration(where, row, columns)
            case "preferences":
                return read_preference(where, row, columns)

    def _prompt(self, example: Example, room: int | None) -> Prompt | None:
        """Prompt of the example; None after a fault, such as more tokens than ``room``."""
        answer, extra = "", {}
        if isinstance(example, Problem):
            answer, extra = example.answer, dict(example.extra)
        try:
            prompt = self.renderer.prompt(example.where, example.messages, answer)
        except DataError as error:
            self.fault(error)
            return None
        if room is not None and len(prompt.token_ids) > room:
            self.fault(
                DataError(
                    f"{example.where}: the prompt has {len(prompt.token_ids)} tokens and the "
                    f"context leaves {room} for it; shorten or remove the row (for training rows, "
                    "data.max_prompt_tokens leaves out long ones), lower sample.max_new_tokens or "
                    "raise model.context_tokens"
                )
            )
            return None
        return replace(prompt, extra=extra)

    def _is_contaminated(self, key: str, where: str) -> bool:
        found = self.section.contamination != "ignore" and key in self.evaluated
        if found:
            self.contamination.append((where, self.evaluated[key]))
        return found

    def _targets_tokens(self, example: Example) -> list[int]:
        match example:
            case Problem():
                return []
            case Demonstration():
                texts: tuple[str, ...] = (example.completion,)
            case Preference():
                texts = (example.chosen, example.rejected)
        return [len(self.renderer.token_ids(text)) for text in texts]


def _room(context_tokens: int, option: str, completion_tokens: int) -> int:
    if completion_tokens >= context_tokens:
        raise ConfigError(
            f"{option}={completion_tokens} leaves no prompt room in the context of "
            f"{context_tokens} tokens; lower it"
        )
    return context_tokens - completion_tokens


def _passes(where: str, row: Row, wanted: PassRateSection) -> bool:
    """Whether the row's rate is in the range.

    Raises:
        DataError: it has none.
    """
    if wanted.column is None:
        return True
    if wanted.column not in row:
        raise DataError(
            f"{where}: lacks column {wanted.column!r}; it has {', '.join(map(str, row))}; set "
            "data.pass_rate.column to one of these"
        )
    value = row[wanted.column]
    try:
        rate = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        rate = math.nan
    if math.isnan(rate):
        raise DataError(
            f"{where}: {wanted.column!r} is {str(value)[:60]!r}; expected a number, which "
            "data.pass_rate compares"
        )
    return wanted.min <= rate <= wanted.max


def _is_kept_by_json(value: object) -> bool:
    """Whether JSON returns the value unchanged: no date, bytes, NaN or integer beyond 64 bits."""
    try:
        return bool(orjson.loads(orjson.dumps(value)) == value)
    except (TypeError, ValueError):
        return False
