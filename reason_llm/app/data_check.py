"""Report on a config's data (``--data-check``), and a trial call of the user's rewards, without
reading weights or running programs."""

import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, TypeVar

from reason_llm.app.option_check import check_options
from reason_llm.config import Config
from reason_llm.data import (
    SIDES,
    Data,
    DataSet,
    Faults,
    load_data,
    player_of,
    unasked_form,
)
from reason_llm.errors import ReasonError, RewardError, printable, without_secrets
from reason_llm.model import decode, end_token_ids, load_tokenizer, quiet_libraries
from reason_llm.model.plan import context_limit
from reason_llm.rollout import TokenRow
from reason_llm.score import Scorer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
NUM_ERRORS_SHOWN = 10
MAX_SHOWN_TOKENS = 1000
"""Tokens of one part of a row that are shown."""


@dataclass(frozen=True, slots=True)
class DataReport:
    """Text of a data check, and its number of errors."""

    lines: list[str]
    """For the terminal; escape sequences in the data are spelled out."""
    num_errors: int
    errors: list[str]
    """The first of each kind, in their order; ``lines`` has the first ten of them."""


def check_data(config: Config, mistakes: list[ReasonError]) -> DataReport:
    """Check the options as ``check_options`` does, and read, render and count all rows. If a
    mistake makes the rows unreadable, the report is empty."""
    quiet_libraries()
    config, columns, _ = check_options(config, mistakes)
    try:
        report = _check_rows(config, columns, mistakes)
    except ReasonError as error:
        mistakes.append(error)
        return DataReport([], 0, [])
    mistakes[:] = [mistake for mistake in mistakes if printable(str(mistake)) not in report.errors]
    return report


def _check_rows(
    config: Config, columns: Collection[str], mistakes: list[ReasonError]
) -> DataReport:
    tokenizer = load_tokenizer(config.model.path, config.model.trust_remote_code)
    faults = Faults()
    wrong_options = bool(mistakes)
    context = context_limit(config.model)
    ends = end_token_ids(config.model.path, tokenizer)
    data = load_data(config, tokenizer, context, faults, columns, ends)
    try:
        _try_rewards(config, data, tokenizer)
    except RewardError as error:
        mistakes.append(error)
    lines = _lines_of_sets(data) + _line_of_judge(config, data)
    # Reading the rows may note further errors, so these are counted last.
    if config.data.is_offline:
        lines += _lines_of_rows(data, tokenizer)
    else:
        lines += _shown_prompts(data, tokenizer)
    for key, options in config.score.by_readers.items():
        lines.append(f"the {options.title} {key} in {options.path} is not read by this check")
    num_errors, errors = faults.count, [printable(str(error)) for error in faults.errors()]
    if num_errors:
        errors_found = "1 error" if num_errors == 1 else f"{num_errors} errors"
        lines.append(f"{errors_found}, the first of each kind:")
        lines += [f"  {error}" for error in errors[:NUM_ERRORS_SHOWN]]
    elif wrong_options:
        lines.append("no errors in the rows, read without the wrong options")
    else:
        lines.append("no errors in the rows; a reward has one, below" if mistakes else "no errors")
    lines = [printable(without_secrets(line), keep="\n\t") for line in lines]
    return DataReport(lines, num_errors, errors)


def _try_rewards(config: Config, data: Data, tokenizer: "PreTrainedTokenizerBase") -> None:
    prompts = data.prompts or data.held_out_prompts
    if prompts and config.judges_answers:
        with Scorer(config.score, config.sample.max_new_tokens, runs_programs=False) as scorer:
            scorer.try_custom(prompts, tokenizer, only_first=not config.samples)


def _lines_of_sets(data: Data) -> list[str]:
    lines, total = [], sum(data.weights)
    for data_set, weight in zip(data.training, data.weights, strict=True):
        item_name = "prompts" if data_set.is_asked else "rows"
        share = f", {weight / total:.1%} of the {item_name}" if len(data.weights) > 1 else ""
        lines += _described(f"train {data_set.source}{share}", data_set)
    if data.held_out_rows is not None:
        lines += _described(f"held out {data.held_out_rows.source}", data.held_out_rows)
    for data_set in data.held_out:
        title = f"eval {data_set.name}".rstrip() + f" {data_set.source}"
        lines += _described(title, data_set)
    if warning := data.contamination_warning():
        lines.append(f"warning: {warning}")
    return lines


def _line_of_judge(config: Config, data: Data) -> list[str]:
    """The reward that scores answers, and the form of an answer that it needs if neither the system
    prompt nor a prompt asks for it. Without a system prompt, the model should know the form."""
    prompts = data.prompts or data.held_out_prompts
    if not prompts or not config.judges_answers:
        return []
    first, system = config.score.rewards[0], config.data.system_prompt
    line = f"judged by {first.key}, the first of score.rewards"
    mark = None if system == "none" else unasked_form(system, first.kind)
    if mark is None or player_of(config) is not None:  # an environment may ask for it
        return [line]
    if any(mark in prompt.text for prompt in _some(prompts)):
        return [line]
    places = "neither data.system_prompt nor the first, the middle or the last prompt"
    return [f"{line}; {places} asks for {mark}"]


def _described(title: str, data_set: DataSet) -> list[str]:
    rows = data_set.units.lengths
    num_used = len(data_set.prompts) + len({unit[0].name for unit in data_set.units})
    counts = f"{title}: {data_set.num_rows} rows, {num_used} taken"
    if len(rows) > num_used:
        counts += f" as {len(rows)} rows of tokens"
    lines = [counts + (f"; {data_set.left_out}" if data_set.dropped else "")]
    lines += [f"  {line}" for line in (*data_set.origins, *data_set.readings)]
    lines += [f"  {error}" for error in data_set.skipped]
    for kind, lengths in (
        ("prompt", data_set.prompts.lengths.tolist()),
        ("row", rows.tolist()),
        ("learned", [sum(row.trained) for unit in data_set.units for row in unit]),
    ):
        if lengths:
            lines.append(f"  {kind} tokens: {_spread(lengths)}")
    return lines


def _lines_of_rows(data: Data, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The first, the middle and the last row."""
    return [
        line
        for unit in _some(data.units)
        for row, side in zip(unit, SIDES if len(unit) > 1 else ("",), strict=True)
        for line in _shown_row(row, side, tokenizer)
    ]


def _some(items: Sequence[T]) -> list[T]:
    places = {0, len(items) // 2, len(items) - 1} if items else set()
    return [items[place] for place in sorted(places)]


def _shown_row(row: TokenRow, side: str, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The row's text in parts, each either read or learned; ``side`` is for a pair."""
    value = f", value {row.value:g}" if row.value else ""
    lines = [f"--- {', '.join(filter(None, (row.name, side)))}, {len(row.ids)} tokens{value}"]
    for is_learned, part in groupby(zip(row.ids, row.trained, strict=True), itemgetter(1)):
        ids = [token_id for token_id, _ in part]
        if is_learned:
            lines.append(f"--- learned, {len(ids)} tokens:")
        elif len(lines) > 1:
            lines.append(f"--- read, {len(ids)} tokens:")
        lines.append(tokenizer.decode(ids[:MAX_SHOWN_TOKENS], clean_up_tokenization_spaces=False))
        if len(ids) > MAX_SHOWN_TOKENS:
            lines.append(f"… and {len(ids) - MAX_SHOWN_TOKENS} tokens more")
    return lines


def _spread(lengths_tokens: Sequence[int]) -> str:
    ordered, mean = sorted(lengths_tokens), statistics.mean(lengths_tokens)
    p95 = ordered[-(-95 * len(ordered) // 100) - 1]  # the nearest rank
    middle = f"mean {mean:.1f}, median {statistics.median(ordered):g}"
    return f"min {ordered[0]}, {middle}, p95 {p95}, max {ordered[-1]}"


def _shown_prompts(data: Data, tokenizer: "PreTrainedTokenizerBase") -> list[str]:
    """The first, the middle and the last training prompt, and what readers are asked."""
    lines = []
    for prompt in _some(data.prompts):
        answer = f"gold answer: {prompt.answer}" if prompt.answer else "no gold answer"
        lines += [
            f"--- {prompt.id}",
            decode(tokenizer, [prompt.token_ids])[0],
            f"--- {answer}",
        ]
        for name, prompts in data.reader_prompts.items():
            if (reader_prompt := prompts.get(prompt.token_ids)) is not None:
                lines += [f"--- the {name} is asked:", *decode(tokenizer, [reader_prompt])]
    return lines
