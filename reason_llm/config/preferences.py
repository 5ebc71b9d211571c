"""The table of preference losses, one row each, and the config's ``preference`` section, as
``algorithms`` has them for reinforcement learning.

With a = log pi(chosen) - log ref(chosen), b likewise of the rejected one,
and h = a - b; the maths is in ``train.preferences``.

Differs: ``irpo`` takes the mean of the negative log-likelihood over all chosen tokens of the batch;
its paper divides each completion's by its own length. A run is one of the paper's iterations.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from reason_llm.config.rows import ChosenRow, row_of_table, with_columns
from reason_llm.config.types import NonNegative, Positive

PreferenceLoss = Literal["sigmoid", "robust", "ipo", "kto", "orpo", "simpo"]


@row_of_table
class PreferenceRow:
    """One row. A config may change every column but those in ``FIXED``."""

    idea: str
    """The idea in a few words."""
    source: str
    """The paper and its equation."""
    loss: PreferenceLoss = "sigmoid"
    beta: Positive = 0.1
    """How far the policy may go from the reference: larger stays nearer. (orpo: the weight of the
    odds; ipo: tau; simpo: the scale of the mean log-probs.)"""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of pairs whose sides are taken to be swapped. One half and more would turn the loss
    against the chosen side."""
    margin: NonNegative = 0.0
    """simpo: the margin gamma by which the chosen side must be ahead."""
    normalize_length: bool = False
    """ipo: log-ratios are means over tokens in the place of sums."""
    nll_coefficient: NonNegative = 0.0
    """Weight of the chosen side's negative log-likelihood, per token."""
    desirable_weight: Positive = 1.0
    """kto: weight of completions labelled good."""
    undesirable_weight: Positive = 1.0
    """kto: weight of those labelled bad."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference's log-probs."""
        return self.loss not in ("orpo", "simpo")

    @property
    def needs_pairs(self) -> bool:
        """Whether it takes pairs; KTO takes single completions with a label."""
        return self.loss != "kto"


PREFERENCES: dict[str, PreferenceRow] = {
    "irpo": PreferenceRow(
        idea="DPO, and the negative log-likelihood of the chosen side, which keeps it likely",
        source="IRPO, arXiv:2404.19733",
        nll_coefficient=1.0,
    ),
    "dpo": PreferenceRow(
        idea="the log-sigmoid of the difference of the log-ratios to the reference",
        source="DPO, arXiv:2305.18290 eq. 7",
    ),
    "cdpo": PreferenceRow(
        idea="DPO where some labels are taken to be swapped",
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
        idea="single completions labelled good or bad, against the batch's KL",
        source="arXiv:2402.01306 (v1) eq. 7",
        loss="kto",
    ),
    "orpo": PreferenceRow(
        idea="the NLL of the chosen side and its odds against the rejected one; no reference",
        source="arXiv:2403.07691 eq. 4, 6 and 7",
        loss="orpo", nll_coefficient=1.0,
    ),
    "simpo": PreferenceRow(
        idea="mean log-probs in the place of log-ratios, with a margin; no reference",
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
"""Columns that only some losses read."""


FIXED = {"idea", "source", "loss"}
"""Columns that a config may not change."""


def resolve(name: str, overrides: dict[str, object]) -> PreferenceRow:
    """The row called ``name`` with the columns in ``overrides`` replaced.

    Raises:
        ValueError: an override that the row would ignore, or a value that it cannot have.
    """
    row = replace(PREFERENCES[name], **overrides)  # type: ignore[arg-type]
    for column, losses in _USED_BY.items():
        if column in overrides and row.loss not in losses:
            raise ValueError(
                f"preference.{column}={overrides[column]} would be ignored because "
                f"preference.name is {name}; leave it out"
            )
    return row


class _ChosenLoss(ChosenRow):
    """A row of the table of preference losses and what to change in it. null: the row's own."""

    TABLE = PREFERENCES
    name: str = "irpo"
    """The row: irpo, dpo, cdpo, rdpo, ipo, kto, orpo or simpo."""

    def row(self) -> PreferenceRow:
        """The table's row with this section's changes; ValueError if one would be ignored."""
        return resolve(self.name, self.changes)


if TYPE_CHECKING:
    PreferenceSection = _ChosenLoss
else:
    PreferenceSection = with_columns("PreferenceSection", _ChosenLoss, PreferenceRow, FIXED)
