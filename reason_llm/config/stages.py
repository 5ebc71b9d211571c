"""Table of stages, and the sections of reward models, PPO's critic and the distillation teacher."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from reason_llm.config.types import (
    Count,
    Fraction,
    NonNegative,
    Section,
    ServiceSection,
    Whole,
)

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
    sections: tuple[str, ...] = ()
    """Sections of the config that only some stages read."""
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
STAGES: dict[StageName, Stage] = {
    "rl": Stage(PROBLEMS, ("algorithm", "critic", "teacher"), samples=True),
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
        (),
        Method(
            "sft",
            "the negative log-likelihood of what the assistant wrote; the prompt is masked",
            "the first step of InstructGPT, arXiv:2203.02155",
        ),
    ),
    "pretrain": Stage(
        ("texts",),
        (),
        Method(
            "pretrain",
            "the negative log-likelihood of every token; documents do not see one another",
            "continued pretraining as in arXiv:2004.10964",
        ),
    ),
    "reward": Stage(
        ("preferences",),
        ("reward",),
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
        ("preferences", "labels"), ("preference",), alarms=("Pairs in order, policy broken",)
    ),
}
"""Stages by name, for config, data check, report and docs."""


READ_BY: dict[str, tuple[StageName, ...]] = {
    section: tuple(name for name, stage in STAGES.items() if section in stage.sections)
    for owner in STAGES.values()
    for section in owner.sections
}
"""Stages that read each such section."""


def usual_form(stage: Any, preference: Any) -> Any:
    """Return the default form of the training rows for an unvalidated stage and section; None for
    an unknown stage."""
    name = preference.get("name") if isinstance(preference, dict) else None
    if stage not in [*STAGES]:  # it may be a list
        return None
    return "labels" if (stage, name) == ("preference", "kto") else STAGES[stage].forms[0]


class RewardSection(Section):
    """Training of a reward model on preferences."""

    centering: NonNegative = 0.01
    """Weight of (r_chosen + r_rejected)^2, which centers rewards at 0. Source: arXiv:2312.09244
    eq. 2."""


class CriticSection(Section):
    """Critic of PPO: an adapter and a value head over the same base."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate of the critic."""
    updates: Count = 1
    """Optimizer steps of the critic per step; each passes over all rollouts once."""
    warmup_steps: Whole = 10
    """Number of first steps that train only the critic."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount per token."""
    lam: Fraction = 1.0
    """Lambda of GAE: 1 uses full returns, 0 only the critic's values. Below 1 a final reward hardly
    reaches the first tokens of a long answer: at 0.95, 4 millionths of it remain 240 tokens
    earlier. The critic is trained on full returns. Source: arXiv:1506.02438 eq. 16; 1 is the
    default of OpenRLHF and verl."""
    value_clip: NonNegative = 0.2
    """Clip range of the values around their old values. 0: no clipping."""
    start: Path | None = None
    """Reward model adapter to start from; its head is scaled like its rewards. It was trained on
    finished answers only, so it needs warmup_steps. null: a new adapter and a zero head."""


class TeacherSection(ServiceSection):
    """Teacher of algorithm.name opd."""

    adapter: Path | None = None
    """Folder of the teacher's adapter for the same base. null: teacher.model, or the base, which
    then needs teacher.prompt."""
    model: str | None = None
    """Folder or Hub id of a separate teacher model with the student's tokenizer. It reads a step's
    rollouts before training and is on the GPU only in that phase. null: the teacher uses the same
    base."""
    quantize: Literal["none", "nf4"] = "none"
    """Quantisation of teacher.model, as in model.quantize."""
    url: str | None = None
    """Address of a vLLM server, such as http://localhost:8000/v1, that returns the log-probs of the
    sampled tokens (prompt_logprobs); teacher.model is then the model's name there."""
    prompt: str | None = None
    """Prompt of the teacher, with {prompt} and {answer}, for example a hint that the student does
    not get. null: the student's prompt."""
