"""What the log-probs of one long row add to memory, beside the logits that never exist.

python -m benchmarks.cpu_logprobs tokens vocabulary
"""

import sys
import time
from pathlib import Path

import torch

from benchmarks.cpu_worker import Turns, resident_bytes
from reason_llm.model import token_logprobs

HIDDEN = 64


def main() -> None:
    """Forward and backward of ``token_logprobs`` alone, after a short row that loads the
    kernels."""
    turns = Turns()
    tokens, vocabulary = int(sys.argv[1]), int(sys.argv[2])
    head_VD = torch.randn(vocabulary, HIDDEN)
    _pass(head_VD, 128)
    hidden_BTD, ids_BT, mask_BT = _row(head_VD, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again: man 5 proc
    before = resident_bytes("VmRSS")
    started = time.perf_counter()
    logprobs_BT, _ = token_logprobs(hidden_BTD, ids_BT, mask_BT, head_VD, None, 1.0)
    logprobs_BT.sum().backward()
    turns.answer(
        {
            "seconds": time.perf_counter() - started,
            "extra_bytes": resident_bytes("VmHWM") - before,
            "logits_bytes": tokens * vocabulary * 4,
        }
    )


def _pass(head_VD: torch.Tensor, tokens: int) -> None:
    hidden_BTD, ids_BT, mask_BT = _row(head_VD, tokens)
    logprobs_BT, _ = token_logprobs(hidden_BTD, ids_BT, mask_BT, head_VD, None, 1.0)
    logprobs_BT.sum().backward()


def _row(head_VD: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mask_BT = torch.ones(1, tokens, dtype=torch.bool)
    mask_BT[:, 0] = False
    ids_BT = torch.randint(0, len(head_VD), (1, tokens))
    return torch.randn(1, tokens, HIDDEN, requires_grad=True), ids_BT, mask_BT
