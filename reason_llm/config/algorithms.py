"""Table of algorithms, and the config's ``algorithm`` section, which names a row and changes some
of its columns. A new algorithm is a row and a test.

This module does not import torch. The maths of each column is in ``train.advantages`` (baseline,
scale, normalization, KL in the reward), ``surrogates`` (surrogate and its columns) and
``train.losses`` (aggregation, KL and entropy in the loss).

Each row follows its paper. Differs: ``gdpo`` and the ``reinforce_pp`` rows divide each completion
by its length, as their equations do; TRL, verl and OpenRLHF by default take
the mean over all tokens, which is ``aggregation: token_mean``. ``pg`` and ``rloo`` have no ratio:
their papers take one optimizer step on fresh samples. TRL's RLOO clips the product of a
completion's ratios; where a step has several optimizer steps, ``surrogate: clip`` sets a clipped
ratio, each token's or, with ``ratio: sequence``, their geometric mean.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from reason_llm.config.rows import ChosenRow, Described, row_of_table, with_columns
from reason_llm.config.surrogates import SURROGATES, SurrogateColumns
from reason_llm.config.types import Count, Fraction, NonNegative, Positive

Baseline = Literal["group_mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "whiten", "none"]
Normalization = Literal["total", "per_reward"]
Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum", "constant"]
KLEstimator = Literal["none", "k1", "k2", "k3"]
KLPlace = Literal["loss", "reward", "token_reward"]
KLReference = Literal["base", "start"]
Credit = Literal["rollout", "turn"]
Keep = Literal["all", "positive"] | Count
Truncated = Literal["train", "leave_out"]
Correction = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


def _with_the_smaller_first(ends: tuple[float, float]) -> tuple[float, float]:
    if ends[0] > ends[1]:
        raise ValueError("is empty; put the smaller number first")
    return ends


Interval = Annotated[tuple[Fraction, Fraction], AfterValidator(_with_the_smaller_first)]
if TYPE_CHECKING:
    SurrogateName = str
else:
    _IDEAS = "; ".join(f"{name}: {each.idea}" for name, each in SURROGATES.items())
    SurrogateName = Annotated[Literal[*SURROGATES], Field(description=f"{_IDEAS}.")]


@row_of_table
class Algorithm(SurrogateColumns, Described):
    """Row of the table. A config may change all columns except those in ``FIXED``."""

    baseline: Baseline = "group_mean"
    """Baseline subtracted from each reward: the mean of the group (group_mean), the mean of the
    others (leave_one_out), or none."""
    scale: Scale = "group"
    """Scaling of the advantages. group, batch: divide by the standard deviation of the group or the
    step's rewards; whiten: standardise the advantages over the step; none: no scaling."""
    normalization: Normalization = "total"
    """total: normalise the weighted sum of rewards; per_reward: normalise each reward separately
    (GDPO)."""
    credit: Credit = "rollout"
    """Credit assignment. rollout: each token's advantage comes from the total reward; turn: from
    the rewards of its turn and later ones, in an environment that rewards turns, with the same
    baseline and scale."""
    keep: Keep = "all"
    """Completions to train on. all; positive: those with an advantage above 0; a number n: the n
    with the highest rewards in each group."""
    surrogate: SurrogateName = "clip"
    aggregation: Aggregation = "token_mean"
    """Aggregation of the token losses: sequence_mean, token_mean, sequence_sum, or constant (the
    sum divided by completions * max_new_tokens)."""
    kl: KLEstimator = "none"
    """Estimator of the KL to the reference: none, k1, k2 or k3. Use k1 only in the reward: in the
    loss its gradient does not depend on the reference (arXiv:2501.03262, v9, appendix B.1)."""
    kl_coefficient: NonNegative = 0.0
    """Weight of the KL (beta)."""
    kl_place: KLPlace = "loss"
    """loss: add the KL to the loss; reward: subtract it from the completion's reward; token_reward:
    from each token's reward."""
    kl_reference: KLReference = "base"
    """Reference of the KL. base: the base model; start: a frozen copy of the adapter in
    model.start, if set."""
    entropy_coefficient: NonNegative = 0.0
    """Weight of the entropy bonus, the mean entropy of the trained tokens. 0: none."""
    top_entropy_fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Train only on this fraction of each optimizer batch's tokens, those with the highest entropy.
    1: all. Source: arXiv:2506.01939."""
    off_policy_threshold: NonNegative = 0.0
    """Mask completions with a negative advantage whose mean log-ratio between sampler and policy
    exceeds this threshold. 0: none. Source: arXiv:2512.02556 eq. 9."""
    correction: Correction = "auto"
    """Importance sampling correction for rollouts of an older policy or of an engine with slightly
    different log-probs: token_truncate, token_mask, sequence_truncate, sequence_mask or none. auto:
    with run.from_buffer, run.max_staleness or vllm token_truncate, or sequence_truncate if ratio is
    per sequence (gspo, gspo_token, luspo); otherwise none."""
    correction_cap: Positive = 2.0
    """Max importance weight; larger weights are set to this value (truncate) or to 0 (mask)."""
    dynamic_sampling: Annotated[int, Field(ge=1, le=100, strict=True)] = 1
    """Dynamic sampling: drop groups with equal rewards and sample other prompts until the step is
    full, up to this many times prompts_per_step in total. 1: keep them. Source: arXiv:2503.14476
    eq. 11."""
    success_range: Interval | None = None
    """With dynamic sampling, keep only groups whose fraction of correct completions by the first
    reward is in this closed interval, such as [0.2, 0.8]. A step without such a group uses the
    groups sampled last."""
    truncated: Truncated = "train"
    """Treatment of completions truncated by max_new_tokens. train: train on them; leave_out: mask
    them in the loss (DAPO's overlong filtering), in whitening and for the critic."""
    missing_eos_penalty: NonNegative = 0.0
    """ppo: penalty subtracted from the reward of completions without an end token. 0: none. Source:
    the option of that name in TRL."""
    critic: bool = False
    """Whether advantages come from a critic's values (PPO)."""
    teacher: bool = False
    """Whether advantages are the teacher's log-probs minus the policy's."""

    @property
    def needs_group(self) -> bool:
        """Whether the advantages need two or more completions of a prompt."""
        return self.baseline != "none" or self.scale == "group" or self.dynamic_sampling > 1

    @property
    def needs_whole_step(self) -> bool:
        """Whether advantages depend on log-probs of all the step's rollouts."""
        return self.kl_place != "loss" or self.critic or self.teacher


ALGORITHMS: dict[str, Algorithm] = {
    "pg": Algorithm(
        idea="REINFORCE: reward times log-prob; with a baseline if you set one",
        source="Williams 1992, doi:10.1007/BF00992696",
        baseline="none", scale="none", surrogate="reinforce",
    ),
    "grpo": Algorithm(
        idea="advantages normalised within the group, clipped ratio, mean of sequence means, KL to "
        "the base",
        source="DeepSeekMath, arXiv:2402.03300 eq. 3 and 4; beta from section 4.2",
        aggregation="sequence_mean", kl="k3", kl_coefficient=0.04,
    ),
    "dapo": Algorithm(
        idea="a higher upper clip, token mean, groups without signal resampled, no KL",
        source="DAPO, arXiv:2503.14476 eq. 8 to 11",
        clip_high=0.28, dynamic_sampling=3,
    ),
    "dr_grpo": Algorithm(
        idea="GRPO without the biases: no division by deviation or length",
        source="Dr. GRPO, arXiv:2503.20783 section 3.2",
        scale="none", aggregation="constant",
    ),
    "bnpo": Algorithm(
        idea="GRPO with the token mean over the optimizer batch",
        source="the loss_type of that name in TRL, after BNPO, arXiv:2506.02864",
    ),
    "gdpo": Algorithm(
        idea="each reward normalised separately within the group, then their sum over the batch",
        source="GDPO, arXiv:2601.05242 eq. 4 to 7",
        normalization="per_reward", scale="whiten", aggregation="sequence_mean",
    ),
    "rloo": Algorithm(
        idea="the baseline is the mean of the other rewards; whole completions; KL in the reward",
        source="RLOO, arXiv:2402.14740",
        baseline="leave_one_out", scale="none", surrogate="reinforce",
        aggregation="sequence_sum", kl="k1", kl_coefficient=0.05, kl_place="reward",
    ),
    "reinforce_pp": Algorithm(
        idea="no group: KL subtracted from every token's reward, returns whitened over the batch",
        source="REINFORCE++, arXiv:2501.03262 (v9) eq. 4 and 5",
        baseline="none", scale="whiten", aggregation="sequence_mean",
        kl="k1", kl_coefficient=0.01, kl_place="token_reward",
    ),
    "reinforce_pp_baseline": Algorithm(
        idea="the group's mean as baseline, whitened over the batch, k2 KL in the loss",
        source="REINFORCE++ w/ baseline, arXiv:2501.03262 (v9) eq. 6 to 8",
        scale="whiten", aggregation="sequence_mean", kl="k2", kl_coefficient=0.01,
    ),
    "gspo": Algorithm(
        idea="one ratio for the whole completion, clipped tightly",
        source="GSPO, arXiv:2507.18071 eq. 5 to 7; clips from section 5.1",
        ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean",
    ),
    "gspo_token": Algorithm(
        idea="GSPO with the gradient and advantage of each token",
        source="GSPO, arXiv:2507.18071 eq. 13 and 14",
        ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean",
    ),
    "luspo": Algorithm(
        idea="GSPO with each completion weighted by its length",
        source="LUSPO, arXiv:2602.05261; clips from section 5.1",
        ratio="sequence", clip_low=2e-3, clip_high=2.5e-3, aggregation="sequence_sum",
    ),
    "cispo": Algorithm(
        idea="the ratio is a clipped weight of the log-prob: no token loses its gradient",
        source="MiniMax-M1, arXiv:2506.13585 eq. 4 and 5; upper bound 5 from ScaleRL, "
        "arXiv:2510.13786",
        surrogate="cispo", clip_low=1.0, clip_high=4.0,
    ),
    "sapo": Algorithm(
        idea="a smooth gate instead of the clip, steeper for negative advantages",
        source="SAPO, arXiv:2511.20347",
        surrogate="sapo", aggregation="sequence_mean",
    ),
    "gmpo": Algorithm(
        idea="the geometric mean of the token ratios, clipped widely in log space",
        source="GMPO, arXiv:2507.20673",
        surrogate="gmpo", clip_low=0.4, clip_high=0.4, aggregation="sequence_mean",
    ),
    "vespo": Algorithm(
        idea="a gamma-shaped weight of the whole completion's ratio",
        source="VESPO, arXiv:2602.10693, as in TRL's loss_type of that name",
        surrogate="vespo",
    ),
    "ppo": Algorithm(
        idea="a critic's values as the baseline; the KL to the start is subtracted from each "
        "token's reward",
        source="PPO, arXiv:1707.06347 eq. 7; GAE, arXiv:1506.02438 eq. 16; KL subtracted "
        "from the reward, arXiv:1909.08593 eq. 2",
        baseline="none", scale="whiten", kl="k1", kl_coefficient=0.02, kl_place="token_reward",
        kl_reference="start", critic=True,
    ),
    "opd": Algorithm(
        idea="on-policy distillation: each token's reverse KL to a teacher as its advantage",
        source="arXiv:2306.13649 eq. 1 with beta = 1, as in tinker's train_on_policy",
        baseline="none", scale="none", teacher=True,
    ),
}  # fmt: skip


FIXED = {"idea", "source", "critic", "teacher"}
"""Columns that a config may not change."""


def resolve(name: str, overrides: dict[str, object]) -> Algorithm:
    """Return the row ``name`` with changes; raises ValueError if it ignores or excludes one."""
    row = replace(ALGORITHMS[name], **overrides)  # type: ignore[arg-type]
    if row.kl == "none" and "kl" in overrides:
        taken_along = {"kl_coefficient": 0.0, "kl_place": "loss", "kl_reference": "base"}
        changes = {k: v for k, v in taken_along.items() if k not in overrides}
        row = replace(row, **changes)  # type: ignore[arg-type]
    for column in sorted(overrides):
        readers = [each for each, surrogate in SURROGATES.items() if column in surrogate.columns]
        if readers and row.surrogate not in readers:
            raise ValueError(
                f"algorithm.{column}={overrides[column]} would be ignored because "
                f"algorithm.surrogate is {row.surrogate}; leave it out, or set surrogate to "
                f"{readers[0]}"
            )
    for columns, is_so, because, fix in IGNORED:
        for column in columns if is_so(row) else ():
            if (value := getattr(row, column)) != getattr(Algorithm, column):
                raise ValueError(
                    f"algorithm.{column}={value} would be ignored because {because}; {fix}"
                )
    for contradicts, message in CONTRADICTIONS:
        if contradicts(row):
            raise ValueError(message.format(row=row))
    return row


IGNORED: tuple[tuple[tuple[str, ...], Callable[[Algorithm], bool], str, str], ...] = (
    (("kl_coefficient", "kl_place", "kl_reference"), lambda row: row.kl == "none",
     "algorithm.kl is none", "set algorithm.kl to k1, k2 or k3, or leave it out"),
    (("kl",), lambda row: row.kl_coefficient == 0,
     "algorithm.kl_coefficient is 0", "set a coefficient above 0, or algorithm.kl to none"),
    (("correction_cap",), lambda row: row.correction == "none",
     "algorithm.correction is none", "set algorithm.correction to token_truncate"),
    (("credit",), lambda row: row.teacher,
     "algorithm.name is opd, which ignores rewards", "leave it out"),
    (("missing_eos_penalty",), lambda row: not row.critic or row.truncated == "leave_out",
     "algorithm.name is not ppo or algorithm.truncated is leave_out", "leave it out"),
    (("success_range",), lambda row: row.dynamic_sampling == 1,
     "algorithm.dynamic_sampling is 1", "set algorithm.dynamic_sampling to 3"),
)  # fmt: skip
"""(columns, whether the row ignores them, why, fix), in order. A column with its default value is
not an error."""

CONTRADICTIONS: tuple[tuple[Callable[[Algorithm], bool], str], ...] = (
    (lambda row: row.normalization == "per_reward" and (
        row.baseline != "group_mean"
        or row.scale not in ("group", "whiten")
        or row.kl_place != "loss"
        or row.credit != "rollout"
     ),
     "algorithm.normalization=per_reward contradicts baseline={row.baseline}, scale={row.scale}, "
     "kl_place={row.kl_place} or credit={row.credit}: it uses each reward's mean and "
     "deviation in the group; set baseline to group_mean, scale to group or whiten, kl_place to "
     "loss and credit to rollout"),
    (lambda row: row.credit == "turn" and (
        row.surrogate == "gmpo" or (row.surrogate == "clip" and row.ratio == "sequence")
     ),
     "algorithm.credit=turn contradicts algorithm.surrogate={row.surrogate} with the whole "
     "completion's ratio, which applies every turn's advantage to all tokens; set "
     "surrogate to clip and ratio to sequence_token, or credit to rollout"),
    (lambda row: row.teacher and (row.baseline, row.scale, row.kl) != ("none", "none", "none"),
     "algorithm.name=opd takes its advantages only from the teacher: set baseline, scale and kl "
     "to none"),
    (lambda row: row.critic and (
        row.baseline != "none"
        or row.scale not in ("whiten", "none")
        or row.kl_place == "reward"
     ),
     "algorithm.name=ppo contradicts baseline={row.baseline}, scale={row.scale} or kl_place="
     "{row.kl_place}: its critic is the baseline, and its rewards and advantages are per "
     "token; set baseline to none, scale to whiten or none, and kl_place to token_reward or "
     "loss"),
    (lambda row: (
        row.kl_place == "token_reward"
        and not row.critic
        and (row.baseline, row.scale) != ("none", "whiten")
     ),
     "algorithm.kl_place=token_reward contradicts algorithm.baseline={row.baseline} or "
     "algorithm.scale={row.scale}: returns differ by token; set baseline to none and scale "
     "to whiten, or kl_place to reward"),
    (lambda row: 0 < row.delta <= 1 + row.clip_high,
     "algorithm.delta={row.delta} contradicts algorithm.clip_high={row.clip_high}: it must be "
     "above 1 + clip_high, or 0 for none"),
    (lambda row: row.surrogate in ("clip", "cispo") and row.clip_low > 1,
     "algorithm.clip_low={row.clip_low} is above 1; set it to 1 or less"),
)  # fmt: skip
"""(whether the row is contradictory, message)."""


class _ChosenAlgorithm(ChosenRow):
    """Algorithm, and changes to its row. null keeps the row's value."""

    TABLE = ALGORITHMS
    name: str = "grpo"
    """Algorithm: pg, grpo, dapo, dr_grpo, bnpo, gdpo, rloo, reinforce_pp, reinforce_pp_baseline,
    gspo, gspo_token, luspo, cispo, sapo, gmpo, vespo, ppo or opd."""

    def row(self) -> Algorithm:
        """Return the row with this section's changes; raise ValueError if one would be ignored."""
        return _resolved(self.name, tuple(self.changes.items()))


@lru_cache  # a run asks some hundred times
def _resolved(name: str, changes: tuple[tuple[str, object], ...]) -> Algorithm:
    return resolve(name, dict(changes))


if TYPE_CHECKING:
    AlgorithmSection = _ChosenAlgorithm
else:
    AlgorithmSection = with_columns("AlgorithmSection", _ChosenAlgorithm, Algorithm, FIXED)
