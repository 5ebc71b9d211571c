"""problems.jsonl: the outcome of each problem of an evaluation, one line each, in a planned order.

A wave of problems is appended whole and synced. After a kill, a partial wave is cut off and sampled
again, so the file is the same as without the kill."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic takes typing's own from Python 3.12 on

from reason_llm.errors import DataError, WriteError, one_line
from reason_llm.files import open_to_append, read_bounded, write_atomically
from reason_llm.rollout import Completion, Prompt

MAX_BYTES = 4 << 30


class _Answer(TypedDict):
    """A completion as it is stored."""

    text: str
    tokens: int
    finish_reason: str
    reward: Annotated[float, Field(gt=-1e100, lt=1e100)]
    """The first reward's value."""
    answer: str | None
    """The final answer that the first reward found, for maj@k."""


class _OutcomeLine(TypedDict):
    """A line of the file."""

    model: str
    set: str
    id: str
    prompt: str
    gold: str
    greedy: _Answer
    samples: list[_Answer]


_OUTCOME = TypeAdapter(_OutcomeLine)
Answer = dict[str, Any]
Outcome = dict[str, Any]
"""An ``_Answer`` and an ``_OutcomeLine``."""


@dataclass(frozen=True, slots=True)
class EvaluationWave:
    """Problems that are sampled together."""

    model: str
    set: str
    start: int
    """Index of its first problem in the set."""
    prompts: Sequence[Prompt]

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """Key of each line of the wave in the file."""
        return [(self.model, self.set, prompt.id) for prompt in self.prompts]


class OutcomeLog:
    """Log of outcomes in ``path``: of each problem the greedy answer and ``num_samples`` samples,
    with their rewards."""

    def __init__(self, path: Path, num_samples: int = 0) -> None:
        self.path = path
        self.num_samples = num_samples
        self.outcomes: list[Outcome] = []

    def resume(self, waves: Sequence[EvaluationWave]) -> int:
        """Read the whole waves in the file, cut off the rest, and return their number. Raises a
        DataError if the file cannot be read or belongs to another evaluation."""
        lines = self._read()
        parsed, num_waves = [self._parsed(i, line) for i, line in enumerate(lines, start=1)], 0
        position = 0
        for wave in waves:
            part = parsed[position : position + len(wave.prompts)]
            if len(part) < len(wave.prompts) or part[-1] is None:
                break
            if [(o["model"], o["set"], o["id"]) for o in part if o] != wave.keys:
                raise DataError(
                    f"{self.path}:{position + 1} is not of this evaluation; remove the folder, or "
                    "set another --out"
                )
            self.outcomes += [o for o in part if o]
            position, num_waves = position + len(part), num_waves + 1
        if position < len(lines) or not self.path.exists():
            write_atomically(self.path, b"".join(lines[:position]))
        return num_waves

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Append a wave; on disk on return. Raises a WriteError."""
        try:
            with open_to_append(self.path) as file:
                file.write(b"".join(orjson.dumps(outcome) + b"\n" for outcome in outcomes))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(
                f"{self.path} cannot be written ({error.strerror}); free the disk and call again"
            ) from error
        self.outcomes += outcomes

    def _read(self) -> list[bytes]:
        try:
            return read_bounded(self.path, MAX_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be read ({one_line(error)}); remove it, or set another --out"
            ) from error

    def _parsed(self, number: int, line: bytes) -> Outcome | None:
        """A line's JSON; None for a last line that was cut off."""
        if not line.endswith(b"\n"):
            return None
        where = ""
        try:
            outcome: Outcome = dict(_OUTCOME.validate_json(line, strict=True))
            if len(outcome["samples"]) == self.num_samples:
                return outcome
        except ValidationError as error:
            where = f" at {'.'.join(map(str, error.errors()[0]['loc']))}"
        raise DataError(
            f"{self.path}:{number}: no outcome of a problem{where}; remove the folder, or set "
            "another --out"
        )


def answer_of(completion: Completion, final: str | None) -> Answer:
    """A completion as it is stored in the file."""
    return {
        "text": completion.text,
        "tokens": len(completion.sampled_ids),
        "finish_reason": completion.finish_reason,
        "reward": completion.reward,
        "answer": final,
    }
