"""What the log-prob chunk does between its two products, as one Triton kernel (a GPU, or Triton's
interpreter).

``logprobs._chunk`` reads and writes the chunk about a dozen times, in float32. Here each row of
logits is read twice in the type it came in, and the second time the weights of its gradient take
its place: there is no float32 copy, and no tensor of probabilities. Nobody has measured it on a GPU
yet, so it is off unless ``train.fused_logprobs`` asks for it.

The sum of the exponentials is kept beside the largest logit so far and scaled whenever that grows.
Source: Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv:1805.02867,
algorithm 3.

Shapes: C tokens of the chunk, V vocabulary.
"""
# Triton reads the annotations of a kernel's arguments, and knows only its own.
# ruff: noqa: ANN001, ANN202
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Logits that one pass of the loop reads."""
WARPS = 8


@triton.jit
def _scaled(logits, softcap, temperature, CAPPED: tl.constexpr):
    """Logits after cap and temperature, and the slope of the cap."""
    slopes = tl.full(logits.shape, 1.0, tl.float32)
    if CAPPED:
        tanh = 2 * tl.sigmoid(2 * (logits / softcap)) - 1
        slopes = 1 - tanh * tanh
        logits = tanh * softcap
    return logits / temperature, slopes


@triton.jit
def _row(
    logits_ptr,
    entropy_weights_ptr,
    targets_ptr,
    logprobs_ptr,
    entropies_ptr,
    vocabulary,
    softcap,
    temperature,
    CAPPED: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ENTROPY_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocabulary
    entropy_weights_ptr += row * vocabulary
    target = tl.load(targets_ptr + row)
    largest = -3.0e38
    total = 0.0
    weighted = 0.0
    for start in range(0, vocabulary, BLOCK):
        places = start + tl.arange(0, BLOCK)
        inside = places < vocabulary
        logits = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
        logits, _ = _scaled(logits, softcap, temperature, CAPPED)
        logits = tl.where(inside, logits, float("-inf"))
        grown = tl.maximum(largest, tl.max(logits, 0))
        exponentials = tl.exp(logits - grown)
        shrink = tl.exp(largest - grown)
        total = total * shrink + tl.sum(exponentials, 0)
        products = tl.where(logits == float("-inf"), 0.0, exponentials * logits)
        weighted = weighted * shrink + tl.sum(products, 0)
        largest = grown
    normaliser = largest + tl.log(total)
    entropy = normaliser - weighted / total
    logit = tl.load(logits_ptr + target).to(tl.float32)
    at_target, _ = _scaled(tl.full([1], 0.0, tl.float32) + logit, softcap, temperature, CAPPED)
    tl.store(logprobs_ptr + row + tl.arange(0, 1), at_target - normaliser)
    tl.store(entropies_ptr + row, entropy)
    if WEIGHTS:
        for start in range(0, vocabulary, BLOCK):
            places = start + tl.arange(0, BLOCK)
            inside = places < vocabulary
            logits = tl.load(logits_ptr + places, mask=inside, other=0.0).to(tl.float32)
            logits, slopes = _scaled(logits, softcap, temperature, CAPPED)
            logprobs = logits - normaliser
            probs = tl.exp(logprobs)
            chosen = tl.where(places == target, 1.0, 0.0)
            weights = (chosen - probs) * slopes
            kind = logits_ptr.dtype.element_ty
            tl.store(logits_ptr + places, weights.to(kind), mask=inside)
            if ENTROPY_WEIGHTS:
                of_entropy = tl.where(probs > 0, -probs * (logprobs + entropy), 0.0) * slopes
                tl.store(entropy_weights_ptr + places, of_entropy.to(kind), mask=inside)


def weights_in_place(
    logits_CV: Tensor,
    targets_C: Tensor,
    temperature: float,
    softcap: float | None,
    wants_gradient: bool,
    entropy_weights_CV: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Log-probs (C,) of the targets and entropies (C,) in nats, float32.

    Args:
        logits_CV: of the head, before cap and temperature, rows one after the other. With
            ``wants_gradient`` the gradient's weights take their place: the log-prob's gradient in
            the hidden state is their product with the head, over the temperature.
        entropy_weights_CV: gets the same for the entropy.
    """
    logprobs_C = torch.empty(len(targets_C), dtype=torch.float32, device=logits_CV.device)
    entropies_C = torch.empty_like(logprobs_C)
    _row[(len(targets_C),)](
        logits_CV,
        logits_CV if entropy_weights_CV is None else entropy_weights_CV,
        targets_C,
        logprobs_C,
        entropies_C,
        logits_CV.shape[1],
        1.0 if softcap is None else softcap,
        temperature,
        CAPPED=softcap is not None,
        WEIGHTS=wants_gradient,
        ENTROPY_WEIGHTS=entropy_weights_CV is not None,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return logprobs_C, entropies_C
