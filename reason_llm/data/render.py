"""Rendering of messages as Prompts, by a chat template and the tokenizer, and the order of the
prompts.

The order is a pure function of the seed and the position, so resuming needs only a number. No torch
here.

A chat template comes with a model and is a program. Transformers runs it in Jinja's sandbox, which
keeps it from everything but its arguments; here its time is limited, and powers, which a loop's
limit cannot end, are refused. The memory that it takes within its time is not limited.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from math import floor
from typing import TYPE_CHECKING

from reason_llm.data.forms import Messages
from reason_llm.data.templates import ChatTemplate
from reason_llm.data.time_limit import within
from reason_llm.errors import ConfigError, DataError, ReasonError, one_line
from reason_llm.files import Panic, without_panics
from reason_llm.rollout import Prompt

RENDER_SECONDS = 20.0
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
        import jinja2

        source = self.template.source

        def render() -> object:
            return self.tokenizer.apply_chat_template(
                messages,
                chat_template=self.template.jinja,
                tokenize=False,
                add_generation_prompt=generation,
                **dict(self.template.arguments),
            )

        try:
            if _has_power(self.tokenizer.get_chat_template(self.template.jinja)):
                raise ConfigError(
                    f"{source} computes a power (**), which could take for ever; multiply instead"
                )
            text = within(RENDER_SECONDS, source, render)
        except TimeoutError as error:
            raise ConfigError(f"{error} on {where}; take another template") from error
        except ReasonError:
            raise  # some are ValueErrors, too
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"{source}, line {error.lineno}: {one_line(error)}; fix that line"
            ) from error
        except (
            *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError),
            *(LookupError, AttributeError, RecursionError, MemoryError),
        ) as error:
            raise DataError(
                f"{where}: {source} fails on it ({one_line(error) or 'no memory'}); fix the "
                "template, or set data.system_prompt=none if it takes no system message"
            ) from error
        if not str(text).strip():
            raise DataError(f"{where}: {source} makes nothing of it; fix it")
        return str(text)


@cache
def _has_power(template: str) -> bool:
    import jinja2

    try:
        tokens = list(jinja2.Environment().lex(template))
    except jinja2.TemplateSyntaxError:  # rendering tells where
        return False
    return any(kind == "operator" and text == "**" for _, kind, text in tokens)


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
