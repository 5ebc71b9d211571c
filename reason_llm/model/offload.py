"""Weights in host memory that are on the GPU only within a phase: an outside reward model's, and
those of a teacher that is a separate model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from reason_llm.errors import OutOfMemory, one_line
from reason_llm.model import nf4
from reason_llm.model.vllm import is_out_of_memory


@contextmanager
def on_device(model: nn.Module, device: torch.device, what: str) -> Iterator[None]:
    """Context in which the weights are on the device; nothing is copied back. Raises OutOfMemory:
    they do not fit; the message names ``what`` they are."""
    held = list(_places(model))
    try:
        for holder, name, tensor in held:
            setattr(holder, name, tensor.to(device))
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory with {what} ({one_line(error)[:200]}); lower "
            "memory.budget_gib or train.micro_batch_tokens; what was sampled is saved"
        ) from None
    finally:
        for holder, name, tensor in held:
            setattr(holder, name, tensor)
        if device.type == "cuda":
            torch.cuda.empty_cache()


def to_host(model: nn.Module) -> None:
    """Move the weights to host memory."""
    for holder, name, tensor in _places(model):
        setattr(holder, name, tensor.cpu())


def _places(model: nn.Module) -> Iterator[tuple[Any, str, Tensor]]:
    """(holder, attribute, tensor) of every parameter, every buffer and the scales of NF4 layers."""
    for tensor in (*model.parameters(), *model.buffers()):
        yield tensor, "data", tensor.data.as_subclass(Tensor)
        if isinstance(tensor, nf4.Params4bit):
            state = tensor.quant_state
            for part in (state, state.state2):
                for name in ("absmax", "code", "offset"):
                    if part is not None and isinstance(part.__dict__.get(name), Tensor):
                        yield part, name, part.__dict__[name]
