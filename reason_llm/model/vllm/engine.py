"""vLLM in this process: started with the sizes of the plan, asleep while the learner learns. On a
GPU that gives back the KV cache's memory; the weights stay, because the learner views them.

Read against vLLM 0.32.0: vllm/v1/engine/core.py, vllm/v1/worker/gpu_worker.py,
vllm/device_allocator/cumem.py.
"""

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig

from reason_llm.errors import ModelError, OutOfMemory, one_line
from reason_llm.model.adapters import SHARED_EXPERT_GATE
from reason_llm.model.families import has_delta_rule
from reason_llm.model.sizes import MAX_LORA_RANKS, EngineSizes
from reason_llm.model.vllm.delta_rule import keep_delta_rule

log = logging.getLogger(__name__)

MAX_EMPTY_STEPS = 64
"""Engine steps that must suffice to clear what finished requests leave behind."""
MIN_RELEASED_FRACTION = 0.9
"""The part of the KV cache's memory that a release must give back."""
GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192)
"""Batch sizes whose decoding is captured as a CUDA graph, besides the largest: vLLM 0.32 captures
172, which keep their memory."""


class Engine:
    """vLLM over one model, awake (with its KV cache) or asleep (without it on a GPU).

    Args:
        llm: a ``vllm.LLM`` in this process.
        standby: it is Unsloth's, whose ``sleep(1)`` leaves the weights where they are, and where
            ``release_kv_cache_memory`` would work once.
    """

    def __init__(self, llm: Any, path: str, kv_cache_bytes: int, standby: bool = False) -> None:
        from vllm.platforms import current_platform

        self.llm = llm
        self.path = path
        self.kv_cache_bytes = kv_cache_bytes
        self.standby = standby
        self.can_release = bool(current_platform.is_sleep_mode_available())
        self.released_bytes = 0
        """Bytes that the last release gave back, in this process."""
        self.awake = True

    @property
    def module(self) -> nn.Module:
        """vLLM's own model, whose parameters are the only copy of the base."""
        model: nn.Module = self.llm.apply_model(lambda module: module)[0]
        return model

    def use(self, tokenizer: Any) -> None:
        """Have vLLM look for stop strings in the texts of this tokenizer, in place of the one that
        it loaded. It is fed with ids and uses a tokenizer for nothing else."""
        from vllm.tokenizers.hf import get_cached_tokenizer

        self.llm.llm_engine.output_processor.tokenizer = get_cached_tokenizer(tokenizer)

    def wake(self) -> None:
        """Restore the KV cache. A second call does nothing. Raises OutOfMemory: there is no room
        for it, even with torch's own cache emptied."""
        # Unsloth's continues only when nothing that it counts as asleep is left.
        tags = {} if self.standby else {"tags": ["kv_cache" if self.can_release else "scheduling"]}
        for is_last in (False, True):
            if self.awake:
                return
            try:
                self.llm.wake_up(**tags)
                self.awake = True
                return
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if is_last:
                    raise OutOfMemory(
                        "out of memory while waking vLLM: its KV cache takes "
                        f"{self.kv_cache_bytes / 2**30:.1f} GiB and "
                        f"{free_gpu_bytes() / 2**30:.1f} GiB of the GPU is free "
                        f"({one_line(error)[:200]}); lower memory.budget_gib, or end what else "
                        "uses the GPU"
                    ) from error
                log.debug("out of memory while waking vLLM, once more: %s", one_line(error))
            gc.collect()
            torch.cuda.empty_cache()

    def release(self) -> None:
        """Finish running work and free the KV cache's memory. A second call does nothing. Raises
        ModelError: the memory did not come back."""
        if not self.awake:
            return
        self._drain()
        self.llm.llm_engine.reset_encoder_cache()
        if not self.can_release:
            self.llm.sleep(level=0)
            self.awake = False
            return
        gc.collect()
        torch.cuda.empty_cache()  # memory that sampling left behind in small pieces
        # Unsloth's allocator does not say what it unmapped: then the whole GPU is looked at.
        count = free_gpu_bytes if self.standby else unmapped_bytes
        before = count()
        self.llm.sleep(level=1 if self.standby else 0)
        self.awake = False
        if not self.standby:
            self.llm.release_kv_cache_memory()
        self.released_bytes = count() - before
        if self.released_bytes < MIN_RELEASED_FRACTION * self.kv_cache_bytes:
            raise ModelError(
                f"vLLM gave back {self.released_bytes:,} of the KV cache's "
                f"{self.kv_cache_bytes:,} bytes; set sample.engine to transformers and report this"
            )

    @contextmanager
    def routes(self) -> Iterator[list[list[Tensor]]]:
        """Context in which a mixture's routers are seen: for each of them, in the order of the
        layers, the experts (N, K) that its N tokens of each pass go to."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        runners = [module for module in self.module.modules() if isinstance(module, MoERunner)]
        held: list[Any] = [runner.router.capture_fn for runner in runners]
        seen: list[list[Tensor]] = [[] for _ in runners]
        for runner, experts in zip(runners, seen, strict=True):
            runner.router.set_capture_fn(lambda ids, seen=experts: seen.append(ids.clone()))
        try:
            yield seen
        finally:
            for runner, before in zip(runners, held, strict=True):
                runner.router.set_capture_fn(before)

    def close(self) -> None:
        """End the engine. Views of its weights must be gone before, or they outlive their pool."""
        gc.collect()
        if self.can_release:
            try:  # or vLLM 0.32 would unmap the released KV cache once more as it ends
                self.wake()
            except (OutOfMemory, RuntimeError) as error:
                log.warning("vLLM is closed while asleep: %s", one_line(error))
        (worker,) = self.llm.collective_rpc(lambda worker: worker)
        allocators = _pool_allocators()
        _unhook(self.module)
        self.llm.llm_engine.engine_core.shutdown()
        # Its manager of adapters would hold the model as long as anything holds the engine.
        vars(worker.model_runner).clear()
        del self.llm
        _forget_slots()
        for _ in range(2):  # a parameter is freed after its views
            gc.collect()
        if self.can_release:
            torch.cuda.empty_cache()
        del allocators

    def _drain(self) -> None:
        """Step until nothing is scheduled, before which vLLM 0.32 refuses to release ("requires a
        completed pause first"): the last finished requests are cleared by a step more."""
        core = self.llm.llm_engine.engine_core.engine_core
        for _ in range(MAX_EMPTY_STEPS):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return
            self.llm.llm_engine.step()
        raise ModelError(f"vLLM still holds requests after {MAX_EMPTY_STEPS} empty steps")


def start(
    path: str,
    dtype: torch.dtype,
    sizes: EngineSizes,
    seed: int,
    override: Callable[[Any], Any] = lambda config: config,
) -> Engine:
    """vLLM over the model in ``path``, a folder or a Hub id.

    Args:
        override: changes the model's config as vLLM reads it.

    Raises:
        ModelError: vLLM cannot be imported, or refuses the model.
    """
    LLM, current_platform = _import_vllm()
    on_cpu = current_platform.is_cpu()
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    has_states = has_delta_rule(config.get_text_config(decoder=True))
    if on_cpu:
        _keep_linear_weights()
        _keep_expert_weights()
        if has_states:
            keep_delta_rule()
    options = _options(sizes, on_cpu, has_states)
    preloaded = os.environ.get("LD_PRELOAD")
    free = None if on_cpu else free_gpu_bytes()
    try:
        llm = LLM(
            model=path,
            trust_remote_code=False,
            dtype=str(dtype).removeprefix("torch."),
            seed=seed,
            hf_overrides=lambda config: override(_with_query_scale(config)),
            enable_sleep_mode=bool(current_platform.is_sleep_mode_available()),
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # no sampling defaults of the model's own
            disable_log_stats=True,
            use_tqdm_on_load=False,
            **options,
        )
    except (ValueError, RuntimeError, OSError, AssertionError, ImportError) as error:
        raise _start_error(path, sizes, error, free) from error
    finally:
        forget_configs()
        # vLLM sets it for its workers; other programs must not inherit it
        if preloaded is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preloaded
    return Engine(llm, path, sizes.kv_cache_bytes)


def _import_vllm() -> tuple[Any, Any]:
    """Import vLLM's ``LLM`` and its platform, after the settings that it reads at import."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no usage reports
    # FlashInfer's sampler gives no processed log-probs, so it is not even imported.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    try:
        from vllm import LLM
        from vllm.platforms import current_platform
    except ImportError as error:
        raise ModelError(
            f"sample.engine=vllm: vLLM cannot be imported ({one_line(error)}); "
            "install it (docs/gpu.md), or set sample.engine to transformers"
        ) from error
    return LLM, current_platform


def _options(sizes: EngineSizes, on_cpu: bool, has_states: bool) -> dict[str, Any]:
    """vLLM's options for these sizes; ``has_states``: the model has recurrent states."""
    attachments = {"language_model_only": True}  # towers that text does not pass are not loaded
    if sizes.attachments is not None:
        attachments = sizes.attachments.engine_options(is_packed=sizes.quantize != "none")
    batches = [size for size in GRAPH_SIZES if size < sizes.max_sequences] + [sizes.max_sequences]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches}
    return {
        "quantization": "bitsandbytes" if sizes.quantize == "nf4" else None,
        "max_model_len": sizes.context_tokens,
        "max_num_seqs": sizes.max_sequences,
        "max_num_batched_tokens": sizes.prefill_tokens,
        # A part of a prompt sets its generator back, which torch's on a CPU refuse.
        "enable_chunked_prefill": not on_cpu,
        "kv_cache_memory_bytes": sizes.kv_cache_bytes,
        "gpu_memory_utilization": 0.01,  # the KV cache's size is given, so this only checks
        "enforce_eager": on_cpu,
        "compilation_config": None if on_cpu else graphs,
        # A recurrent state is cached at the ends of blocks, where a prompt must be cut.
        "enable_prefix_caching": not (on_cpu and has_states),
        **attachments,
        **_adapter_options(sizes),
    }


def _start_error(
    path: str, sizes: EngineSizes, error: BaseException, free: int | None
) -> ModelError | OutOfMemory:
    """The error to raise when vLLM does not start; ``free``: bytes of the GPU before, if any."""
    if free is not None and is_out_of_memory(error):
        needed = sizes.kv_cache_bytes + sizes.other_bytes
        return OutOfMemory(
            f"out of memory as vLLM starts ({one_line(error)[:200]}): by its plan sampling "
            f"takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the GPU was free; "
            f"set memory.budget_gib to {0.95 * min(free, needed) / 2**30:.1f} or less, or end "
            "what else uses the GPU"
        )
    return ModelError(
        f"model.path={path}: vLLM cannot load it ({one_line(error)[:300]}); "
        "set sample.engine to transformers"
    )


def _adapter_options(sizes: EngineSizes) -> dict[str, Any]:
    """vLLM's options for the adapter; empty if there is none. Raises ModelError: vLLM does not
    support the rank, or drops the adapter of a target."""
    if not sizes.lora_rank:
        return {}
    rank = next((r for r in MAX_LORA_RANKS if r >= sizes.lora_rank), None)
    if rank is None:
        raise ModelError(
            f"model.adapter.rank={sizes.lora_rank} is more than vLLM's {MAX_LORA_RANKS[-1]}; "
            "lower it, or set sample.engine to transformers"
        )
    if SHARED_EXPERT_GATE in sizes.lora_targets:
        raise ModelError(
            f"model.adapter.targets with {SHARED_EXPERT_GATE}: vLLM 0.32 applies no adapter there; "
            "leave it out, or set sample.engine to transformers"
        )
    targets = list(sizes.lora_targets) or None
    limits = {"max_loras": 1, "max_lora_rank": rank}
    return {"enable_lora": True, "lora_target_modules": targets, **limits}


def forget_configs() -> None:
    """Have Transformers read configs by its own classes again: vLLM 0.32 registers others for some
    families, such as DeepSeek V3.2, of which Transformers makes no model. Ends when vLLM keeps its
    classes to itself."""
    for name in CONFIG_MAPPING._extra_content.keys() & CONFIG_MAPPING._mapping.keys():
        del CONFIG_MAPPING._extra_content[name]


def _with_query_scale(config: Any) -> Any:
    """The config with Ministral 3's query scaling by position where vLLM 0.32 reads it
    (vllm/model_executor/models/mistral.py): vLLM reads it from Mistral's own params.json and drops
    config.json's. Ends when vLLM reads ``rope_parameters``."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        positions = rope["original_max_position_embeddings"]
        text.llama_4_scaling = {"original_max_position_embeddings": positions, "beta": beta}
    return config


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports that memory ran out; vLLM's allocator and torch on a CPU have no
    separate class for it."""
    phrases = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
    is_phrase = any(phrase in str(error).casefold() for phrase in phrases)
    return is_phrase or isinstance(error, torch.OutOfMemoryError | MemoryError)


def free_gpu_bytes() -> int:
    """Free bytes by the driver, because torch's counters do not see vLLM's pool being unmapped."""
    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def unmapped_bytes() -> int:
    """Bytes of vLLM's pools in this process that were freed; other programs do not change it."""
    from vllm.device_allocator.cumem import CuMemAllocator

    held = {} if CuMemAllocator.instance is None else CuMemAllocator.instance.pointer_to_data
    return sum(int(data.handle[1]) for data in held.values() if data.is_asleep)


def _unhook(module: nn.Module) -> None:
    """Remove the hooks through which Dynamo holds vLLM's compiled modules, and so the weights in
    their pool, for the whole process. vLLM 0.31 does it when its engine is collected
    (vllm/v1/engine/llm_engine.py, ``_cleanup_instance_caches``), by a weak reference to the model
    around them, which may be collected first. Ends when vLLM removes them as it shuts down."""
    from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper

    for compiled in module.modules():
        if isinstance(compiled, TorchCompileWithNoGuardsWrapper):
            compiled.cleanup()


def _pool_allocators() -> list[Any]:
    """Allocators of vLLM's pools. A pool does not own its allocator, and vLLM 0.31 drops both as it
    shuts down (vllm/device_allocator/cumem.py, ``release_pools``), before the last tensors in the
    pool are freed."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.instance
    return [] if allocator is None else [pair[1] for pair in allocator.allocator_and_pools.values()]


def _forget_slots() -> None:
    """Clear vLLM's tables of adapter slots, which it keeps by address for the whole process: vLLM
    0.32 refuses to start again while they hold anything in the pool of the weights, and would take
    a new slot at an old address for the old one. Ends when vLLM clears them as it shuts down."""
    from vllm.lora.ops.triton_ops import utils

    utils._LORA_A_PTR_DICT.clear()
    utils._LORA_B_PTR_DICT.clear()


@contextmanager
def on_default_stream() -> Iterator[None]:
    """Context of torch's default CUDA stream, if there is a GPU; earlier work ends first. vLLM's
    bitsandbytes plugin leaves the process on its own stream, and bitsandbytes 0.50.2 quantises
    and steps its optimizers on the default stream without waiting for any other."""
    if not torch.cuda.is_available():
        yield
        return
    theirs, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    default.wait_stream(theirs)
    try:
        with torch.cuda.stream(default):
            yield
    finally:
        theirs.wait_stream(default)


def _keep_expert_weights() -> None:
    """Compute experts in torch on a CPU, over the weights as a GPU has them: with adapters vLLM
    0.32 takes its Triton kernel for experts on every machine, and a CPU has no Triton. Ends when
    vLLM has experts with adapters there."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    def apply(
        self: Any,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        activation: Any,
        **kwargs: Any,
    ) -> None:
        total = torch.zeros_like(output)
        for expert in topk_ids.unique().tolist():
            rows, places = (topk_ids == expert).nonzero(as_tuple=True)
            biases = [b if b is None else b[expert] for b in (self.w1_bias, self.w2_bias)]
            inner = nn.functional.linear(hidden_states[rows], w1[expert], biases[0])
            gated = inner.new_empty(len(rows), w2.shape[2])
            if activation.value == "swigluoai":  # which vLLM has not built for CPUs
                gate, up = inner[:, ::2].clamp(max=7), inner[:, 1::2].clamp(-7, 7)
                gated = gate * torch.sigmoid(1.702 * gate) * (up + 1)
            else:
                self.activation(activation, gated, inner)
            outer = nn.functional.linear(gated, w2[expert], biases[1])
            total.index_add_(0, rows, outer * topk_weights[rows, places, None].to(outer.dtype))
        output.copy_(total)

    TritonExperts.apply = apply


def _keep_linear_weights() -> None:
    """Keep linear weights: on a CPU vLLM 0.32 would pack each layer for oneDNN and drop its weight.
    Ends when vLLM offers a switch for it."""
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain
