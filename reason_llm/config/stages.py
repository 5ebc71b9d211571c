"""Table of stages, and the section of the stage that trains a reward model."""

from dataclasses import dataclass
from typing import Literal

from reason_llm.config.readers import ReaderSections
from reason_llm.config.types import NonNegative, Section

StageName = Literal["rl", "sample", "sft", "pretrain", "reward", "preference"]


@dataclass(frozen=True, slots=True)
class Method:
    """Method of a run: a row of one of the two tables, or a stage without one."""

    name: str
    idea: str
    """Short description."""
    source: str
    """Paper and equation."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Properties of a stage. Its objective is in ``train.stages``."""

    forms: tuple[str, ...]
    """Allowed forms of training rows, the default first."""
    reads: tuple[str, ...] = ()
    """Sections and options of the config that only some stages read."""
    method: Method | None = None
    """None: a row of a table, named in a section."""
    samples: bool = False
    """Whether it samples rollouts; the others train on a set of rows."""
    learns: bool = True
    """Whether it trains the adapter."""
    scores: bool = False
    """Whether its model returns scores instead of text."""
    alarms: tuple[str, ...] = ()
    """Alarms of the report for this stage only."""


PROBLEMS = ("problems", "prompts")
OF_ROWS = ("train.rows_per_step", "eval.rows")
"""Options of the stages that train on a set of rows."""
STAGES: dict[StageName, Stage] = {
    "rl": Stage(
        PROBLEMS,
        ("algorithm", *ReaderSections.model_fields, "run.from_buffer"),
        samples=True,
    ),
    "sample": Stage(
        PROBLEMS,
        method=Method(
            "sample",
            "samples and scores, and trains nothing",
            "the first half of rejection sampling: RAFT, arXiv:2304.06767 algorithm 1",
        ),
        samples=True,
        learns=False,
    ),
    "sft": Stage(
        ("demonstrations",),
        OF_ROWS,
        Method(
            "sft",
            "the negative log-likelihood of what the assistant wrote; the prompt is masked",
            "the first step of InstructGPT, arXiv:2203.02155",
        ),
    ),
    "pretrain": Stage(
        ("texts",),
        OF_ROWS,
        Method(
            "pretrain",
            "the negative log-likelihood of every token; documents do not see one another",
            "continued pretraining as in arXiv:2004.10964",
        ),
    ),
    "reward": Stage(
        ("preferences",),
        ("reward", *OF_ROWS),
        Method(
            "reward",
            "Bradley-Terry: the log-sigmoid of the difference of the two sides' rewards",
            "InstructGPT, arXiv:2203.02155 eq. 1; margin, arXiv:2307.09288 eq. 2; centering, "
            "arXiv:2312.09244 eq. 2",
        ),
        scores=True,
        alarms=("The reward model goes by length",),
    ),
    "preference": Stage(
        ("preferences", "labels"),
        ("preference", *OF_ROWS),
        alarms=("Pairs in order, policy broken",),
    ),
}
"""Stages by name, for config, data check, report and docs."""


READ_BY: dict[str, tuple[StageName, ...]] = {
    name: tuple(stage for stage, row in STAGES.items() if name in row.reads)
    for owner in STAGES.values()
    for name in owner.reads
}
"""Stages that read each such section or option."""


class RewardSection(Section):
    """Training of a reward model on preferences."""

    centering: NonNegative = 0.01
    """Weight of (r_chosen + r_rejected)^2, which centers rewards at 0. Source: arXiv:2312.09244
    eq. 2."""
