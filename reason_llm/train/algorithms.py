"""Every algorithm is one row of this table; adding one is a row and a test.

Standard library only, so that the config can check names and columns without torch. What each
column does is in ``advantages.py`` (baseline, scale) and ``losses.py`` (clip, aggregation, KL).
"""

from dataclasses import dataclass, replace
from typing import Literal

Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
KLEstimator = Literal["none", "k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One row. Every column but ``source`` can be overridden in the config's ``algorithm``
    section."""

    scale: Scale
    """What the group's centred rewards are divided by: the standard deviation of the group's or
    the whole step's (``batch``) rewards, or nothing."""
    clip_low: float
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float
    """The ratio is clipped above at 1 + clip_high."""
    aggregation: Aggregation
    """How token losses become one: mean of sequence means, mean over all tokens, or sum over N *
    max_new_tokens."""
    kl: KLEstimator
    """The estimator of KL(policy || reference) added to the loss."""
    kl_coefficient: float
    """Its weight (beta)."""
    source: str
    """Paper and equation."""


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(
        scale="group", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean",
        kl="k3", kl_coefficient=0.04,
        source="DeepSeekMath, arXiv:2402.03300 eq. 3 and 4; beta from section 4.2",
    ),
    "dapo": Algorithm(
        scale="group", clip_low=0.2, clip_high=0.28, aggregation="token_mean",
        kl="none", kl_coefficient=0.0,
        source="DAPO, arXiv:2503.14476 eq. 8: clip-higher and token-level loss",
    ),
    "dr_grpo": Algorithm(
        scale="none", clip_low=0.2, clip_high=0.2, aggregation="constant",
        kl="none", kl_coefficient=0.0,
        source="Dr. GRPO, arXiv:2503.20783 section 3.2",
    ),
}  # fmt: skip


def resolve(name: str, overrides: dict[str, object]) -> Algorithm:
    """The row called ``name`` with the columns in ``overrides`` replaced.

    Raises:
        ValueError: an override that the resulting row would ignore, or a KL without a coefficient.
    """
    row = replace(ALGORITHMS[name], **overrides)  # type: ignore[arg-type]
    if row.kl == "none" and "kl" in overrides and "kl_coefficient" not in overrides:
        row = replace(row, kl_coefficient=0.0)
    if row.kl == "none" and row.kl_coefficient > 0:
        raise ValueError(
            f"algorithm.kl_coefficient={row.kl_coefficient} would be ignored because "
            f"algorithm.kl is none for {name}; set algorithm.kl to k3, or leave kl_coefficient out"
        )
    if row.kl != "none" and row.kl_coefficient == 0:
        raise ValueError(
            f"algorithm.kl={row.kl} would be ignored because algorithm.kl_coefficient is 0; "
            "set a coefficient above 0, or algorithm.kl to none"
        )
    return row
