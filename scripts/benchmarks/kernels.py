"""``benchmark.py kernels`` and ``config``: vLLM for CUDA as far as it goes without a device.

1. ``config``: vLLM's config as the product starts it, for cards of four generations, in bfloat16
   and NF4, and the attention backend that follows.
2. ``kernels``: the Triton kernels of sampling with an adapter, compiled for the same cards through
   vLLM's own calling code, each within the shared memory of the card. Needs Triton.

Not here: vLLM's compiled extensions (FlashAttention, norms, the KV cache's), kernels that
torch.compile writes, and whether any kernel computes what it should.
"""

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks import emulated, models
from benchmarks.emulated import SHARED_BYTES, SIZES, Kernel
from benchmarks.gpu_check import Report
from reason_llm.model.vllm.engine import GRAPH_SIZES

HIDDEN, VOCABULARY, HEAD = 3584, 152064, 128
"""Of Qwen2.5-7B, as the widths of its fused layers below."""
LAYERS: dict[str, tuple[int, ...]] = {
    "q, k and v": (3584, 512, 512),
    "gate and up": (18944, 18944),
    "o": (3584,),
}
RANKS = (8, 32)
TOKENS = (16, 2048)
"""Decoding and reading prompts: vLLM takes other block sizes from 128 tokens."""
DRAWS: dict[str, dict[str, float]] = {
    "as the model says": {},
    "temperature": {"temperature": 0.7},
    "min-p": {"min_p": 0.1},
    "top-k": {"top_k": 20},
    "top-p": {"top_p": 0.9},
    "top-k and top-p": {"top_k": 20, "top_p": 0.9},
}
BATCHES = (16, 96)
"""vLLM draws with other kernels up to 64 sequences."""


def run_config(capability: str, folder: Path, say: Callable[[str], None]) -> int:
    """Resolve the config for one card; the number of checks that failed."""
    report = Report(say)
    models.make("tiny", folder)
    emulated.pretend(capability)
    kinds: tuple[Literal["none", "nf4"], ...] = ("none", "nf4")
    for quantize in kinds:
        kind = "bfloat16" if quantize == "none" else "NF4"
        report.check(f"{capability}: config, {kind}", partial(_config, folder, quantize))
    return report.end()


def _config(folder: Path, quantize: Literal["none", "nf4"]) -> str:
    config = emulated.resolved_config(folder, quantize)
    wrong = differences(config, expected(quantize))
    adapted = tuple(config.lora_config.target_modules)
    if adapted != SIZES.lora_targets:
        wrong.append(f"the adapted layers are {adapted}")
    if wrong:
        raise AssertionError("; ".join(wrong))
    backend, version = emulated.attention_of(config, HEAD)
    if backend != "FLASH_ATTN" or version is None:
        raise AssertionError(f"attention is {backend}, FlashAttention {version}")
    runner = "V2" if config.use_v2_model_runner else "V1 (V2 needs Triton)"
    return f"FlashAttention {version}, model runner {runner}"


def expected(quantize: Literal["none", "nf4"]) -> dict[str, Any]:
    """What the plan and the phases take for granted, by its place in vLLM's config."""
    most = SIZES.max_sequences
    return {
        "device_config.device_type": "cuda",
        "parallel_config.worker_cls": "vllm.v1.worker.gpu_worker.Worker",
        "model_config.dtype": torch.bfloat16,
        "model_config.quantization": "bitsandbytes" if quantize == "nf4" else None,
        "model_config.enable_sleep_mode": True,
        "model_config.logprobs_mode": "processed_logprobs",
        "model_config.enforce_eager": False,
        "compilation_config.cudagraph_mode.name": "FULL_DECODE_ONLY",
        "compilation_config.cudagraph_capture_sizes": [
            *(size for size in GRAPH_SIZES if size < most), most,
        ],
        "compilation_config.mode.name": "VLLM_COMPILE",
        "scheduler_config.async_scheduling": True,
        "scheduler_config.max_num_seqs": most,
        "scheduler_config.max_num_batched_tokens": SIZES.prefill_tokens,
        "cache_config.enable_prefix_caching": True,
        "cache_config.kv_cache_memory_bytes": SIZES.kv_cache_bytes,
        "lora_config.max_lora_rank": SIZES.lora_rank,
        "lora_config.lora_dtype": torch.bfloat16,
    }  # fmt: skip


def differences(config: Any, wanted: dict[str, Any]) -> list[str]:
    """One line for each value of vLLM's config that is another one."""
    found = {place: attrgetter(place)(config) for place in wanted}
    return [f"{place} is {found[place]}, not {value}" for place, value in wanted.items()
            if found[place] != value]  # fmt: skip


def run_kernels(capability: str, folder: Path, say: Callable[[str], None]) -> int:
    """Compile the kernels for one card; the number of checks that failed."""
    report = Report(say)
    models.make("tiny", folder / "model")
    emulated.pretend(capability)
    config = emulated.resolved_config(folder / "model", "none")
    cache = folder / "triton"

    def check(name: str, act: Callable[[], None]) -> None:
        def compiled() -> str:
            with emulated.compiling(capability, cache) as made:
                act()
            return summary(made, capability)

        report.check(f"{capability}: {name}", compiled)

    report.check(f"{capability}: model runner", partial(_runner, config))
    for layer, widths in LAYERS.items():
        check(f"adapter of {layer}", partial(_adapter, config, widths))
    for name, draw in DRAWS.items():
        check(f"draw, {name}", partial(_draw, config, draw))
    check("inputs and block tables of a step", _step)
    return report.end()


def _runner(config: Any) -> str:
    """The one whose kernels are compiled below."""
    if not config.use_v2_model_runner:
        raise AssertionError("vLLM takes its model runner V1, which has other kernels")
    return "V2"


def summary(made: Iterable[Kernel], capability: str) -> str:
    """The kernels and the most shared memory of one.

    Raises:
        AssertionError: none was compiled, or one takes more shared memory than a block may.
    """
    compiled, most = set(made), SHARED_BYTES[capability]
    if not compiled:
        raise AssertionError("no kernel was compiled")
    for kernel in compiled:
        if kernel.arch != int(capability.replace(".", "")):
            raise AssertionError(f"{kernel.name} is for sm_{kernel.arch}")
        if kernel.shared_bytes > most:
            raise AssertionError(f"{kernel.name} takes {kernel.shared_bytes:,} bytes of shared "
                                 f"memory, and a block may take {most:,}")  # fmt: skip
    largest = max(kernel.shared_bytes for kernel in compiled)
    names = ", ".join(sorted({kernel.name.strip("_") for kernel in compiled}))
    return f"{len(compiled)} variants, shared memory up to {largest:,} bytes: {names}"


def _adapter(config: Any, widths: tuple[int, ...]) -> None:
    """Shrink and expand as a fused layer calls them, in decoding and in reading prompts."""
    from vllm.lora.ops.triton_ops import lora_expand_op, lora_shrink_op
    from vllm.lora.punica_wrapper import punica_gpu

    # vLLM registers them for the device; their Python functions are what is registered.
    punica_gpu.lora_shrink = lora_shrink_op._lora_shrink
    punica_gpu.lora_expand = lora_expand_op._lora_expand
    wrapper = punica_gpu.PunicaWrapperGPU(
        max(TOKENS), SIZES.max_sequences, torch.device("cuda", 0), lora_config=config.lora_config
    )
    for tokens in TOKENS:
        wrapper.token_mapping_meta.prepare_tensors(torch.zeros(tokens, dtype=torch.int32))
        for rank in RANKS:
            wrapper.add_lora_linear(
                torch.empty(tokens, sum(widths), dtype=torch.bfloat16),
                torch.empty(tokens, HIDDEN, dtype=torch.bfloat16),
                tuple(torch.empty(1, 1, rank, HIDDEN, dtype=torch.bfloat16) for _ in widths),
                tuple(torch.empty(1, 1, width, rank, dtype=torch.bfloat16) for width in widths),
                1.0,
                widths,
            )


def _draw(config: Any, draw: dict[str, float]) -> None:
    """vLLM's sampler as the product asks it, up to the log-prob of each token drawn."""
    from vllm import SamplingParams
    from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers
    from vllm.v1.worker.gpu.sample.sampler import Sampler

    device, most = torch.device("cuda", 0), max(BATCHES)
    state = _request_state()
    sampler = Sampler(config, most, VOCABULARY, device, state, config.model_config.logprobs_mode)
    for row in range(most):
        sampler.add_request(row, SamplingParams(logprobs=0, max_tokens=8, **draw))
    sampler.apply_staged_writes()
    for batch in BATCHES:
        buffers = InputBuffers(most, most, device)
        inputs = InputBatch.make_dummy(batch, batch, buffers)
        sampler(torch.zeros(batch, VOCABULARY, dtype=torch.bfloat16), inputs)


def _request_state() -> Any:
    from vllm.v1.worker.gpu.states import RequestState

    return RequestState(
        max(BATCHES), SIZES.context_tokens, 2048, 0, VOCABULARY, torch.device("cuda", 0)
    )


def _step() -> None:
    """What surrounds a forward pass: requests and blocks written, inputs made, results kept."""
    from vllm.v1.worker.gpu import input_batch as batch
    from vllm.v1.worker.gpu.block_table import BlockTables

    device, most, context = torch.device("cuda", 0), max(BATCHES), SIZES.context_tokens
    state = _request_state()
    state.add_request("a", 4, [1, 2, 3, 4], 0, 8)
    state.apply_staged_writes()
    tables = BlockTables([16], most, 2048, [context // 16], device, [16])
    tables.append_block_ids(0, ([1, 2],), overwrite=True)
    tables.apply_staged_writes()
    rows = torch.zeros(1, dtype=torch.int32)
    starts, lengths = torch.zeros(2, dtype=torch.int32), torch.zeros(most, dtype=torch.int32)
    ids, positions = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int64)
    tables.gather_block_tables(rows, 1)
    tables.compute_slot_mappings(rows, starts, positions, 16)
    prefill, computed = state.prefill_len.gpu, state.num_computed_tokens.gpu
    tokens = state.all_token_ids.gpu
    batch.prepare_prefill_inputs(
        ids, state.next_prefill_tokens, rows, starts, tokens, prefill, computed
    )
    batch.prepare_pos_seq_lens(rows, starts, computed, positions, lengths)
    last = state.last_sampled_tokens
    batch.combine_sampled_and_draft_tokens(
        ids, rows, last, starts, lengths, prefill, state.draft_tokens, starts, 1
    )
    drawn = torch.zeros(1, 1, dtype=torch.int64)
    sampled, rejected = batch.get_num_sampled_and_rejected(rows + 1, lengths, starts, rows, prefill)
    counts = torch.zeros(most, VOCABULARY, dtype=torch.int32)
    for begin in (starts, None):  # vLLM has counted the tokens of some steps before
        batch.post_update(
            rows,
            computed,
            last,
            counts,
            drawn,
            sampled,
            rejected,
            begin,
            tokens,
            state.total_len.gpu,
        )
