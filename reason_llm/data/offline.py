"""The rows of the offline stages: training sets in order, one held-out set, and the held-out
problems that a run is judged by.

The filters act in this order: pass rate, duplicates, contamination, length. What they drop is
counted.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reason_llm.config import ColumnsSection, Config, DataSection
from reason_llm.data.conditioning import Condition, Conditioning, fit
from reason_llm.data.forms import (
    Demonstration,
    read_demonstration,
    read_document,
    read_labelled,
    read_preference,
)
from reason_llm.data.load import LoadedSet, preprocess_of, read_evaluation
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
from reason_llm.data.token_rows import Learned, LongRow, prompt_tokens, render
from reason_llm.errors import ConfigError, DataError
from reason_llm.rollout import TokenRow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(slots=True)
class RowSet(ReadSet):
    """One file or Hub set of rows to learn from."""

    units: list[tuple[TokenRow, ...]] = field(default_factory=list)
    """What ``order`` draws: one row each, of preferences the chosen and the rejected one."""

    @property
    def rows(self) -> list[TokenRow]:
        """The rows of all units."""
        return [row for unit in self.units for row in unit]


@dataclass(frozen=True, slots=True)
class TokenRows:
    """Everything that an offline stage learns from, and is judged by."""

    training: list[RowSet]
    weights: list[float]
    """Of the training sets."""
    held_out: RowSet | None
    """Rows of the same form that are not learned from; None if there is no such set."""
    evaluation: list[LoadedSet]
    """The held-out problems of ``data.eval`` and ``eval.sets``."""
    contamination: list[tuple[str, str]]
    """(training row, held-out row) with the same question, those left out included."""
    conditioning: Conditioning | None
    """How scores were written into the prompts; None if they were not."""

    @property
    def units(self) -> list[tuple[TokenRow, ...]]:
        """Units of all training sets, one set after the other."""
        return [unit for each in self.training for unit in each.units]

    @property
    def sizes(self) -> list[int]:
        """Units in each training set."""
        return [len(each.units) for each in self.training]

    def imitated(self, form: str) -> list[TokenRow]:
        """Rows that a policy learns to write, of ``data.form``: of a pair the chosen side, of
        labels those that are not bad."""
        return [unit[0] for unit in self.units if form != "labels" or unit[0].value >= 0]

    def notes(self) -> list[str]:
        """Lines for each training set from which rows were dropped, and of labels all alike."""
        found = [line for each in self.training for line in each.notes]
        for value, kind in {1.0: "good", -1.0: "bad"}.items():
            if all(len(unit) == 1 and unit[0].value == value for unit in self.units):
                found.append(
                    f"all {len(self.units)} rows are labelled {kind}; KTO tells good from bad"
                )
        return found

    def contamination_warning(self) -> str | None:
        """Warning about held-out questions in the training sets; None without any."""
        return contamination_warning(self.contamination, self.training)


def load_rows(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    end_token_ids: Collection[int],
    fault: Fault = raise_fault,
    *,
    held_out: str | None = None,
    condition: Condition | None = None,
    extra_columns: Collection[str] = (),
) -> TokenRows:
    """Read and render all rows of ``data.train``, which are of the form ``data.form``.

    Args:
        context_tokens: most tokens of a row.
        end_token_ids: the tokens that end an answer.
        fault: is given each row and each file that cannot be used.
        held_out: a file or Hub set of the same form, not learned from; None for none.
        condition: how the scores of demonstrations are written into their prompts, and its target
            into those of held-out problems; None for not.
        extra_columns: columns of held-out problems that custom rewards ask for.

    Raises:
        ConfigError: options that contradict each other, or name no template.
        ModelError: the model has no chat template, and held-out problems need one.
        DataError: from ``fault``; scores that cannot be compared.
    """
    section = config.data
    if not section.is_offline:
        raise ConfigError(
            f"data.form={section.form} are prompts to sample from and no rows to learn from; set "
            "data.form to demonstrations, texts, preferences or labels"
        )
    if section.max_tokens is not None and not 2 <= section.max_tokens <= context_tokens:
        raise ConfigError(
            f"data.max_tokens={section.max_tokens} is not from 2 to {context_tokens}, the tokens "
            "of the context; set it to one of these"
        )
    if condition is not None and section.form != "demonstrations":
        raise ConfigError(
            f"data.form={section.form} has no prompts that scores could be written into; set "
            "data.form=demonstrations"
        )
    evaluated = config.evaluation_sets
    sources = [each.source for each in section.sources]
    others_named = [] if held_out is None else [held_out]
    check_columns_of(section, [*sources, *others_named, *evaluated.values(), *evaluated])
    evaluation, questions, conditioned = read_evaluation(
        config, tokenizer, context_tokens, fault, extra_columns
    )
    reader = _Reader(
        section,
        renderer_of(config, tokenizer),
        context_tokens,
        end_token_ids,
        fault,
        condition is not None,
        questions,
        preprocess_of(section),
    )
    others = None if held_out is None else RowSet("", held_out)
    other_examples = [] if others is None else reader.held_out(others)
    training = [RowSet("", each.source) for each in section.sources]
    examples = [reader.training(each) for each in training]
    if condition is not None:
        scores = [e.score for each in examples for e in each if isinstance(e, Demonstration)]
        try:
            reader.conditioning = fit(scores, condition)
            evaluation = conditioned(reader.conditioning)
        except DataError as error:
            fault(error)
    number = 0
    for found, learned in zip(training, examples, strict=True):
        number = reader.render(found, learned, number, is_training=True)
        if found.dropped and not found.units:
            fault(DataError(f"{found.source}: no row is left; {found.left_out}; ask for less"))
    if others is not None:
        reader.render(others, other_examples, 0, is_training=False)
    return TokenRows(
        training,
        [each.weight for each in section.sources],
        others,
        evaluation,
        questions.contamination,
        reader.conditioning,
    )


def renderer_of(config: Config, tokenizer: "PreTrainedTokenizerBase") -> Renderer:
    """The renderer; without a chat template it reads texts alone, and no system prompt."""
    section, has_one = config.data, tokenizer.chat_template is not None
    if section.template != "auto" or has_one:
        return Renderer(
            tokenizer,
            chat_template(section.template, config.model.path, has_one, section.template_arguments),
            system_prompt(section.system_prompt, config.prompting_reward),
        )
    if section.system_prompt not in ("auto", "none"):
        raise ConfigError(
            f"data.system_prompt={section.system_prompt!r:.60} needs a chat template, which "
            f"{config.model.path} has not; set data.system_prompt=none or data.template"
        )
    return Renderer(tokenizer, chat_template("auto", config.model.path, model_has_one=True), None)


@dataclass(slots=True)
class _Reader:
    """One reading of all sets."""

    section: DataSection
    renderer: Renderer
    context_tokens: int
    end_token_ids: Collection[int]
    fault: Fault
    with_scores: bool
    questions: Questions
    preprocess: Preprocess | None
    conditioning: Conditioning | None = None

    def held_out(self, found: RowSet) -> list[Learned]:
        """All rows of the held-out set."""
        examples = list(self._examples(found, is_training=False))
        for example in examples:
            self.questions.evaluate(example)
        return examples

    def training(self, found: RowSet) -> list[Learned]:
        """Rows of a training set that pass the filters but that of the length."""
        kept = []
        section = self.section
        for example in self._examples(found, is_training=True):
            if option := self.questions.dropped_by(example, section):
                found.dropped[option] += 1
            else:
                kept.append(example)
        return kept

    def _examples(self, found: RowSet, is_training: bool) -> Iterator[Learned]:
        read = partial(self._of_form, self.section.columns_for("", found.source))
        limit = self.section.limit if is_training else None
        return read_examples(
            found, self.section, read, self.fault, is_training=is_training, limit=limit,
            preprocess=self.preprocess,
        )  # fmt: skip

    def render(self, found: RowSet, examples: list[Learned], number: int, is_training: bool) -> int:
        """Fill the set with units, numbered from ``number`` on.

        Returns:
            The number of the next unit.
        """
        drops = is_training and self.section.max_tokens is not None
        fault = fault_of_rows(found, self.section, self.fault, is_training)
        for example in examples:
            try:
                rows = self._rows(example, number, is_training)
            except LongRow as error:
                if drops:
                    found.dropped["data.max_tokens"] += 1
                else:
                    fault(error)
                continue
            except DataError as error:
                fault(error)
                continue
            if is_training and self._is_long_prompt(rows):
                found.dropped["data.max_prompt_tokens"] += 1
                continue
            found.units += [rows] if self.section.form == "preferences" else [(r,) for r in rows]
            number += len({row.group for row in rows})
        return number

    def _rows(self, example: Learned, number: int, is_training: bool) -> tuple[TokenRow, ...]:
        if self.conditioning is not None and isinstance(example, Demonstration):
            if example.sampled is not None:
                raise DataError(
                    f"{example.where}: its prompt is token ids, which a score cannot be written "
                    "into; set sft.condition=none, or give rows of texts"
                )
            example = self.conditioning.apply(example)
        most = self.context_tokens
        if is_training or self.section.form == "texts":
            most = self.section.max_tokens or most
        return render(example, self.renderer, most, self.end_token_ids, number)

    def _is_long_prompt(self, rows: tuple[TokenRow, ...]) -> bool:
        most = self.section.max_prompt_tokens
        return most is not None and any(prompt_tokens(row) > most for row in rows)

    def _of_form(self, columns: ColumnsSection, where: str, row: Row) -> Learned:
        match self.section.form:
            case "demonstrations":
                return read_demonstration(where, row, columns, score=self.with_scores)
            case "texts":
                return read_document(where, row, columns)
            case "preferences":
                return read_preference(where, row, columns)
            case "labels":
                return read_labelled(where, row, columns)
        raise AssertionError(self.section.form)
