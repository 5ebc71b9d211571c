"""Interface between a run and its observers (console, trackers, notebook), which cannot change
it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from reason_llm.rollout import Group
from reason_llm.run.store.metrics import Record

Progress = Callable[[int, int], None]
"""Called with the progress: (tokens, items)."""


@dataclass(frozen=True, slots=True)
class Begun:
    """Data of a run that begins."""

    folder: Path
    id: str
    name: str
    step: int
    """Steps that were learned before."""
    last_step: int
    records: Sequence[Record]
    """Records of the steps that were learned before."""
    judged_by: str = "accuracy"
    """Name of what evaluation measures: the first reward's, unless it tells what is right."""


class Watch:
    """Observer of a run, called in the thread that runs it. This one shows nothing."""

    def line(self, text: str) -> None:
        """A line for the user."""

    def run(self, begun: Begun) -> AbstractContextManager[None]:
        """Context of the run's steps; its records are in ``metrics.jsonl`` as they are written."""
        return nullcontext()

    def phase(self, name: str, total: int) -> AbstractContextManager[Progress]:
        """Context of a phase with ``total`` items; what it yields is called with the progress."""
        return nullcontext(lambda tokens, items: None)

    def step(self, record: Record, group: Group | None) -> None:
        """A step was recorded; the record of step 0 tells of the policy before training. ``group``
        is the last one that was learned from; None at step 0."""


Silent = Watch
SILENT = Watch()
