"""What the engine does where memory runs out or something fails, with vLLM's parts stood in for.

1. Closing clears what vLLM keeps for the process; a wake that fails does not hide the real error.
2. Waking is tried once more after torch's cache is emptied, then one line.
3. Only this process's own memory is counted when it is released.
4. Out of memory as vLLM starts names memory.budget_gib.
5. A model that fails to load leaves no engine behind, and no frame that holds memory.
"""

import types
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from conftest import TINY
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError, OutOfMemory
from reason_llm.model import base, nf4
from reason_llm.model.base import Model
from reason_llm.model.vllm import engine, shared_weights
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
            engine_core=types.SimpleNamespace(
                engine_core=core, shutdown=lambda: self.asked.append("shutdown")
            )
        )

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


def test_only_this_process_is_counted(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    llm = StandInLLM()
    started = made(llm, monkeypatch)
    started.release()
    assert started.released_bytes == SIZES.kv_cache_bytes
    started.wake()
    monkeypatch.setattr(llm, "release_kv_cache_memory", lambda: None)
    with pytest.raises(ModelError, match="gave back 0 of the KV cache's 67,108,864"):
        started.release()


def test_waking_is_tried_once_more_after_the_cache_is_emptied(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = StandInLLM(refusals=1)
    started = made(llm, monkeypatch)
    started.release()
    gpu.clear()
    started.wake()
    assert started.awake
    assert gpu == ["emptied"]
    assert llm.asked == ["sleep", "wake", "wake"]
    assert not llm.cache.is_asleep


def test_a_wake_without_room_is_one_line(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    started = made(StandInLLM(refusals=2), monkeypatch)
    started.release()
    with pytest.raises(OutOfMemory, match=r"KV cache takes 0\.1 GiB.*memory\.budget_gib") as told:
        started.wake()
    assert "\n" not in str(told.value)
    assert not started.awake
    started.wake()  # there is room again
    assert started.awake


def test_another_error_of_waking_is_not_taken_for_memory(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = StandInLLM()
    started = made(llm, monkeypatch)
    started.release()

    def broken(tags: list[str]) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(llm, "wake_up", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        started.wake()


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


BUDGET = r"as vLLM starts.*set memory\.budget_gib to"
HELD = r"holds the model before it in this process; give the command"


@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), OutOfMemory, BUDGET),
        (RuntimeError(NO_ROOM), OutOfMemory, BUDGET),
        # In vLLM's words, as it refused on an H100.
        (AssertionError("CuMem allocator can only be used for one instance per process."),
         ModelError, HELD),
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


@pytest.mark.parametrize("on_cpu", [False, True])
@pytest.mark.parametrize("is_more", [False, True])
def test_vllm_is_started_with_the_sizes_of_the_plan(
    on_cpu: bool, is_more: bool, gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever else decides what is sampled, too."""
    import vllm
    from vllm.platforms import current_platform

    seen: list[dict[str, Any]] = []

    def refused(**options: Any) -> None:
        seen.append(options)
        raise ValueError("no such model")

    monkeypatch.setattr(vllm, "LLM", refused)
    monkeypatch.setattr(current_platform, "is_cpu", lambda: on_cpu)
    monkeypatch.setattr(current_platform, "is_sleep_mode_available", lambda: not on_cpu)
    for name in ("_keep_linear_weights", "_keep_expert_weights"):
        monkeypatch.setattr(engine, name, lambda: None)
    more = {"lora_rank": 0, "quantize": "nf4", "prefill_tokens": 300}
    sizes = replace(SIZES, lora_targets=("q_proj",), **(more if is_more else {}))
    with pytest.raises(ModelError, match=r"cannot load it \(no such model\); set sample\.engine"):
        engine.start("org/name", torch.bfloat16, sizes, 5)
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8,
            "lora_target_modules": ["q_proj"]}  # fmt: skip
    assert seen == [{
        "model": "org/name", "trust_remote_code": False, "dtype": "bfloat16", "seed": 5,
        "quantization": "bitsandbytes" if is_more else None, "max_model_len": 256,
        "max_num_seqs": 16, "max_num_batched_tokens": 300 if is_more else None,
        "enable_chunked_prefill": not on_cpu, "kv_cache_memory_bytes": 64 << 20,
        "gpu_memory_utilization": 0.01, "enforce_eager": on_cpu,
        "compilation_config": None if on_cpu else graphs, "enable_prefix_caching": True,
        "enable_sleep_mode": not on_cpu, "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm", "disable_log_stats": True, "use_tqdm_on_load": False,
        **({} if is_more else lora),
    }]  # fmt: skip


def test_a_model_that_fails_to_load_closes_its_engine(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    class Started:
        def release(self) -> None:
            """Nothing to give back."""

        def close(self) -> None:
            closed.append("closed" if views() is None else "closed under a view")

    def verify(model: torch.nn.Module, path: str) -> None:
        copy = model  # what a frame of the traceback holds
        raise ModelError(f"{path} differs from {type(copy).__name__}")

    model = torch.nn.Linear(2, 2)
    views = weakref.ref(model)
    left = [model]
    del model
    monkeypatch.setattr(engine, "start", lambda *_: Started())
    monkeypatch.setattr(shared_weights, "model_over", lambda *_: left.pop())
    monkeypatch.setattr(shared_weights, "verify", verify)
    with pytest.raises(ModelError, match="differs from Linear"):
        Model(ModelSection(path=str(TINY), adapter=AdapterSection()), tokenizer, 0, SIZES)
    assert closed == ["closed"]


def test_what_fails_while_closing_does_not_hide_the_error(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        def close(self) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def learn() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise ZeroDivisionError("the real one")

    held: list[Any] = []
    section = ModelSection(path=str(TINY), dtype="float32", adapter=AdapterSection())
    with pytest.raises(ZeroDivisionError, match="the real one"), Model(section, tokenizer, 0) as m:
        m.engine = Broken()  # type: ignore[assignment]
        learn()
    assert held[0]() is None
    assert "closing vLLM failed: CUDA error" in caplog.text
    with pytest.raises(RuntimeError, match="illegal"), Model(section, tokenizer, 0) as m:
        m.engine = Broken()  # type: ignore[assignment]


def test_the_table_of_nf4_is_made_before_vllm_starts(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Made while vLLM loads, it would lie in the weights' pool for good."""
    seen: list[bool] = []

    def start(*_: Any) -> None:
        seen.append("dynamic" in nf4.name2qmap)
        raise ModelError("no vLLM here")

    monkeypatch.delitem(nf4.name2qmap, "dynamic", raising=False)
    monkeypatch.setattr(engine, "start", start)
    section = ModelSection(path=str(TINY), quantize="nf4", adapter=AdapterSection())
    with pytest.raises(ModelError, match="no vLLM here"):
        Model(section, tokenizer, 0, SIZES)
    assert seen == [True]
    import bitsandbytes.functional as theirs

    table = theirs.name2qmap["dynamic"]
    theirs.quantize_blockwise(torch.ones(256))
    assert theirs.name2qmap["dynamic"] is table
    assert base.default_device().type == table.device.type
