"""The data of a run: sources become rows, rows become examples, and examples become prompts or
rows of tokens. The filters of training rows act in this order, whatever the form: preprocess, pass
rate, duplicates, contamination, length. All sets are read before the first one is rendered."""

import hashlib
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from string import ascii_uppercase
from typing import TYPE_CHECKING, Any

import orjson

from reason_llm.config import ColumnsSection, Config, share_of
from reason_llm.data.attachments import IMAGES, Attachments, attached, folder_of, has_images
from reason_llm.data.cells import Cells
from reason_llm.data.faults import Faults
from reason_llm.data.forms import (
    NO_EXTRAS,
    Asked,
    Completed,
    Example,
    Learned,
    PlainProblem,
    Problem,
    TemplateExtras,
    TextDocument,
    option_for,
    plain_problem,
    read_demonstrated,
    read_demonstration,
    read_document,
    read_labelled,
    read_preference,
    read_problem,
)
from reason_llm.data.golds import JUDGE_SECONDS, NO_VALUE, damage, has_answer, unpaid
from reason_llm.data.messages import SYSTEM_ROLES, Messages
from reason_llm.data.own_code import load_function, place_of
from reason_llm.data.played import Player, is_played, player_of
from reason_llm.data.render import AT_ONCE, Renderer, most_tokens
from reason_llm.data.rows import (
    READERS,
    Fault,
    Row,
    check_made,
    read_rows,
)
from reason_llm.data.sets import Data, DataSet, question_key
from reason_llm.data.templates import chat_template, system_prompt
from reason_llm.data.token_rows import prompt_tokens, render
from reason_llm.errors import ConfigError, DataError, one_line
from reason_llm.rollout import ALL, CHAT, MAY_LACK, ROW, Prompt, TokenRow
from reason_llm.score.math import equivalent, is_only_text, is_same_label, same_word
from reason_llm.workers import within

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

CODE_REWARDS = ("code_tests", "code_tests_fraction")
"""With one of these first, a row's answer is its tests."""
MATH_REWARDS = ("boxed", "think_answer_tags")
"""With one of these first, an answer is compared with the gold one as mathematics."""
LABEL_REWARD = "exact"
"""With this one first, the gold answer is the whole text of its column."""
_LABEL = re.compile(r"[^\W\d_]{2,30}+(?:[ _/&-]{1,3}[^\W\d_]{1,30}+){0,4}")
"""A label of up to five words."""
_YES_OR_NO = frozenset({"yes", "no", "true", "false"})
_CHOICE = re.compile(r"\\(?:textbf|text|mathrm)\{\(([A-J])\)[ ~\\]*\}?+ ?\S")
"""``\\textbf{(B) } 6``, as in AMC's solutions."""
LEARNED: dict[str, Callable[[str, Row, ColumnsSection], Learned]] = {
    "texts": read_document, "preferences": read_preference, "labels": read_labelled,
}  # fmt: skip
TEMPLATE_MARKS = (
    "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<<SYS>>", "<|start_header_id|>",
    "<|eot_id|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|end|>",
    "<|endoftext|>", "<|end_of_text|>", "<｜User｜>", "<｜Assistant｜>", "</s>", "### Response:",
)  # fmt: skip
"""Marks of turns, and ends of texts, that chat templates write."""
NOT_LISTED = "the gold answer has the letter of a choice that the question does not list"
OWN_SYSTEM = "the row's system message replaces data.system_prompt"
TURN_BY_TURN = (
    "turns are trained as separate rows of tokens, because the chat template changes earlier turns "
    "(Qwen3's drops their reasoning),"
)
PREPROCESS_SECONDS = 60.0
"""Seconds for one row."""


def load_data(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    fault: Fault | None = None,
    extra_columns: Collection[str] = (),
    end_token_ids: Collection[int] = (),
    tokenises_later: bool = False,
) -> Data:
    """Read and render everything, for a context of so many tokens (prompt and completion).

    Args:
        fault: is given each row and each file that cannot be used; by default all that were read
            are raised together, before any is rendered.
        extra_columns: further columns that custom rewards ask for.
        end_token_ids: the tokens that end an answer; only rows to learn from need them.
        tokenises_later: training prompts that are sure to fit are tokenised when they are drawn.

    Raises:
        ConfigError: options that contradict each other or the context, or name no template.
        ModelError: the model has no chat template, and prompts need one.
    """
    section = config.data
    training = [DataSet("", each.source, section.form, True) for each in section.sources]
    problems = held_out_sets(config)
    rows = (
        None if config.eval.rows is None else _held_out(config, "", config.eval.rows, section.form)
    )
    sets = [*problems, *([] if rows is None else [rows]), *training]
    faults = Faults()
    reader = _SetReader(
        config,
        renderer_of(config, tokenizer),
        context_tokens,
        fault or faults,
        extra_columns,
        end_token_ids,
    )
    check_lengths(config, context_tokens)
    if tokenises_later and not reader.asked:
        for each in training:
            each.prompts.encode = reader.renderer.with_ids
    if problems or not section.is_offline:
        reader.renderer.check_generation_prompt()
    examples = [reader.read(each) for each in sets]
    faults.raise_all()
    for data_set, of_set in zip(sets, examples, strict=True):
        reader.render(data_set, of_set)
        faults.raise_all()
    return Data(
        training,
        [each.weight for each in section.sources],
        problems,
        rows,
        reader.contamination,
        {
            name: {asked: prompt for asked, (_, prompt) in prompts.items()}
            for name, prompts in reader.reader_prompts.items()
        },
    )


def held_out_sets(config: Config) -> list[DataSet]:
    """The sets of ``data.eval`` and ``eval.sets``, not yet read."""
    return [_held_out(config, *each, "problems") for each in config.evaluation_sets.items()]


def _held_out(config: Config, name: str, source: str, form: str) -> DataSet:
    share = share_of(source)
    source = source if share is None else config.data.sources[0].source
    return DataSet(name, source, form, share=share)


def check_lengths(config: Config, context_tokens: int) -> None:
    """Raises ConfigError: an option on a length contradicts the context of so many tokens."""
    section = config.data
    if config.evaluation_sets:
        _room(config, context_tokens, is_training=False)
    if not section.is_offline:
        room = _room(config, context_tokens, is_training=True)
        if section.max_prompt_tokens is not None and section.max_prompt_tokens > room:
            raise ConfigError(
                f"data.max_prompt_tokens={section.max_prompt_tokens} is more than the {room} "
                f"that the context leaves for a prompt; set it to {room} or less"
            )
    elif not 2 <= (section.max_tokens or context_tokens) <= context_tokens:
        raise ConfigError(
            f"data.max_tokens={section.max_tokens} is not from 2 to {context_tokens}, "
            "the tokens of the context; set it to one of these"
        )


def _room(config: Config, context_tokens: int, is_training: bool) -> int:
    """Tokens that the context leaves for a prompt."""
    option, most = "eval.max_new_tokens", config.eval_max_new_tokens
    if is_training:
        option, most = "sample.max_new_tokens", config.sample.max_new_tokens
    if most >= context_tokens:
        raise ConfigError(
            f"{option}={most} leaves no prompt room in the context of {context_tokens} "
            "tokens; lower it"
        )
    return context_tokens - most


def check_files(config: Config, fault: Fault) -> None:
    """Read the first row of each file that the config names, but not of sets of the Hub; ``fault``
    is given those that cannot be read."""
    section = config.data
    sources = [*(each.source for each in section.sources), *config.evaluation_sets.values()]
    for source in filter(None, [*sources, config.eval.rows]):
        try:
            if share_of(source) is not None:
                continue
            if Path(source).suffix.lower() in READERS or Path(source).is_file():
                next(read_rows(source, "", lambda error: None, section.given), None)
        except DataError as error:
            fault(error)


def load_evaluation(
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    context_tokens: int,
    extra_columns: Collection[str] = (),
) -> list[DataSet]:
    """The held-out problems alone, read as by ``load_data``."""
    sets = held_out_sets(config)
    renderer = renderer_of(config, tokenizer)
    faults = Faults()
    reader = _SetReader(config, renderer, context_tokens, faults, extra_columns)
    for data_set in sets:
        examples = reader.read(data_set)
        faults.raise_all()
        reader.render(data_set, examples)
    faults.raise_all()
    return sets


def renderer_of(config: Config, tokenizer: "PreTrainedTokenizerBase") -> Renderer:
    """The renderer of ``data.template``. Where there are only rows to learn from, a model without
    a chat template is taken, too: it reads texts alone, and no system prompt.

    Raises:
        ConfigError: an option names no template or no system prompt.
        ModelError: the model has no chat template, and prompts need one.
    """
    section, has_one = config.data, tokenizer.chat_template is not None
    player = player_of(config) if config.judges_answers else None
    tools_of = {} if player is None else dict(player.tools)
    tools = tools_of.pop("", ())
    takes_texts = section.is_offline and section.template == "auto" and not config.evaluation_sets
    path, arguments, system = config.model.path, section.template_arguments, None
    if has_one or not takes_texts:
        system = system_prompt(section.system_prompt, config.prompting_reward)
    elif section.system_prompt not in ("auto", "none"):
        raise ConfigError(
            f"data.system_prompt={section.system_prompt!r:.60} needs a chat template, but {path} "
            "has none; set data.system_prompt=none or data.template"
        )
    has_one = has_one or takes_texts
    template = chat_template(section.template, path, has_one, arguments, section.date)
    renderer = Renderer(tokenizer, template, system, tools, tools_of)
    if player is not None and player.needs_tools:
        renderer.check_tools(player.option)
    return renderer


@dataclass(slots=True)
class _SetReader:
    """One reading of all sets, and what is known of those that were read before."""

    config: Config
    renderer: Renderer
    context_tokens: int
    fault: Fault
    extra_columns: Collection[str]
    end_token_ids: Collection[int] = ()
    evaluated: dict[bytes, str] = field(default_factory=dict)
    """Place of each question of a held-out set, by its key's digest."""
    golds: dict[bytes, tuple[str, str]] = field(default_factory=dict)
    """Place and gold answer of each question of the source that is read."""
    golds_of_split: dict[str, dict[bytes, tuple[str, str]]] = field(default_factory=dict)
    """``golds`` of each training source, of which a share may be held out."""
    trained: set[bytes] = field(default_factory=set)
    """Digests of the keys of the training questions that were kept."""
    contamination: list[tuple[str, str]] = field(default_factory=list)
    """(training row, held-out row) with the same question, those left out included."""
    reader_prompts: dict[str, dict[tuple[int, ...], tuple[str, tuple[int, ...]]]] = field(
        default_factory=dict
    )
    """By the reader and a training prompt's ids: its row, and what the reader is asked instead."""
    asked: Mapping[str, str] = field(init=False)
    """``Config.reader_prompts``."""
    judge: str = field(init=False)
    """Name of the first reward."""
    left_out: set[str] = field(default_factory=set)
    """Columns that rewards in TRL's form are not given, of which the user knows."""
    player: Player | None = None
    """What replies to the model's turns, if anything does."""
    preprocess: Callable[..., Any] | None = field(init=False, default=None)
    attachments: Attachments | None = None
    """Opened at the first row that has one; None: the model reads none."""
    attachments_opened: bool = False

    def __post_init__(self) -> None:
        self.asked = self.config.reader_prompts
        self.judge = self.config.score.rewards[0].kind
        self.player = player_of(self.config)
        if self.player is not None:
            self.extra_columns = {*self.extra_columns, CHAT, ROW}
        if (name := self.config.data.preprocess) is not None:
            self.preprocess = load_function(name, "data.preprocess")

    def read(self, data_set: DataSet) -> list[Example]:
        """Return the examples of a set that pass all filters but those of length, and count the
        rows read, dropped and invalid in ``data_set``.

        An invalid row goes to ``fault`` or, if it may be skipped, is noted. So does a set without
        rows.
        """
        section, limit, examples = self.config.data, None, list[Example]()
        may_be_plain = self._may_be_plain(data_set)
        is_split = data_set.is_training or data_set.share is not None
        self.golds = self.golds_of_split.setdefault(data_set.source, {}) if is_split else {}
        if data_set.is_training:
            limit = section.limit
        elif data_set.is_asked:
            limit = self.config.eval.limit

        def no_row(error: DataError) -> None:
            """Count what is no row, and note why."""
            data_set.num_rows += 1
            self._bad_row(data_set, error)

        try:
            # The limit counts rows before any filter: the same ones are read, whatever is dropped.
            for where, row in islice(self._rows(data_set, no_row), limit):
                data_set.num_rows += 1
                try:
                    plain = plain_problem(where, row) if may_be_plain else None
                    example = plain or self._example(data_set, where, row)
                    option = self._option_that_drops(data_set, example)
                except DataError as error:
                    self._bad_row(data_set, error)
                    continue
                if option is not None:
                    data_set.dropped[option] += 1
                elif example is not None:
                    examples.append(example)
            if not data_set.num_rows:
                raise DataError(f"{data_set.source} holds no rows; give a file with at least one")
        except DataError as error:
            self.fault(error)
        self._note_labels(data_set, examples)
        return examples

    def _note_labels(self, data_set: DataSet, examples: list[Example]) -> None:
        """Note that all gold answers are a few labels in words, which are no mathematics."""
        if self.config.score.rewards[0].kind not in MATH_REWARDS:
            return
        asked = [each for each in examples if isinstance(each, Asked)]
        labels = {each.answer.casefold() for each in asked}
        if not 1 < len(labels) <= len(asked) / 2 or labels <= _YES_OR_NO:
            return
        if all(map(_LABEL.fullmatch, labels)):
            says = (
                f"set score.rewards={LABEL_REWARD}, which compares labels word for word: "
                f"{self.config.score.rewards[0].key} compares the {len(labels)} different labels "
                "as mathematics"
            )
            data_set.doubts[says] = [each.where for each in asked]

    def _rows(self, data_set: DataSet, no_row: Fault) -> Iterator[tuple[str, Row]]:
        """The rows of a set: of one that is a share of the training set that share, of the training
        set what is not held out. Equal rows are on the same side."""
        section, shares = self.config.data, [data_set.share, *self.config.held_out_shares]
        if not data_set.is_training and data_set.share is None:
            yield from read_rows(data_set.source, "test", no_row, section.given)
            return

        def read(no_row: Fault) -> Iterator[tuple[str, Row]]:
            """Yield the (where, row) pairs of the source, ``data.limit`` at most; what is no row
            goes to ``no_row``. Raises DataError: the source cannot be read."""
            rows = read_rows(data_set.source, section.split, no_row, section.given)
            return islice(rows, section.limit)

        if (share := next(filter(None, shares), None)) is None:
            yield from read(no_row)
            return

        def skip(error: DataError) -> None:
            """The other side of the split says it."""

        order = sorted({_place_in_split(row) for _, row in read(skip)})
        count = max(1, round(share * len(order)))
        if count >= len(order):
            raise DataError(
                f"{data_set.source} has {len(order)} different rows, too few to hold out a part of "
                "them; name a file in data.eval"
            )
        for where, row in read(no_row if data_set.is_training else skip):
            if (_place_in_split(row) < order[count]) != data_set.is_training:
                yield where, row

    def render(self, data_set: DataSet, examples: list[Example]) -> None:
        """Fill the set with the examples' prompts, or rows of tokens; the list is empty then."""
        examples.reverse()
        while examples:
            part = examples[: -AT_ONCE - 1 : -1]
            del examples[-AT_ONCE:]
            self._render(data_set, part)
        if data_set.dropped and not data_set.size:
            first = f"; the first: {data_set.skipped[0]}" if data_set.skipped else ""
            self.fault(
                DataError(
                    f"{data_set.source}: no rows are left ({data_set.left_out}); relax these "
                    f"filters{first}"
                )
            )

    def _render(self, data_set: DataSet, examples: list[Example]) -> None:
        """Add the prompts or rows of some examples."""
        made, surely_fit, texts = dict[str, Prompt | DataError](), 0, dict[str, str]()
        if data_set.is_asked and data_set.prompts.encode is not None and self.attachments is None:
            # One token may be put before the text.
            room = self._room(data_set.is_training)
            surely_fit = min(room, self.config.data.max_prompt_tokens or room)
            plain = [each for each in examples if isinstance(each, PlainProblem)]
            framed = zip(plain, self.renderer.framed([each.text for each in plain]), strict=True)
            texts = {e.where: text for e, text in framed if text and most_tokens(text) < surely_fit}
        examples = [
            each.problem if isinstance(each, PlainProblem) and each.where not in texts else each
            for each in examples
        ]
        # The tokenizer is fast only in batches, and a batch has one environment and one set of
        # template arguments; the results are put back in the order of the rows below.
        asked: dict[tuple[str, str], list[tuple[str, Messages, str]]] = {}
        extras: dict[str, TemplateExtras] = {}
        for each in examples:
            if isinstance(each, Problem):
                key = "" if each.extras is NO_EXTRAS else orjson.dumps(each.extras).decode()
                extras[key] = each.extras
                part = asked.setdefault((each.toolset, key), [])
                part.append((each.where, each.messages, each.answer))
        for (name, key), part in asked.items():
            try:
                renderer = self.renderer.of(name).with_extras(extras[key])
                made |= renderer.prompts(part, surely_fit)
            except DataError as error:
                made |= {where: DataError(f"{where}: {error}") for where, _, _ in part}
        most = self.context_tokens
        if data_set.is_training or data_set.form == "texts":
            most = self.config.data.max_tokens or most
        learned = [each for each in examples if isinstance(each, Learned)]
        rendered = render(learned, self.renderer, most, self.end_token_ids)
        for example in examples:
            try:
                if isinstance(example, PlainProblem):
                    text = texts[example.where]
                    data_set.prompts.append(Prompt(example.where, text, (), example.answer))
                    continue
                if isinstance(example, Problem):
                    option = self._add_prompt(data_set, example, made[example.where])
                else:
                    option = self._add_rows(data_set, example, most, *next(rendered))
            except DataError as error:
                self._bad_row(data_set, error)
                continue
            if option is not None:
                data_set.dropped[option] += 1

    def _bad_row(self, data_set: DataSet, error: DataError) -> None:
        if self.config.data.on_bad_row == "error":
            self.fault(error)
        elif self._skips(data_set):
            data_set.skip(error)
        else:
            self.fault(DataError(f"{error}; data.on_bad_row=skip does not skip held-out rows"))

    def _skips(self, data_set: DataSet) -> bool:
        """Whether bad rows of a set are left out."""
        may = data_set.is_training or data_set.share is not None
        return may and self.config.data.on_bad_row == "skip"

    def _example(self, data_set: DataSet, where: str, row: Row) -> Example | None:
        """The row as an example; None where ``data.preprocess`` drops it."""
        section = self.config.data
        # The user's function comes first, so that it can fix what the checks below would refuse.
        if self.preprocess is not None:
            made = self._preprocessed(where, row, self.preprocess)
            if made is None:
                return None
            row = made
        detached: Sequence[Any] = ()
        if (attachments := self._attachments_of(where, row)) is not None:
            data_set.attachments = attachments
            row, detached = attachments.detach(where, row, data_set.source, section.columns.ignore)
        try:
            example = self._of_form(data_set, where, row)
            if attachments is not None:
                example = attachments.placed(example, detached)
        except DataError as error:
            if (option := self._option_that_reads(data_set, row)) is None:
                raise
            raise DataError(
                f"{where}: columns {', '.join(map(str, row)):.200} do not match "
                f"data.form={data_set.form}; set {option}"
            ) from error
        is_number = self.config.score.rewards[0].kind in MATH_REWARDS and self._skips(data_set)
        if isinstance(example, Problem) and is_number and example.doubt == NO_VALUE:
            raise DataError(
                f"{where}: the gold answer {example.answer!r} is a word for no value; write the "
                "answer"
            )
        if isinstance(example, Completed) and example.origin:
            data_set.origins.setdefault(example.origin)
        if example.ignored:
            self._note_ignored(data_set, example, row)
        for each in filter(None, dict.fromkeys(self._doubts(example))):
            data_set.doubts.setdefault(each, []).append(where)
        return example

    def _may_be_plain(self, data_set: DataSet) -> bool:
        """Whether the rows of a set have all that they mean in a plain text and a number."""
        columns = self.config.data.columns
        return (
            data_set.form == "problems"
            and not (self.preprocess or self.player or self.extra_columns)
            and not (columns.prompt or columns.answer or columns.ignore)
            and not (self._is_demonstrated(data_set) or is_played(data_set.source))
            and self.judge not in CODE_REWARDS
            and self.config.score.rewards[0].name != LABEL_REWARD
            and not any(
                plain_problem("", {"prompt": f"0{name}", "answer": "0"})
                for name in self.renderer.controls
            )
        )

    def _option_that_drops(self, data_set: DataSet, example: Example | None) -> str | None:
        """The option that drops a row: what ``_example`` returns, or asks what another one asks."""
        if example is None:
            return "data.preprocess"
        # Evaluation sets are read first, so their questions are known when training rows come.
        section, where, key = self.config.data, example.where, question_key(example)
        if isinstance(example, Asked):
            self._compare_golds(data_set, example, key)
        if not data_set.is_training:
            self.evaluated.setdefault(key, where)
            return None
        if key in self.trained and section.deduplicate:
            return "data.deduplicate"
        if section.contamination != "ignore" and key in self.evaluated:
            self.contamination.append((where, self.evaluated[key]))
            if section.contamination == "drop":
                return "data.contamination"
        self.trained.add(key)
        return None

    def _option_that_reads(self, data_set: DataSet, row: Row) -> str | None:
        """The option with which a row of another form would be read; None if there is none."""
        section = self.config.data
        option = option_for(row, data_set.form, section.columns)
        if option is None or self._is_demonstrated(data_set):
            return None
        if not data_set.is_training and data_set.form != section.form:
            option = "eval.rows in the place of data.eval and eval.sets, if rows are learned"
        elif section.form == "prompts":
            option += ", and leave data.form out"
        if data_set.form in ("preferences", "labels") and option == "stage=sft":
            option += ", which learns every answer, the bad ones too"
        return option

    def _note_ignored(self, data_set: DataSet, example: Problem | Learned, row: Row) -> None:
        """Count the columns of an example that nothing reads, and those for rewards alone."""
        elsewhere = self._read_elsewhere(data_set, row)
        unread = [name for name in example.ignored if name not in elsewhere]
        if ALL in self.extra_columns and data_set.is_asked:
            handed = [name for name in unread if name in row and name not in self.left_out]
            data_set.handed.update(handed)
            unread = [name for name in unread if name not in handed]
        data_set.ignored.update(unread)

    def _doubts(self, example: Problem | Learned) -> tuple[str, ...]:
        """What the user should look at in an example; empty texts for what is in order."""
        if isinstance(example, TextDocument):
            return (damage(example.text),)
        said = _messages_of(example)
        doubt = self._doubt(example) if isinstance(example, Problem) else example.doubt
        damaged = next(filter(None, (damage(each["content"]) for each in said)), "")
        has_own_system = example.messages[0]["role"] in SYSTEM_ROLES
        own = OWN_SYSTEM if has_own_system and self.renderer.system_prompt is not None else ""
        return doubt, damaged, own, self._spelled(example, said)

    def _compare_golds(self, data_set: DataSet, problem: Asked, key: bytes) -> None:
        """Note a question that an earlier row of the set has with another gold answer."""
        judge = self.judge
        if not problem.answer or judge in CODE_REWARDS:
            return
        key += problem.toolset.encode() if isinstance(problem, Problem) else b""
        where, gold = self.golds.setdefault(key, (problem.where, problem.answer))
        is_same = gold == problem.answer or (
            is_same_label(gold, problem.answer)
            if judge == LABEL_REWARD
            else judge in MATH_REWARDS and equivalent(gold, problem.answer, JUDGE_SECONDS)
        )
        if not is_same:
            data_set.contradictions.setdefault(
                key.hex(), f"{where} has {gold!r:.40}, {problem.where} has {problem.answer!r:.40}"
            )

    def _spelled(self, example: Problem | Completed, said: Messages) -> str:
        """Return a note on the control tokens that a row spells; empty where it spells none, where
        no template writes them, and where the row has its own token ids."""
        has_template = self.renderer.template.jinja or self.renderer.tokenizer.chat_template
        if has_template is None:
            return ""
        if isinstance(example, Completed) and example.sampled is not None:
            return ""
        if named := self.renderer.controls_in(said):
            return f"control tokens that the row spells ({named[0]}) are read as text"
        texts = [text for each in said if _may_be_marked(text := each["content"])]
        mark = next((mark for mark in TEMPLATE_MARKS for text in texts if mark in text), None)
        return f"marks of other chat templates ({mark}) are read as text" if mark else ""

    def _attachments_of(self, where: str, row: Row) -> Attachments | None:
        """The reader of the row's attachments; None for a row without any, and for a model of
        text."""
        if given := self.config.data.columns.ignore:
            ignored = {*map(str.casefold, given)}
            row = {n: v for n, v in row.items() if n.casefold() not in ignored}
        if not has_images(row):
            return None
        if not self.attachments_opened:
            folder = folder_of(IMAGES, f"{where}: a row with {IMAGES}")
            self.attachments = folder.open_attachments(self.config.model)
            self.attachments_opened = True
        return self.attachments

    def _doubt(self, problem: Problem) -> str:
        """Why the gold answer may be another one, or may never be paid; empty where it is clear."""
        asked, doubt = problem.messages[-1]["content"], problem.doubt
        if doubt or self.judge not in MATH_REWARDS:
            return doubt
        if not problem.answer or problem.answer.isdecimal():
            return ""
        letter = problem.answer.strip("(). ")
        if letter in (*ascii_uppercase,) and re.search(rf"\b{letter}\b", asked) is None:
            return NOT_LISTED
        if problem.answer.casefold() in ("true", "false"):
            is_accepted = "is" if same_word(problem.answer, asked) else "is not"
            return f"Yes or No {is_accepted} accepted for the gold answer True or False"
        choice = _CHOICE.match(problem.answer)
        if choice is not None and f"({choice[1]})" not in asked:
            return NOT_LISTED
        if not is_only_text(problem.answer):
            return unpaid(problem.answer, asked)
        return "the gold answer is not mathematics, so only the same words are accepted"

    def _preprocessed(self, where: str, row: Row, function: Callable[..., Any]) -> Row | None:
        """The row as the user's function returns it."""
        what = f"data.preprocess={self.config.data.preprocess}"
        try:
            made = within(PREPROCESS_SECONDS, what, lambda: function(dict(row)))
        except (Exception, SystemExit) as error:
            place = place_of(error)
            raise DataError(
                f"{where}: {what} failed ({type(error).__name__}: "
                f"{one_line(error)[:200]}{f' at {place}' if place else ''}); fix it"
            ) from error
        if made is None:
            return None
        if not isinstance(made, dict) or not all(isinstance(key, str) for key in made):
            raise DataError(
                f"{where}: {what} returned {str(made)[:60]!r}; expected a dict of columns, or "
                "None to drop the row"
            )
        check_made(f"{where}: {what} returned a row that cannot be used", made)
        return made

    def _is_demonstrated(self, data_set: DataSet) -> bool:
        """Whether a set's problems are a held-out share of demonstrations."""
        is_share = data_set.is_asked and data_set.share is not None
        return is_share and self.config.data.form == "demonstrations"

    def _of_form(self, data_set: DataSet, where: str, row: Row) -> Problem | Learned:
        columns = self.config.data.columns
        if self._is_demonstrated(data_set):
            judge = self.config.score.rewards[0]
            is_label, marked = judge.name == LABEL_REWARD, judge.kind in MATH_REWARDS
            asked = read_demonstrated(where, row, columns, label=is_label, marked=marked)
            return self._with_extra(asked, row)
        if data_set.form == "demonstrations":
            return read_demonstration(where, row, columns)
        if not data_set.is_asked:
            return LEARNED[data_set.form](where, row, columns)
        answer = data_set.form == "problems" and not is_played(data_set.source)
        judge = self.config.score.rewards[0]
        if self.config.data.form == "prompts" and judge.custom is not None:
            answer = answer and has_answer(Cells(where, row, columns))
        needs_prompt = self.player is None or self.player.needs_prompt  # else reset may give it
        problem = read_problem(
            where, row, columns, tests=self.judge in CODE_REWARDS, label=judge.name == LABEL_REWARD,
            answer=answer, prompt=needs_prompt,
        )  # fmt: skip
        return self._with_extra(problem, row)

    def _read_elsewhere(self, data_set: DataSet, row: Row) -> set[str]:
        """Columns of a row that a filter, the player or a custom reward reads."""
        found = {*self.extra_columns}
        if data_set.is_asked and self.player is not None:
            found |= self.player.columns_of(row)
        return {str(name).removesuffix(MAY_LACK) for name in found}

    def _with_extra(self, problem: Problem, row: Row) -> Problem:
        """The problem with the name of its tools and the columns that rewards and player read."""
        if self.player is None and not self.extra_columns:
            return problem
        talk = self.renderer.with_system_prompt(problem.messages)
        there = {**row, CHAT: talk}
        if ROW in self.extra_columns:
            kept = {name: value for name, value in row.items() if _is_kept_by_json(value)}
            for name in row.keys() - kept - self.left_out:
                self.left_out.add(name)
                logger.warning(
                    "%s: column %r holds %.60r, which JSON cannot represent: rewards of TRL's "
                    "form do not get it; write it as text, a number or a list",
                    problem.where,
                    name,
                    row[name],
                )
            prompt = talk if problem.prompt is None else problem.prompt
            there[ROW] = {"prompt": prompt, "columns": kept}
        toolset, asked = "", dict[str, str]()
        if self.player is not None:
            toolset = self.player.name(problem.where, row)
            if self.config.judges_answers:
                asked |= self.player.needed_columns(toolset)
        extra_columns = sorted(
            name.removesuffix(MAY_LACK)
            for name in self.extra_columns
            if not name.endswith(MAY_LACK) or name.removesuffix(MAY_LACK) in there
        )
        asked |= dict.fromkeys(extra_columns, "a custom reward")
        missing = [
            f"column {n!r}, which {who} asks for" for n, who in asked.items() if n not in there
        ]
        if missing:
            raise DataError(
                f"{problem.where}: lacks {', and '.join(missing)}; it has "
                f"{', '.join(map(str, row))}; add what it lacks, or change the function that asks"
            )
        # A resumed run scores from the buffer: a column must come back from it as it was.
        for name, who in asked.items():
            if not _is_kept_by_json(there[name]):
                raise DataError(
                    f"{problem.where}: column {name!r}, which {who} asks for, holds "
                    f"{there[name]!r:.60}, which JSON cannot represent; write it as text, "
                    "a number or a list"
                )
        extra = {name: there[name] for name in dict.fromkeys(extra_columns)}
        return replace(problem, extra=extra, toolset=toolset)

    def _add_prompt(
        self, data_set: DataSet, problem: Problem, prompt: Prompt | DataError
    ) -> str | None:
        """Add the prompt of a problem, or return the option that drops it."""
        if isinstance(prompt, DataError):
            raise prompt
        if self.attachments is not None and (found := attached(problem.messages)):
            prompt = self.attachments.prompt(prompt, found)
        num_tokens, room = len(prompt.token_ids), self._room(data_set.is_training)
        most = self.config.data.max_prompt_tokens
        if data_set.is_training and most is not None and num_tokens > most:
            return "data.max_prompt_tokens"
        if num_tokens > room:
            raise DataError(
                f"{problem.where}: the prompt has {num_tokens} tokens and the context leaves "
                f"{room} for it; shorten or remove the row (for training rows, "
                "data.max_prompt_tokens leaves out long ones), lower sample.max_new_tokens or "
                "raise model.context_tokens"
            )
        for name, text in self.asked.items() if data_set.is_training else ():
            self._ask_reader(name, problem, prompt, text, room)
        renderer = self.renderer.of(problem.toolset).with_extras(problem.extras)
        if ignored := renderer.check_written(problem.where, problem.messages, prompt.text):
            data_set.ignored.update(ignored)
        if problem.extra:
            prompt = replace(prompt, extra={**prompt.extra, **problem.extra})
        data_set.prompts.append(prompt)
        return None

    def _room(self, is_training: bool) -> int:
        return _room(self.config, self.context_tokens, is_training)

    def _ask_reader(
        self, name: str, problem: Problem, prompt: Prompt, text: str, room: int
    ) -> None:
        """Note what a reader is asked in this prompt's place."""
        if "{answer}" in text and not problem.answer:
            raise DataError(
                f"{problem.where}: has no gold answer for the {{answer}} of {name}.prompt; give "
                "it one, or leave {answer} out"
            )
        *earlier, last = problem.messages  # of the user
        filled = {"prompt": last["content"], "answer": problem.answer}
        # In one pass, so that a question that holds {answer} stays as it is.
        content = re.sub(r"\{(prompt|answer)\}", lambda found: filled[found[1]], text)
        talk = [*earlier, {**last, "content": content}]
        renderer = self.renderer.of(problem.toolset)
        asked = renderer.prompt(problem.where, talk, problem.answer).token_ids
        if len(asked) > room:
            raise DataError(
                f"{problem.where}: with {name}.prompt the prompt has {len(asked)} tokens and "
                f"the context leaves {room} for it; shorten {name}.prompt, lower "
                "sample.max_new_tokens or raise model.context_tokens"
            )
        prompts = self.reader_prompts.setdefault(name, {})
        where, known = prompts.setdefault(prompt.token_ids, (problem.where, asked))
        if known != asked:
            raise DataError(
                f"{problem.where}: asks what {where} asks and has another answer, so "
                f"{name}.prompt would give one of them away wrongly; remove one of the two, or "
                "set data.deduplicate=true"
            )

    def _add_rows(
        self,
        data_set: DataSet,
        example: Learned,
        most: int,
        rows: tuple[TokenRow, ...] | DataError,
        ignored: list[str],
    ) -> str | None:
        """Add the rows of tokens of an example, or return the option that drops them."""
        section = self.config.data
        if isinstance(rows, DataError):
            raise rows
        data_set.ignored.update({*ignored})
        first = len(data_set.units)
        rows = tuple(replace(row, group=first + row.group) for row in rows)
        found = () if isinstance(example, TextDocument) else attached(example.messages)
        if self.attachments is not None and found:
            rows = tuple(self.attachments.row(row, found) for row in rows)
        most_asked = section.max_prompt_tokens if data_set.is_training else None
        if most_asked is not None and any(prompt_tokens(row) > most_asked for row in rows):
            return "data.max_prompt_tokens"
        longest = max((len(row.ids) for row in rows), default=0)
        if longest > most:
            if data_set.is_training and section.max_tokens is not None:
                return "data.max_tokens"
            raise DataError(
                f"{example.where}: the row has {longest:,} tokens and the context {most:,}; "
                "shorten or remove it, set data.max_tokens, which drops such training rows, or "
                "raise model.context_tokens"
            )
        if isinstance(example, Completed) and len(rows) > len(example.completions):
            data_set.doubts.setdefault(TURN_BY_TURN, []).append(example.where)
        is_pair = data_set.form == "preferences"
        for unit in [rows] if is_pair else [(row,) for row in rows]:
            data_set.units.append(unit)
        return None


def _messages_of(example: Problem | Completed) -> Messages:
    """All messages of an example."""
    said = example.completions if isinstance(example, Completed) else ()
    return [*example.messages, *(message for part in said for message in part)]


def _may_be_marked(text: str) -> bool:
    """Whether a text has the first character of any of ``TEMPLATE_MARKS``."""
    return "<" in text or "[" in text or "#" in text


def _is_kept_by_json(value: object) -> bool:
    """Whether JSON returns the value unchanged: no date, bytes, NaN or integer beyond 64 bits."""
    try:
        return bool(orjson.loads(orjson.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def _place_in_split(row: Row) -> bytes:
    """Digest of a row, by which rows are ordered before the first ones are held out: the same ones
    in every run, so that no run learns from what another one is judged by. Objects such as images
    count by their type, since reading them again makes others."""
    content = json.dumps(row, default=lambda each: type(each).__name__)
    return hashlib.sha256(content.encode()).digest()[:16]
