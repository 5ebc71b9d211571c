"""Recurrent layers over rows that lie end to end in one: the state and the convolution begin anew
with each row, and those at the end of a shared prompt start each of its completions. Gated DeltaNet
(Qwen3.5, Qwen3-Next, OLMo Hybrid; arXiv:2412.06464) and Mamba 2 (Granite 4; arXiv:2405.21060).

Transformers 5.19 takes the lengths of such rows in its functions of a layer, and drops them where
the kernels are not installed. The functions are replaced by some that compute the rows apart, with
Transformers' own: the convolution over rows with their prompts' last tokens before them, the rest
in two rounds, of which the second begins with the states at the end of the first.

Shapes: N tokens of the row, M of the same with those tokens before them, C channels, S segments,
T tokens of the longest, H heads, D head size.
"""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, softplus
from torch.nn.utils.rnn import pad_sequence

from reason_llm.model.attention import Segments
from reason_llm.model.layout import on_device

Columns = Sequence[Sequence[Tensor]]
"""Inputs of each part, by what they are."""
Round = Callable[[Columns, Tensor | None], tuple[list[Tensor], Tensor]]
"""Outputs of each part and the states (S, ...) at their ends, from its inputs and first states."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Order in which a recurrent layer reads the segments."""

    lengths: tuple[int, ...]
    """Tokens of each part, in the order of the row; a row whose prompt is shared has two parts."""
    first: tuple[int, ...]
    """Parts that begin with no state: shared prompts and other rows."""
    second: tuple[int, ...]
    """Parts that follow a shared prompt."""
    parents_S: Tensor
    """Place of that prompt in ``first``."""
    inputs_M: Tensor
    """The convolution's inputs, by place in the row plus one; 0 for a zero."""
    outputs_N: Tensor
    """Place of each token among them."""


@lru_cache(maxsize=2)
def rounds(segments: Segments, before: int) -> Rounds:
    """Rounds of these segments; the convolution of each token reads the ``before`` tokens ahead of
    it."""
    lengths = zip(segments.query_lengths, segments.key_lengths, strict=True)
    skipped = [keys - own for own, keys in lengths]
    starts = segments.prompt_starts
    shared = {start: n for start, n in zip(starts, skipped, strict=True) if start is not None}
    parts, first, second, parents = list[int](), list[int](), list[int](), list[int]()
    inputs, outputs, number = list[int](), list[int](), dict[int, int]()
    ends = accumulate(segments.query_lengths)
    for own, end, prompt, known in zip(segments.query_lengths, ends, starts, skipped, strict=True):
        start, rest = end - own, own
        if prompt is None:
            prompt, whole = start, shared.get(start, own)
            number[start], rest = len(first), own - whole
            first.append(len(parts))
            parts.append(whole)
        if rest:
            second.append(len(parts))
            parts.append(rest)
            parents.append(number[prompt])
        # The prompt's last tokens lie before each of its completions, zeros before other rows.
        seen = [*(0,) * before, *range(prompt + 1, prompt + known + 1)]
        inputs += seen[len(seen) - before :]
        outputs += range(len(inputs), len(inputs) + own)
        inputs += range(start + 1, end + 1)
    numbers = tuple(map(torch.tensor, (parents, inputs, outputs)))
    there = on_device(numbers, segments.query_ends.device)
    return Rounds(tuple(parts), tuple(first), tuple(second), *there)


def separate_rows(model: nn.Module) -> None:
    """Have the recurrent layers of a Transformers model, if there are any, read packed rows apart.
    Without ``segments`` they compute as before."""
    kinds = {(type(m).__name__, type(m).__module__) for m in model.modules()}
    for name, module in kinds:
        for end, functions in FUNCTIONS.items():
            for function, replaced in functions.items() if name.endswith(end) else ():
                theirs = getattr(sys.modules[module], function)
                if not hasattr(theirs, "reads_rows_apart"):
                    apart: Any = wraps(theirs)(replaced(theirs))
                    apart.reads_rows_apart = True
                    setattr(sys.modules[module], function, apart)


def _convolution(theirs: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def convolve(
        x_1CN: Tensor, weight: Tensor, *args: Any, segments: Segments | None = None, **kwargs: Any
    ) -> Tensor:
        """Convolve rows that lie end to end: (1, C, N) channels of N tokens, the same shape out."""
        if segments is None:
            return theirs(x_1CN, weight, *args, **kwargs)
        plan = rounds(segments, weight.shape[-1] - 1)
        x_1CM = pad(x_1CN, (1, 0)).index_select(2, plan.inputs_M)
        return theirs(x_1CM, weight, *args, **kwargs).index_select(2, plan.outputs_N)

    return convolve


def _rule(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def compute(
        *qkv_1NHD: Tensor, g: Tensor, beta: Tensor, segments: Segments | None = None, **kwargs: Any
    ) -> Any:
        """Apply the delta rule to rows that lie end to end: (1, N, H, D) queries, keys and values;
        returns the outputs (1, N, H, D) and no state. Rows that continue another one begin from
        its last state, so they take a second round."""
        if segments is None:
            return theirs(*qkv_1NHD, g=g, beta=beta, **kwargs)

        def one_round(columns: Columns, states: Tensor | None) -> tuple[list[Tensor], Tensor]:
            first = {} if states is None else {"initial_state": states}
            return _one_round(theirs, columns, kwargs | first | {"output_final_state": True})

        return _apart(one_round, (*qkv_1NHD, g, beta), segments), None

    return compute


def _scan(theirs: Callable[..., Any]) -> Callable[..., Any]:
    def compute(
        x_1NHD: Tensor,
        dt_1NH: Tensor,
        A_H: Tensor,
        *BC: Tensor,
        segments: Segments | None = None,
        **kwargs: Any,
    ) -> Any:
        if segments is None:
            return theirs(x_1NHD, dt_1NH, A_H, *BC, **kwargs)
        # The steps are made here, so that zeros behind a row are steps of no length.
        dt_1NH = softplus(dt_1NH + kwargs["dt_bias"].to(dt_1NH.dtype)).clamp(*kwargs["dt_limit"])
        step_options = {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, math.inf)}

        def one_round(columns: Columns, states: Tensor | None) -> tuple[list[Tensor], Tensor]:
            x_STHD, dt_STH, *rest = (pad_sequence(list(c), batch_first=True) for c in columns)
            size = min(kwargs["chunk_size"], x_STHD.shape[1])
            options = step_options | {"initial_states": states, "chunk_size": size}
            options["return_final_states"] = True
            outputs, ends = theirs(x_STHD, dt_STH, A_H, *rest, **kwargs | options)
            return [out[: len(own)] for out, own in zip(outputs, columns[0], strict=True)], ends

        return _apart(one_round, (x_1NHD, dt_1NH, *BC), segments)

    return compute


def _fused(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel of the whole layer, which knows no rows; without it the layer calls the others."""

    def compute(*args: Any, segments: Segments | None = None, **kwargs: Any) -> Any:
        return theirs(*args, **kwargs) if segments is None else None

    return compute


def _apart(one_round: Round, columns: Sequence[Tensor], segments: Segments) -> Tensor:
    """The outputs of a row from its inputs, each (1, N, ...), computed in two rounds."""
    plan = rounds(segments, 0)
    parts = [column[0].split(plan.lengths) for column in columns]
    outputs, states = one_round([[c[i] for i in plan.first] for c in parts], None)
    if plan.second:
        states = states.index_select(0, plan.parents_S)
        outputs += one_round([[c[i] for i in plan.second] for c in parts], states)[0]
    in_order = dict(zip((*plan.first, *plan.second), outputs, strict=True))
    return torch.cat([in_order[i] for i in range(len(outputs))])[None]


def _one_round(
    theirs: Callable[..., Any], columns: Columns, options: dict[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """Outputs of each part, and the states (S, H, D, D) at their ends: by fla on a GPU, end to end
    (``attention.unfit``); by torch with zeros behind them, which change no state."""
    lengths = [len(part) for part in columns[0]]
    if columns[0][0].device.type == "cuda":
        q, k, v, g, beta = (torch.cat(list(column))[None] for column in columns)
        ends = torch.tensor([0, *accumulate(lengths)], device=q.device)
        out_1NHD, states = theirs(q, k, v, g=g, beta=beta, **options | {"cu_seqlens": ends})
        return list(out_1NHD[0].split(lengths)), states
    q, k, v, g, beta = (pad_sequence(list(column), batch_first=True) for column in columns)
    out_STHD, states = theirs(q, k, v, g=g, beta=beta, **options)
    return [out[:length] for out, length in zip(out_STHD, lengths, strict=True)], states


FUNCTIONS: dict[str, dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "DeltaNet": {"causal_conv1d_fn": _convolution, "torch_chunk_gated_delta_rule": _rule},
    "GraniteMoeHybridMambaLayer": {
        "causal_conv1d_fn": _convolution,
        "mamba2_chunk_scan": _scan,
        "mamba2_split_conv1d_scan_combined": _fused,
    },
}
"""The functions that are replaced in Transformers' modules, by the end of the layer's name."""
