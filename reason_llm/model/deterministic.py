"""The same bits from the same step on a GPU (``model.deterministic``), at the price of speed.

What else may add in another order each time: torch's backward passes with atomics, FlashAttention's
among them, cuBLAS where it splits a product over streams, and vLLM's kernels, whose order follows
the batch. Read in torch 2.13 and vLLM 0.31.0; never run on a GPU. A CPU needs none of it.

Source: https://docs.pytorch.org/docs/stable/notes/randomness.html; VLLM_BATCH_INVARIANT in
vllm/envs.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

ENVIRONMENT = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "VLLM_BATCH_INVARIANT": "1"}
"""What cuBLAS and vLLM read once, when they start."""


def prepare() -> None:
    """Set what is read when the GPU's libraries and vLLM start."""
    os.environ.update(ENVIRONMENT)


@contextmanager
def operators() -> Iterator[None]:
    """Context in which torch takes deterministic operators, and refuses one that has no such form
    with a RuntimeError that names it."""
    before = torch.are_deterministic_algorithms_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]
