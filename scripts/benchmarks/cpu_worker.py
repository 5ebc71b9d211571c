"""What each side's process has in common: its orders, its answers, its memory.

A side takes one step when it reads a line and answers with one line of JSON, so that the sides of a
benchmark take turns. Its memory is what Linux says of its process: VmHWM, the largest resident
memory from its start to its end, and VmRSS once its libraries are imported and nothing is loaded.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import orjson

from benchmarks.cpu_workloads import Workload
from reason_llm.config import RewardSpec, ScoreSection
from reason_llm.files import read_object, read_text
from reason_llm.rollout import Completion, Group
from reason_llm.score import Scorer


class Turns:
    """One process's end of the conversation; whatever a library prints goes to standard error."""

    def __init__(self) -> None:
        self._answers: TextIO = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self._before_bytes = resident_bytes("VmRSS")

    def wait(self) -> None:
        """Until it is this side's turn."""
        if not sys.stdin.readline():
            raise SystemExit(0)  # the other end is gone

    def answer(self, value: dict[str, Any]) -> None:
        """The turn is over."""
        self._answers.write(orjson.dumps(value).decode() + "\n")
        self._answers.flush()

    def finish(self) -> None:
        """The last turn: the memory that it all took, in bytes."""
        self.wait()
        self.answer({"peak_bytes": resident_bytes("VmHWM"), "before_bytes": self._before_bytes})


def resident_bytes(field: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def read_workload() -> Workload:
    """The workload in the file that the command line names first."""
    return Workload.from_json(read_object(Path(sys.argv[1])))


def accuracy(workload: Workload, texts: Sequence[str]) -> float:
    """Share of the held-out prompts whose completion the workload's reward calls right."""
    assert workload.reward is not None
    groups = [
        Group(prompt, (Completion((), text, (), "stop"),))
        for prompt, text in zip(workload.held_out, texts, strict=True)
    ]
    section = ScoreSection(rewards=[RewardSpec(name=workload.reward)])
    with Scorer(section, workload.max_new_tokens) as scorer:
        scored = scorer.score(groups, only_first=True)
    return sum((group.completions[0].reward or 0.0) >= 1 for group in scored) / len(scored)


def check_lengths(workload: Workload, lengths: list[int]) -> None:
    """Both sides must do the same work.

    Raises:
        RuntimeError: they would not.
    """
    if workload.lengths is not None and tuple(lengths) != workload.lengths:
        raise RuntimeError(f"completions of {lengths} tokens, not of {workload.lengths}")
