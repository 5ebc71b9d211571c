"""Report on all data that a config names (``--data-check``). The rewards say which columns are
needed; no weight is read and no program is run."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from reason_llm.config import Config
from reason_llm.data import Data, LoadedSet, load_data
from reason_llm.errors import DataError, printable, without_secrets
from reason_llm.model import base, quiet_libraries
from reason_llm.score import Scorer

NUM_ERRORS_SHOWN = 10


@dataclass(frozen=True, slots=True)
class DataReport:
    """Lines and number of errors of a data check."""

    lines: list[str]
    """For the terminal; escape sequences in the data are spelled out."""
    num_errors: int


def check_data(config: Config) -> DataReport:
    """Read, render and count all rows.

    Raises:
        ReasonError: the tokenizer, a template, a reward or the options cannot be used at all.
    """
    quiet_libraries()
    tokenizer = base.load_tokenizer(config.model.path, config.model.trust_remote_code)
    first_errors: list[str] = []
    num_errors = 0

    def note(error: DataError) -> None:
        nonlocal num_errors
        num_errors += 1
        if num_errors <= NUM_ERRORS_SHOWN:
            first_errors.append(printable(str(error)))

    context = base.context_limit(config.model)
    with Scorer(config.score, config.sample.max_new_tokens, runs_programs=False) as scorer:
        data = load_data(config, tokenizer, context, note, extra_columns=scorer.columns)
    total = sum(data.weights)
    lines = []
    for loaded, weight in zip(data.training, data.weights, strict=True):
        share = f", {weight / total:.1%} of the prompts" if len(data.weights) > 1 else ""
        lines += _described(f"train {loaded.source}{share}", loaded)
    for loaded in data.held_out:
        lines += _described(f"eval {loaded.name}".rstrip() + f" {loaded.source}", loaded)
    if warning := data.contamination_warning():
        lines.append(f"warning: {warning}")
    lines += _shown_prompts(data)
    if num_errors:
        lines.append(f"{num_errors} errors, the first {len(first_errors)}:")
        lines += [f"  {error}" for error in first_errors]
    else:
        lines.append("no errors")
    return DataReport([printable(without_secrets(line), keep="\n\t") for line in lines], num_errors)


def _described(title: str, loaded: LoadedSet) -> list[str]:
    counts = f"{title}: {loaded.num_rows} rows, {len(loaded.prompts)} taken"
    lines = [counts + (f"; {loaded.left_out}" if loaded.dropped else "")]
    prompts_tokens = [len(prompt.token_ids) for prompt in loaded.prompts]
    for what, lengths in (("prompt", prompts_tokens), ("completion", loaded.targets_tokens)):
        if lengths:
            lines.append(f"  {what} tokens: {_spread(lengths)}")
    return lines


def _spread(lengths_tokens: Sequence[int]) -> str:
    ordered = sorted(lengths_tokens)
    p95 = ordered[-(-95 * len(ordered) // 100) - 1]  # the nearest rank
    return f"min {ordered[0]}, median {statistics.median(ordered):g}, p95 {p95}, max {ordered[-1]}"


def _shown_prompts(data: Data) -> list[str]:
    """The first, the middle and the last training prompt, as the model reads them."""
    prompts = data.prompts
    lines = []
    for index in sorted({0, len(prompts) // 2, len(prompts) - 1} if prompts else set()):
        prompt = prompts[index]
        answer = f"gold answer: {prompt.answer}" if prompt.answer else "no gold answer"
        lines += [f"--- {prompt.id}", prompt.text, f"--- {answer}"]
    return lines
