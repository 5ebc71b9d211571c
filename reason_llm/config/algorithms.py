"""The table of algorithms, one row each. Adding one is a row and a test.

Standard library only, so that the config can check names and columns without torch. What each
column does is in ``advantages.py`` (baseline, scale, normalisation, KL in the reward) and
``losses.py`` (ratio, surrogate, aggregation, KL and entropy in the loss).

Each row is its paper's form. Differs: ``gdpo`` and the ``reinforce_pp`` rows divide each completion
by its length, as their equations do; code around them (TRL, verl and OpenRLHF as they come) takes
the mean over all tokens, which is ``aggregation: token_mean``. ``pg`` and ``rloo`` have no ratio:
their papers take one optimizer step on what was just sampled. TRL's RLOO clips the product of a
completion's ratios; where a step has several optimizer steps, ``surrogate: clip`` sets a clipped
ratio, each token's or, with ``ratio: sequence``, their geometric mean.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

Baseline = Literal["group_mean", "leave_one_out", "none"]
Scale = Literal["group", "batch", "whiten", "none"]
Normalization = Literal["total", "per_reward"]
Ratio = Literal["token", "sequence", "sequence_token"]
Surrogate = Literal["clip", "reinforce", "cispo", "sapo", "gmpo", "vespo"]
Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum", "constant"]
KLEstimator = Literal["none", "k1", "k2", "k3"]
KLPlace = Literal["loss", "reward", "token_reward"]
KLReference = Literal["base", "start"]
Keep = Literal["all", "positive", "top_k"]
Truncated = Literal["train", "leave_out"]
Correction = Literal[
    "auto", "none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row. Every column but ``idea`` and ``source`` can be overridden in the config's
    ``algorithm`` section; the fields of ``config.AlgorithmSection`` say what each does."""

    idea: str
    """In a few words."""
    source: str
    """Paper and equation."""
    baseline: Baseline = "group_mean"
    scale: Scale = "group"
    normalization: Normalization = "total"
    keep: Keep = "all"
    top_k: int = 0
    ratio: Ratio = "token"
    surrogate: Surrogate = "clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    delta: float = 0.0
    dual_clip: float = 0.0
    temperature_positive: float = 1.0
    temperature_negative: float = 1.05
    aggregation: Aggregation = "token_mean"
    kl: KLEstimator = "none"
    kl_coefficient: float = 0.0
    kl_place: KLPlace = "loss"
    kl_reference: KLReference = "base"
    kl_target: float = 0.0
    kl_horizon: int = 10_000
    entropy_coefficient: float = 0.0
    top_entropy_fraction: float = 1.0
    off_policy_threshold: float = 0.0
    max_ratio: float = 0.0
    correction: Correction = "auto"
    correction_cap: float = 2.0
    correction_floor: float = 0.0
    min_reward_std: float = 0.0
    dynamic_sampling: int = 1
    success_range: tuple[float, float] | None = None
    truncated: Truncated = "train"
    critic: bool = False
    """PPO's: advantages come from values. Not a choice: the other rows have no use for one."""
    teacher: bool = False
    """Advantages are a teacher's log-probs less the policy's."""

    @property
    def needs_group(self) -> bool:
        """Whether a single completion of a prompt has no advantage."""
        return self.baseline != "none" or self.scale == "group" or self.dynamic_sampling > 1

    @property
    def needs_whole_step(self) -> bool:
        """Whether advantages are made from log-probs of all the step's rollouts."""
        return self.kl_place != "loss" or self.critic or self.teacher


ALGORITHMS: dict[str, Algorithm] = {
    "pg": Algorithm(
        idea="REINFORCE: reward times log-prob; with a baseline if you set one",
        source="Williams 1992, doi:10.1007/BF00992696",
        baseline="none", scale="none", surrogate="reinforce",
    ),
    "grpo": Algorithm(
        idea="advantages normalised in their group, clipped ratio, mean of sequence means, KL to "
        "the base",
        source="DeepSeekMath, arXiv:2402.03300 eq. 3 and 4; beta from section 4.2",
        aggregation="sequence_mean", kl="k3", kl_coefficient=0.04,
    ),
    "dapo": Algorithm(
        idea="a higher upper clip, all tokens alike, groups without signal sampled anew, no KL",
        source="DAPO, arXiv:2503.14476 eq. 8 to 11",
        clip_high=0.28, dynamic_sampling=3,
    ),
    "dr_grpo": Algorithm(
        idea="GRPO without the biases: no division by deviation or length",
        source="Dr. GRPO, arXiv:2503.20783 section 3.2",
        scale="none", aggregation="constant",
    ),
    "bnpo": Algorithm(
        idea="GRPO with all tokens of the optimizer batch alike",
        source="the loss_type of that name in TRL, after BNPO, arXiv:2506.02864",
    ),
    "gdpo": Algorithm(
        idea="each reward normalised in its group by itself, then the sum over the batch",
        source="GDPO, arXiv:2601.05242 eq. 4 to 7",
        normalization="per_reward", scale="whiten", aggregation="sequence_mean",
    ),
    "rloo": Algorithm(
        idea="the baseline is the mean of the others; whole completions; KL in the reward",
        source="RLOO, arXiv:2402.14740",
        baseline="leave_one_out", scale="none", surrogate="reinforce",
        aggregation="sequence_sum", kl="k1", kl_coefficient=0.05, kl_place="reward",
    ),
    "reinforce_pp": Algorithm(
        idea="no group: KL taken off every token's reward, returns whitened over the batch",
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
        idea="GSPO whose gradient and advantage are each token's own",
        source="GSPO, arXiv:2507.18071 eq. 13 and 14",
        ratio="sequence_token", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean",
    ),
    "luspo": Algorithm(
        idea="GSPO with each completion weighed by its length",
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
        idea="a smooth gate in the clip's place, steeper for negative advantages",
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
        idea="a critic's values in the place of a baseline; the KL to the start off each token",
        source="PPO, arXiv:1707.06347 eq. 7; GAE, arXiv:1506.02438 eq. 16; the KL off the reward, "
        "arXiv:1909.08593 eq. 2",
        baseline="none", scale="whiten", kl="k1", kl_coefficient=0.02, kl_place="token_reward",
        kl_reference="start", critic=True,
    ),
    "opd": Algorithm(
        idea="on-policy distillation: each token's reverse KL to a teacher as its advantage",
        source="arXiv:2306.13649 eq. 1 with beta = 1, as in tinker's train_on_policy",
        baseline="none", scale="none", teacher=True,
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SurrogateForm:
    """What a surrogate reads and maximises; its function, which needs torch, is of the same name in
    ``train.losses``."""

    latex: str
    """What is summed over the tokens; ``$A`` is the advantage, the others are the row's columns."""
    columns: tuple[str, ...] = ()
    """Columns that not every surrogate reads."""
    weights_inside: bool = False
    """Whether the importance weights are in its own ratio, and no factor beside it."""


SURROGATES: dict[Surrogate, SurrogateForm] = {
    "clip": SurrogateForm(
        r"\min($unclipped $A, \operatorname{clip}(r_{i,t}, 1 - $low, 1 + $high) $A)",
        ("ratio", "clip_low", "clip_high", "delta", "dual_clip"),
    ),
    "reinforce": SurrogateForm(r"$A \log \pi_θ(o_{i,t})"),
    "cispo": SurrogateForm(
        r"\operatorname{sg}(\operatorname{clip}(r_{i,t}, 1 - $low, 1 + $high)) "
        r"$A \log \pi_θ(o_{i,t})",
        ("ratio", "clip_low", "clip_high"),
    ),
    "sapo": SurrogateForm(
        r"\frac{4}{τ_A} σ(τ_A (r_{i,t} - 1)) $A",
        ("ratio", "temperature_positive", "temperature_negative"),
    ),
    "gmpo": SurrogateForm(
        r"$A \exp\left(\frac{1}{|o_i|} \sum_t \operatorname{clip}(\log r_{i,t})\right)",
        ("clip_low", "clip_high"),
    ),
    "vespo": SurrogateForm(r"\operatorname{sg}(φ_i) $A \log \pi_θ(o_{i,t})", weights_inside=True),
}


def resolve(name: str, overrides: dict[str, object]) -> Algorithm:
    """The row called ``name`` with the columns in ``overrides`` replaced.

    Raises:
        ValueError: an override that the resulting row would ignore, naming both options.
    """
    row = replace(ALGORITHMS[name], **overrides)  # type: ignore[arg-type]
    if row.kl == "none" and "kl" in overrides:
        taken_along = {"kl_coefficient": 0.0, "kl_place": "loss", "kl_reference": "base"}
        changes = {k: v for k, v in taken_along.items() if k not in overrides}
        row = replace(row, **changes)  # type: ignore[arg-type]
    for column, option, needed in _ignored(row, overrides):
        raise ValueError(
            f"algorithm.{column}={getattr(row, column)} would be ignored because {option}; {needed}"
        )
    _check_meaning(row)
    return row


FIXED = {"idea", "source", "critic", "teacher"}
"""What a config may not override."""


def columns() -> list[str]:
    """The names of all columns that a config may override."""
    return [field.name for field in fields(Algorithm) if field.name not in FIXED]


def _ignored(row: Algorithm, overrides: dict[str, object]) -> list[tuple[str, str, str]]:
    """(column, the option that makes it useless, the fix) for each override without effect."""
    found = []
    only_some = {column for form in SURROGATES.values() for column in form.columns}
    for column in sorted(only_some & overrides.keys()):
        surrogates = [name for name, form in SURROGATES.items() if column in form.columns]
        if row.surrogate not in surrogates:
            found.append((column, f"algorithm.surrogate is {row.surrogate}",
                          f"leave it out, or set surrogate to {surrogates[0]}"))  # fmt: skip
    if row.kl == "none" and row.kl_coefficient > 0:
        found.append(("kl_coefficient", "algorithm.kl is none",
                      "set algorithm.kl to k3, or leave kl_coefficient out"))  # fmt: skip
    if row.kl == "none" and row.kl_place != "loss":
        found.append(("kl_place", "algorithm.kl is none", "set algorithm.kl to k1"))
    if row.kl == "none" and "kl_reference" in overrides:
        found.append(("kl_reference", "algorithm.kl is none", "leave it out"))
    if row.kl_target > 0 and row.kl_place == "loss":
        found.append(("kl_target", "algorithm.kl_place is loss", "set kl_place to token_reward"))
    if row.kl_target == 0 and "kl_horizon" in overrides:
        found.append(("kl_horizon", "algorithm.kl_target is 0", "set a target above 0"))
    if row.kl != "none" and row.kl_coefficient == 0:
        found.append(("kl", "algorithm.kl_coefficient is 0",
                      "set a coefficient above 0, or algorithm.kl to none"))  # fmt: skip
    if row.keep != "top_k" and row.top_k > 0:
        found.append(("top_k", f"algorithm.keep is {row.keep}", "set algorithm.keep to top_k"))
    for column in ("correction_cap", "correction_floor"):
        if row.correction == "none" and column in overrides:
            found.append((column, "algorithm.correction is none",
                          "set algorithm.correction to token_truncate"))  # fmt: skip
    if row.min_reward_std > 0 and (not row.needs_group or row.critic or row.teacher):
        found.append(("min_reward_std", "the algorithm does not compare the completions of a group",
                      "leave it out, or set algorithm.name to grpo"))  # fmt: skip
    elif row.min_reward_std > 0 and row.kl_place != "loss" and row.dynamic_sampling == 1:
        found.append(("min_reward_std", f"algorithm.kl_place is {row.kl_place}, where the KL makes "
                      "advantages, too",
                      "leave it out, or set algorithm.kl_place to loss"))  # fmt: skip
    if row.dynamic_sampling == 1 and row.success_range is not None:
        found.append(("success_range", "algorithm.dynamic_sampling is 1",
                      "set algorithm.dynamic_sampling to 3"))  # fmt: skip
    return found


def _check_meaning(row: Algorithm) -> None:
    """Refuse combinations that contradict each other.

    Raises:
        ValueError: naming both options.
    """
    if row.keep == "top_k" and row.top_k < 1:
        raise ValueError("algorithm.keep=top_k needs algorithm.top_k; set it to 1 or more")
    if row.kl_place != "loss" and row.normalization == "per_reward":
        raise ValueError(
            f"algorithm.kl_place={row.kl_place} contradicts algorithm.normalization=per_reward, "
            "which knows no reward for the KL; set kl_place to loss"
        )
    if row.normalization == "per_reward" and row.baseline != "group_mean":
        raise ValueError(
            f"algorithm.baseline={row.baseline} contradicts algorithm.normalization=per_reward, "
            "which takes each reward's own mean in the group; set baseline to group_mean"
        )
    if row.normalization == "per_reward" and row.scale not in ("group", "whiten"):
        raise ValueError(
            f"algorithm.scale={row.scale} contradicts algorithm.normalization=per_reward, which "
            "divides each reward by its own deviation in the group; set scale to group, or to "
            "whiten, which does the same to their sum over the step"
        )
    if row.teacher and (row.baseline, row.scale, row.kl) != ("none", "none", "none"):
        raise ValueError(
            "algorithm.name=opd takes its advantages from the teacher alone: set baseline, scale "
            "and kl to none"
        )
    if row.critic and row.scale not in ("whiten", "none"):
        raise ValueError(
            f"algorithm.scale={row.scale} contradicts algorithm.name=ppo, whose advantages are "
            "each token's; set it to whiten or none"
        )
    if row.critic and (row.baseline != "none" or row.normalization != "total"):
        raise ValueError(
            "algorithm.name=ppo has a critic in the baseline's place; set baseline to none and "
            "normalization to total"
        )
    if row.critic and row.kl_place == "reward":
        raise ValueError(
            "algorithm.kl_place=reward contradicts algorithm.name=ppo, whose rewards are each "
            "token's; set it to token_reward or loss"
        )
    if (
        row.kl_place == "token_reward"
        and not row.critic
        and (row.baseline, row.scale) != ("none", "whiten")
    ):
        raise ValueError(
            f"algorithm.kl_place=token_reward contradicts algorithm.baseline={row.baseline} or "
            f"algorithm.scale={row.scale}: every token has its own return; set baseline to none "
            "and scale to whiten, or kl_place to reward"
        )
    if 0 < row.dual_clip <= 1:
        raise ValueError(
            f"algorithm.dual_clip={row.dual_clip} must be above 1, or 0 for none (arXiv:1912.09729)"
        )
    if 0 < row.delta <= 1 + row.clip_high:
        raise ValueError(
            f"algorithm.delta={row.delta} contradicts algorithm.clip_high={row.clip_high}: it must "
            f"be above 1 + clip_high, or 0 for none"
        )
    if 0 < row.max_ratio < 1:
        raise ValueError(
            f"algorithm.max_ratio={row.max_ratio} would leave every completion out: on policy the "
            "ratio is 1; set algorithm.max_ratio above 1, or to 0 for none"
        )
    if row.correction_floor >= row.correction_cap:
        raise ValueError(
            f"algorithm.correction_floor={row.correction_floor} contradicts "
            f"algorithm.correction_cap={row.correction_cap}: no weight lies between them; set it "
            "below the cap, or to 0 for none"
        )
    if row.surrogate in ("clip", "cispo") and row.clip_low > 1:
        raise ValueError(f"algorithm.clip_low={row.clip_low} is above 1; set it to 1 or less")
    if row.success_range is not None and row.success_range[0] > row.success_range[1]:
        raise ValueError(f"algorithm.success_range={list(row.success_range)} is empty")
