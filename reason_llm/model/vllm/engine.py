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
from reason_llm.model.attention import has_delta_rule
from reason_llm.model.sizes import MAX_LORA_RANKS, EngineSizes, ImageSizes

log = logging.getLogger(__name__)

MOST_EMPTY_STEPS = 64
"""Engine steps that must suffice to clear what finished requests leave behind."""
LEAST_RELEASED_FRACTION = 0.9
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
        found: nn.Module = self.llm.apply_model(lambda module: module)[0]
        return found

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
        if self.released_bytes < LEAST_RELEASED_FRACTION * self.kv_cache_bytes:
            raise ModelError(
                f"vLLM gave back {self.released_bytes:,} of the KV cache's "
                f"{self.kv_cache_bytes:,} bytes; set sample.engine to transformers and report this"
            )

    @contextmanager
    def routes(self) -> Iterator[list[list[Tensor]]]:
        """Context in which a mixture's routers are seen: for each of them, in the order of the
        layers, the experts (N, K) that its N tokens of each pass go to."""
        from vllm.model_executor.layers.fused_moe.layer import MoERunner

        found = [module for module in self.module.modules() if isinstance(module, MoERunner)]
        held: list[Any] = [runner.router.capture_fn for runner in found]
        seen: list[list[Tensor]] = [[] for _ in found]
        for runner, experts in zip(found, seen, strict=True):
            runner.router.set_capture_fn(lambda ids, seen=experts: seen.append(ids.clone()))
        try:
            yield seen
        finally:
            for runner, before in zip(found, held, strict=True):
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
        for _ in range(MOST_EMPTY_STEPS):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return
            self.llm.llm_engine.step()
        raise ModelError(f"vLLM still holds requests after {MOST_EMPTY_STEPS} empty steps")


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
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
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
    on_cpu = current_platform.is_cpu()
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    is_recurrent = has_delta_rule(config.get_text_config(decoder=True))
    if on_cpu:
        _keep_linear_weights()
        _keep_expert_weights()
        if is_recurrent:
            _keep_delta_rule()
    if sizes.images is not None and sizes.quantize == "nf4":
        _keep_tower_unpacked()
    adapter = _adapter_options(sizes)
    batches = [size for size in GRAPH_SIZES if size < sizes.max_sequences] + [sizes.max_sequences]
    graphs = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": batches}
    preloaded = os.environ.get("LD_PRELOAD")
    free = 0 if on_cpu else free_gpu_bytes()
    try:
        llm = LLM(
            model=path,
            trust_remote_code=False,
            dtype=str(dtype).removeprefix("torch."),
            quantization="bitsandbytes" if sizes.quantize == "nf4" else None,
            seed=seed,
            max_model_len=sizes.context_tokens,
            max_num_seqs=sizes.max_sequences,
            max_num_batched_tokens=sizes.prefill_tokens,
            # A part of a prompt sets its generator back, which torch's on a CPU refuse.
            enable_chunked_prefill=not on_cpu,
            kv_cache_memory_bytes=sizes.kv_cache_bytes,
            gpu_memory_utilization=0.01,  # the KV cache's size is given, so this only checks
            enforce_eager=on_cpu,
            compilation_config=None if on_cpu else graphs,
            # A recurrent state is cached at the ends of blocks, where a prompt must be cut.
            enable_prefix_caching=not (on_cpu and is_recurrent),
            **_image_options(sizes.images),
            hf_overrides=lambda config: override(_with_query_scale(config)),
            enable_sleep_mode=bool(current_platform.is_sleep_mode_available()),
            **adapter,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # no sampling defaults of the model's own
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
    except (ValueError, RuntimeError, OSError, AssertionError, ImportError) as error:
        if not on_cpu and is_out_of_memory(error):
            needed = sizes.kv_cache_bytes + sizes.beside_kv_bytes
            raise OutOfMemory(
                f"out of memory as vLLM starts ({one_line(error)[:200]}): by its plan sampling "
                f"takes {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB of the GPU was free; "
                f"set memory.budget_gib to {0.95 * min(free, needed) / 2**30:.1f} or less, or end "
                "what else uses the GPU"
            ) from error
        if "one instance per process" in str(error):  # seen with torch 2.11
            raise ModelError(
                f"model.path={path}: vLLM still holds the model before it in this process; give "
                "the command again, which goes on from here (without run.resume never), or restart "
                "the notebook's kernel"
            ) from error
        raise ModelError(
            f"model.path={path}: vLLM cannot load it ({one_line(error)[:300]}); "
            "set sample.engine to transformers"
        ) from error
    finally:
        forget_configs()
        # vLLM sets it for its workers; other programs must not inherit it
        if preloaded is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preloaded
    return Engine(llm, path, sizes.kv_cache_bytes)


def _adapter_options(sizes: EngineSizes) -> dict[str, Any]:
    """vLLM's options for the adapter, if there is one. Raises ModelError: vLLM has no such rank, or
    drops the adapter of a target."""
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
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank,
            "lora_target_modules": list(sizes.lora_targets) or None}  # fmt: skip


def _image_options(images: ImageSizes | None) -> dict[str, Any]:
    """vLLM's options for images. It prepares none itself, and the size of its cache of features
    follows from the largest image that its processor would make."""
    if images is None:
        return {"language_model_only": True}  # towers that only images pass through are not loaded
    pixels = images.most_tokens * images.token_pixels
    size = {"shortest_edge": images.token_pixels, "longest_edge": pixels}
    return {
        "limit_mm_per_prompt": {"image": images.most_images, "video": 0},
        "mm_processor_kwargs": {"images_kwargs": {"size": size}},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,  # or vLLM 0.32 normalises our pixels once more
        "skip_mm_profiling": True,  # the plan counts it
    }


def forget_configs() -> None:
    """Have Transformers read configs by its own classes again: vLLM 0.32 registers others for some
    families, such as DeepSeek V3.2, of which Transformers makes no model. Ends when vLLM keeps its
    classes to itself."""
    for name in CONFIG_MAPPING._extra_content.keys() & CONFIG_MAPPING._mapping.keys():
        del CONFIG_MAPPING._extra_content[name]


def _with_query_scale(config: Any) -> Any:
    """The config with the growth of Ministral 3's queries with their position where vLLM 0.32 looks
    for it (vllm/model_executor/models/mistral.py): it takes that from Mistral's own params.json and
    drops what config.json says. Ends when vLLM reads ``rope_parameters``."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is not None:
        positions = rope["original_max_position_embeddings"]
        text.llama_4_scaling = {"original_max_position_embeddings": positions, "beta": beta}
    return config


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out: vLLM's allocator and torch on a CPU have no class
    of their own for it."""
    words = ("out of memory", "can't allocate memory", "cublas_status_alloc_failed")
    is_told = any(each in str(error).casefold() for each in words)
    return is_told or isinstance(error, torch.OutOfMemoryError | MemoryError)


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

    for each in module.modules():
        if isinstance(each, TorchCompileWithNoGuardsWrapper):
            each.cleanup()


def _pool_allocators() -> list[Any]:
    """Allocators of vLLM's pools. A pool does not own its allocator, and vLLM 0.31 drops both as it
    shuts down (vllm/device_allocator/cumem.py, ``release_pools``), before the last tensors in the
    pool are freed."""
    from vllm.device_allocator.cumem import CuMemAllocator

    found = CuMemAllocator.instance
    return [] if found is None else [pair[1] for pair in found.allocator_and_pools.values()]


def _forget_slots() -> None:
    """Clear vLLM's tables of adapter slots, which it keeps by address for the whole process: vLLM
    0.32 refuses to start again while they hold anything in the pool of the weights, and would take
    a new slot at an old address for the old one. Ends when vLLM clears them as it shuts down."""
    import vllm.lora.ops.triton_ops.utils as kept

    kept._LORA_A_PTR_DICT.clear()
    kept._LORA_B_PTR_DICT.clear()


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
        self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor,
        topk_weights: Tensor, topk_ids: Tensor, activation: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
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


def _keep_tower_unpacked() -> None:
    """Keep the part that reads images in its dtype: vllm-bnb-plugin 0.0.3 packs all linear layers
    of a model and takes modules to skip from a checkpoint alone. Ends when a caller can name
    some."""
    from vllm_bnb_plugin.quantization import config, utils

    def is_skipped(prefix: str, skipped: list[str]) -> bool:
        return bool(utils.is_layer_skipped_bnb(prefix, [*skipped, "visual"]))

    config.is_layer_skipped_bnb = is_skipped


def _keep_delta_rule() -> None:
    """Compute Gated DeltaNet by Transformers' torch functions on a CPU, in any type, over the
    weights as a GPU has them: vLLM 0.32's kernels there take bfloat16 alone, and of the newer CPUs
    a convolution that is packed for them. Ends when vLLM offers a switch for it."""
    from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen3_5
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType, _resolve_layer_name

    def core(
        mixed_qkv: Tensor, b: Tensor, a: Tensor, core_attn_out: Tensor, layer_name: LayerNameType
    ) -> None:
        """Write one layer's outputs of all tokens into ``core_attn_out`` (N, H, D), and the last
        states and convolution inputs of each sequence into the layer's cache."""
        context = get_forward_context()
        layer = context.no_compile_layers[_resolve_layer_name(layer_name)]
        if context.attn_metadata is None:  # vLLM measures itself
            return
        meta = context.attn_metadata[layer.prefix]
        tails, states = layer.kv_cache
        tails = tails if is_conv_state_dim_first() else tails.transpose(1, 2)
        states = states.view(*states.shape[:2], *states.shape[:1:-1])  # their keys come first here
        ends, decoded = meta.non_spec_query_start_loc.tolist(), meta.num_decodes
        # Sequences that get one token come first, and are computed together.
        groups = [(0, decoded)] * (decoded > 0)
        groups += [(i, i + 1) for i in range(decoded, decoded + meta.num_prefills)]
        for first, last in groups:
            tokens = slice(ends[first], ends[last])
            slots = meta.non_spec_state_indices_tensor[first:last].long()
            is_new = first >= decoded and not bool(meta.has_initial_state[first])
            before = tails[slots] * (not is_new)
            rows = mixed_qkv[tokens].unflatten(0, (last - first, -1)).mT
            row = torch.cat([before, rows.to(before.dtype)], -1)
            tails[slots] = row[..., -before.shape[-1] :]
            weight = layer.conv1d.weight
            mixed = nn.functional.conv1d(row.to(weight.dtype), weight, groups=row.shape[1])
            mixed = nn.functional.silu(mixed).mT.to(mixed_qkv.dtype)
            q, k, v = mixed.split([layer.key_dim, layer.key_dim, layer.value_dim], -1)
            v = v.unflatten(-1, (-1, layer.head_v_dim))
            q, k = (each.unflatten(-1, (-1, layer.head_k_dim)) for each in (q, k))
            q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], 2) for each in (q, k))
            gates = nn.functional.softplus(a[tokens].float() + layer.dt_bias)
            g = (-layer.A_log.float().exp() * gates).unflatten(0, (last - first, -1))
            beta = b[tokens].sigmoid().unflatten(0, (last - first, -1))
            kind = "recurrent" if first < decoded else "chunk"
            found, after = getattr(qwen3_5, f"torch_{kind}_gated_delta_rule")(
                q, k, v, g=g, beta=beta, initial_state=None if is_new else states[slots],
                output_final_state=True, use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            core_attn_out[tokens] = found.flatten(0, 1)
            states[slots] = after.to(states.dtype)

    gdn_attention.cpu_gdn_attention_core = core


def _keep_linear_weights() -> None:
    """Keep linear weights: on a CPU vLLM 0.32 would pack each layer for oneDNN and drop its weight.
    Ends when vLLM offers a switch for it."""
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain
