"""What the log-probs of one long row add to memory, beside the logits that never exist.

python -m benchmarks.cpu_logprobs tokens vocabulary
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.cpu_worker import Turns, resident_bytes
from reason_llm.model import target_logprobs

HIDDEN = 64


def main() -> None:
    """Forward and backward of ``target_logprobs`` alone, after a short row that loads the
    kernels."""
    turns = Turns()
    tokens, vocabulary = int(sys.argv[1]), int(sys.argv[2])
    head_VD = torch.randn(vocabulary, HIDDEN)
    _pass(head_VD, 128)
    hidden_ND, targets_N = _row(head_VD, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again: man 5 proc
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    logprobs_N, _ = target_logprobs(hidden_ND, targets_N, head_VD, None, 1.0)
    logprobs_N.sum().backward()
    turns.answer(
        {
            "seconds": time.perf_counter() - started,
            "extra_bytes": resident_bytes("VmHWM") - before,
            "logits_bytes": tokens * vocabulary * 4,
        }
    )


def _pass(head_VD: torch.Tensor, tokens: int) -> None:
    hidden_ND, targets_N = _row(head_VD, tokens)
    logprobs_N, _ = target_logprobs(hidden_ND, targets_N, head_VD, None, 1.0)
    logprobs_N.sum().backward()


def _row(head_VD: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and the tokens that they predict: all but the row's first."""
    targets_N = torch.randint(0, len(head_VD), (tokens - 1,))
    return torch.randn(tokens - 1, HIDDEN, requires_grad=True), targets_N
