"""Scores in prompts, for conditional SFT: the score of a completion follows the question, as the
number of its quantile bin or as a z-score, so that a policy learns to distinguish good and bad
answers and can be asked for a good one.

Source: arXiv:2308.12050, as OpenRLHF wrote it until March 2026 (``conditional_sft_processor`` of
openrlhf/utils/processor.py); bins: arXiv:2205.13636, with text instead of control tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from reason_llm.config import Config, PairsSection
from reason_llm.data import renderer_of
from reason_llm.errors import DataError, RolloutBufferError, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QUESTION = "question-8315"


@dataclass(frozen=True, slots=True)
class Condition:
    """Text after each question, fitted to the scores of all rows."""

    mean: float
    deviation: float
    edges: tuple[float, ...] | None
    """K - 1 bin edges, in units of the score; None for z-scores."""

    def text(self, score: float) -> str:
        """Return the text after the question, such as `` <rm_score>: 4 `` in the fifth bin."""
        if self.edges is None:
            return f" <rm_score>: {(score - self.mean) / self.deviation:.2f} "
        return f" <rm_score>: {bin_of(score, self.edges)} "


def fit(scores: Sequence[float], section: PairsSection) -> Condition:
    """Fit the condition to the scores of all rows: z = (score - mean) / deviation, with the
    unbiased deviation, in float64. Raises a DataError if they are all equal, or too large."""
    num_bins = section.bins
    if len(set(scores)) < 2:
        raise DataError(
            f"all {len(scores)} scores are equal, so there is nothing to tell good from bad; give "
            "rollouts with different rewards"
        )
    if num_bins:
        edges = quantile_edges(scores, num_bins)
        distinct = sorted(set(scores))
        # Where many scores are equal, the quantiles of all of them would leave bins empty.
        if len({bin_of(score, edges) for score in distinct}) < min(num_bins, len(distinct)):
            edges = quantile_edges(distinct, num_bins)
        return Condition(0.0, 1.0, edges)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(np.mean(scores)), float(np.std(scores, ddof=1))
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0):
        raise DataError(
            f"the scores from {min(scores):g} to {max(scores):g} have no finite deviation; give "
            "smaller ones"
        )
    return Condition(mean, deviation, None)


def quantile_edges(scores: Sequence[float], num_bins: int) -> tuple[float, ...]:
    """Return the quantiles 1/K .. (K-1)/K, linearly interpolated."""
    shares = np.arange(1, num_bins) / num_bins
    return tuple(np.quantile(np.asarray(scores, np.float64), shares, method="linear").tolist())


def bin_of(score: float, edges: Sequence[float]) -> int:
    """Return the bin of a score, the number of edges up to it: 0 is the worst, K - 1 the best."""
    return sum(edge <= score for edge in edges)


def _options_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a stored config, without the digests that identify its run."""
    options = {}
    for name, value in config.items():
        if (field := Config.model_fields.get(name)) is None:
            continue
        known = getattr(field.annotation, "model_fields", None)
        if known is not None and isinstance(value, Mapping):
            value = {option: each for option, each in value.items() if option in known}
        options[name] = value
    return options


class QuestionEnd:
    """End of the question in the prompts of a run, by the config stored with its rollouts."""

    def __init__(self, config: Mapping[str, Any], tokenizer: "PreTrainedTokenizerBase") -> None:
        try:
            config_of_run = Config.model_validate(_options_of(config))
        except ValueError as error:
            raise RolloutBufferError(
                f"the rollouts' config is not one of this version ({one_line(error)[:200]}), so "
                "where a question ends is unknown; sample them again"
            ) from error
        self._renderer = renderer_of(config_of_run, tokenizer)
        rendered = self._renderer.text("a question", [{"role": "user", "content": _QUESTION}])
        self._after = rendered.rpartition(_QUESTION)[2]

    def insert(self, row: dict[str, Any], text: str) -> dict[str, Any] | None:
        """Return the row of a rollout with the text at the end of the question; None if its prompt
        does not end like the chat template, or its token ids differ from its text."""
        prompt, name = row["prompt"], row["source"]
        if not prompt.endswith(self._after):
            return None
        if self._renderer.marked_ids(name, prompt) != list(row["prompt_ids"]):
            return None
        changed = prompt.removesuffix(self._after) + text + self._after
        return row | {"prompt": changed, "prompt_ids": self._renderer.marked_ids(name, changed)}
