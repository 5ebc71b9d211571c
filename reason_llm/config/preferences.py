"""The table of preference losses, one row each, as ``algorithms`` is for reinforcement learning.

Standard library only. With a = log pi(chosen) - log ref(chosen), b likewise of the rejected one,
and h = a - b; the maths is in ``train.preferences``.
"""

from dataclasses import dataclass, fields, replace
from typing import Literal

PreferenceLoss = Literal["sigmoid", "robust", "ipo", "kto", "orpo", "simpo"]


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """One row. Every column but ``idea`` and ``source`` can be overridden in the config's
    ``preference`` section, whose fields say what each does."""

    idea: str
    """In a few words."""
    source: str
    """Paper and equation."""
    loss: PreferenceLoss = "sigmoid"
    beta: float = 0.1
    label_smoothing: float = 0.0
    margin: float = 0.0
    normalize_length: bool = False
    nll_coefficient: float = 0.0
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

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


def columns() -> list[str]:
    """The names of all columns that a config may override."""
    kept = {"idea", "source", "loss"}
    return [field.name for field in fields(PreferenceRow) if field.name not in kept]


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
    if row.loss == "robust" and not row.label_smoothing < 0.5:
        raise ValueError(
            f"preference.label_smoothing={row.label_smoothing} must be below 0.5 for {name}, which "
            "divides by 1 - 2 of it"
        )
    return row
