"""README.md of an exported model, from the run's files and ``model_card.md.jinja``; what they do
not say is called unknown."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import ModelCardData
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reason_llm.config import Config, yaml_text
from reason_llm.data import system_prompt
from reason_llm.errors import ModelError, one_line, printable, without_secrets
from reason_llm.evaluate import OF_A_RUN
from reason_llm.files import read_object, read_text
from reason_llm.model import digests
from reason_llm.run import Best
from reason_llm.run.store import folder as run_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Contents of a card."""

    name: str
    """Name of the exported folder."""
    base: str
    """Name or path that the user gave."""
    licence: str | None
    merged: str | None
    """The type of merged weights; None for an adapter alone."""
    parity: str | None
    """Result of the parity check."""
    config: Config | None
    """The run's config; None without a run."""
    run: Path | None
    adapter: Path
    """The run's folder."""
    task: str = "text-generation"
    """Task of the model on the Hub."""
    loader: str = "AutoModelForCausalLM"
    """Transformers' class that loads the base."""
    merged_loader: str | None = None
    """Class that loads the merged model; None: the same one."""
    base_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the base's config with which an adapter alone has to be loaded."""


def licence_of(base: Path) -> str | None:
    """The licence that a model's own card names; None if there is no card, or it names none."""
    try:
        header = _HEADER.match(read_text(base / "README.md"))
        lines = header[1].splitlines() if header else []
        fields = yaml_text.parse(next(line for line in lines if line.startswith("license:")))
        licence = fields.get("license")
    except (OSError, ValueError, StopIteration, AttributeError):
        return None
    return licence if isinstance(licence, str) else None


def render(card: ModelCard) -> str:
    """The card as Markdown with the header that the Hub reads, and no secret of the environment;
    raises a ModelError if a summary of the run is damaged."""
    config, run = card.config, card.run
    sources = [] if config is None else [source.source for source in config.data.sources]
    header = ModelCardData(
        base_model=card.base if is_hub_id(card.base) else None,
        library_name="transformers" if card.merged else "peft",
        pipeline_tag=card.task,
        license=card.licence,
        tags=["reason_llm", *([] if config is None else [config.method.name])],
        datasets=[each.partition(":")[0] for each in sources if is_hub_id(each)] or None,
    )
    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
    environment.filters["printable"] = printable
    template = environment.from_string(read_text(Path(__file__).with_suffix(".md.jinja")))
    try:
        sections = {} if config is None else _training(card, config, sources)
        if run is not None:
            sections["Evaluation"] = _evaluation(run, card.adapter)
        shown = template.render(
            card=card, config=config, header=header.to_yaml(),
            model_class=card.merged_loader or card.loader,
            sections={title: map(printable, lines) for title, lines in sections.items()},
        )  # fmt: skip
        return without_secrets(f"{shown}\n")
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ModelError(
            f"{run}: its summary.json, or one in evaluation/, is damaged ({type(error).__name__}: "
            f"{one_line(error)[:100]}); remove it, or evaluate again"
        ) from error


def _training(card: ModelCard, config: Config, sources: list[str]) -> dict[str, list[str]]:
    """Lines of the sections on training and prompt."""
    planned, train, sample = config.run.steps, config.train, config.sample
    steps = None if card.run is None else run_folder.learned_steps(card.run, card.adapter)
    learned = planned if steps == planned else f"{steps or 'unknown'} of {planned} planned"
    kind, method = "algorithm" if config.samples else "objective", config.method
    lines = [
        f"- data: {', '.join(sources)}",
        f"- {kind}: {method.name}: {method.idea} ({method.source})",
    ]
    if config.samples:
        rewards = [f"{each.key} * {each.weight:g}" for each in config.score.rewards]
        lines += [
            f"- rewards: {', '.join(rewards)}",
            f"- {learned} steps of {sample.prompts_per_step} prompts with "
            f"{sample.completions_per_prompt} completions each, at most {sample.max_new_tokens} "
            f"tokens, temperature {sample.temperature:g}",
        ]
    else:
        rows = "pairs" if config.learns_pairs else "rows"
        lines.append(f"- {learned} steps of {train.rows_per_step} {rows}")
    if config.model.start is not None:
        lines.append(f"- begun from the adapter {config.model.start}")
    adapter, digest = (
        config.model.adapter,
        hashlib.sha256(orjson.dumps(config.model_dump(mode="json"))).hexdigest()[:16],
    )
    trained = f"LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}"
    if config.model.train == "full":
        trained = "all weights, without an adapter (model.adapter was not used)"
    lines += [
        f"- {trained}; learning rate {train.learning_rate:g}, {train.schedule}; "
        f"seed {config.run.seed}",
        f"- config digest (SHA-256, first 16): {digest}; all of it is in training_config.yaml",
    ]
    system = system_prompt(config.data.system_prompt, config.score.rewards[0].kind)
    template = "the model's own" if config.data.template == "auto" else config.data.template
    prompt = [f"Chat template: {template}."]
    prompt += (
        ["No system prompt."] if system is None else ["The system prompt of the training:", ""]
    )
    prompt += [f"> {line}" for line in (system or "").splitlines()]
    return {"Training": lines, "Prompt": prompt}


def is_hub_id(source: str) -> bool:
    """Whether a source is a name on the Hub and not a file."""
    is_file = source.lower().endswith(_FILE_SUFFIXES) or Path(source).exists()
    return bool(_HUB_ID.fullmatch(source)) and not is_file


def _evaluation(run: Path, adapter: Path) -> list[str]:
    """Lines of the run's own held-out numbers, and of those of the command evaluate of this
    adapter; the numbers of a run that was resumed since then are left out."""
    lines: list[str] = []
    if adapter == run_folder.place_of(run, "best") and (best := run_folder.best_record(run)):
        lines.append(f"The best evaluation of the run: {Best(**best)}.")
    if adapter == run / run_folder.KEPT["ema"]:
        lines.append("An exponential moving average of the adapter over the run (train.ema).")
    is_last = adapter == run_folder.place_of(run, "last")
    summary = _read(run / "summary.json") if is_last else {}
    by = summary.get("judged_by", "accuracy")

    def change(ends: Sequence[float], form: str = "{:.4g}") -> str:
        before, after = map(form.format, ends)
        return f"{before} before training, {after} after"

    judged = "{:.1%}" if by == "accuracy" else "{:.4g}"
    ends = [
        summary[key]
        for key in ("accuracy_before", "accuracy_after")
        if summary.get(key) is not None
    ]
    if len(ends) == 2:
        samples = summary.get("accuracy_samples")
        how = f"mean of {samples} samples" if samples else "greedy"
        if count := summary.get("accuracy_problems"):
            how = f"{count:,} problems, {how}"
        lines.append(f"Held-out {by}, {how}: {change(ends, judged)}.")
    if loss := summary.get("held_out_loss"):
        lines.append(f"Held-out loss: {change(loss)}.")
    if right := summary.get("held_out_pair_accuracy"):
        lines.append(f"Held-out pairs in order: {change(right, '{:.1%}')}.")
    sets = summary.get("accuracy_of_sets") or {}
    lines += [f"- {name}: {change(each, judged)}" for name, each in sets.items()]
    shown = _evaluated(run, adapter)
    results = _read(run / "evaluation" / "summary.json").get("results", {})
    rows = [
        f"| {name} | {found['problems']} | {score} | {model} | {100 * each['value']:.1f} | "
        f"{100 * each['low']:.1f} to {100 * each['high']:.1f} |"
        for model, of_model in results.items()
        if model in shown
        for name, found in of_model.items()
        for score, each in found.items()
        if isinstance(each, dict) and each["low"] is not None
    ]
    if rows:
        head = ["", "| set | problems | score | model | value | 95 % interval |"]
        lines += [*head, "|---|---|---|---|---|---|", *rows]
    lines = lines or ["Not evaluated, as far as the run's files say."]
    has_curves = (run / "curves.png").exists()
    return [*lines, *(["", "![Curves over the steps](curves.png)"] if has_curves else [])]


def _evaluated(run: Path, adapter: Path) -> set[str]:
    """Labels of the command evaluate's models whose results belong on the card: this adapter or
    whole model, and what it was compared with; not another adapter or whole model of the run. Empty
    where this one was not evaluated."""
    asked = _read(run / "evaluation" / "evaluation.json").get("models", {})
    is_whole, of_this, compared = not run_folder.is_adapter(adapter), set[str](), set[str]()
    for label, each in asked.items():
        if (each["adapter"] is None) == is_whole:
            own = (str(adapter), None) if is_whole else (each["path"], adapter)
            if each["sha256"] == digests.weights_digest(*own):
                of_this.add(label)
        is_other = each["adapter"] is None and label not in OF_A_RUN
        if is_other and each["sha256"] == digests.weights_digest(each["path"]):
            compared.add(label)
    return of_this | compared if of_this else set()


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}
