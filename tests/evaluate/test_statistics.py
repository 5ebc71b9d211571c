"""Scores and their intervals, against the exact formulas, against every case counted, and against
what scipy 1.17.1 and statsmodels 0.15.0 gave for the same numbers."""

import itertools
import math
import random

import pytest

from marks import most_are_long
from reason_llm.score import statistics
from reason_llm.score.statistics import (
    compare,
    exact_sign_flip,
    mean,
    paired_interval,
    pass_at_k,
    proportion,
    wilson,
)

OURS = [7, 7, 8, 8, 8, 2, 2, 5, 7, 7, 0, 6, 5, 6, 1, 0, 6, 8, 4, 2, 7, 6, 1, 0, 0, 6, 7, 4, 2, 1,
        0, 0, 8, 2, 0, 8, 8, 7, 8, 8]  # fmt: skip
THEIRS = [4, 7, 7, 8, 2, 8, 6, 4, 8, 0, 5, 8, 8, 3, 0, 3, 8, 7, 6, 8, 6, 0, 1, 2, 5, 5, 8, 7, 8, 4,
          7, 8, 2, 1, 8, 8, 6, 1, 2, 2]  # fmt: skip
"""Right ones of 8 samples of each of 40 problems."""


@pytest.mark.parametrize("num_samples", [1, 2, 5, 16, 200])
def test_pass_at_k_is_the_exact_formula(num_samples: int) -> None:
    for k in {1, 2, num_samples // 2, num_samples - 1, num_samples} - {0}:
        for right in range(num_samples + 1):
            if k > num_samples:
                continue
            missed = math.comb(num_samples - right, k) / math.comb(num_samples, k)
            assert pass_at_k(num_samples, right, k) == pytest.approx(1 - missed, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_choices_of_k() -> None:
    samples = [1, 0, 0, 1, 0, 0]
    for k in range(1, 7):
        choices = list(itertools.combinations(samples, k))
        exact = sum(any(choice) for choice in choices) / len(choices)
        assert pass_at_k(6, 2, k) == pytest.approx(exact)


def test_pass_at_k_of_what_cannot_be() -> None:
    for case in ((4, 5, 1), (4, 2, 5), (4, 2, 0), (4, -1, 1)):
        with pytest.raises(ValueError, match="pass@"):
            pass_at_k(*case)


@pytest.mark.parametrize(
    ("right", "count", "low", "high"),
    [  # scipy.stats.binomtest(right, count).proportion_ci(method="wilson")
        (0, 30, 0.0, 0.11351339317396875),
        (1, 30, 0.005908590381612441, 0.16670390991409173),
        (15, 30, 0.3315412564053377, 0.6684587435946623),
        (30, 30, 0.8864866068260312, 1.0),
        (233, 256, 0.8687984850418649, 0.9393866327337874),
        (700, 1319, 0.5037224879302896, 0.5575093395573453),
    ],
)
def test_wilson_as_scipy_has_it(right: int, count: int, low: float, high: float) -> None:
    values = [1.0] * right + [0.0] * (count - right)
    for found in (wilson(right / count, count), proportion(values)):
        assert (found.low, found.high) == pytest.approx((low, high), abs=1e-12)


def test_samples_of_a_problem_count_as_what_they_tell() -> None:
    """The clustered standard error is that of statsmodels' OLS with cov_type="cluster", times
    sqrt(n / (n - 1)); the interval is statsmodels' Wilson one at the effective size."""
    found = proportion([right / 8 for right in OURS], trials_each=8)
    assert found.value == pytest.approx(0.56875)
    assert (found.low, found.high) == pytest.approx((0.4479923762546415, 0.6818510680670061))


def test_the_interval_is_as_wide_as_its_evidence() -> None:
    def width(values: list[float], each: int) -> float:
        found = proportion(values, each)
        return found.high - found.low

    agreeing, independent = [1.0, 0.0] * 20, [0.5] * 40
    assert width(agreeing, 8) == width(agreeing, 1)  # 40 problems, each all right or all wrong
    assert width(independent, 8) == pytest.approx(
        wilson(0.5, 320).high - wilson(0.5, 320).low
    )  # as 320 coins
    assert width([1.0] * 40, 8) == wilson(1.0, 40).high - wilson(1.0, 40).low
    assert proportion([1.0]).low == pytest.approx(wilson(1.0, 1).low)
    assert width([0.5], 8) == wilson(0.5, 1).high - wilson(0.5, 1).low  # not as 8 problems


def test_intervals_cover_what_they_should() -> None:
    """95 % of the intervals of simulated evaluations hold the truth, also where the normal one
    fails."""
    generator = random.Random(0)
    for alpha, beta in ((0.5, 0.5), (0.2, 3.0)):
        truth, hits = alpha / (alpha + beta), 0
        for _ in range(1000):
            chances = [generator.betavariate(alpha, beta) for _ in range(30)]
            values = [sum(generator.random() < c for _ in range(4)) / 4 for c in chances]
            found = proportion(values, trials_each=4)
            hits += found.low <= truth <= found.high
        assert 0.92 <= hits / 1000 <= 0.98


@pytest.mark.parametrize(
    ("better", "worse", "p_value"),
    [  # statsmodels' mcnemar(exact=True)
        (1, 0, 1.0),
        (5, 1, 0.21875),
        (10, 10, 1.0),
        (30, 12, 0.007915897334896727),
        (150, 7, 4.674586427453427e-36),
    ],
)
def test_on_zeros_and_ones_it_is_mcnemar_s_exact_test(
    better: int, worse: int, p_value: float
) -> None:
    ours = [1.0] * better + [0.0] * worse + [1.0, 0.0]
    theirs = [0.0] * better + [1.0] * worse + [1.0, 0.0]
    found = compare(ours, theirs, unit=1.0)
    assert (found.better, found.worse) == (better, worse)
    assert found.p_value == pytest.approx(p_value, rel=1e-9)


@pytest.mark.parametrize("start", [0, 7, 20])
def test_every_assignment_of_signs_is_counted(start: int) -> None:
    differences = [
        a - b for a, b in zip(OURS[start : start + 12], THEIRS[start : start + 12], strict=True)
    ]
    observed = abs(sum(differences))
    as_large = sum(
        abs(sum(s * d for s, d in zip(signs, differences, strict=True))) >= observed
        for signs in itertools.product((-1, 1), repeat=12)
    )
    assert exact_sign_flip(differences) == pytest.approx(as_large / 2**12)


def test_paired_differences_as_statsmodels_has_them() -> None:
    ours, theirs = [a / 8 for a in OURS], [b / 8 for b in THEIRS]
    found = compare(ours, theirs, unit=1 / 8)
    assert found.difference.value == pytest.approx(-0.059375)
    # Theirs is that of the paired standard error, which the score agrees with for many problems.
    assert (found.difference.low, found.difference.high) == pytest.approx(
        (-0.22230929, 0.10355929), abs=0.02
    )
    assert 0.3 < found.p_value < 0.7  # the normal approximation of 0.71 errors is 0.475
    assert compare(ours, theirs, unit=0).p_value == pytest.approx(found.p_value, abs=0.03)


@pytest.mark.parametrize("unit", [1.0, 0.0])
@pytest.mark.parametrize("count", most_are_long([4, 8, 40], [8]))
def test_interval_and_p_value_agree(count: int, unit: float) -> None:
    """At 8 problems, 4 better and none worse: the standard error excluded 0 beside p = 0.125."""
    for better in range(count + 1):
        ours, theirs = [1.0] * better + [0.0] * (count - better), [0.0] * count
        found = compare(ours, theirs, unit=unit)
        excludes = found.difference.low > 0
        assert excludes == (found.p_value <= 0.05), (better, found)
        assert found.difference.high <= 1


@pytest.mark.parametrize(
    ("better", "worse", "count", "low", "high"),
    [  # Fagerland, Lydersen and Laake 2014, table V; then by hand
        (1, 7, 21, -0.517, -0.026),
        (0, 0, 100, -3.8415 / 103.8415, 3.8415 / 103.8415),
        (0, 5, 5, -1, (3.8415 - 5) / (3.8415 + 5)),  # 1 - d^2 is the variance at a mean of d
    ],
)
def test_verdicts_have_tango_s_interval(
    better: int, worse: int, count: int, low: float, high: float
) -> None:
    differences = [1.0] * better + [-1.0] * worse + [0.0] * (count - better - worse)
    assert paired_interval(differences, 1.0) == pytest.approx((low, high), abs=5e-4)
    mirrored = paired_interval([-d for d in differences], 1.0)
    assert mirrored == pytest.approx((-high, -low), abs=5e-4)


def test_both_ends_solve_tango_s_equation() -> None:
    """His eq. 2: (b - c - n d) / sqrt(n (2 q + d (1 - d))) = +-Z, with q the larger root of
    2 n q^2 + (-b - c + (2 n - b + c) d) q - c d (1 - d) = 0."""
    for b, c, n in ((3, 1, 12), (40, 20, 160), (2, 0, 100), (9, 9, 30)):
        ends = paired_interval([1.0] * b + [-1.0] * c + [0.0] * (n - b - c), 1.0)
        for d, z in zip(ends, (statistics.Z, -statistics.Z), strict=True):
            linear = -b - c + (2 * n - b + c) * d
            q = (math.sqrt(linear**2 + 8 * n * c * d * (1 - d)) - linear) / (4 * n)
            assert (b - c - n * d) / math.sqrt(n * (2 * q + d * (1 - d))) == pytest.approx(z)


def test_several_samples_of_a_problem_have_an_interval_of_their_values() -> None:
    """By hand: n differences of v. A mean d above v has the mass (1 - d) / (1 - v) on v and the
    rest on 1, a variance of (d - v) (1 - d), and so an upper end of (v + r) / (1 + r), r = Z^2 /
    n."""
    r = statistics.Z**2 / 20
    low, high = paired_interval([0.25] * 20, 1.0)
    assert high == pytest.approx((0.25 + r) / (1 + r))
    assert low == pytest.approx((0.25 - r) / (1 + r))
    scaled = paired_interval([0.5] * 20, 2.0)
    assert scaled == pytest.approx((2 * low, 2 * high))


def test_two_models_that_never_differ_are_not_known_to_be_equal() -> None:
    same = [1.0] * 50 + [0.0] * 50
    found = compare(same, same, unit=1.0).difference
    assert (found.low, found.high) == pytest.approx((-0.03699, 0.03699), abs=1e-4)


def test_an_interval_without_0_has_a_p_value_of_at_most_5_percent_and_the_reverse() -> None:
    for total in (0, 5, 6, 20):
        for better in range(total + 1):
            ours = [1.0] * better + [0.0] * (40 - better)
            theirs = [0.0] * better + [1.0] * (total - better) + [0.0] * (40 - total)
            found = compare(ours, theirs, unit=1.0)
            excludes = found.difference.low > 0 or found.difference.high < 0
            assert excludes == (found.p_value <= 0.05), (better, total)


@pytest.mark.long
@pytest.mark.parametrize("changed", [0.03, 0.1, 0.5])
@pytest.mark.parametrize(("problems", "samples"), [(20, 1), (20, 4), (50, 1), (50, 4)])
def test_intervals_of_differences_cover_what_they_should(
    changed: float, problems: int, samples: int
) -> None:
    """Most problems are as hard for both models, and a few became easy or hard. At 20 problems with
    one verdict each and 3 % changed, the paired standard error covers the truth in 4 of 10."""
    generator = random.Random(f"{changed} {problems} {samples}")
    hits = 0
    for _ in range(300):
        differences = []
        for _ in range(problems):
            before = generator.betavariate(0.3, 0.3)
            draws = [generator.random() for _ in range(samples)]
            ours = theirs = sum(draw < before for draw in draws) / samples
            if generator.random() < changed:
                after = generator.betavariate(0.8, 0.2)
                ours = sum(generator.random() < after for _ in range(samples)) / samples
            differences.append(ours - theirs)
        low, high = paired_interval(differences, 1.0)
        hits += low <= changed * (0.8 - 0.5) <= high
    assert hits >= 0.92 * 300


@pytest.mark.parametrize("unit", [1 / 3, 0.0])  # of mean@3, and pass@2 of 3 samples
def test_a_difference_of_shares_stays_within_what_can_be(unit: float) -> None:
    for ours, theirs in (([1.0] * 23 + [0.0], [0.0] * 24), ([1.0] * 8, [1 / 3] + [0.0] * 7)):
        for found in (compare(ours, theirs, unit), compare(theirs, ours, unit)):
            assert -1 <= found.difference.low <= found.difference.high <= 1
    of_rewards = compare([2.0] * 8, [-2.0] * 8, 1.0).difference
    assert of_rewards.low <= of_rewards.value == 4 <= of_rewards.high


def test_the_same_model_twice_differs_by_nothing() -> None:
    same = [0.0, 1.0, 1.0]
    found = compare(same, same, unit=1.0)
    assert (found.difference.value, found.p_value, found.better, found.worse) == (0, 1, 0, 0)


def test_values_from_0_to_1_are_a_proportion_and_others_have_a_mean() -> None:
    half = statistics.Z / math.sqrt(3)
    for values in ([1.0, 2.0, 3.0], [-1.0, 0.0, 1.0]):
        found = statistics.estimate(values, 8)
        wanted = (values[1], values[1] - half, values[1] + half)
        assert (found.value, found.low, found.high) == pytest.approx(wanted)
    independent = [0.0, 0.5, 0.5, 1.0]
    assert statistics.estimate(independent, 8) == proportion(independent, 8)
    assert proportion(independent, 8) != proportion(independent)


def test_rewards_without_a_unit_are_compared_by_the_normal_approximation() -> None:
    found = compare([3.0, 0.5, 1.0], [1.0, 1.0, 0.0], 0)
    z = (2 - 0.5 + 1) / math.sqrt(4 + 0.25 + 1)
    assert found.p_value == pytest.approx(math.erfc(z / math.sqrt(2)))


def test_a_comparison_s_bounds_and_single_problem() -> None:
    lowest = compare([0.0] * 8, [1.0] * 8, 1.0).difference
    assert (lowest.value, lowest.low) == (-1, -1)
    alone = compare([1.0], [0.0], 1.0)
    assert (alone.difference.value, alone.p_value, alone.better) == (1, 1, 1)
    assert (alone.difference.low, alone.difference.high) == pytest.approx((-0.586901371, 1))
    beyond = compare([3.0, -2.0], [0.0, 0.0], 0).difference  # of no unit: not within -1 and 1
    assert beyond.low < -1 < 1 < beyond.high
    always_2 = compare([2.0, 2.0], [2.0, 2.0], 0).difference  # nothing tells what a value can be
    assert always_2.value == 0
    assert math.isnan(always_2.low)
    assert math.isnan(always_2.high)


def test_one_problem_says_nothing_of_the_spread() -> None:
    found = mean([0.3])
    assert found.value == 0.3
    assert math.isnan(found.low)
    assert math.isnan(found.high)
