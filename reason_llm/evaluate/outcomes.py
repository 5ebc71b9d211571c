"""problems.jsonl: the outcome of each problem of an evaluation, one line each, in a planned order.

A wave of problems is appended whole and synced. After a kill what follows the last whole wave is
cut off, so that every wave is sampled as it would have been. Knows nothing of models.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from reason_llm.errors import DataError, WriteError, one_line
from reason_llm.files import open_to_append, read_bounded, sha256, write_atomically
from reason_llm.rollout import Completion, Prompt

Outcome = dict[str, Any]
"""``{"model", "set", "id", "prompt", "gold", "greedy": answer or null, "samples": [answer, ...]}``.
An answer is ``{"text", "tokens", "finish_reason", "reward", "answer"}``: a count of tokens, the
first reward's value, and the final answer that it found, for maj@k."""

MOST_BYTES = 4 << 30
LARGEST = 1e100
"""Reward that is read."""


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
        """Key of each line of the wave in the file."""
        return [(self.model, self.set, prompt.id) for prompt in self.prompts]


class OutcomeLog:
    """Log of outcomes in ``path``, read back by waves.

    Args:
        num_samples: of each problem, beside the greedy answer.
        judged: whether there is a greedy answer, and a reward for each.
    """

    def __init__(self, path: Path, num_samples: int = 0, judged: bool = True) -> None:
        self.path = path
        self.num_samples = num_samples
        self.judged = judged
        self.outcomes: list[Outcome] = []

    def resume(self, waves: Sequence[Wave]) -> int:
        """Read the whole waves in the file, cut off the rest, and return their number.

        Raises:
            DataError: a line is of another evaluation, or the file cannot be read.
        """
        lines = self._read()
        found, done = [self._parsed(i, line) for i, line in enumerate(lines, start=1)], 0
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
        """Append a wave; on disk on return.

        Raises:
            WriteError: the disk is full or read-only.
        """
        try:
            with open_to_append(self.path) as file:
                file.write(b"".join(orjson.dumps(each) + b"\n" for each in outcomes))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise WriteError(
                f"{self.path} cannot be written ({error.strerror}); free the disk and call again"
            ) from error
        self.outcomes += outcomes

    def digest(self) -> str:
        """SHA-256 of the file.

        Raises:
            OSError: it cannot be read.
        """
        return sha256(self.path, MOST_BYTES)

    def check(self, digest: str) -> None:
        """Check that the file of a finished evaluation is the one that was written.

        Raises:
            DataError: it is not.
        """
        try:
            if self.digest() == digest:
                return
            problem = "its SHA-256 differs from the one in summary.json"
        except OSError as error:
            problem = one_line(error)
        raise DataError(
            f"{self.path} is not what the evaluation wrote ({problem}); restore it, set another "
            "--out, or --run.resume never, which moves it aside"
        )

    def _read(self) -> list[bytes]:
        try:
            return read_bounded(self.path, MOST_BYTES).splitlines(keepends=True)
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
        try:
            value = orjson.loads(line)
            if not self._is_outcome(value):
                raise ValueError("no outcome of a problem")
        except ValueError as error:
            raise DataError(
                f"{self.path}:{number}: {error}; remove the folder, or set another --out"
            ) from error
        found: Outcome = value
        return found

    def _is_outcome(self, value: Any) -> bool:
        if not isinstance(value, dict) or not {"model", "set", "id"} <= value.keys():
            return False
        greedy, samples = value.get("greedy"), value.get("samples")
        if not isinstance(samples, list) or len(samples) != self.num_samples:
            return False
        answers = samples if greedy is None and not self.judged else [greedy, *samples]
        return all(_is_answer(each, self.judged) for each in answers)


def answer_of(completion: Completion, final: str | None) -> dict[str, Any]:
    """A completion as it is stored in the file."""
    return {
        "text": completion.text,
        "tokens": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "reward": completion.reward,
        "answer": final,
    }


def _is_answer(value: Any, judged: bool) -> bool:
    if not isinstance(value, dict) or type(value.get("tokens")) is not int:
        return False
    if not all(isinstance(value.get(name), str) for name in ("text", "finish_reason")):
        return False
    answer, reward = value.get("answer", 0), value.get("reward")
    is_number = isinstance(reward, int | float) and abs(reward) < LARGEST
    return isinstance(answer, str | None) and (is_number or not judged)
