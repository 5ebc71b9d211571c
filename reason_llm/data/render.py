"""Rendering of messages as Prompts, by a chat template and the tokenizer, and the order of the
prompts.

The order is a pure function of the seed and the position, so resuming needs only a number. No torch
here.

A chat template comes with a model and is a program. Transformers runs it in Jinja's sandbox, which
keeps it from everything but its arguments; here it runs in a process of its own, whose memory and
time are limited.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from math import floor
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from reason_llm.data.forms import Messages
from reason_llm.data.templates import ChatTemplate
from reason_llm.data.time_limit import within
from reason_llm.errors import ConfigError, DataError, one_line
from reason_llm.files import Confined, Panic, without_panics
from reason_llm.rollout import Prompt

RENDER_SECONDS = 5.0
"""Of the processor's time, for one conversation."""
MOST_TEXT_CHARACTERS = 16 << 20
"""Of one conversation."""
ENCODE_SECONDS = 20.0
"""Of one text. The tokenizer lets other threads run meanwhile."""

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Renderer:
    """Renderer of messages as the text that the model reads."""

    tokenizer: "PreTrainedTokenizerBase"
    template: ChatTemplate
    system_prompt: str | None
    """Text put before each conversation that has no system message of its own; None for none."""

    def prompt(self, where: str, messages: Messages, answer: str) -> Prompt:
        """The Prompt of these messages.

        Raises:
            DataError: the template cannot take them.
            ConfigError: the template is not valid.
        """
        text = self.text(where, self.with_system_prompt(messages))
        return Prompt(where, text, tuple(self.token_ids(where, text)), answer)

    @property
    def digest(self) -> str:
        """Digest of the template and the system prompt."""
        jinja = self.template.jinja or self.tokenizer.chat_template
        content = f"{jinja}\0{self.system_prompt}"
        if self.template.arguments:
            content += f"\0{self.template.arguments}"
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def has_template(self) -> bool:
        """Whether there is a template; without one only texts can be read."""
        return self.template.jinja is not None or self.tokenizer.chat_template is not None

    def with_system_prompt(self, messages: Messages) -> Messages:
        """The messages after ``system_prompt``, where they have no system message of their own."""
        if self.system_prompt is None or messages[0]["role"] == "system":
            return messages
        return [{"role": "system", "content": self.system_prompt}, *messages]

    def token_ids(self, where: str, text: str) -> list[int]:
        """Token ids of a text, without special tokens added.

        Raises:
            DataError: the tokenizer, whose patterns come with the model, gives up or takes too
                long.
        """
        try:
            with without_panics():
                return within(
                    ENCODE_SECONDS,
                    "the model's tokenizer",
                    lambda: list(self.tokenizer.encode(text, add_special_tokens=False)),
                )
        except (TimeoutError, Panic) as error:
            raise DataError(
                f"{where}: {error} on its {len(text)} characters; take another model, or leave "
                "this row out"
            ) from error

    def text(self, where: str, messages: Messages, generation: bool = True) -> str:
        """The messages as the template writes them.

        Args:
            generation: with the text after which the assistant's answer comes.

        Raises:
            DataError: the template cannot take them.
            ConfigError: the template is not valid.
        """
        source, tokenizer = self.template.source, self.tokenizer
        process = _PROCESSES.get(tokenizer)
        if process is None or not process.lives:
            process = _PROCESSES[tokenizer] = Confined(partial(_render, tokenizer))
        text: str | None
        try:
            jinja = tokenizer.get_chat_template(self.template.jinja)
            arguments = {"add_generation_prompt": generation, **dict(self.template.arguments)}
            text, problem, line = process.ask(RENDER_SECONDS, messages, jinja, arguments)
        except TimeoutError as error:
            raise ConfigError(
                f"{source} took longer than {RENDER_SECONDS:g} s of the processor on {where}; take "
                "another template"
            ) from error
        except (ValueError, MemoryError) as error:
            text, problem, line = None, one_line(error) or "it takes too much memory", None
        if line is not None:
            raise ConfigError(f"{source}, line {line}: {problem}; fix that line")
        if text is None:
            raise DataError(
                f"{where}: {source} fails on it ({problem}); fix the template, or set "
                "data.system_prompt=none if it takes no system message"
            )
        if not text.strip():
            raise DataError(f"{where}: {source} makes nothing of it; fix it")
        return text


_PROCESSES: WeakKeyDictionary["PreTrainedTokenizerBase", Confined] = WeakKeyDictionary()
"""Those that render, by the tokenizer that they have a copy of."""


def _render(
    tokenizer: "PreTrainedTokenizerBase", messages: Messages, jinja: str, arguments: dict[str, Any]
) -> tuple[str | None, str, int | None]:
    """The text; or the problem, with the line of the template where its syntax is wrong. In the
    process that may take little memory."""
    import jinja2

    try:
        text = str(
            tokenizer.apply_chat_template(
                messages, chat_template=jinja, tokenize=False, **arguments
            )
        )
        if len(text) > MOST_TEXT_CHARACTERS:
            return None, f"it writes more than {MOST_TEXT_CHARACTERS:,} characters", None
        return text, "", None
    except jinja2.TemplateSyntaxError as error:
        return None, one_line(error), error.lineno
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (whatever it is, it is the template's)
        return None, one_line(error)[:1000] or type(error).__name__, None


def order(
    sizes: Sequence[int], weights: Sequence[float], seed: int, start: int, count: int
) -> list[int]:
    """Indices of the prompts at positions ``start .. start + count`` of an endless shuffled order.

    The sets take turns, so that any stretch of it holds each set in the proportion of its weight,
    to within one prompt for each set. Each pass over a set is a fresh permutation of it. Any slice
    can be drawn without drawing what came before.

    Args:
        sizes: of the training sets; index ``sizes[0]`` is the first prompt of the second set.
    """
    indices: list[int] = []
    permutations: dict[tuple[int, int], list[int]] = {}
    for position in range(start, start + count):
        number, turn = _turn(weights, position)
        epoch, offset = divmod(turn, sizes[number])
        if (number, epoch) not in permutations:
            permutation = list(range(sizes[number]))
            salt = f"/{number}" if number else ""  # two sets of one size are shuffled differently
            random.Random(f"{seed}/{epoch}{salt}").shuffle(permutation)
            permutations[number, epoch] = permutation
        indices.append(sum(sizes[:number]) + permutations[number, epoch][offset])
    return indices


def _turn(weights: Sequence[float], position: int) -> tuple[int, int]:
    """Index of the set at this position, and number of its earlier turns.

    Of the first ``p`` positions, the first set has ``floor(p * share)``: a number that grows by 0
    or 1, so that it can be told for any ``p`` alone. What it leaves is shared out among the others
    in the same way. Fractions, since a rounded product could grow by 2.
    """
    rest = sum(map(Fraction, weights))
    for number, weight in enumerate(weights):
        share = Fraction(weight) / rest
        before = floor(position * share)
        if floor((position + 1) * share) > before:
            return number, before
        position -= before
        rest -= Fraction(weight)
    raise AssertionError("the last set takes all that is left")
