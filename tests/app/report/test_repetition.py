import pytest

from reason_llm.app.report.rollouts import repeated_fraction, similarity


def test_repeated_n_grams_are_counted() -> None:
    assert repeated_fraction([1, 2, 3, 4, 5, 6, 7]) == 0
    # 1212 2121 1212 2121 1212: five of which two differ.
    assert repeated_fraction([1, 2, 1, 2, 1, 2, 1, 2]) == pytest.approx(3 / 5)
    assert repeated_fraction([1, 1, 1]) == 0


def test_similarity_is_the_mean_over_pairs_of_the_shared_n_grams() -> None:
    same, other = [1, 2, 3, 4], [5, 6, 7, 8]
    assert similarity([same, same]) == 1
    assert similarity([same, other]) == 0
    # 123 234 beside 123 239: one of three.
    assert similarity([same, [1, 2, 3, 9]]) == pytest.approx(1 / 3)
    assert similarity([same, same, other]) == pytest.approx(1 / 3)
    assert similarity([same]) == 0
    assert similarity([[1], [1]]) == 1
