"""Layout of rows in a micro-batch: padded on the right, without an attention mask, or end to end in
one row ("varlen"), a prompt once for all its completions in the micro-batch.

The shift is here: the hidden state of token t - 1 predicts token t, and entry t of every per-token
tensor belongs to token t.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from reason_llm.model.attention import Segments
from reason_llm.model.datum import Datum
from reason_llm.rollout import Attachment

T = TypeVar("T")
ALIGNMENT = 16
"""Bytes at whose multiples the parts of a copy begin."""


class PlacedRow(NamedTuple):
    """A row with its attachments, and its place in a batch."""

    attachments: Sequence[Attachment]
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
    ids, positions, predictors, keys = (list[NDArray[np.int64]]() for _ in range(4))
    query_lengths, key_lengths, skips, row_ends = (list[int]() for _ in range(4))
    starts: dict[tuple[bytes | str, ...], int] = {}
    start = 0
    for datum in data:
        key, length = datum.prompt_key, datum.num_tokens
        skipped = datum.num_prompt if key in starts else 0
        at = starts.setdefault(key, start)
        ids.append(datum.ids[skipped:])
        positions.append(np.arange(skipped, length))
        places = np.append(np.arange(at, at + skipped), np.arange(start, start + length - skipped))
        # The prompt's last token predicts the first one of each of its completions.
        trained = np.flatnonzero(datum.trained)
        predictors.append(places[trained - 1])
        row_ends.append(int(places[trained[-1]]) if len(trained) else at)
        keys.append(places)
        skips.append(skipped)
        query_lengths.append(length - skipped)
        key_lengths.append(length)
        start += length - skipped
    index_M = np.concatenate(keys) if len(starts) < len(data) else None
    layout = Layout(
        ids_1N=torch.from_numpy(np.concatenate(ids)[None]),
        positions_1N=torch.from_numpy(np.concatenate(positions)[None]),
        predictors_M=torch.from_numpy(np.concatenate(predictors)),
        ends_B=torch.tensor(row_ends),
        segments=Segments.of(query_lengths, key_lengths, index_M),
        skipped=tuple(skips),
    )
    return on_device(layout, device)


def placed(data: Sequence[Datum], layout: Layout | None) -> list[PlacedRow]:
    """The rows of a batch, padded or end to end."""
    if layout is None:
        return [PlacedRow(row.attachments, row.num_tokens, i, 0) for i, row in enumerate(data)]
    rows, column = list[PlacedRow](), 0
    for row, skipped in zip(data, layout.skipped, strict=True):
        rows.append(PlacedRow(row.attachments, row.num_tokens, 0, column, skipped))
        column += row.num_tokens - skipped
    return rows


def collate(data: Sequence[Datum], device: torch.device) -> tuple[Tensor, Tensor]:
    """ids_BT (int64) and mask_BT (True on trained tokens), padded on the right."""
    shape = len(data), max(datum.num_tokens for datum in data)
    ids_BT, mask_BT = np.zeros(shape, np.int64), np.zeros(shape, np.bool_)
    for row, datum in enumerate(data):
        ids_BT[row, : datum.num_tokens] = datum.ids
        mask_BT[row, : datum.num_tokens] = datum.trained
    return on_device((torch.from_numpy(ids_BT), torch.from_numpy(mask_BT)), device)


def places_of(mask_BT: Tensor) -> Tensor:
    """Places (N,) of the masked tokens among all of them, in order. A card is waited for."""
    return mask_BT.flatten().nonzero()[:, 0]


def in_rows(data: Sequence[Datum], order: Sequence[int], parts: Sequence[Tensor]) -> list[Tensor]:
    """Values of each row's trained tokens, in host memory; ``parts`` are those of the rows in
    ``order``, and other rows get none. Waits for the GPU."""
    values = [torch.empty(0)] * len(data)
    if parts:
        split = torch.cat(list(parts)).cpu().split([data[i].num_trained for i in order])
        for i, numbers in zip(order, split, strict=True):
            values[i] = numbers
    return values


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows as the model and the objective read them."""

    ids_BT: Tensor
    mask_BT: Tensor
    """True on trained tokens."""
    places_M: Tensor
    """See ``places_of``."""
    rewards_B: Tensor
    columns: dict[str, Tensor]
    """Columns that every row has, (B, T) float32, 0 in the padding."""
    layout: Layout | None
    """None: the rows are padded for the model, too."""

    @classmethod
    def of(cls, data: Sequence[Datum], device: torch.device, is_packed: bool) -> "MicroBatch":
        """Rows on the device, by one copy."""
        host = torch.device("cpu")
        ids_BT, mask_BT = collate(data, host)
        names = set.intersection(*(set(datum.columns) for datum in data))
        columns = {
            name: pad_sequence([datum.columns[name].float() for datum in data], batch_first=True)
            for name in sorted(names)
        }
        batch = cls(
            ids_BT,
            mask_BT,
            torch.from_numpy(np.flatnonzero(mask_BT.numpy())),
            torch.tensor([datum.reward for datum in data]),
            columns,
            lay_out(data, host) if is_packed else None,
        )
        return on_device(batch, device)


def on_device(value: T, device: torch.device) -> T:
    """A tensor, or a record with tensors of the host, on the device: by one copy from pinned
    memory, for which nobody waits."""
    if device.type == "cpu":
        return value
    tensors = list[Tensor]()
    _changed(value, tensors.append)
    starts = [0, *accumulate(-(-t.nbytes // ALIGNMENT) * ALIGNMENT for t in tensors)]
    held = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")

    def parts(whole: Tensor) -> Iterator[Tensor]:
        for start, tensor in zip(starts, tensors, strict=False):
            part = whole[start : start + tensor.nbytes]
            yield part.view(tensor.dtype).view(tensor.shape)

    for part, tensor in zip(parts(held), tensors, strict=True):
        part.copy_(tensor)
    copies = parts(held.to(device, non_blocking=True))
    moved: T = _changed(value, lambda _: next(copies))
    return moved


def _changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    """The value, with each tensor in it changed; in a fixed order."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple):
        return tuple(_changed(item, change) for item in value)
    if isinstance(value, dict):
        return {name: _changed(item, change) for name, item in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **_changed(parts, change))
    return value
