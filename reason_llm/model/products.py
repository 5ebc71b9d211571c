"""Products of float32 matrices on a CPU. PyTorch multiplies them with MKL, which uses AVX2 on every
CPU that is not Intel's. So on AMD CPUs with AVX-512, PyTorch's other library, oneDNN, computes all
but the small products; elsewhere nothing changes.

Measured on one core of an EPYC (family 26), GFLOP/s of MKL and of oneDNN: 2,048 tokens, 384 inputs,
1,024 outputs 98 and 232; 64 tokens 80 and 150; 8 tokens 34 and 46.

Shapes: N tokens, I inputs, O outputs.
"""

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from reason_llm.files import MIB, read_text

SMALL = 2**21
"""Multiplications and additions below which a product is left to MKL: a call of oneDNN takes 10
microseconds more."""
CPU_INFO = Path("/proc/cpuinfo")


@cache
def is_amd() -> bool:
    """Whether the CPU is AMD's, for which MKL does less than it could."""
    try:
        return "AuthenticAMD" in read_text(CPU_INFO, 16 * MIB)
    except (OSError, UnicodeDecodeError):  # not Linux
        return False


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN multiplies float32 matrices faster than MKL here: on AMD with AVX-512."""
    return (
        torch.backends.cpu.get_cpu_capability() == "AVX512"
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and is_amd()
    )


def linear(inputs: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear`` without gradient: inputs (..., I) to outputs (..., O)."""
    if by_onednn(inputs, weight_OI) and (bias_O is None or bias_O.is_contiguous()):
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(
            inputs, weight_OI, bias_O, "none", [], ""
        )
        return outputs
    return torch.nn.functional.linear(inputs, weight_OI, bias_O)


def matmul(left_NI: Tensor, right_IO: Tensor) -> Tensor:
    """``left_NI @ right_IO`` without gradient."""
    right_OI = right_IO.t()
    return linear(left_NI, right_OI) if by_onednn(left_NI, right_OI) else left_NI @ right_IO


def by_onednn(inputs: Tensor, weight_OI: Tensor) -> bool:
    """Whether ``linear`` is oneDNN's: its operator knows neither autocast nor gradients."""
    return (
        inputs.numel() * weight_OI.shape[0] >= SMALL
        and inputs.dtype == weight_OI.dtype == torch.float32
        and inputs.device.type == weight_OI.device.type == "cpu"
        and prefers_onednn()
        and not torch.is_autocast_enabled("cpu")
        and not (torch.is_grad_enabled() and (inputs.requires_grad or weight_OI.requires_grad))
    )
