"""README.md of an exported model, from the run's files and ``model_card.md.jinja``."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from jinja2 import StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reason_llm.app import lines
from reason_llm.config import Config
from reason_llm.data import system_prompt
from reason_llm.errors import ModelError, one_line, printable, without_secrets
from reason_llm.files import read_object, read_text
from reason_llm.run import Best
from reason_llm.run.store import folder as run_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")


@dataclass(frozen=True, slots=True)
class ModelCard:
    """Contents of a card."""

    name: str
    place: str
    """Folder or Hub id that it is loaded from."""
    base: str
    """Name or path that the user gave."""
    merged: str | None
    """The type of merged weights; None for an adapter alone."""
    parity: str | None
    config: Config | None
    run: Path | None
    adapter: Path
    is_reward: bool = False
    loader: str = "AutoModelForCausalLM"
    """Transformers' class that loads the base."""
    base_options: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the base's config with which an adapter alone has to be loaded."""
    serve: str = ""
    """Command of vLLM that serves an adapter alone; empty: there is none."""


def render(card: ModelCard) -> str:
    """The card as Markdown with the header that the Hub reads, without secrets."""
    config = card.config
    sources = [] if config is None else [source.source for source in config.data.sources]
    header = ModelCardData(
        base_model=card.base if is_hub_id(card.base) else None,
        library_name="transformers" if card.merged else "peft",
        pipeline_tag="text-classification" if card.is_reward else "text-generation",
        tags=["reason_llm", *([] if config is None else [config.method.name])],
        datasets=[name.partition(":")[0] for name in sources if is_hub_id(name)] or None,
    )
    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, finalize=lambda value: printable(str(value))
    )
    template = environment.from_string(read_text(Path(__file__).with_suffix(".md.jinja")))
    loader = "AutoModelForSequenceClassification" if card.is_reward else card.loader
    values: dict[str, Any] = {"card": card, "config": config, "loader": loader, "sources": sources}
    if config is not None:
        values["held_out"] = [*config.evaluation_sets.values(), *filter(None, [config.eval.rows])]
        values["system"] = system_prompt(config.data.system_prompt, config.prompting_reward)
        values |= {"steps": "unknown", "evaluations": [], "has_curves": False}
    if card.run is not None:
        values["steps"] = run_folder.learned_steps(card.run, card.adapter) or "unknown"
        values["evaluations"] = _evaluations(card.run, card.adapter)
        values["has_curves"] = (card.run / "curves.png").exists()
    body = template.render(values)
    return without_secrets(f"---\n{header.to_yaml()}\n---\n\n{body}\n")


def is_hub_id(source: str) -> bool:
    """Whether a source is a name on the Hub and not a file."""
    is_file = source.lower().endswith(_FILE_SUFFIXES) or Path(source).exists()
    return bool(_HUB_ID.fullmatch(source)) and not is_file


def _evaluations(run: Path, adapter: Path) -> list[str]:
    """Held-out scores of the exported adapter, in words; empty if the run's files have none."""
    if adapter == run_folder.place_of(run, "best") and (record := run_folder.best_record(run)):
        return [f"{Best(**record)}, selected on this held-out data, so the value is optimistic"]
    # summary.json is of the end of the run, so it says nothing about an earlier adapter.
    if adapter != run_folder.place_of(run, "last") or not (run / "summary.json").exists():
        return []
    try:
        return lines.of_evaluations(read_object(run / "summary.json"))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        problem = f"{type(error).__name__}: {one_line(error)[:100]}"
        raise ModelError(f"{run}/summary.json is damaged ({problem}); remove it") from error
