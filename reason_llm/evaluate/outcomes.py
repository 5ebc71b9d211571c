"""problems.jsonl: what became of each problem of an evaluation, one line each, in a planned order.

A wave of problems is appended whole and synced. After a kill what follows the last whole wave is
cut off, so that every wave is sampled as it would have been. Knows nothing of models.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from reason_llm.errors import DataError, WriteError
from reason_llm.files import write_atomically
from reason_llm.rollout import Completion, Prompt

Outcome = dict[str, Any]
"""``{"model", "set", "id", "prompt", "gold", "greedy": answer or null, "samples": [answer, ...]}``.
An answer is ``{"text", "tokens", "finish_reason", "reward", "answer"}``: a count of tokens, the
first reward's value, and the final answer that it found, for maj@k."""


@dataclass(frozen=True, slots=True)
class Wave:
    """Problems that are sampled together."""

    model: str
    set: str
    start: int
    """Index of its first problem in the set."""
    prompts: Sequence[Prompt]

    @property
    def keys(self) -> list[tuple[str, str, str]]:
        """What tells its lines in the file."""
        return [(self.model, self.set, prompt.id) for prompt in self.prompts]


class OutcomeLog:
    """The lines in ``path`` that belong to the waves, and those to come."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.outcomes: list[Outcome] = []

    def resume(self, waves: Sequence[Wave]) -> int:
        """Read the whole waves that are there, and cut off what follows; how many there are.

        Raises:
            DataError: a line is of another evaluation.
        """
        lines = self.path.read_bytes().splitlines(keepends=True) if self.path.exists() else []
        found, done = [_parsed(self.path, i, line) for i, line in enumerate(lines, start=1)], 0
        position = 0
        for wave in waves:
            part = found[position : position + len(wave.prompts)]
            if len(part) < len(wave.prompts) or part[-1] is None:
                break
            if [(each["model"], each["set"], each["id"]) for each in part if each] != wave.keys:
                raise DataError(
                    f"{self.path}:{position + 1} is not of this evaluation; remove the folder, or "
                    "set another --out"
                )
            self.outcomes += [each for each in part if each]
            position, done = position + len(part), done + 1
        if position < len(lines) or not self.path.exists():
            write_atomically(self.path, b"".join(lines[:position]))
        return done

    def append(self, outcomes: Sequence[Outcome]) -> None:
        """Add a wave; on disk when it returns.

        Raises:
            WriteError: the disk is full or read-only.
        """
        try:
            with self.path.open("ab") as file:
                file.write(b"".join(orjson.dumps(each) + b"\n" for each in outcomes))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(
                f"{self.path} cannot be written ({error.strerror}); free the disk and call again"
            ) from error
        self.outcomes += outcomes


def answer_of(completion: Completion, final: str | None) -> dict[str, Any]:
    """A completion as it stands in the file."""
    return {
        "text": completion.text,
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "reward": completion.reward,
        "answer": final,
    }


def _parsed(path: Path, number: int, line: bytes) -> Outcome | None:
    """None for a last line that was cut off."""
    if not line.endswith(b"\n"):
        return None
    try:
        value = orjson.loads(line)
        if not isinstance(value, dict) or not {"model", "set", "id"} <= value.keys():
            raise ValueError("no outcome of a problem")
    except ValueError as error:
        raise DataError(
            f"{path}:{number}: {error}; remove the folder, or set another --out"
        ) from error
    return value
