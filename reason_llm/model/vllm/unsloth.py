"""Unsloth behind the interface of the native backend: its loader, kernels, checkpointing and
Standby, through its public API only. Sampling, the adapter's slot and the checks are ours.

Read against unsloth and unsloth_zoo 2026.10.7 with vLLM 0.31.0; never run. Where a
fact is from: [loader] unsloth/models/loader.py FastLanguageModel.from_pretrained, [llama]
unsloth/models/llama.py FastLlamaModel, [zoo] unsloth_zoo/vllm_utils.py.
"""

import importlib.util
import io
import logging
import os
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from transformers import PretrainedConfig

from reason_llm.config import ModelSection, installation
from reason_llm.errors import ModelError, OutOfMemory, clear_frames, one_line
from reason_llm.model import adapters
from reason_llm.model.vllm import shared_weights
from reason_llm.model.vllm.engine import MAX_LORA_RANKS, Engine, EngineSizes, is_out_of_memory

log = logging.getLogger(__name__)

INSTALL = f"{installation.install('gpu,unsloth')}, which replaces Transformers by 5.17, its newest"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that [loader] sends to the hand-written kernels. gemma and gemma2 too, but those scale
their embeddings and cap their logits, which is unread."""
_REFUSALS = (AssertionError, ImportError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
ENVIRONMENT = {
    # Read when unsloth is imported (unsloth_zoo/__init__.py): no expandable segments, as sleeping
    # wants it. Read again by [zoo] patch_vllm and load_vllm.
    "UNSLOTH_VLLM_STANDBY": "1",
    "UNSLOTH_VLLM_STANDBY_UTIL_OVERRIDE": "1",  # [zoo] load_vllm: keep the utilisation asked for
    "UNSLOTH_DISABLE_STATISTICS": "1",  # unsloth/models/_utils.py get_statistics: no downloads
    "UNSLOTH_RETURN_HIDDEN_STATES": "0",  # [llama] CausalLM_fast_forward: logits are logits
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def choose(config: ModelSection, text: PretrainedConfig, device: torch.device) -> tuple[str, str]:
    """``model.backend`` with auto, which is native, resolved, and one line with choice and reason.
    Raises ModelError: Unsloth is asked for and cannot serve this model here."""
    if config.backend != "unsloth":
        return "native", "weights shared by our own views"
    if (reason := unfit(config, text, device)) is not None:
        raise ModelError(f"model.backend=unsloth: {reason}; or set model.backend to native")
    return "unsloth", "weights shared by Unsloth"


def unfit(config: ModelSection, text: PretrainedConfig, device: torch.device) -> str | None:
    """Reason why Unsloth cannot serve this model here, with the fix; None if it can."""
    if device.type != "cuda":
        return "there is no GPU, which Unsloth needs"
    if torch.cuda.get_device_capability(device)[0] < 8:  # [llama] would fall back to float16
        return "this GPU has no bfloat16, which we need for Unsloth"
    if any(importlib.util.find_spec(name) is None for name in ("unsloth", "unsloth_zoo", "vllm")):
        return f"Unsloth or vLLM is not installed; {INSTALL}"
    if text.model_type not in FAMILIES:
        return f"Unsloth is used for {', '.join(FAMILIES)}, and this is {text.model_type}"
    if getattr(text, "sliding_window", None) is not None:
        return f"sliding_window={text.sliding_window} is untested in Unsloth's attention"
    if getattr(text, "quantization_config", None) is not None:
        return "the checkpoint is quantised already; take the unquantised one"
    if config.adapter.rank > MAX_LORA_RANKS[-1]:
        return f"model.adapter.rank={config.adapter.rank} is more than {MAX_LORA_RANKS[-1]}"
    return None


def load(
    config: ModelSection, sizes: EngineSizes, dtype: torch.dtype, seed: int, checkpointing: bool
) -> tuple[Engine, PeftModel]:
    """vLLM as Unsloth starts it, and the policy over its weights, adapter attached in float32.

    Args:
        seed: of the adapter's start.
        checkpointing: recompute activations, and hold what is kept in host memory.

    Raises:
        ModelError: Unsloth is not installed, refuses the model or does not do what was asked.
    """
    unsloth = _import()
    mode = "unsloth" if checkpointing else False
    printed = io.StringIO()  # it prints a lot
    try:
        with redirect_stdout(printed):
            model, _ = unsloth.from_pretrained(
                model_name=config.path,
                trust_remote_code=False,
                max_seq_length=sizes.context_tokens,  # the learner cuts longer rows off
                dtype=dtype,
                load_in_4bit=sizes.quantize == "nf4",
                use_exact_model_name=True,  # or a Hub id becomes one of unsloth's own uploads
                use_gradient_checkpointing=mode,
                fast_inference=True,
                gpu_memory_utilization=_utilisation(config.path, sizes),
                max_lora_rank=sizes.lora_rank,  # rounded up to one that vLLM takes
                max_num_seqs=min(sizes.max_sequences, 255),  # [zoo] load_vllm takes 256 as "choose"
                random_state=seed % 2**32,
            )
            engine = _engine_of(model, config.path, sizes)
            try:
                engine.release()  # verifying needs room
                shared_weights.verify(model, config.path)
                policy = _with_adapter(unsloth, model, config, seed, mode)
            except BaseException as error:
                del model
                clear_frames(error)
                engine.close()
                raise
    except (ModelError, OutOfMemory):
        raise
    except _REFUSALS as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"out of memory as Unsloth starts ({one_line(error)[:200]}); lower "
                "memory.budget_gib, or end what else uses the GPU"
            ) from error
        raise ModelError(
            f"model.path={config.path}: Unsloth cannot load it ({one_line(error)[:300]}); "
            "set model.backend to native"
        ) from error
    finally:
        log.debug("%s", printed.getvalue())
    return engine, policy


def _with_adapter(
    unsloth: Any, model: Any, config: ModelSection, seed: int, checkpointing: str | bool
) -> PeftModel:
    """The policy over a model that Unsloth has loaded."""
    adapter = config.adapter
    policy: PeftModel = unsloth.get_peft_model(
        model,
        r=adapter.rank,
        target_modules=adapters.find_targets(model, adapter.targets),
        lora_alpha=adapter.alpha,
        use_rslora=adapter.rslora,
        lora_dropout=adapter.dropout,
        use_gradient_checkpointing=checkpointing,
        random_state=seed % 2**32,  # numpy's limit
    )
    return policy


def _import() -> Any:
    """Import Unsloth's FastLanguageModel, after the settings that it reads at import. It warns that
    it should come first: its patches are of classes, so models built afterwards have them."""
    os.environ.update(ENVIRONMENT)
    os.environ.setdefault(  # or a folder in the working directory, and on sys.path
        "UNSLOTH_COMPILE_LOCATION", str(Path.home() / ".cache" / "unsloth_compiled_cache")
    )
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.filterwarnings("ignore", message=".*Unsloth should be imported before")
            from unsloth import FastLanguageModel
    except (ImportError, NotImplementedError, RuntimeError) as error:
        raise ModelError(
            f"model.backend=unsloth: Unsloth cannot be imported ({one_line(error)[:300]}); "
            f"{INSTALL}, or set model.backend to native"
        ) from error
    return FastLanguageModel


def _utilisation(path: str, sizes: EngineSizes) -> float:
    """Fraction of the free memory for weights, KV cache and workspace; Unsloth accepts no size in
    bytes ([zoo] approximate_vllm_memory_usage)."""
    needed, free = sizes.kv_cache_bytes + sizes.other_bytes, torch.cuda.mem_get_info()[0]
    if needed > 0.97 * free:
        raise ModelError(
            f"model.path={path}: Unsloth's vLLM needs {needed / 2**30:.1f} GiB and "
            f"{free / 2**30:.1f} GiB is free; lower memory.budget_gib or set model.quantize to nf4"
        )
    return needed / free


def _engine_of(model: Any, path: str, sizes: EngineSizes) -> Engine:
    """Our engine over ``model.vllm_engine``, after the checks of Unsloth's work."""
    from vllm.device_allocator.cumem import CuMemAllocator

    llm = getattr(model, "vllm_engine", None)
    if llm is None:  # [llama] from_pretrained then prints "Will use Unsloth inference!"
        raise ModelError(
            f"model.path={path}: Unsloth went on without vLLM; set model.backend to native"
        )
    vllm_model = llm.llm_engine.vllm_config.model_config
    if vllm_model.max_model_len < sizes.context_tokens:  # [zoo] _fit_max_seq_length_to_kv_cache
        raise ModelError(
            f"model.path={path}: Unsloth cut the context from {sizes.context_tokens} to "
            f"{vllm_model.max_model_len} tokens; lower sample.max_new_tokens or set model.quantize"
        )
    # [zoo] patch_vllm_enable_sleep_mode: only its sleep leaves the weights where the learner is.
    stays = "unsloth_zoo" in CuMemAllocator.sleep.__code__.co_filename
    if not (vllm_model.enable_sleep_mode and stays):
        raise ModelError(
            f"model.path={path}: Unsloth's Standby is off; set model.backend to native"
        )
    return Engine(llm, path, sizes.kv_cache_bytes, standby=True)
