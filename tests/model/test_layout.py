"""Micro-batches: every row once, within the budget, longest first."""

import random

import torch

from reason_llm.model.datum import Datum
from reason_llm.model.layout import collate, lay_out
from reason_llm.model.sizes import MAX_KEYS_PER_TOKEN
from reason_llm.train.micro_batches import packed_batches, padded_batches


def test_by_hand() -> None:
    assert padded_batches([3, 10, 4, 9], budget_tokens=20) == [[1, 3], [2], [0]]
    assert padded_batches([10, 10, 10, 10, 9, 7], budget_tokens=60) == [[0, 1, 2, 3, 4], [5]]
    assert padded_batches([10, 10, 10, 10, 9, 9], budget_tokens=60) == [[0, 1, 2, 3, 4, 5]]


def test_at_most_a_twentieth_is_padding_however_the_lengths_fall() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        lengths = [min(2000, 16 + int(draw.paretovariate(1.1) * 10)) for _ in range(300)]
        batches = padded_batches(lengths, 8192)
        passed = sum(len(batch) * lengths[batch[0]] for batch in batches)
        assert passed - sum(lengths) <= 0.05 * passed
        assert len(batches) < 150  # and still in batches


def test_every_row_once_within_the_budget_longest_first() -> None:
    lengths = [random.Random(0).randint(1, 300) for _ in range(200)]
    batches = padded_batches(lengths, 1024)
    assert sorted(i for batch in batches for i in batch) == list(range(200))
    assert all(len(batch) * max(lengths[i] for i in batch) <= 1024 for batch in batches)
    flat = [lengths[i] for batch in batches for i in batch]
    assert flat == sorted(flat, reverse=True)


def test_units_of_two_rows_stay_together() -> None:
    lengths = [4, 5, 9, 10, 5, 5, 10, 10]
    assert padded_batches(lengths, 20, size=2) == [[2, 3], [6, 7], [0, 1, 4, 5]]
    assert padded_batches(lengths, 19, size=2) == [[2, 3], [6, 7], [0, 1], [4, 5]]
    pairs = ((1, 2), (1, 8), (2, 3), (2, 1), (1, 4), (1, 5))
    rows = [rollout((p,) * 10, (1,) * n) for p, n in pairs]
    assert packed_batches(rows, 29, size=2) == [[0, 1, 4, 5], [2, 3]]  # 10 + 10 + 9 tokens


def test_a_row_beyond_the_budget_stands_alone() -> None:
    assert padded_batches([5, 100], budget_tokens=10) == [[1], [0]]


def test_no_rows_no_batches() -> None:
    assert padded_batches([], 10) == []


def test_collate_masks_the_completion_only() -> None:
    rows = [
        Datum.of((7, 8), (9,)),
        Datum.of((4,), (5, 6, 3)),
    ]
    ids, mask = collate(rows, torch.device("cpu"))
    assert ids.tolist() == [[7, 8, 9, 0], [4, 5, 6, 3]]
    assert mask.tolist() == [[False, False, True, False], [False, True, True, True]]


def rollout(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Datum:
    return Datum.of(prompt, completion)


def test_a_layout_by_hand() -> None:
    rows = [
        rollout((10, 11, 12), (20, 21)),
        rollout((30,), (40,)),
        rollout((10, 11, 12), (50, 51)),
    ]
    found = lay_out(rows, torch.device("cpu"))
    assert found.ids_1N.tolist() == [[10, 11, 12, 20, 21, 30, 40, 50, 51]]
    assert found.positions_1N.tolist() == [[0, 1, 2, 3, 4, 0, 1, 3, 4]]
    assert found.predictors_M.tolist() == [2, 3, 5, 2, 7]
    segments = found.segments
    assert (segments.query_lengths, segments.key_lengths) == ((5, 2, 2), (5, 2, 5))
    assert segments.index_M is not None
    assert segments.index_M.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 7, 8]
    assert segments.query_ends.tolist() == [0, 5, 7, 9]
    assert segments.key_ends.tolist() == [0, 5, 7, 12]
    assert segments.key_ends.dtype == torch.int32
    assert lay_out(rows[:2], torch.device("cpu")).segments.index_M is None


def test_packed_micro_batches_count_a_prompt_once() -> None:
    rows = [rollout((p,) * 20, (1,) * length) for p in (1, 2) for length in (5, 30, 10)]
    batches = packed_batches(rows, 70)
    assert batches == [[1, 2, 0], [4, 5, 3]]  # 20 + 30 + 10 + 5 of 70
    assert packed_batches(rows, 64) == [[1, 2], [0], [4, 5], [3]]  # 65 would be too many
    assert packed_batches(rows, 1) == [[1], [2], [0], [4], [5], [3]]


def test_packed_micro_batches_bound_the_copied_keys() -> None:
    rows = [rollout((1,) * 90, (2,)) for _ in range(40)]
    for batch in packed_batches(rows, 100):
        keys = sum(rows[i].num_tokens for i in batch)
        assert keys <= MAX_KEYS_PER_TOKEN * 100
    assert [len(batch) for batch in packed_batches(rows, 100)] == [4] * 10


def test_packed_micro_batches_hold_every_rollout_once_and_within_the_budget() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 60, (200, 2), generator=generator).tolist()
    rows = [rollout((i % 40,) * (1 + i % 40), (1,) * n) for i, (n, _) in enumerate(lengths)]
    for budget in (50, 128, 1000):
        batches = packed_batches(rows, budget)
        assert sorted(i for batch in batches for i in batch) == list(range(200))
        for batch in batches:
            tokens = lay_out([rows[i] for i in batch], torch.device("cpu")).ids_1N.numel()
            assert tokens <= budget or len(batch) == 1
    assert max(rows[i].num_tokens for i in batches[0]) == max(r.num_tokens for r in rows)
