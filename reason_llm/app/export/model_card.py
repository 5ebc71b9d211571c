"""README.md of an exported model: what it is, how it was trained, how good it is.

Only what the run's files say; what they do not say is called unknown.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from huggingface_hub import ModelCardData

from reason_llm.app.report.payload import shown_config
from reason_llm.config import Config, DataSection, yaml_text
from reason_llm.data import system_prompt
from reason_llm.errors import ModelError, one_line, printable, without_secrets
from reason_llm.files import MIB, read_object, read_text
from reason_llm.run import Best
from reason_llm.run.store import folder as run_folder

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(:[\w.-]+)?")
_HEADER = re.compile(r"\A---\r?\n(.*?)\r?\n---", re.DOTALL)
MOST_CARD_BYTES = MIB
_FILE_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True)
class Card:
    """Contents of a card."""

    name: str
    """Of the exported folder."""
    base: str
    """As the user named it."""
    licence: str | None
    merged: str | None
    """The type of merged weights; None for an adapter alone."""
    parity: str | None
    """What the parity check found."""
    config: Config | None
    """Of the run, where there is one."""
    run: Path | None
    adapter: Path
    """Its folder."""
    is_reward_model: bool = False
    """It gives scores and writes nothing."""


def licence_of(base: Path) -> str | None:
    """The licence that a model's own card names; None if there is no card, or it names none."""
    try:
        header = _HEADER.match(read_text(base / "README.md", MOST_CARD_BYTES))
        lines = header[1].splitlines() if header else []
        fields = yaml_text.parse(next(each for each in lines if each.startswith("license:")))
    except (OSError, ValueError, StopIteration):
        return None
    found = fields.get("license") if isinstance(fields, dict) else None
    return found if isinstance(found, str) else None


def render(card: Card) -> str:
    """The card as Markdown with the header that the Hub reads, and no secret of the environment."""
    datasets = [] if card.config is None else [*filter(is_hub_id, _sources(card.config.data))]
    header = ModelCardData(
        base_model=card.base if is_hub_id(card.base) else None,
        library_name="transformers" if card.merged else "peft",
        pipeline_tag="text-classification" if card.is_reward_model else "text-generation",
        license=card.licence,
        tags=["reason_llm", *([] if card.config is None else [card.config.method.name])],
        datasets=[each.partition(":")[0] for each in datasets] or None,
    )
    parts = [f"# {card.name}", _what(card), _use(card)]
    if card.config is not None:
        steps = None if card.run is None else run_folder.learned_steps(card.run, card.adapter)
        parts += [_training(card.config, steps), _prompt(card.config)]
    if card.run is not None:
        parts += _evaluation(card.run, card.adapter)
    parts.append(_licence(card))
    return without_secrets(f"---\n{header.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n")


def is_hub_id(source: str) -> bool:
    """Whether a source is a name on the Hub and not a file."""
    is_file = source.lower().endswith(_FILE_SUFFIXES) or Path(source).exists()
    return bool(_HUB_ID.fullmatch(source)) and not is_file


def _what(card: Card) -> str:
    if card.merged is None:
        text = f"A LoRA adapter in PEFT's form over `{card.base}`."
    else:
        text = (
            f"`{card.base}` with a LoRA adapter merged into its unquantised weights; {card.merged}."
        )
    if card.is_reward_model:
        text += (
            " It is a reward model: one score for a conversation, read at its last token; higher is"
            " better, and only differences have a meaning."
        )
        if card.merged is None:
            text += (
                " The score is the product of the weight in `score.safetensors` and the last "
                "hidden state, after the final norm, of base plus adapter."
            )
    if card.config is not None and card.config.model.quantize == "nf4":
        text += " It was trained over the base in NF4 (QLoRA)."
    if card.parity is not None:
        compared = "scores of rows" if card.is_reward_model else "log-probs of rollouts"
        text += f"\n\nParity with base plus adapter, {compared}: {card.parity}."
    return text + "\n\nMade with reason_llm."


def _use(card: Card) -> str:
    path = card.name
    if card.is_reward_model and card.merged is not None:
        code = (
            "from transformers import AutoModelForSequenceClassification, AutoTokenizer\n\n"
            f'model = AutoModelForSequenceClassification.from_pretrained("{path}", dtype="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{path}")\n'
            "chat = [{'role': 'user', 'content': '...'}, {'role': 'assistant', 'content': '...'}]\n"
            "text = tokenizer.apply_chat_template(chat, tokenize=False).rstrip()\n"
            "inputs = tokenizer(text, add_special_tokens=False, return_tensors='pt')\n"
            "score = model(**inputs).logits[0, 0]"
        )
    elif card.merged is None:
        code = (
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM\n\n"
            f'base = AutoModelForCausalLM.from_pretrained("{card.base}")\n'
            f'model = PeftModel.from_pretrained(base, "{path}")'
        )
    else:
        code = (
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{path}", dtype="auto")\n'
            f'tokenizer = AutoTokenizer.from_pretrained("{path}")'
        )
    return f"## Use\n\n```python\n{code}\n```"


def _training(config: Config, steps: int | None) -> str:
    method, train = config.method, config.train
    digest = hashlib.sha256(orjson.dumps(config.model_dump(mode="json"))).hexdigest()[:16]
    planned = config.run.steps
    learned = f"{planned}" if steps == planned else f"{steps or 'unknown'} of {planned} planned"
    lines = [
        f"- data: {', '.join(_sources(config.data))}",
        f"- {'algorithm' if config.samples else 'objective'}: {method.name}: {method.idea} "
        f"({method.source})",
        *_steps(config, learned),
        f"- LoRA of rank {config.model.adapter.rank}, alpha {config.model.adapter.alpha:g}; "
        f"learning rate {train.learning_rate:g}, {train.schedule}; seed {config.run.seed}",
        f"- config digest (SHA-256, first 16): {digest}; all of it is in training_config.yaml",
    ]
    return "## Training\n\n" + "\n".join(map(printable, lines))


def _steps(config: Config, learned: str) -> list[str]:
    """What a step was made of, and what it began from."""
    sample, found = config.sample, []
    if config.samples:
        weighted = (f"{each.key} * {each.weight:g}" for each in config.score.rewards)
        found += [
            f"- rewards: {', '.join(weighted)}",
            f"- {learned} steps of {sample.prompts_per_step} prompts with "
            f"{sample.completions_per_prompt} completions each, at most {sample.max_new_tokens} "
            f"tokens, temperature {sample.temperature:g}",
        ]
    else:
        unit = "pairs" if config.learns_pairs else "rows"
        found.append(f"- {learned} steps of {config.train.rows_per_step} {unit}")
    if config.model.start is not None:
        found.append(f"- begun from the adapter {config.model.start}")
    return found


def _prompt(config: Config) -> str:
    system = system_prompt(config.data.system_prompt, config.score.rewards[0].kind)
    template = "the model's own" if config.data.template == "auto" else config.data.template
    text = f"## Prompt\n\nChat template: {printable(template)}."
    if system is None:
        return f"{text} No system prompt."
    quoted = "\n".join(f"> {printable(line)}" for line in without_secrets(system).splitlines())
    return f"{text} The system prompt of the training:\n\n{quoted}"


def _evaluation(run: Path, adapter: Path) -> list[str]:
    """The run's own held-out numbers, and those of the command evaluate where it was called;
    of this adapter alone, which a run that went on since then has left behind."""
    try:
        body = _scores(run, adapter) or "Not evaluated, as far as the run's files say."
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{run}: its summary.json, or one in evaluation/, is damaged ({type(error).__name__}: "
            f"{one_line(error)[:100]}); remove it, or evaluate again"
        ) from error
    picture = "\n\n![Curves over the steps](curves.png)"
    return ["## Evaluation\n\n" + body + (picture if (run / "curves.png").exists() else "")]


def _scores(run: Path, adapter: Path) -> str:
    lines = []
    if adapter == run / run_folder.BEST and (found := run_folder.best_record(run)):
        lines.append(f"The best evaluation of the run: {Best(**found)}.")
    if adapter == run / run_folder.EMA:
        lines.append("An exponential moving average of the adapter over the run (train.ema).")
    summary = _read(run / "summary.json") if adapter == run / "adapter" else {}
    before, after = summary.get("accuracy_before"), summary.get("accuracy_after")
    if before is not None and after is not None:
        by = summary.get("judged_by", "accuracy")
        ends = [f"{v:.1%}" if by == "accuracy" else f"{v:.4g}" for v in (before, after)]
        lines.append(f"Held-out {by}, greedy: {ends[0]} before training, {ends[1]} after.")
    if (loss := summary.get("held_out_loss")) is not None:
        lines.append(f"Held-out loss: {loss[0]:.4g} before training, {loss[1]:.4g} after.")
    if (right := summary.get("held_out_pair_accuracy")) is not None:
        lines.append(f"Held-out pairs in order: {right[0]:.1%} before, {right[1]:.1%} after.")
    for name, (first, last) in summary.get("accuracy_of_sets", {}).items():
        lines.append(f"- {name}: {first:.1%} before, {last:.1%} after")
    asked = _read(run / "evaluation" / "evaluation.json").get("models", {})
    of_this = {
        label
        for label, each in asked.items()
        if each["sha256"]
        == run_folder.weights_digest(each["path"], adapter if each["adapter"] else None)
    }
    results = _read(run / "evaluation" / "summary.json").get("results", {})
    rows = [
        f"| {name} | {found['problems']} | {score} | {model} | {100 * each['value']:.1f} | "
        f"{100 * each['low']:.1f} to {100 * each['high']:.1f} |"
        for model, sets in results.items()
        if model in of_this
        for name, found in sets.items()
        for score, each in found.items()
        if isinstance(each, dict) and each["low"] is not None
    ]
    if rows:
        head = (
            "| set | problems | score | model | value | 95 % interval |\n|---|---|---|---|---|---|"
        )
        lines.append("\n" + "\n".join([head, *rows]))
    return "\n".join(lines)


def _licence(card: Card) -> str:
    if card.licence:
        return f"## Licence\n\nThe base's card names `{card.licence}`; its terms apply."
    return "## Licence\n\nUnknown: the base's folder holds no card that names one. Its terms apply."


def _sources(data: DataSection) -> list[str]:
    return [each.source for each in data.sources]


def _read(file: Path) -> Mapping[str, Any]:
    try:
        return read_object(file)
    except (OSError, ValueError):
        return {}


def training_config(run: Path) -> bytes:
    """The run's whole config as in its file, without the environment's secrets."""
    return shown_config(run / run_folder.CONFIG).encode()
