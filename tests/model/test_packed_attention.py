"""What FlashAttention is asked for, with an operator of torch 2.13's signature and one of 2.11's.

On a CPU the operator itself cannot run: a stand-in computes what its documentation promises.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from reason_llm.model import attention as packed_attention
from reason_llm.model.attention import Places, Segments


def operator(
    query_NHD: Tensor,
    key_MKD: Tensor,
    value_MKD: Tensor,
    ends: tuple[Tensor, Tensor],
    scale: float | None,
    window_size: tuple[int, int],
) -> Tensor:
    """Each segment by itself; queries end with the keys and see so many before their own."""
    query_ends, key_ends = (each.tolist() for each in ends)
    before, after = window_size
    assert after == 0
    found = []
    for index in range(len(query_ends) - 1):
        queries = query_NHD[query_ends[index] : query_ends[index + 1]].transpose(0, 1)[None]
        keys, values = (
            each[key_ends[index] : key_ends[index + 1]].transpose(0, 1)[None]
            for each in (key_MKD, value_MKD)
        )
        own = torch.arange(keys.shape[2])[-queries.shape[2] :, None]
        other = torch.arange(keys.shape[2])[None]
        seen = (other <= own) & ((before < 0) | (other >= own - before))
        found.append(
            scaled_dot_product_attention(
                queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=True
            )[0].transpose(0, 1)
        )
    return torch.cat(found)


def of_torch_213(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Tensor:
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError("Expect query and key/value to have the same number of heads")
    return operator(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)


def of_torch_211(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    return operator(query, key, value, (cu_seq_q, cu_seq_k), scale, window_size)


@pytest.mark.parametrize("varlen_attn", [of_torch_213, of_torch_211])
@pytest.mark.parametrize("key_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 1, 3])
def test_both_versions_of_the_operator_are_asked_for_the_same(
    varlen_attn: Callable[..., Any],
    key_heads: int,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    generator = torch.Generator().manual_seed(0)
    shared = [0, 1, 2, 3, 4, 5, 0, 1, 6, 7, 8]  # 0 and 1 are a prompt with two completions
    segments = Segments.of([6, 3], [6, 5], shared, torch.device("cpu"))
    query, key, value = (
        torch.randn(1, heads, 9, 8, generator=generator) for heads in (4, key_heads, key_heads)
    )
    gathered = [x.index_select(2, torch.tensor(shared)) for x in (key, value)]
    found = packed_attention._flash(query, *gathered, segments, 0.5, window)
    expected = packed_attention.attend(query, key, value, segments, 0.5, window)
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(512, 640), (700, 701), (512, 641), (300, 310)])
def test_long_completions_get_queries_in_the_prompts_place(
    queries: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And values and gradients of one mask over all keys."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, tokens, 8, generator=generator, requires_grad=True)
        for heads, tokens in ((4, queries), (2, keys), (2, keys))
    )
    incoming = torch.randn(1, queries, 4, 8, generator=generator)
    segments = Segments.of([queries], [keys], list(range(keys)), torch.device("cpu"))
    asked: list[bool] = []

    def told(*args: Any, is_causal: bool = False, **options: Any) -> Tensor:
        asked.append(is_causal)
        return scaled_dot_product_attention(*args, is_causal=is_causal, **options)

    monkeypatch.setattr(packed_attention, "scaled_dot_product_attention", told)
    found = packed_attention.attend(query, key, value, segments)
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    expected = scaled_dot_product_attention(
        query, key, value, attn_mask=seen, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    inputs = (query, key, value)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, incoming),
        torch.autograd.grad(expected, inputs, incoming),
        rtol=1e-4,
        atol=1e-4,
    )
    assert asked == [(queries, keys) in ((512, 640), (700, 701))]


@pytest.mark.parametrize("index", [[0, 1, 2, *([0, 1] * 40), 3, 1], [3, 0, 1, 2, 0, 1], [1, 0]])
def test_shared_keys_add_up_in_float32_and_in_one_order(index: list[int]) -> None:
    """torch's own backward pass adds in 16 bits, and on a GPU by atomics."""
    tokens = max(index) + 1
    places = Places.of(index, torch.device("cpu"))
    torch.manual_seed(0)
    key = torch.randn(1, 2, tokens, 3).bfloat16().requires_grad_()
    gathered = packed_attention._gathered(key, places)
    assert torch.equal(gathered, key[:, :, index])
    gradient = torch.rand(gathered.shape).bfloat16()
    gathered.backward(gradient)
    exact = torch.zeros(1, 2, tokens, 3, dtype=torch.float64)
    exact.index_add_(2, torch.tensor(index), gradient.double())
    assert key.grad is not None
    assert torch.equal(key.grad, exact.bfloat16())
    plain = torch.zeros(1, 2, tokens, 3, dtype=torch.bfloat16)
    plain.index_add_(2, torch.tensor(index), gradient)
    assert len(index) < 80 or not torch.equal(plain, key.grad)
