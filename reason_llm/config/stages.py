"""The sections of the stages that learn from a set of rows: sft, reward, preference; and those of
PPO's critic and the teacher of a distillation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from reason_llm.config.preferences import PREFERENCES, PreferenceRow, resolve
from reason_llm.config.types import Count, Fraction, NonNegative, Section
from reason_llm.config.wrong_values import none_of

Stage = Literal["rl", "sample", "sft", "pretrain", "reward", "preference"]


@dataclass(frozen=True, slots=True)
class Method:
    """What a run learns by: a row of one of the two tables, or a stage without one."""

    name: str
    idea: str
    """In a few words."""
    source: str
    """Paper and equation."""


METHODS: dict[str, Method] = {
    "sample": Method(
        "sample",
        "samples and scores, and learns nothing",
        "the first half of rejection sampling: RAFT, arXiv:2304.06767 algorithm 1",
    ),
    "sft": Method(
        "sft",
        "the negative log-likelihood of what the assistant wrote; the prompt is masked",
        "the first step of InstructGPT, arXiv:2203.02155",
    ),
    "pretrain": Method(
        "pretrain",
        "the negative log-likelihood of every token; documents do not see one another",
        "continued pretraining as in arXiv:2004.10964",
    ),
    "reward": Method(
        "reward",
        "Bradley-Terry: the log-sigmoid of the difference of the two sides' rewards",
        "InstructGPT, arXiv:2203.02155 eq. 1; margin, arXiv:2307.09288 eq. 2; centering, "
        "arXiv:2312.09244 eq. 2",
    ),
}
"""Of the stages without a table."""


class SupervisedSection(Section):
    """Supervised fine-tuning and continued pretraining."""

    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    """token_mean: every trained token of an optimizer batch counts the same. sequence_mean: every
    row does."""
    condition: Literal["none", "reward", "bins"] = "none"
    """Conditional SFT: the row's ``score`` is written into its prompt, so that the best can be
    asked for. reward: as a z-score over the set; bins: as the number of its quantile (of the
    distinct scores, where so many are equal that a bin would be empty)."""
    condition_bins: Annotated[int, Field(ge=2, le=100, strict=True)] = 5
    """Quantiles, for condition: bins."""
    condition_text: str = "{input} <rm_score>: {reward} "
    """How prompt and score are put together."""
    condition_target: str | None = None
    """What evaluation, chat and evaluate ask for in the score's place. null: the best, which is
    5.00, or the highest bin."""

    @model_validator(mode="after")
    def _condition_reads_every_option(self) -> Self:
        fields, needed = type(self).model_fields, {"condition_bins": "bins"}
        for name in ("condition_bins", "condition_text"):
            value, is_on = getattr(self, name), self.condition != "none"
            is_read = self.condition == needed[name] if name in needed else is_on
            if value != fields[name].default and not is_read:
                raise ValueError(
                    f"sft.{name}={value!r:.60} would be ignored because sft.condition is "
                    f"{self.condition}; leave it out, or set condition to bins"
                )
        return self

    @model_validator(mode="after")
    def _target_is_used(self) -> Self:
        target, bins = self.condition_target, self.condition_bins
        if target is None:
            return self
        if self.condition == "none":
            raise ValueError(
                f"sft.condition_target={target} would be ignored because sft.condition is none; "
                "leave it out"
            )
        is_bin = target.isdecimal() and target.isascii() and len(target) < 4 and int(target) < bins
        if self.condition == "bins" and not is_bin:
            raise ValueError(
                f"sft.condition_target={target!r:.60} is no bin; set it to 0 .. {bins - 1}"
            )
        return self


class RewardSection(Section):
    """A reward model, from preferences."""

    centering: NonNegative = 0.01
    """Weight of (r_chosen + r_rejected)^2, which keeps rewards around 0. Source: arXiv:2312.09244
    eq. 2."""
    margin: bool = True
    """Whether a row's ``margin`` is subtracted from the difference. Source: arXiv:2307.09288
    eq. 2."""


class PreferenceSection(Section):
    """A row of the table of preference losses and what to change in it. null: the row's own."""

    name: str = "irpo"
    """The row: irpo, dpo, cdpo, rdpo, ipo, kto, orpo or simpo."""
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How far the policy may go from the reference: larger stays nearer. (orpo: the weight of the
    odds; ipo: tau; simpo: the scale of the mean log-probs.)"""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of pairs whose sides are taken to be swapped."""
    margin: NonNegative | None = None
    """simpo: the margin gamma by which the chosen side must be ahead."""
    normalize_length: bool | None = None
    """ipo: log-ratios are means over tokens in the place of sums."""
    nll_coefficient: NonNegative | None = None
    """Weight of the chosen side's negative log-likelihood, per token."""
    desirable_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """kto: weight of completions labelled good."""
    undesirable_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """kto: weight of those labelled bad."""
    reference: Literal["auto", "base", "start"] = "auto"
    """Who the policy is compared with. base: the base model; start: a frozen copy of the adapter in
    model.start; auto: start where there is one, else base. orpo and simpo have no reference."""

    @field_validator("name")
    @classmethod
    def _is_a_row(cls, name: str) -> str:
        if name not in PREFERENCES:
            raise ValueError(none_of(name, PREFERENCES))
        return name

    def row(self) -> PreferenceRow:
        """The table's row with this section's overrides; ValueError if one would be ignored."""
        return resolve(self.name, self.model_dump(exclude={"name", "reference"}, exclude_none=True))

    @model_validator(mode="after")
    def _row_uses_every_override(self) -> Self:
        if self.reference != "auto" and not self.row().needs_reference:
            raise ValueError(
                f"preference.reference={self.reference} would be ignored because preference.name "
                f"is {self.name}, which has no reference; leave it out"
            )
        return self


class CriticSection(Section):
    """The critic of PPO: an adapter with a head of its own over the same base."""

    learning_rate: NonNegative = 1e-4
    """Peak learning rate of the critic."""
    updates: Count = 1
    """Optimizer steps of the critic in a step; the rollouts are passed once in each."""
    warmup_steps: Annotated[int, Field(ge=0, strict=True)] = 10
    """First steps in which only the critic learns."""
    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Discount of a reward for each token."""
    lam: Fraction = 0.95
    """GAE's lambda: 1 takes whole returns, 0 the critic's word. Source: arXiv:1506.02438 eq. 16."""
    value_lam: Fraction | None = None
    """lambda of the returns that the critic learns. null: lam. Source: arXiv:2503.01491."""
    value_clip: NonNegative = 0.2
    """A value counts as moved by at most this in a step. 0: no clip."""
    start: Path | None = None
    """A reward model's adapter to begin from. null: a fresh adapter and a head of zeros."""


class TeacherSection(Section):
    """The teacher of algorithm.name opd."""

    adapter: Path | None = None
    """Folder of the teacher's adapter over the same base. null: the base itself, which then needs
    teacher.prompt."""
    prompt: str | None = None
    """What the teacher is asked in the student's place, with {prompt} and {answer}: a hint that the
    student does not have. null: the student's own prompt."""
    coefficient: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Weight of the reverse KL."""

    @field_validator("prompt")
    @classmethod
    def _holds_the_question(cls, text: str | None) -> str | None:
        if text is not None and "{prompt}" not in text:
            raise ValueError("must hold {prompt}, in whose place the question is put")
        return text
