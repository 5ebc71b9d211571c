"""Options of the command ``pairs``, which selects rollouts to write as training rows."""

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from reason_llm.config.types import Count, Section
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
    """Selection among the completions of each prompt."""

    by: Literal["best_worst", "threshold", "all", "best"] | None = None
    """Selection rule. best_worst: the best and the worst completion as a pair, unless their rewards
    are equal. threshold: for preferences the same if only the best is correct; for labels every
    completion, labelled correct or wrong; for demonstrations the correct ones. all: each correct
    completion with each wrong one; for conditioned every completion. best: the best completions,
    correct or not. null: best_worst for preferences, all for conditioned, otherwise threshold."""
    threshold: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Min reward of a correct completion."""
    per_prompt: Count | None = None
    """Max rows per prompt over all buffers; for labels, per label. null: 1 for best, otherwise no
    limit."""
    reward: str | None = None
    """Name of the reward to select by. null: the weighted sum."""
    bins: Annotated[int, Field(ge=0, le=100, strict=True)] = 5
    """For conditioned: number of quantile bins of the score (of the distinct scores, if ties would
    leave a bin empty); the question contains the bin of the row, 0 for the worst. 0: the question
    contains the z-score over all rows."""

    @field_validator("bins")
    @classmethod
    def _is_no_single_bin(cls, value: int) -> int:
        if value == 1:
            raise ValueError("does not separate scores; set it to 0, or to 2 or more")
        return value

    def way(self, form: PairForm) -> str:
        """Return ``by`` for rows of this form; raises a ConfigError if the form has no such rule,
        or an option would be ignored."""
        way = self.by or WAYS[form][0]
        if way not in WAYS[form]:
            raise ConfigError(
                f"by {way} makes no {form}; set by to {' or '.join(WAYS[form])}, or use another "
                "form"
            )
        is_conditioned = form == "conditioned"
        ignored = {
            "threshold": is_conditioned or way in ("best_worst", "best"),
            "bins": not is_conditioned,
        }
        for name, is_ignored in ignored.items():
            value = getattr(self, name)
            if is_ignored and value != type(self).model_fields[name].default:
                raise ConfigError(
                    f"{name}={value} would be ignored, as {form} by {way} do not read it; leave it "
                    "out"
                )
        return way
