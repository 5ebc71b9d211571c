"""Micro-batches: every row once, within the budget, longest first."""

import random

import torch

from reason_llm.train.packing import Rollout, collate, micro_batches


def test_by_hand() -> None:
    assert micro_batches([3, 10, 4, 9], budget_tokens=20) == [[1, 3], [2], [0]]
    assert micro_batches([10, 10, 10, 10, 9, 7], budget_tokens=60) == [[0, 1, 2, 3, 4], [5]]
    assert micro_batches([10, 10, 10, 10, 9, 9], budget_tokens=60) == [[0, 1, 2, 3, 4, 5]]


def test_at_most_a_twentieth_is_padding_however_the_lengths_fall() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [min(2000, 16 + int(draw.paretovariate(1.1) * 10)) for _ in range(300)]
        batches = micro_batches(lengths, 8192)
        passed = sum(len(batch) * lengths[batch[0]] for batch in batches)
        assert passed - sum(lengths) <= 0.05 * passed
        assert len(batches) < 150  # and still in batches


def test_every_row_once_within_the_budget_longest_first() -> None:
    lengths = [random.Random(0).randint(1, 300) for _ in range(200)]
    batches = micro_batches(lengths, 1024)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1024 for batch in batches)
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(flat, reverse=True)


def test_a_row_beyond_the_budget_stands_alone() -> None:
    assert micro_batches([5, 100], budget_tokens=10) == [[1], [0]]


def test_no_rows_no_batches() -> None:
    assert micro_batches([], 10) == []


def test_collate_masks_the_completion_only() -> None:
    rows = [
        Rollout("a#0", (7, 8), (9,), (-0.1,), 1.0),
        Rollout("b#0", (4,), (5, 6, 3), (-0.1, -0.2, -0.3), -1.0),
    ]
    ids, mask = collate(rows, torch.device("cpu"))
    assert ids.tolist() == [[7, 8, 9, 0], [4, 5, 6, 3]]
    assert mask.tolist() == [[False, False, True, False], [False, True, True, True]]
