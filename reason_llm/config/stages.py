"""The sections of the stages that learn from a set of rows: sft, reward, preference; and those of
PPO's critic and the teacher of a distillation."""

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
    """What a run learns by: a row of one of the two tables, or a stage without one."""

    name: str
    idea: str
    """The idea in a few words."""
    source: str
    """The paper and its equation."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage learns from. Its objective is in ``train.stages``."""

    forms: tuple[str, ...]
    """What its training rows may be, the usual first."""
    sections: tuple[str, ...] = ()
    """Sections of the config that not every stage reads."""
    method: Method | None = None
    """None: a row of a table, which a section names."""
    samples: bool = False
    """Whether it draws rollouts; the others learn from a set of rows."""
    learns: bool = True
    """Whether it changes the adapter."""
    scores: bool = False
    """Whether its model gives scores, by a head, and writes no answers."""
    alarms: tuple[str, ...] = ()
    """Checks of the report that are for this stage alone."""


PROBLEMS = ("problems", "prompts")
STAGES: dict[StageName, Stage] = {
    "rl": Stage(PROBLEMS, ("algorithm", "critic", "teacher"), samples=True),
    "sample": Stage(
        PROBLEMS,
        method=Method(
            "sample",
            "samples and scores, and learns nothing",
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
"""What config, data check, report and docs know of each stage."""


READ_BY: dict[str, tuple[StageName, ...]] = {
    section: tuple(name for name, stage in STAGES.items() if section in stage.sections)
    for owner in STAGES.values()
    for section in owner.sections
}
"""Sections that only some stages read, and those stages."""


def usual_form(stage: Any, preference: Any) -> Any:
    """The form of the training rows, from an unchecked stage and section; None for no stage."""
    name = preference.get("name") if isinstance(preference, dict) else None
    if stage not in [*STAGES]:  # it may be a list
        return None
    return "labels" if (stage, name) == ("preference", "kto") else STAGES[stage].forms[0]


class RewardSection(Section):
    """A reward model, from preferences."""

    centering: NonNegative = 0.01
    """Weight of (r_chosen + r_rejected)^2, which keeps rewards around 0. Source: arXiv:2312.09244
    eq. 2."""


class CriticSection(Section):
    """The critic of PPO: an adapter with a head of its own over the same base."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate of the critic."""
    updates: Count = 1
    """Optimizer steps of the critic in a step; the rollouts are passed once in each."""
    warmup_steps: Whole = 10
    """First steps in which only the critic learns."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token."""
    lam: Fraction = 1.0
    """GAE's lambda: 1 takes whole returns, 0 the critic's word. Below 1 a reward at the end hardly
    reaches the first tokens of a long answer: 0.95 leaves 4 millionths of it 240 tokens before.
    The critic learns whole returns. Source: arXiv:1506.02438 eq. 16; 1 is the default of OpenRLHF
    and verl."""
    value_clip: NonNegative = 0.2
    """A value counts as moved by at most this in a step. 0: no clip."""
    start: Path | None = None
    """A reward model's adapter to begin from; its head is scaled as its rewards are. It has judged
    whole answers and no unfinished ones, so it needs warmup_steps. null: a fresh adapter and a head
    of zeros."""


class TeacherSection(ServiceSection):
    """The teacher of algorithm.name opd."""

    adapter: Path | None = None
    """Folder of the teacher's adapter over the same base. null: teacher.model, or the base itself,
    which then needs teacher.prompt."""
    model: str | None = None
    """A teacher that is a model of its own, a folder or a Hub id, with the tokenizer of the model
    that learns. It reads a step's rollouts before they are learned, on the GPU in that phase alone.
    null: the teacher is over the same base."""
    quantize: Literal["none", "nf4"] = "none"
    """For teacher.model, as model.quantize."""
    url: str | None = None
    """Address of a vLLM server, such as http://localhost:8000/v1, that is asked for the log-probs
    of the sampled tokens (prompt_logprobs); teacher.model is then the model's name there."""
    prompt: str | None = None
    """What the teacher is asked in the student's place, with {prompt} and {answer}: a hint that the
    student does not have. null: the student's own prompt."""
