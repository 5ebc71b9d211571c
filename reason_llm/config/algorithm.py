"""The config's ``algorithm`` section: a row of the table and what to change in it."""

from typing import Annotated, Self

from pydantic import Field, field_validator, model_validator

from reason_llm.config.algorithms import (
    ALGORITHMS,
    Aggregation,
    Algorithm,
    Baseline,
    Correction,
    Keep,
    KLEstimator,
    KLPlace,
    KLReference,
    Normalization,
    Ratio,
    Scale,
    Surrogate,
    Truncated,
    resolve,
)
from reason_llm.config.types import Count, Fraction, NonNegative, Section
from reason_llm.config.wrong_values import none_of


class AlgorithmSection(Section):
    """A row of the algorithm table and what to change in it. null: the row's own value."""

    name: str = "grpo"
    """The row: pg, grpo, dapo, dr_grpo, bnpo, gdpo, rloo, reinforce_pp, reinforce_pp_baseline,
    gspo, gspo_token, luspo, cispo, sapo, gmpo, vespo, ppo or opd."""
    baseline: Baseline | None = None
    """Subtracted from each reward: the group's mean, the mean of its others (leave_one_out), or
    nothing."""
    scale: Scale | None = None
    """Divisor of the advantages. group, batch: standard deviation of the group or the step; whiten:
    their own over the step, after their mean is subtracted; none: 1."""
    normalization: Normalization | None = None
    """total: of the weighted sum of rewards; per_reward: of each reward by itself (GDPO)."""
    keep: Keep | None = None
    """Completions that are trained: all; positive, those with an advantage above 0; top_k, those of
    each group with the highest rewards."""
    top_k: Annotated[int, Field(ge=0, strict=True)] | None = None
    """Completions kept of each group, for keep: top_k."""
    ratio: Ratio | None = None
    """The probability ratio: each token's; the whole completion's geometric mean (sequence); or
    that value with each token's gradient (sequence_token)."""
    surrogate: Surrogate | None = None
    """clip (PPO, GRPO), reinforce, cispo, sapo, gmpo or vespo."""
    clip_low: NonNegative | None = None
    """The probability ratio is clipped below at 1 - clip_low (gmpo: its log at -clip_low)."""
    clip_high: NonNegative | None = None
    """The probability ratio is clipped above at 1 + clip_high (gmpo: its log at clip_high)."""
    delta: NonNegative | None = None
    """Upper bound of the unclipped ratio, for negative advantages (two-sided clip). 0: none."""
    dual_clip: NonNegative | None = None
    """A negative advantage costs at most this many times itself (dual-clip PPO). 0: none."""
    temperature_positive: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """SAPO's gate for positive advantages."""
    temperature_negative: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """SAPO's gate for negative advantages."""
    aggregation: Aggregation | None = None
    """sequence_mean, token_mean, sequence_sum, or constant (the sum over completions *
    max_new_tokens)."""
    kl: KLEstimator | None = None
    """Estimator of the KL to the base model: none, k1, k2 or k3. k1 belongs in the reward, where
    only its gradient is the KL's: in the loss it does not depend on the base (arXiv:2501.03262, v9,
    appendix B.1)."""
    kl_coefficient: NonNegative | None = None
    """Weight of that KL (beta)."""
    kl_place: KLPlace | None = None
    """loss: added to it; reward: subtracted from the completion's; token_reward: from each
    token's."""
    kl_reference: KLReference | None = None
    """base: the base model; start: a frozen copy of the adapter in model.start, where there is
    one."""
    kl_target: NonNegative | None = None
    """KL of a completion, in nats, that the weight is adapted to after each step. 0: the weight
    stays. Source: arXiv:1909.08593 section 2.2."""
    kl_horizon: Count | None = None
    """Rollouts over which the weight adapts."""
    entropy_coefficient: NonNegative | None = None
    """Weight of the entropy bonus: the mean entropy of the trained tokens, subtracted from the
    loss. 0: none."""
    top_entropy_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Train only this fraction of each optimizer batch's tokens, those with the highest entropy
    before the step. 1: all. Source: arXiv:2506.01939."""
    off_policy_threshold: NonNegative | None = None
    """Completions with a negative advantage whose mean log-ratio to the sampler is above this are
    masked. 0: none. Source: arXiv:2512.02556 eq. 9."""
    max_ratio: NonNegative | None = None
    """Completions with a token whose probability ratio is above this are masked; at least 1, for
    several optimizer steps per step. 0: none."""
    correction: Correction | None = None
    """Importance weights, from the log-probs in the buffer, for rollouts of another policy or of a
    sampler that differs slightly from the policy: token_truncate, token_mask, sequence_truncate,
    sequence_mask or none. auto: token_truncate with run.from_buffer, run.max_staleness and vllm;
    else none, as the log-probs of transformers are the learner's."""
    correction_cap: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Max weight; a larger one becomes this (truncate) or 0 (mask)."""
    correction_floor: NonNegative | None = None
    """Min weight; a smaller one becomes this (truncate) or 0 (mask). 0: none."""
    min_reward_std: NonNegative | None = None
    """Groups whose total rewards have a smaller standard deviation, such as 0.1, are taken as
    groups without signal: their advantages are 0, and dynamic sampling drops them. 0: only groups
    of equal rewards are."""
    dynamic_sampling: Annotated[int, Field(ge=1, le=100, strict=True)] | None = None
    """Groups without signal are dropped and others sampled until the step is full, from up to this
    many times prompts_per_step. 1: they are kept. Source: arXiv:2503.14476 eq. 11."""
    success_range: tuple[Fraction, Fraction] | None = None
    """With dynamic sampling, keep only groups whose fraction of completions with a positive first
    reward is in this range, ends included, such as [0.2, 0.8]. A step without any such group takes
    the last ones that were sampled."""
    truncated: Truncated | None = None
    """Completions cut off by max_new_tokens: train, or leave_out, masked in the loss (DAPO's
    overlong filtering)."""

    @field_validator("name")
    @classmethod
    def _is_a_row(cls, name: str) -> str:
        if name not in ALGORITHMS:
            raise ValueError(none_of(name, ALGORITHMS))
        return name

    def row(self) -> Algorithm:
        """The table's row with this section's overrides; ValueError if one of them would be
        ignored."""
        return resolve(self.name, self.model_dump(exclude={"name"}, exclude_none=True))

    @model_validator(mode="after")
    def _row_uses_every_override(self) -> Self:
        self.row()
        return self
