"""Layout of rows in a micro-batch: padded on the right, without an attention mask, or end to end in
one row ("varlen"), a prompt once for all its completions in the micro-batch.

The shift is here: the hidden state of token t - 1 predicts token t, and entry t of every per-token
tensor belongs to token t.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from reason_llm.model.attention import Segments
from reason_llm.model.datum import Datum
from reason_llm.rollout import Image


class PlacedRow(NamedTuple):
    """A row with its images, and its place in a batch."""

    images: Sequence[Image]
    tokens: int
    row: int
    column: int
    """Place of the first token that is passed."""
    skipped: int = 0
    """Tokens before it, which are elsewhere in the batch."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows end to end in one row of N tokens, M of which are predicted by it and trained."""

    ids_1N: Tensor
    positions_1N: Tensor
    """Position of each token in its own row."""
    predictors_M: Tensor
    """Place of the hidden state that predicts each trained token, in order."""
    ends_B: Tensor
    """Place of each row's last trained token."""
    segments: Segments
    skipped: tuple[int, ...]
    """Tokens of each row that are there already: its prompt's, or none."""


def lay_out(data: Sequence[Datum], device: torch.device) -> Layout:
    """Rows end to end: each row whole, or only the tokens after a prompt that is already there."""
    ids, positions, predictors, ends, keys = (list[int]() for _ in range(5))
    query_lengths, key_lengths, skips = list[int](), list[int](), list[int]()
    starts: dict[tuple[int | str, ...], int] = {}
    for datum in data:
        prompt, start = datum.prompt_ids, len(ids)
        key = datum.prompt_key
        skipped = len(prompt) if key in starts else 0
        at = starts.setdefault(key, start)
        skips.append(skipped)
        ids += datum.ids[skipped:]
        positions += range(skipped, datum.num_tokens)
        own = range(start, len(ids))
        # The prompt's last token predicts the first one of each of its completions.
        places = [*range(at, at + skipped), *own]
        predictors += [places[t - 1] for t, is_trained in enumerate(datum.trained) if is_trained]
        ends.append(max((p for p, t in zip(places, datum.trained, strict=True) if t), default=at))
        keys += places
        query_lengths.append(len(own))
        key_lengths.append(datum.num_tokens)
    is_shared = len(starts) < len(data)
    return Layout(
        ids_1N=torch.tensor([ids], device=device),
        positions_1N=torch.tensor([positions], device=device),
        predictors_M=torch.tensor(predictors, device=device),
        ends_B=torch.tensor(ends, device=device),
        segments=Segments.of(query_lengths, key_lengths, keys if is_shared else None, device),
        skipped=tuple(skips),
    )


def placed(data: Sequence[Datum], layout: Layout | None) -> list[PlacedRow]:
    """The rows of a batch, padded or end to end."""
    if layout is None:
        return [PlacedRow(row.images, row.num_tokens, i, 0) for i, row in enumerate(data)]
    found, column = list[PlacedRow](), 0
    for row, skipped in zip(data, layout.skipped, strict=True):
        found.append(PlacedRow(row.images, row.num_tokens, 0, column, skipped))
        column += row.num_tokens - skipped
    return found


def collate(data: Sequence[Datum], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids_BT (int64) and mask_BT (True on trained tokens), padded on the right."""
    longest = max(datum.num_tokens for datum in data)
    ids_BT = torch.zeros(len(data), longest, dtype=torch.long)
    mask_BT = torch.zeros(len(data), longest, dtype=torch.bool)
    for row, datum in enumerate(data):
        ids_BT[row, : datum.num_tokens] = torch.tensor(datum.ids)
        mask_BT[row, : datum.num_tokens] = torch.tensor(datum.trained)
    return ids_BT.to(device), mask_BT.to(device)


def collate_columns(data: Sequence[Datum], device: torch.device) -> dict[str, Tensor]:
    """Columns that every row has, (B, T) float32, 0 in the padding."""
    names = set.intersection(*(set(datum.columns) for datum in data))
    return {
        name: torch.nn.utils.rnn.pad_sequence(
            [datum.columns[name].to(device).float() for datum in data], batch_first=True
        )
        for name in sorted(names)
    }
