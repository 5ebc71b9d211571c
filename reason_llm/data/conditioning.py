"""Conditional SFT: a demonstration's score is written into its prompt, as a z-score or as the
number of its quantile bin, so that a policy learns what a good and a bad answer is, and is sampled
with a good score in the prompt. It is saved beside the adapter, as ``conditioning.json``.

Source: arXiv:2308.12050, as OpenRLHF wrote it until March 2026 (``conditional_sft_processor`` of
openrlhf/utils/processor.py); the bins are those of arXiv:2205.13636, whose control tokens are text
here.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import orjson
from pydantic import TypeAdapter

from reason_llm.config import SupervisedSection
from reason_llm.data.forms import Completed
from reason_llm.data.messages import Messages
from reason_llm.errors import ConfigError, DataError, one_line
from reason_llm.files import MIB, read_object, sealed, write_atomically

BEST_SCORE = "5.00"
"""The z-score in the prompt when the policy is sampled."""
FILE = "conditioning.json"
_FIELDS = ("{input}", "{reward}")


@dataclass(frozen=True, slots=True)
class Conditioning:
    """``sft.condition``, fitted to the scores of a training set."""

    template: str
    mean: float
    deviation: float
    edges: tuple[float, ...] | None
    """The K - 1 borders of the bins, in the unit of the scores; None for z-scores."""
    target: str = BEST_SCORE
    """The value of {reward} in the prompt when the policy is sampled."""

    def reward_text(self, score: float) -> str:
        """What stands for {reward}: ``1.16`` of a z-score, or ``4`` of the fifth bin."""
        if self.edges is None:
            return f"{(score - self.mean) / self.deviation:.2f}"
        return str(bin_of(score, self.edges))

    def prompt(self, text: str, reward: str) -> str:
        """The text with a reward; braces in the text itself are left alone."""
        before, _, after = self.template.partition("{input}")
        return before.replace("{reward}", reward) + text + after.replace("{reward}", reward)

    def apply(self, example: Completed) -> Completed:
        """The demonstration with its score in the user's last message; DataError if the prompt does
        not end with one, or is token ids."""
        if example.sampled is not None:
            raise DataError(
                f"{example.where}: its prompt is token ids, which a score cannot be written into; "
                "set sft.condition=none, or give rows of texts"
            )
        reward = self.reward_text(example.value)
        return replace(example, messages=self.asking(example.where, example.messages, reward))

    def write(self, folder: Path) -> None:
        """Save into a run's or an adapter's folder."""
        content = orjson.dumps(asdict(self), option=orjson.OPT_INDENT_2)
        write_atomically(folder / FILE, sealed(content))

    def asking(self, where: str, messages: Messages, reward: str | None = None) -> Messages:
        """The messages with a reward (None: the target, for sampling) in the user's last one."""
        *earlier, last = messages
        if last["role"] != "user":
            raise DataError(
                f"{where}: the prompt ends with a message of {last['role']!r:.60}; "
                "expected one of the user, which the score is written into"
            )
        return [*earlier, {**last, "content": self.prompt(last["content"], reward or self.target)}]


def read(folder: Path) -> Conditioning | None:
    """What ``Conditioning.write`` saved; None if nothing was, DataError for a damaged file."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = orjson.dumps(read_object(path, MIB))
        saved = TypeAdapter(Conditioning).validate_json(content, strict=True)
        _check_template(saved.template)
    except (OSError, ValueError) as error:
        raise DataError(
            f"{path} is damaged ({one_line(error)[:200]}); restore it, or remove it to ask without "
            "a score"
        ) from error
    return saved


def _check_template(template: str) -> None:
    for name in _FIELDS:
        if template.count(name) != 1:
            raise ConfigError(
                f"the template {template!r:.200} of the condition holds {name} "
                f"{template.count(name)} times; write {' and '.join(_FIELDS)} once each"
            )


def fit(scores: Sequence[float], section: SupervisedSection) -> Conditioning:
    """The condition fitted to the scores of all training rows: z = (score - mean) / deviation, with
    the unbiased deviation, in float64.

    Raises:
        ConfigError: the text lacks a field.
        DataError: all scores are equal, or too large to be compared.
    """
    text, num_bins = section.condition_text, section.condition_bins
    _check_template(text)
    if len(set(scores)) < 2:
        raise DataError(
            f"all {len(scores)} scores are equal, so there is nothing to tell good from bad; give "
            "rows with different numbers in the column 'score'"
        )
    if section.condition == "bins":
        edges = quantile_edges(scores, num_bins)
        distinct = sorted(set(scores))
        if len({bin_of(score, edges) for score in distinct}) < min(num_bins, len(distinct)):
            edges = quantile_edges(distinct, num_bins)
        target = section.condition_target or str(num_bins - 1)
        return Conditioning(text, 0.0, 1.0, edges, target)
    with np.errstate(over="ignore", invalid="ignore"):
        mean, deviation = float(np.mean(scores)), float(np.std(scores, ddof=1))
    if not (math.isfinite(mean) and math.isfinite(deviation) and deviation > 0):
        raise DataError(
            f"the scores from {min(scores):g} to {max(scores):g} have no finite deviation; write "
            "smaller numbers into the column 'score'"
        )
    return Conditioning(text, mean, deviation, None, section.condition_target or BEST_SCORE)


def quantile_edges(scores: Sequence[float], num_bins: int) -> tuple[float, ...]:
    """The quantiles 1/K .. (K-1)/K, with linear interpolation: ``[0, 1, 2, 3, 4], 2 -> (2.0,)``."""
    shares = np.arange(1, num_bins) / num_bins
    return tuple(np.quantile(np.asarray(scores, np.float64), shares, method="linear").tolist())


def bin_of(score: float, edges: Sequence[float]) -> int:
    """The number of edges that are at most the score: 0 for the worst, K - 1 for the best."""
    return sum(edge <= score for edge in edges)
