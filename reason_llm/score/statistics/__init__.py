"""Intervals of scores and paired comparison of models: numbers in, numbers out.

A score is a mean over problems of a value of each problem: 0 or 1 (greedy, maj@k), the part of its
k samples that is right (mean@k), or the chance that one of k is right (pass@k). Problems are drawn
independently; the samples of one problem are not independent, so the problem is the unit throughout
(a cluster). Source: Miller, Adding Error Bars to Evals, arXiv:2411.00640.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np

LEVEL = 0.95
Z = NormalDist().inv_cdf((1 + LEVEL) / 2)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its 95 % interval; nan for a single problem, which has no spread."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """One model minus another on the same problems."""

    difference: Estimate
    p_value: float
    """Two-sided, of no difference."""
    better: int
    """Problems on which the first one's value is the higher."""
    worse: int


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Probability that at least one of k samples is right, estimated without bias from n >= k.

    ``1 - C(n - c, k) / C(n, k)``, as the product of 1 - k / i for i from n - c + 1 to n, in which
    nothing overflows. Source: arXiv:2107.03374 eq. 1.
    """
    if not 0 <= num_right <= num_samples or not 1 <= k <= num_samples:
        raise ValueError(f"pass@{k} of {num_right} right among {num_samples}")
    if num_samples - num_right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1))


def wilson(value: float, count: float) -> Estimate:
    """Wilson's score interval of a proportion ``value`` of ``count`` trials; count need not be
    whole.

    Never empty, not even at 0 or 1, and never beyond them. Source: Wilson, Probable inference, the
    law of succession, and statistical inference, 1927.
    """
    centre = (value + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z * math.sqrt(value * (1 - value) / count + Z**2 / (4 * count**2)) / (1 + Z**2 / count)
    return Estimate(value, max(0.0, min(value, centre - half)), min(1.0, max(value, centre + half)))


def proportion(values: Sequence[float], trials_each: int = 1) -> Estimate:
    """Mean and interval of values from 0 to 1, one for each problem.

    Wilson's interval at the effective number of trials ``m (1 - m) / SE^2``, where m is the mean
    and SE its standard error over problems. It lies between the number of problems (the trials of a
    problem all agree; for values of 0 and 1 this is Wilson's interval itself) and the number of
    trials (they are independent). Source: Franco et al., Comparative Study of Confidence Intervals
    for Proportions in Complex Sample Surveys, 2019 (PMC6690503), which recommends Wilson's form at
    the effective sample size for clustered proportions; SE from arXiv:2411.00640.

    Args:
        trials_each: independent trials behind each value, such as k of mean@k.
    """
    mean, count = fmean(values), len(values)
    error = stdev(values) / math.sqrt(count) if count > 1 else 0.0
    most = count * trials_each
    effective = mean * (1 - mean) / error**2 if error > 0 else most
    if mean in (0.0, 1.0) or count == 1:
        effective = count  # neither trials that all agree nor one problem tell of independence
    return wilson(mean, min(max(effective, count), most))


def mean(values: Sequence[float]) -> Estimate:
    """Mean and interval of values of any range, by the central limit theorem over problems.

    Source: arXiv:2411.00640.
    """
    centre = fmean(values)
    half = Z * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(centre, centre - half, centre + half)


def estimate(values: Sequence[float], trials_each: int = 1) -> Estimate:
    """``proportion`` of values from 0 to 1, ``mean`` of others."""
    is_proportion = min(values) >= 0 and max(values) <= 1
    return proportion(values, trials_each) if is_proportion else mean(values)


def compare(ours: Sequence[float], theirs: Sequence[float], unit: float) -> Comparison:
    """Difference of two models on the same problems, in the same order.

    The interval is ``paired_interval``, extended to 0 if the test of no difference does not reject
    it: an interval without 0 always has a p-value of at most 0.05. The reverse holds for verdicts
    of 0 and 1.

    Args:
        unit: of which all values are multiples, such as 1 / k; 0 if there is none.
    """
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    p_value = (
        exact_sign_flip([round(d / unit) for d in differences])
        if unit
        else _normal_sign_flip(differences)
    )
    least, most = min(*ours, *theirs), max(*ours, *theirs)
    low, high = paired_interval(differences, 1.0 if 0 <= least <= most <= 1 else most - least)
    if p_value > 1 - LEVEL:
        low, high = min(low, 0.0), max(high, 0.0)
    return Comparison(
        difference=Estimate(fmean(differences), low, high),
        p_value=p_value,
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
    )


def paired_interval(differences: Sequence[float], bound: float) -> tuple[float, float]:
    """Score interval of the mean of paired differences, each from -bound to bound; nan if the bound
    is 0.

    It holds each mean d that is within Z standard errors of the observed one, where the error is
    that of the likeliest distribution whose mean is d. For differences of -1, 0 and 1 this is
    Tango's interval; without any difference among n problems, it is ``± Z^2 / (n + Z^2)``. A
    standard error of the observed differences would be 0 there, and too small where few differ.
    Source: Tango, Equivalence test and confidence interval for the difference in proportions for
    the paired-sample design, 1998, eq. 2; recommended by Fagerland, Lydersen and Laake, Recommended
    tests and confidence intervals for paired binomial proportions, 2014.

    Differs: from Tango for other differences, where the likeliest distribution is on the observed
    values and the bounds (Owen, Empirical likelihood ratio confidence intervals for a single
    functional, 1988).
    """
    if not bound:
        return math.nan, math.nan
    ends = [
        _upper_end(np.asarray(side) / bound) * bound
        for side in (-np.array(differences), differences)
    ]
    return -ends[0], ends[1]


def _upper_end(differences: np.ndarray) -> float:
    """The upper end of ``paired_interval`` of differences from -1 to 1."""
    values, counts = np.unique(differences, return_counts=True)
    chances, observed = counts / len(differences), float(differences.mean())

    def excess(mean: float) -> float:
        error = math.sqrt(_variance_at(mean, values, chances) / len(differences))
        return mean - observed - Z * error

    return _root(excess, observed, 1.0) if observed < 1 else 1.0


def _variance_at(mean: float, values: np.ndarray, chances: np.ndarray) -> float:
    """Variance of the likeliest distribution with a ``mean`` above the observed one: the observed
    chances over ``1 - tilt (value - mean)``, and the rest of the mass on 1."""
    off = values - mean

    def pull(tilt: float) -> float:
        return float((chances * off / (1 - tilt * off)).sum())

    most = 1 / (1 - mean)
    tilt = _root(pull, 0.0, most * (1 - 1e-12) if values[-1] >= 1 else most)
    tilted = chances / (1 - tilt * off)
    return float((tilted * off**2).sum() + max(0.0, 1 - tilted.sum()) * (1 - mean) ** 2)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Where an increasing function is 0, by bisection; ``high`` if it is negative throughout."""
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return high


def exact_sign_flip(differences: Sequence[int]) -> float:
    """Two-sided p-value of the paired permutation test, over all sign assignments of the
    differences.

    With differences of -1, 0 and 1 it is McNemar's exact test. The distribution of the sum is built
    one difference at a time. Source: Fisher, The Design of Experiments, 1935; McNemar, Note on the
    sampling error of the difference between correlated proportions or percentages, 1947.
    """
    sizes = [abs(d) for d in differences if d]
    total = sum(sizes)
    chances = np.zeros(2 * total + 1)  # of the sums -total .. total
    chances[total] = 1.0
    reach = 0
    for size in sizes:
        near = chances[total - reach : total + reach + 1] / 2
        reach += size
        chances[total - reach : total + reach + 1] = 0.0
        chances[total - reach : total - reach + len(near)] += near
        chances[total + reach + 1 - len(near) : total + reach + 1] += near
    observed = abs(sum(differences))
    return min(1.0, 2 * float(chances[total + observed :].sum())) if observed else 1.0


def _normal_sign_flip(differences: Sequence[float]) -> float:
    """The normal approximation of ``exact_sign_flip``, for values without a common unit: signs at
    random give a sum of mean 0 and variance ``sum(d^2)``."""
    scale = math.hypot(*differences)
    return 2 * NormalDist().cdf(-abs(math.fsum(differences)) / scale) if scale else 1.0
