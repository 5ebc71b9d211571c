"""System prompts and chat templates of ``templates.yaml``, by name."""

import datetime
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from reason_llm.config import nearest
from reason_llm.errors import ConfigError, ModelError, one_line
from reason_llm.files import MIB, read_text

MOST_TEMPLATE_BYTES = MIB
DATE_FUNCTION = "strftime_now"
"""Name by which Transformers gives templates the date, the only way to it that they have."""


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """Content of ``templates.yaml``, which comes with the package."""
    found: dict[str, dict[str, Any]]
    found = yaml.safe_load(read_text(Path(__file__).with_suffix(".yaml")))
    return found


def system_prompt(name: str, reward: str) -> str | None:
    """The text that ``data.system_prompt`` names: a shipped one, ``auto`` by the reward, or the
    text itself; None for none.

    Raises:
        ConfigError: a single word that names none.
    """
    texts = shipped()["system_prompts"]
    if name == "auto":
        name = shipped()["system_prompt_of_reward"].get(reward, "none")
    if name not in texts and len(name.split()) < 2:
        raise ConfigError(
            f"data.system_prompt={name!r} is neither a text of several words nor any of auto, "
            f"{', '.join(texts)}{_nearest(name, texts)}"
        )
    prompt: str | None = texts.get(name, name)
    return prompt


def unasked_form(name: str, reward: str) -> str | None:
    """The form of an answer, such as ``<answer>``, that a reward looks for and the system prompt
    ``name``, as of ``system_prompt``, does not ask for; None where it does, or the reward needs
    none, as ``exact`` does."""
    asked, form = system_prompt(name, reward) or "", system_prompt("auto", reward) or ""
    marks = () if reward == "exact" else ("\\boxed", "<answer>", "```python")
    return next((mark for mark in marks if mark in form and mark not in asked), None)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and where it comes from."""

    source: str
    """Its name in error messages."""
    jinja: str | None
    """The template's text; None for the tokenizer's own."""
    arguments: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    """Further arguments of the template, by name."""
    date: str | None = None
    """The date that it reads, as 2026-11-27; None: today's."""


def chat_template(
    name: str,
    model_path: str,
    model_has_one: bool,
    arguments: Mapping[str, bool | int | float | str] | None = None,
    date: str | None = None,
) -> ChatTemplate:
    """The chat template that ``data.template`` names, with ``data.template_arguments`` and
    ``data.date``.

    Raises:
        ModelError: ``auto``, and the model has none.
        ConfigError: there is no such template.
    """
    named, given = shipped()["chat_templates"], tuple(sorted((arguments or {}).items()))
    if name == "auto" and not model_has_one:
        raise ModelError(
            f"model.path={model_path}: its tokenizer has no chat template; take an instruct model, "
            f"or set data.template to one of {', '.join(named)}, or to a .jinja file"
        )
    if name == "auto":
        return ChatTemplate(f"the chat template of {model_path}", None, given, date)
    if name in named:
        return ChatTemplate(f"the template {name}", named[name], given, date)
    if name.endswith(".jinja"):
        try:
            text = read_text(Path(name), MOST_TEMPLATE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"data.template={name} cannot be read ({one_line(error)}); name a Jinja text file"
            ) from error
        if not text.strip():
            raise ConfigError(f"data.template={name} is empty; write a Jinja template into it")
        return ChatTemplate(name, text, given, date)
    raise ConfigError(
        f"data.template={name!r} is not one of auto, {', '.join(named)}, and no .jinja file"
        f"{_nearest(name, named)}"
    )


def reads_date(template: object) -> bool:
    """Whether a chat template, or one of several by name, reads the date."""
    return DATE_FUNCTION in str(template)


def date_argument(date: str | None) -> dict[str, Callable[[str], str]]:
    """The argument with which a template reads this date instead of today's."""
    return {} if date is None else {DATE_FUNCTION: datetime.datetime.fromisoformat(date).strftime}


def today() -> str:
    """Today's date as ``data.date`` has it."""
    return datetime.date.today().isoformat()


def _nearest(name: str, names: Iterable[str]) -> str:
    near = nearest(name, names)
    return f"; did you mean {near}?" if near else "; give one of these"
