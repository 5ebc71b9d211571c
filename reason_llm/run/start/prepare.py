"""Preparation of a run: everything that can be checked before a weight is read, and its locks."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reason_llm.config import SURROGATES, Algorithm, Config
from reason_llm.data import Data, system_prompt
from reason_llm.errors import DataError, one_line, printable
from reason_llm.files import MIB, move_aside, read_object, write_atomically
from reason_llm.model import adapters
from reason_llm.model.plan import Plan, Subject
from reason_llm.readers import reference
from reason_llm.run.start import recovery
from reason_llm.run.start.resolve import ResolvedRun, resolve
from reason_llm.run.store import best, environment, folder as run_folder, kept_adapters
from reason_llm.run.store.checkpoint import RunState
from reason_llm.run.store.metrics import MetricsLog
from reason_llm.run.watch import Watch
from reason_llm.score import Scorer
from reason_llm.train import kto_desirable_weights

logger = logging.getLogger(__name__)

MOST_SHOWN = 80
"""Characters of a system prompt in its line at the start."""

WIDTH = 100
"""Characters of a line on the steps."""

LOWEST_ADAPTER_RATE = 3e-6
"""Learning rate below which a start warns that an adapter learns next to nothing."""

OF_A_CALL = ("run.steps:", "run.resume:", "log.console:")
"""Options of which a finished run has no use for another value."""


@dataclass(frozen=True, slots=True)
class Job:
    """A checked run that has not loaded a weight yet."""

    run: ResolvedRun
    data: Data
    scorer: Scorer
    plan: Plan
    state: RunState

    @property
    def config(self) -> Config:
        """The run's config with every open option decided."""
        return self.run.config

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run.folder

    @property
    def is_new(self) -> bool:
        """Whether the run has no checkpoint yet."""
        return self.state.folder not in self.run.checkpoints

    def begin(self, started: float) -> MetricsLog:
        """Make the first changes on disk; the first record's seconds count from ``started``."""
        if self.config.run.resume == "never":
            if any(self.folder.glob("[!.]*")):  # more files than a buffer's lock
                move_aside(self.folder)
            if self.config.samples:
                move_aside(self.config.run.buffer_path)
        resolved = run_folder.config_to_bytes(self.config)
        write_atomically(self.folder / run_folder.CONFIG, resolved)
        step = 0 if self.is_new else self.state.step
        environment.record_start(self.folder, step, self.data, self.plan)
        if self.config.model.start is not None and self.is_new:
            adapters.copy_folder(self.config.model.start, self.folder / reference.START)
        learned = None if self.is_new else self.state.step
        return MetricsLog(self.folder, learned, started, self.state.metrics_sha256)

    def try_rewards(self) -> None:
        """Call the user's rewards with made-up completions of the first prompt they judge."""
        prompts = self.data.prompts or self.data.held_out_prompts
        if self.config.judges_answers:
            only_first = not self.config.samples
            self.scorer.try_custom(prompts, self.run.subject.tokenizer, only_first)

    def finished(self, watch: Watch) -> dict[str, Any] | None:
        """Summary of the run if it is finished, else None; a run writes it last."""
        if self.state.step < self.config.run.steps and not self.ends_early(self.state):
            return None
        read = "summary.json"
        try:
            summary = read_object(self.folder / read, 16 * MIB)
            if summary.get("steps") != self.state.step:
                return None
            read = "adapters"
            if self.state.folder is not None:
                noted = summary.get("kept")
                noted = noted if isinstance(noted, dict) else {}
                kept_adapters.check_written(self.folder, self.config, self.state, noted)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            logger.warning(
                "%s: %s: %s; written again from %s",
                self.folder, read, one_line(error), self.state.folder,
            )  # fmt: skip
            return None
        line = (
            f"{self.folder} is finished at step {self.state.step}: raise --run.steps to continue, "
            "or start afresh with --run.resume never"
        )
        if self.ends_early(self.state):
            line = (
                f"{self.folder} was ended early at step {self.state.step} by eval.patience: raise "
                "it to continue, or start afresh with --run.resume never"
            )
        if changed := [each for each in self.state.changed if not each.startswith(OF_A_CALL)]:
            line += (
                f"; these options differ from those of the run: {'; '.join(changed)}; to use them, "
                "give this run another --run.name"
            )
        watch.line(line)
        return summary

    def ends_early(self, state: RunState) -> bool:
        """Whether ``eval.patience`` ends the run in this state."""
        return best.ends_early(state.best, self.config.eval.patience)


def prepare(config: Config, watch: Watch) -> Job:
    """Check rewards, model, data, the run's folder and its buffer, in this order; write nothing."""
    answers = config.run.directory / str(config.run.name) / run_folder.ANSWERS
    scorer = Scorer(config.score, config.sample.max_new_tokens, answers=answers)
    run, data = resolve(config, scorer, watch)
    if run.config.stage == "preference" and not run.config.learns_pairs:
        _check_labels(run.config, data)
    state = recovery.state_of(run)
    for line in _lines(run, state, data, scorer):
        watch.line(line)
    if run.config.learns:
        _check_rate(run.config)
    if warning := data.contamination_warning():
        logger.warning("%s", warning)
    return Job(run, data, scorer, _plan(run.subject, data), state)


def _lines(run: ResolvedRun, state: RunState, data: Data, scorer: Scorer) -> Iterator[str]:
    """Lines for the user about the run that starts or resumes."""
    config = run.config
    where = f"resumes after step {state.step}" if state.folder else "starts"
    kind = "prompts" if config.samples else "pairs" if config.learns_pairs else "rows"
    yield (
        f"run {config.run.name} {where}: {sum(data.sizes)} {kind}, "
        f"{data.num_held_out} held out, model {config.model.path}"
    )
    yield from data.notes()
    name = config.data.system_prompt
    if (text := system_prompt(name, config.prompting_reward)) is not None:
        named = f" (data.system_prompt: {name})" if name != text else ""
        yield f"system prompt of rows without one: {_shown(text)}{named}"
    if config.learns:
        yield from _settings(config)
    for reader in run.readers:
        yield from reader.lines()
    yield from run.subject.why if config.learns else run.subject.why[:-1]
    if config.judges_answers:
        yield from scorer.descriptions


def _shown(text: str, most: int = MOST_SHOWN) -> str:
    """The beginning of a text, in one line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= most else f"{line[: most - 1]}…"


def _settings(config: Config) -> Iterator[str]:
    """Lines on what decides the size and the strength of the steps."""
    train, adapter = config.train, config.model.adapter
    rows = f"{train.rows_per_step} rows"
    if config.samples:
        sample = config.sample
        rows = f"{sample.prompts_per_step} prompts x {sample.completions_per_prompt} completions"
    yield f"{config.method.name}: steps of {rows}"
    if config.samples:
        row = config.algorithm.row()
        kl = "no KL" if row.kl == "none" else f"KL {row.kl} x {row.kl_coefficient:g}"
        yield f"objective: aggregation {row.aggregation}; {kl}{_clipping(row)}"
    if config.stage == "preference":
        preference = config.preference.row()
        nll = f"; NLL of the chosen side x {preference.nll_coefficient:g}"
        yield f"objective: beta {preference.beta:g}{nll if preference.nll_coefficient else ''}"
    updates, total = train.epochs * train.optimizer_steps, config.policy_optimizer_steps
    warm_up = f"warm-up {train.warmup_steps}" if train.warmup_steps > 1 else ""
    if updates > 1 or warm_up:
        each = f"{updates} optimizer step{'s' * (updates > 1)} each, {total} in all"
        yield f"{each}{warm_up and f'; {warm_up}'}"
    rate = f"; learning rate {train.learning_rate:g} ({train.schedule})"
    if config.model.train == "full":
        yield f"all weights are trained{rate}"
        return
    trained = f"LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}"
    trained += f"{' (rsLoRA)' if adapter.rslora else ''}, on "
    on = [adapter.targets] if isinstance(adapter.targets, str) else adapter.targets
    layers = "/".join((*on, *adapter.target_parameters)).replace("_proj/", "/")
    yield f"{trained}{_shown(layers, WIDTH - len(trained) - len(rate))}{rate}"


def _check_rate(config: Config) -> None:
    """Warn of an adapter's learning rate that suits all weights; 0 trains nothing on purpose."""
    if config.model.train == "adapter" and 0 < config.train.learning_rate < LOWEST_ADAPTER_RATE:
        usual = "1e-5 to 2e-5" if config.samples else "5e-6 or more"
        logger.warning(
            "train.learning_rate=%g teaches a LoRA adapter next to nothing; set it to %s, or set "
            "model.train to full, which trains all weights", config.train.learning_rate, usual,
        )  # fmt: skip


def _clipping(row: Algorithm) -> str:
    """The range to which the surrogate clips the ratio; empty where it has none."""
    columns = SURROGATES[row.surrogate].columns
    if "clip_low" not in columns:
        return ""
    middle = int("ratio" in columns)  # gmpo's is of the logarithm
    name = "log-ratio" if not middle else "ratio" if row.ratio == "token" else f"{row.ratio} ratio"
    name = name.replace("sequence_token", "sequence")
    return f"; {name} clipped to {middle - row.clip_low:g} ... {middle + row.clip_high:g}"


def _check_labels(config: Config, data: Data) -> None:
    """Warn of weights of KTO under which one label outweighs the other."""
    if data.held_out_rows is not None and len(data.held_out_rows.units.values) == 1:
        raise DataError(
            f"eval.rows={config.eval.rows} holds one row, and {config.preference.name} compares "
            "each row with another one; add a row, or leave eval.rows out"
        )
    row, good, bad = config.preference.row(), 0.0, 0.0
    for each, weight in zip(data.training, data.weights, strict=True):
        share = float((each.units.values > 0).mean())
        good, bad = good + weight * share, bad + weight * (1 - share)
    if not (good and bad):
        return  # the line on the rows says so
    low, high = kto_desirable_weights(good, bad, row.undesirable_weight)
    if not 0.95 * low <= row.desirable_weight <= 1.05 * high:
        logger.warning(
            "preference.desirable_weight=%g leaves the labels out of balance: %.0f %% of the rows "
            "are good ones; set it to a number from %.3g to %.3g", row.desirable_weight,
            100 * good / (good + bad), low, high,
        )  # fmt: skip


def _plan(subject: Subject, data: Data) -> Plan:
    """The memory plan, by the longest prompt and the longest row. KTO's baseline takes each prompt
    with the completion of another row; raises a DataError if two such do not fit into the
    context."""
    config, context = subject.config, subject.context_tokens
    longest = max(each.prompts.lengths.max(initial=0) for each in [*data.training, *data.held_out])
    sets = [*data.training, *([data.held_out_rows] if data.held_out_rows else [])]
    mixes = config.stage == "preference" and not config.learns_pairs
    longest_row = max(each.units.lengths.max(initial=0) for each in sets)
    if mixes:
        asked = max(each.units.asked.max(initial=0) for each in sets)
        mixed = asked + max((each.units.lengths - each.units.asked).max(initial=0) for each in sets)
        if mixed > context:
            raise DataError(
                "kto passes each prompt with the completion of another row, and the longest of "
                f"both have {mixed} tokens together, which is more than the context of {context}; "
                "drop long rows with data.max_tokens, or raise model.context_tokens"
            )
        longest_row = max(longest_row, mixed)
    if data.reader_prompts:  # a reader reads the policy's answer to each
        prompts = [prompt for of in data.reader_prompts.values() for prompt in of.values()]
        longest_row = max(map(len, prompts)) + config.sample.max_new_tokens
    attachments = None if data.attachments is None else data.attachments.sizes
    return subject.plan(int(longest), config.learns, int(longest_row), attachments)
