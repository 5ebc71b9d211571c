"""Workloads of the stages that learn from a set of rows: demonstrations (sft) and pairs (dpo) of
given ids, over the 25 M model of workload (b).

Rows are random ids: a prompt and one completion, or two, whose last token ends them. In
``dpo_known`` both sides know the reference's log-probs before the clock starts, as from the second
pass over a set on.
"""

import random
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.cpu_workloads import MIDDLE, SEED, SMALL, heavy_tail, make_model
from reason_llm.model import Datum

Ids = tuple[int, ...]
STAGES = ("sft", "dpo", "dpo_known")
BETA = 0.1


@dataclass(frozen=True, slots=True)
class RowsWorkload:
    """One optimizer step's rows or pairs, for every step."""

    title: str
    stage: str
    model: str
    steps: tuple[tuple[tuple[Ids, ...], ...], ...]
    """By step and unit: (prompt, completion) or (prompt, chosen, rejected). The first step is a
    warm-up."""
    trl_rows: int
    """Rows, or pairs, of one of TRL's forward passes."""
    trl_rows_small: int | None = None
    learning_rate: float = 1e-5
    rank: int = 16
    alpha: float = 32.0
    modules: tuple[str, str] = ("cpu_rows_ours", "cpu_rows_trl")
    """Our side and TRL's."""

    @property
    def is_paired(self) -> bool:
        """Whether a unit is a pair."""
        return self.stage != "sft"

    def data(self, step: int) -> list[Datum]:
        """Our rows of a step; the sides of a pair follow each other."""
        return [
            Datum.of(prompt, completion, f"{step}:{number}", group=number)
            for number, (prompt, *completions) in enumerate(self.steps[step])
            for completion in completions
        ]

    def tokens(self, step: int) -> int:
        """Trained tokens of a step."""
        return sum(len(ids) for _, *completions in self.steps[step] for ids in completions)

    def to_json(self) -> dict[str, Any]:
        """What ``from_json`` takes."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "RowsWorkload":
        """The workload that ``to_json`` gave."""
        steps = tuple(
            tuple(tuple(tuple(ids) for ids in unit) for unit in step) for step in value["steps"]
        )
        return cls(**{**value, "steps": steps, "modules": tuple(value["modules"])})


def make(stage: str, num_steps: int, small: bool, folder: Path) -> RowsWorkload:
    """The workload of a stage, with its model made in ``folder``."""
    is_paired = stage != "sft"
    units = 4 if small else 16 if is_paired else 32
    vocabulary, sizes = (2048, SMALL) if small else (32_000, MIDDLE)
    parameters = make_model(folder, vocabulary, **sizes)
    most = 48 if small else 256
    sides = 2 if is_paired else 1
    lengths = heavy_tail(units * sides, 16, most)
    steps = tuple(_units(step, units, sides, lengths, vocabulary) for step in range(num_steps))
    what = {"sft": "SFT", "dpo": "DPO", "dpo_known": "DPO, references known"}[stage]
    return RowsWorkload(
        title=f"({stage}) {what}, {parameters / 1e6:.0f} M parameters, vocabulary {vocabulary:,}, "
        f"{units} {'pairs' if is_paired else 'rows'}, completions of {min(lengths)} to "
        f"{max(lengths)} tokens",
        stage=stage,
        model=str(folder),
        steps=steps,
        trl_rows=min(units, 4 if is_paired else 8),
    )


def _units(
    step: int, units: int, sides: int, lengths: tuple[int, ...], vocabulary: int
) -> tuple[tuple[Ids, ...], ...]:
    draw = random.Random(f"{SEED}/rows/{step}")

    def ids(count: int) -> Ids:
        return tuple(draw.randrange(300, vocabulary - 2) for _ in range(count))

    shuffled = draw.sample(lengths, len(lengths))
    return tuple(
        (
            ids(draw.randint(16, 96)),
            *(
                (*ids(length - 1), vocabulary - 1)
                for length in shuffled[unit * sides : (unit + 1) * sides]
            ),
        )
        for unit in range(units)
    )
