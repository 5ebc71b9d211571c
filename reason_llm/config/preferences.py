"""Table of preference losses, and the config's ``preference`` section, which names a row.

Notation: a = log pi(chosen) - log ref(chosen), b the same for rejected, h = a - b. The maths is in
``train.preferences``.

Differs: ``irpo`` takes the mean of the negative log-likelihood over all chosen tokens of the batch;
its paper divides each completion's by its own length. A run is one of the paper's iterations.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from reason_llm.config.rows import ChosenRow, Described, row_of_table, with_columns
from reason_llm.config.types import NonNegative, Positive

PreferenceLoss = Literal["sigmoid", "robust", "ipo", "kto", "orpo", "simpo"]


@row_of_table
class PreferenceRow(Described):
    """Row of the table. A config may change all columns except those in ``FIXED``."""

    loss: PreferenceLoss = "sigmoid"
    beta: Positive = 0.1
    """Strength of the pull to the reference. For orpo the weight of the odds ratio, for ipo tau,
    for simpo the scale of the mean log-probs."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Assumed fraction of pairs with swapped labels, below one half."""
    margin: NonNegative = 0.0
    """simpo: target margin gamma between the chosen and the rejected side."""
    normalize_length: bool = False
    """ipo: use means instead of sums of log-ratios over tokens."""
    nll_coefficient: NonNegative = 0.0
    """Weight of the negative log-likelihood of the chosen side, per token."""
    desirable_weight: Positive = 1.0
    """kto: weight of desirable completions."""
    undesirable_weight: Positive = 1.0
    """kto: weight of undesirable completions."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses the reference's log-probs."""
        return self.loss not in ("orpo", "simpo")

    @property
    def needs_pairs(self) -> bool:
        """Whether the loss takes pairs; KTO takes labelled completions."""
        return self.loss != "kto"


PREFERENCES: dict[str, PreferenceRow] = {
    "irpo": PreferenceRow(
        idea="DPO plus the NLL of the chosen side, which keeps it likely",
        source="IRPO, arXiv:2404.19733",
        nll_coefficient=1.0,
    ),
    "dpo": PreferenceRow(
        idea="the log-sigmoid of the difference of the log-ratios to the reference",
        source="DPO, arXiv:2305.18290 eq. 7",
    ),
    "cdpo": PreferenceRow(
        idea="DPO with some labels assumed to be swapped",
        source="Mitchell 2023, a note on DPO with noisy preferences, eq. 3",
        label_smoothing=0.1,
    ),
    "rdpo": PreferenceRow(
        idea="DPO without the bias that swapped labels cause",
        source="arXiv:2403.00409",
        loss="robust", label_smoothing=0.1,
    ),
    "ipo": PreferenceRow(
        idea="the squared distance of h from 1 / (2 beta), which bounds it",
        source="arXiv:2310.12036 eq. 17",
        loss="ipo",
    ),
    "kto": PreferenceRow(
        idea="single completions labelled good or bad, relative to the batch's KL",
        source="arXiv:2402.01306 (v1) eq. 7",
        loss="kto",
    ),
    "orpo": PreferenceRow(
        idea="the NLL of the chosen side plus the log odds ratio of both sides; no reference",
        source="arXiv:2403.07691 eq. 4, 6 and 7",
        loss="orpo", nll_coefficient=1.0,
    ),
    "simpo": PreferenceRow(
        idea="mean log-probs instead of log-ratios, with a margin; no reference",
        source="arXiv:2405.14734 eq. 6",
        loss="simpo", beta=2.0, margin=1.0,
    ),
}  # fmt: skip

_USED_BY: dict[str, tuple[str, ...]] = {
    "label_smoothing": ("sigmoid", "robust"),
    "margin": ("simpo",),
    "normalize_length": ("ipo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "nll_coefficient": ("sigmoid", "robust", "ipo", "orpo", "simpo"),
}
"""Losses that read a column, for columns that only some read."""


FIXED = {"idea", "source", "loss"}
"""Columns that a config may not change."""


def resolve(name: str, overrides: dict[str, object]) -> PreferenceRow:
    """Return the row ``name`` with changes; raises ValueError if it ignores one."""
    row = replace(PREFERENCES[name], **overrides)  # type: ignore[arg-type]
    for column, losses in _USED_BY.items():
        if column in overrides and row.loss not in losses:
            raise ValueError(
                f"preference.{column}={overrides[column]} would be ignored because "
                f"preference.name is {name}; leave it out"
            )
    return row


class _ChosenLoss(ChosenRow):
    """Preference loss, and changes to its row. null keeps the row's value."""

    TABLE = PREFERENCES
    name: str = "irpo"
    """Preference loss: irpo, dpo, cdpo, rdpo, ipo, kto, orpo or simpo."""

    def row(self) -> PreferenceRow:
        """Return the row with this section's changes; raise ValueError if one would be ignored."""
        return resolve(self.name, self.changes)


if TYPE_CHECKING:
    PreferenceSection = _ChosenLoss
else:
    PreferenceSection = with_columns("PreferenceSection", _ChosenLoss, PreferenceRow, FIXED)
