"""README.md of an exported model, from the run's files and ``model_card.md.jinja``; what they do
not say is called unknown."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import ModelCardData
from jinja2 import StrictUndefined, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from reason_llm.config import Config, yaml_text
from reason_llm.data import system_prompt
from reason_llm.errors import ModelError, one_line, printable, without_secrets
from reason_llm.files import read_object, read_text
from reason_llm.model import digests
from reason_llm.run import Best
from reason_llm.run.store import folder as run_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Card:
    """Contents of a card."""

    name: str
    """Name of the exported folder."""
    base: str
    """As the user named it."""
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
    is_reward_model: bool = False
    """Whether it is a reward model, which gives scores and writes no text."""


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


def render(card: Card) -> str:
    """The card as Markdown with the header that the Hub reads, and no secret of the environment;
    raises a ModelError if a summary of the run is damaged."""
    config, run = card.config, card.run
    sources = [] if config is None else [source.source for source in config.data.sources]
    header = ModelCardData(
        base_model=card.base if is_hub_id(card.base) else None,
        library_name="transformers" if card.merged else "peft",
        pipeline_tag="text-classification" if card.is_reward_model else "text-generation",
        license=card.licence,
        tags=["reason_llm", *([] if config is None else [config.method.name])],
        datasets=[each.partition(":")[0] for each in sources if is_hub_id(each)] or None,
    )
    values: dict[str, Any] = {"card": card, "config": config, "header": header.to_yaml()}
    if config is not None:
        planned = config.run.steps
        steps = None if run is None else run_folder.learned_steps(run, card.adapter)
        content = orjson.dumps(config.model_dump(mode="json"))
        part = f"{steps or 'unknown'} of {planned} planned"
        values |= {
            "sources": sources,
            "learned": planned if steps == planned else part,
            "digest": hashlib.sha256(content).hexdigest()[:16],
            "system": system_prompt(config.data.system_prompt, config.score.rewards[0].kind),
        }
    environment = ImmutableSandboxedEnvironment(
        keep_trailing_newline=True, undefined=StrictUndefined
    )
    environment.filters["printable"] = printable
    template = environment.from_string(read_text(Path(__file__).with_suffix(".md.jinja")))
    try:
        values |= {} if run is None else _measured(run, card.adapter)
        return without_secrets(template.render(values))
    except (KeyError, TypeError, ValueError, AttributeError, UndefinedError) as error:
        raise ModelError(
            f"{run}: its summary.json, or one in evaluation/, is damaged ({type(error).__name__}: "
            f"{one_line(error)[:100]}); remove it, or evaluate again"
        ) from error


def is_hub_id(source: str) -> bool:
    """Whether a source is a name on the Hub and not a file."""
    is_file = source.lower().endswith(_FILE_SUFFIXES) or Path(source).exists()
    return bool(_HUB_ID.fullmatch(source)) and not is_file


def _measured(run: Path, adapter: Path) -> dict[str, Any]:
    """The run's own held-out numbers, and those of the command evaluate of this adapter, which a
    run that went on since then has left behind."""
    asked = _read(run / "evaluation" / "evaluation.json").get("models", {})
    weights_digest = digests.weights_digest
    of_this = {
        label
        for label, each in asked.items()
        if each["sha256"] == weights_digest(each["path"], adapter if each["adapter"] else None)
    }
    results = _read(run / "evaluation" / "summary.json").get("results", {})
    best = run_folder.best_record(run) if adapter == run_folder.place_of(run, "best") else None
    is_last = adapter == run_folder.place_of(run, "last")
    return {
        "best": None if not best else Best(**best),
        "is_ema": adapter == run / run_folder.KEPT["ema"],
        "summary": _read(run / "summary.json") if is_last else {},
        "results": [
            (name, found["problems"], score, model, each)
            for model, sets in results.items()
            if model in of_this
            for name, found in sets.items()
            for score, each in found.items()
            if isinstance(each, dict) and each["low"] is not None
        ],
        "has_curves": (run / "curves.png").exists(),
    }


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}
