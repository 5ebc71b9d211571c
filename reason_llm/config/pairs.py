"""The choice of rollouts that become rows: options of the command ``pairs``."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from reason_llm.config.types import Count, NonNegative, Section
from reason_llm.errors import ConfigError

PairForm = Literal["preferences", "labels", "demonstrations", "conditioned"]
PAIR_FORMS: tuple[PairForm, ...] = get_args(PairForm)
WAYS: dict[PairForm, tuple[str, ...]] = {
    "preferences": ("best_worst", "threshold", "all"),
    "labels": ("threshold",),
    "demonstrations": ("threshold", "best"),
    "conditioned": ("all",),
}
"""Values of ``by`` for each form of rows, the default first."""


class PairsSection(Section):
    """The choice among the completions of each prompt."""

    by: Literal["best_worst", "threshold", "all", "best"] | None = None
    """best_worst: a pair of the best and the worst completion. threshold: of preferences the same,
    if only the best is right; of labels each completion, right or wrong; of demonstrations the
    right ones. all: each right completion with each wrong one; of conditioned every completion.
    best: the best completions, right or not. null: best_worst for preferences, all for conditioned,
    else threshold."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Completions with at least this reward are right."""
    min_margin: NonNegative = 0.0
    """Pairs whose rewards are less than this apart are left out; equal ones always are."""
    per_prompt: Count | None = None
    """Most rows of a prompt, over all buffers; of labels, most right ones and most wrong ones.
    null: 1 for best, else no limit."""
    reward: str | None = None
    """Name of the reward that chooses. null: the weighted sum."""
    bins: Annotated[int, Field(ge=0, le=100, strict=True)] = 5
    """Of conditioned: the number of quantiles (of the distinct scores, where so many are equal that
    a bin would be empty), of which the question names the row's own, from 0 for the worst. 0: it
    names the score as a z-score over all rows."""
    condition_text: str = " <rm_score>: {reward} "
    """Of conditioned: what follows the question, with the number for {reward}."""

    @field_validator("bins")
    @classmethod
    def _is_no_single_bin(cls, value: int) -> int:
        if value == 1:
            raise ValueError("tells no score from another; set it to 0, or to 2 or more")
        return value

    def way(self, form: PairForm) -> str:
        """``by`` for rows of this form.

        Raises:
            ConfigError: there is no such way, or an option would be ignored.
        """
        way = self.by or WAYS[form][0]
        if way not in WAYS[form]:
            raise ConfigError(
                f"by {way} makes no {form}; take by {' or '.join(WAYS[form])}, or another form"
            )
        is_conditioned = form == "conditioned"
        ignored = {
            "threshold": is_conditioned or way in ("best_worst", "best"),
            "min_margin": form != "preferences",
            "bins": not is_conditioned,
            "condition_text": not is_conditioned,
        }
        for name, is_ignored in ignored.items():
            value = getattr(self, name)
            if is_ignored and value != type(self).model_fields[name].default:
                raise ConfigError(
                    f"{name}={value} would be ignored, as {form} by {way} do not read it; leave it "
                    "out"
                )
        return way
