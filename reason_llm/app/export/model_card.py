"""README.md of an exported model, from the run's files and ``model_card.md.jinja``; missing values
are called unknown."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import ModelCardData
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reason_llm.config import Config, yaml_text
from reason_llm.data import system_prompt
from reason_llm.errors import ModelError, one_line, printable, without_secrets
from reason_llm.evaluate import RUN_ADAPTERS
from reason_llm.files import read_object, read_text
from reason_llm.model import digests
from reason_llm.run import Best
from reason_llm.run.store import folder as run_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_DAMAGE = (KeyError, TypeError, ValueError, AttributeError, IndexError)
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Contents of a card."""

    name: str
    base: str
    """Name or path that the user gave."""
    licence: str | None
    merged: str | None
    """The type of merged weights; None for an adapter alone."""
    parity: str | None
    config: Config | None
    run: Path | None
    adapter: Path
    task: str = "text-generation"
    loader: str = "AutoModelForCausalLM"
    """Transformers' class that loads the base."""
    merged_loader: str | None = None
    """Class that loads the merged model; None: the same one."""
    folder: Path | None = None
    """Folder that it is loaded from; None: the Hub has it under its name."""
    base_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the base's config with which an adapter alone has to be loaded."""
    serve: str = ""
    """Command of vLLM that serves an adapter alone; empty: there is none."""


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
    """The card as Markdown with the header that the Hub reads, without secrets."""
    config, run = card.config, card.run
    sources = [] if config is None else [source.source for source in config.data.sources]
    header = ModelCardData(
        base_model=card.base if is_hub_id(card.base) else None,
        library_name="transformers" if card.merged else "peft",
        pipeline_tag=card.task,
        license=card.licence,
        tags=["reason_llm", *([] if config is None else [config.method.name])],
        datasets=[name.partition(":")[0] for name in sources if is_hub_id(name)] or None,
    )
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, finalize=lambda value: printable(str(value))
    )
    template = environment.from_string(read_text(Path(__file__).with_suffix(".md.jinja")))
    # The template reads files of the run, which may be damaged or of another version.
    try:
        values = {} if config is None else _training(card, config)
        if run is not None:
            values |= _evaluation(run, card.adapter)
        values["model_class"] = card.merged_loader or card.loader
        body = template.render(card=card, config=config, sources=sources, **values)
    except (*_DAMAGE, TemplateError) as error:
        raise ModelError(
            f"{run}: its summary.json, or one in evaluation/, is damaged ({type(error).__name__}: "
            f"{one_line(error)[:100]}); remove it, or evaluate again"
        ) from error
    return without_secrets(f"---\n{header.to_yaml()}\n---\n\n{body}\n")


def _training(card: ModelCard, config: Config) -> dict[str, Any]:
    """Values of the template on training and prompt."""
    content = orjson.dumps(config.model_dump(mode="json"))
    held_out = dict(config.evaluation_sets)
    if config.eval.rows is not None:
        held_out["rows"] = config.eval.rows
    return {
        "held_out": held_out,
        "model": config.model,
        "train": config.train,
        "sample": config.sample,
        "planned": config.run.steps,
        "steps": None if card.run is None else run_folder.learned_steps(card.run, card.adapter),
        "digest": hashlib.sha256(content).hexdigest()[:16],
        "system": system_prompt(config.data.system_prompt, config.score.rewards[0].kind),
    }


def is_hub_id(source: str) -> bool:
    """Whether a source is a name on the Hub and not a file."""
    is_file = source.lower().endswith(_FILE_SUFFIXES) or Path(source).exists()
    return bool(_HUB_ID.fullmatch(source)) and not is_file


def _evaluation(run: Path, adapter: Path) -> dict[str, Any]:
    """Template values for the run's held-out scores and its evaluations of this adapter; scores
    from before a later resume are left out."""
    is_best = adapter == run_folder.place_of(run, "best")
    best = run_folder.best_record(run) if is_best else None
    # summary.json is of the end of the run, so it says nothing about an earlier adapter.
    is_last = adapter == run_folder.place_of(run, "last")
    summary = _read(run / "summary.json") if is_last else {}
    judged_by = summary.get("judged_by", "accuracy")
    ends = [summary.get(key) for key in ("accuracy_before", "accuracy_after")]
    labels = _evaluated(run, adapter)
    results = _read(run / "evaluation" / "summary.json").get("results", {})
    rows = [
        (name, set_results["problems"], score, model, estimate)
        for model, of_model in results.items()
        if model in labels
        for name, set_results in of_model.items()
        for score, estimate in set_results.items()
        if isinstance(estimate, dict) and estimate["low"] is not None
    ]
    return {
        "best": Best(**best) if best else None,
        "summary": summary,
        "judged_by": judged_by,
        "form": "{:.1%}" if judged_by == "accuracy" else "{:.4g}",
        "ends": [value for value in ends if value is not None],
        "sets": summary.get("accuracy_of_sets") or {},
        "rows": rows,
        "has_curves": (run / "curves.png").exists(),
    }


def _evaluated(run: Path, adapter: Path) -> set[str]:
    """Labels of the evaluated models whose results belong on the card: this adapter (or whole
    model) and models outside of the run; none if this one was not evaluated."""
    models = _read(run / "evaluation" / "evaluation.json").get("models", {})
    is_whole, of_this, compared = not run_folder.is_adapter(adapter), set[str](), set[str]()
    for label, record in models.items():
        if (record["adapter"] is None) == is_whole:
            weights = (str(adapter), None) if is_whole else (record["path"], adapter)
            if record["sha256"] == digests.weights_digest(*weights):
                of_this.add(label)
        is_other = record["adapter"] is None and label not in RUN_ADAPTERS
        if is_other and record["sha256"] == digests.weights_digest(record["path"]):
            compared.add(label)
    return of_this | compared if of_this else set()


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}
