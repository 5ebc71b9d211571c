"""What the engine does where memory runs out or something fails, with vLLM's parts stood in for.

1. Closing clears what vLLM keeps for the process; a wake that fails does not hide the real error.
   No weight outlives it, so that the pool is empty for a second engine, whoever holds the first.
2. Waking without room is one line.
3. Out of memory as vLLM starts names memory.budget_gib.
"""

import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import TINY
from reason_llm.errors import OutOfMemory
from reason_llm.model.vllm import engine
from reason_llm.model.vllm.engine import Engine, EngineSizes

pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
pytestmark = pytest.mark.filterwarnings("default")

SIZES = EngineSizes(context_tokens=256, kv_cache_bytes=64 << 20, max_sequences=16, lora_rank=8)
NO_ROOM = "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:139"


class StandInLLM:
    """A vllm.LLM whose KV cache is one allocation of vLLM's own allocator, on a card that may be
    full."""

    def __init__(self, refusals: int = 0) -> None:
        from vllm.device_allocator.cumem import AllocationData, CuMemAllocator

        self.refusals = refusals
        self.asked: list[str] = []
        self.cache = AllocationData((0, SIZES.kv_cache_bytes, 4096, 0), "kv_cache")
        self.allocator = CuMemAllocator()
        weights = AllocationData((0, 7 << 20, 8192, 0), "weights")
        self.allocator.pointer_to_data = {4096: self.cache, 8192: weights}
        core = types.SimpleNamespace(
            scheduler=types.SimpleNamespace(has_requests=lambda: False), batch_queue=None
        )
        self.llm_engine = types.SimpleNamespace(
            reset_encoder_cache=lambda: None,
            engine_core=types.SimpleNamespace(
                engine_core=core, shutdown=lambda: self.asked.append("shutdown")
            ),
        )

    def collective_rpc(self, act: Any) -> list[Any]:
        return [act(types.SimpleNamespace(model_runner=types.SimpleNamespace()))]

    def apply_model(self, act: Any) -> list[Any]:
        return [act(torch.nn.Module())]

    def sleep(self, level: int) -> None:
        self.asked.append("sleep")

    def release_kv_cache_memory(self) -> None:
        self.cache.is_asleep = True

    def wake_up(self, tags: list[str]) -> None:
        self.asked.append("wake")
        if self.refusals:
            self.refusals -= 1
            raise RuntimeError(NO_ROOM)
        self.cache.is_asleep = False


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A card that somebody else fills as fast as we release: how often its cache was emptied."""
    from vllm.device_allocator.cumem import CuMemAllocator

    emptied: list[str] = []
    free = iter(range(10**12, 0, -(10**9)))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("emptied"))
    monkeypatch.setattr(engine, "free_gpu_bytes", lambda: next(free))
    monkeypatch.setattr(CuMemAllocator, "instance", None)
    yield emptied


def made(llm: StandInLLM, monkeypatch: pytest.MonkeyPatch) -> Engine:
    from vllm.device_allocator.cumem import CuMemAllocator

    monkeypatch.setattr(CuMemAllocator, "instance", llm.allocator)
    started = Engine(llm, "model", SIZES.kv_cache_bytes)
    started.can_release = True
    return started


def test_a_wake_without_room_is_one_line(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started = made(StandInLLM(refusals=2), monkeypatch)
    started.release()
    with pytest.raises(OutOfMemory, match=r"KV cache takes 0\.1 GiB.*memory\.budget_gib") as told:
        started.wake()
    assert "\n" not in str(told.value)
    assert not started.awake
    started.wake()  # there is room again
    assert started.awake


def test_closing_clears_the_slots_that_vllm_keeps(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import vllm.lora.ops.triton_ops.utils as kept

    slot = torch.zeros(1, 1, 8, 16)
    kept._get_lora_a_ptr([slot], torch.device("cpu"))
    kept._get_lora_b_ptr([slot], 0, torch.device("cpu"))
    held = weakref.ref(slot)
    del slot
    assert held() is not None, "vLLM does not keep it: the workaround can go"
    llm = StandInLLM(refusals=2)
    started = made(llm, monkeypatch)
    started.release()
    started.close()
    assert not kept._LORA_A_PTR_DICT
    assert not kept._LORA_B_PTR_DICT
    assert held() is None
    assert llm.asked == ["sleep", "wake", "wake", "shutdown"]
    assert "vLLM is closed while asleep: out of memory" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("is_compiled", [False, True])
def test_no_weight_outlives_its_engine(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real vLLM. On a GPU it compiles its model, for which Dynamo holds the compiled module."""
    import vllm
    from torch._dynamo import convert_frame

    if is_compiled:  # as far as vLLM compiles on a CPU: without adapters
        options = {"enforce_eager": False, "compilation_config": {"mode": 3}}
        monkeypatch.setattr(vllm, "LLM", lambda real=vllm.LLM, **k: real(**(k | options)))
        monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # by Dynamo alone, without a C++ compiler
    sizes = replace(SIZES, lora_rank=0 if is_compiled else 8)
    started = engine.start(str(TINY), torch.bfloat16, sizes, 0)
    held = started.llm  # as a notebook may hold it
    assert bool(convert_frame._bytecode_hooks) == is_compiled
    weights = [weakref.ref(each) for each in started.module.parameters()]
    started.close()
    assert len(weights) > 20
    assert [ref for ref in weights if ref() is not None] == []
    assert not convert_frame._bytecode_hooks
    del held


BUDGET = r"as vLLM starts.*set memory\.budget_gib to"


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), OutOfMemory, BUDGET),
        (RuntimeError(NO_ROOM), OutOfMemory, BUDGET),
    ],
)  # fmt: skip
def test_what_ends_the_start_of_vllm_is_told_with_its_fix(
    error: Exception,
    kind: type[Exception],
    told: str,
    gpu: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import vllm
    from vllm.platforms import current_platform

    def refused(**sizes: Any) -> None:
        raise error

    monkeypatch.setattr(vllm, "LLM", refused)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    with pytest.raises(kind, match=told) as found:
        engine.start(str(TINY), torch.float32, SIZES, 0)
    assert "sample.engine" not in str(found.value)
