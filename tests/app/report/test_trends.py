import pytest

from reason_llm.app.report.evidence import change, series


def test_a_change_is_of_the_ends_and_its_error_of_the_neighbours() -> None:
    found = change([1.0, 2.0, 1.0, 2.0, 5.0, 6.0])
    assert found is not None
    # Thirds of 2 values; mean square of neighbours' differences (1 + 1 + 1 + 9 + 1) / 5 / 2 = 1.3.
    assert (found.before, found.after) == (1.5, 5.5)
    assert found.error == pytest.approx((2 * 1.3 / 2) ** 0.5)
    assert found.is_up
    assert not found.is_down


def test_noise_is_no_change_and_a_fall_is_none_upwards() -> None:
    noise = change([1.0, 2.0] * 10)
    fall = change([float(-i) for i in range(20)])
    assert noise is not None
    assert not noise.is_up
    assert not noise.is_down
    assert fall is not None
    assert fall.is_down
    assert not fall.is_up


def test_few_values_tell_nothing() -> None:
    assert change([0.0, 1.0, 2.0, 3.0, 4.0]) is None


def test_a_series_leaves_out_what_is_not_there() -> None:
    records = [{"step": 1, "a": 2.0}, {"step": 2}, {"step": 3, "a": None}]
    assert series(records, "a") == ([1], [2.0])  # type: ignore[arg-type]
