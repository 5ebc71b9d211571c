"""One piece of work that every system is given, and what one of them came to; to and from JSON."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Literal

from reason_llm.files import read_object

Kind = Literal["bf16", "nf4"]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Adapted layers: all of a dense decoder's."""


@dataclass(frozen=True, slots=True)
class Work:
    """Steps of GRPO with LoRA: sample the groups, then one optimizer step over all of them."""

    model: str
    """A folder that ``models.make`` wrote."""
    kind: Kind
    """The base's weights: bfloat16, or NF4."""
    prompts: int
    completions: int
    """Of each prompt."""
    prompt_tokens: int
    completion_tokens: int
    """Of every completion: an end of sequence ends nothing."""
    rank: int
    repeats: int
    """Steps that are measured."""
    warmup: bool
    """A step before them is not."""
    budget_gib: float | None = None
    """GPU memory that may be used; None: all."""

    @property
    def context(self) -> int:
        """Tokens of a whole rollout."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def rollouts(self) -> int:
        """Of a step."""
        return self.prompts * self.completions

    @property
    def steps(self) -> int:
        """Measured or not."""
        return self.repeats + int(self.warmup)

    def at_context(self, tokens: int, budget_gib: float) -> "Work":
        """One step with one group of rollouts of so many tokens, within so much memory."""
        return replace(
            self,
            prompts=1,
            completion_tokens=tokens - self.prompt_tokens,
            repeats=1,
            warmup=False,
            budget_gib=budget_gib,
        )


@dataclass(slots=True)
class Outcome:
    """What one system came to."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """One number for each measured step; ``largest_gib`` is one of the whole process."""
    notes: list[str] = field(default_factory=list)
    error: str | None = None
    """Why there is nothing more, in one line."""
    trace: str = ""
    """The whole error, as its process printed it."""


Keep = Callable[[Outcome], None]
"""Saves what was measured so far; called after each step."""


def write(record: Work | Outcome, path: Path) -> None:
    """As JSON, whole or not at all: a process may be ended at any moment."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(asdict(record)))
    part.replace(path)


def read_work(path: Path) -> Work:
    """What ``write`` wrote."""
    return Work(**read_object(path))


def read_outcome(path: Path) -> Outcome:
    """What ``write`` wrote."""
    return Outcome(**read_object(path))
