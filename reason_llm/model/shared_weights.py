"""vLLM in this process owns the base weights; the model that learns is made of views of them.

vLLM keeps q, k and v (gate and up) of a layer in one fused tensor. A Transformers model is built
without storage, and each of its parameters becomes a view of the right rows. Nothing is copied: a
layer that cannot be shared is refused by name. The LoRA adapter is written in place into vLLM's
adapter slot. Only the KV cache comes and goes between the phases. 4-bit layers are shared the same
way, through ``nf4``.

Not here: several GPUs, mixtures of experts.

Read against vLLM 0.31.0: vllm/lora/worker_manager.py, vllm/v1/engine/core.py,
vllm/device_allocator/cumem.py.
"""

import gc
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from peft import PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from reason_llm.errors import ModelError, one_line
from reason_llm.model import nf4

LORA_ID = 1
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM accepts as max_lora_rank."""
MOST_EMPTY_STEPS = 64
"""Engine steps that must suffice to clear what finished requests leave behind."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """What vLLM is told to hold."""

    context_tokens: int
    kv_cache_bytes: int
    max_sequences: int
    lora_rank: int
    quantize: Literal["none", "nf4"] = "none"


class Engine:
    """vLLM over one model, awake (KV cache there) or asleep (on a GPU, its memory given back).

    Raises:
        ModelError: vLLM cannot be imported, or refuses the model.
    """

    def __init__(self, path: str, dtype: torch.dtype, sizes: EngineSizes, seed: int) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # read when vllm is imported
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from vllm import LLM
            from vllm.platforms import current_platform
        except ImportError as error:
            raise ModelError(
                f"sample.engine=vllm: vLLM cannot be imported ({one_line(error)}); "
                "install it again, or set sample.engine to transformers"
            ) from error
        self.path = path
        self.quantize = sizes.quantize
        self.can_release = bool(current_platform.is_sleep_mode_available())
        if current_platform.is_cpu():
            _keep_linear_weights()
        rank = next((r for r in MAX_LORA_RANKS if r >= sizes.lora_rank), None)
        if rank is None:
            raise ModelError(
                f"model.adapter.rank={sizes.lora_rank} is more than vLLM's {MAX_LORA_RANKS[-1]}; "
                "lower it, or set sample.engine to transformers"
            )
        try:
            self.llm = LLM(
                model=path,
                dtype=str(dtype).removeprefix("torch."),
                quantization="bitsandbytes" if sizes.quantize == "nf4" else None,
                seed=seed,
                max_model_len=sizes.context_tokens,
                max_num_seqs=sizes.max_sequences,
                kv_cache_memory_bytes=sizes.kv_cache_bytes,
                gpu_memory_utilization=0.01,  # the KV cache's size is given, so this only checks
                enforce_eager=current_platform.is_cpu(),
                enable_prefix_caching=True,
                enable_sleep_mode=self.can_release,
                enable_lora=True,
                max_loras=1,
                max_lora_rank=rank,
                logprobs_mode="processed_logprobs",
                generation_config="vllm",  # no sampling defaults of the model's own
                disable_log_stats=True,
                use_tqdm_on_load=False,
            )
        except (ValueError, RuntimeError, OSError) as error:
            raise ModelError(
                f"model.path={path}: vLLM cannot load it ({one_line(error)[:300]}); "
                "set sample.engine to transformers"
            ) from error
        self.awake = True

    @property
    def module(self) -> nn.Module:
        """vLLM's own model, whose parameters are the only copy of the base."""
        found: nn.Module = self.llm.apply_model(lambda module: module)[0]
        return found

    def wake(self) -> None:
        """Bring the KV cache back. Twice does nothing more."""
        if not self.awake:
            self.llm.wake_up(tags=["kv_cache"] if self.can_release else ["scheduling"])
            self.awake = True

    def release(self) -> None:
        """Finish what is under way and give the KV cache's memory back. Twice does nothing more."""
        if not self.awake:
            return
        self._drain()
        self.llm.sleep(level=0)
        self.awake = False
        if self.can_release:
            self.llm.release_kv_cache_memory()

    def close(self) -> None:
        """End the engine. Views of its weights must be gone before."""
        del self.llm
        gc.collect()

    def _drain(self) -> None:
        """Step until nothing is scheduled: the last finished requests are cleared by a step more.

        Without it vLLM 0.31 refuses to release ("requires a completed pause first").
        """
        core = self.llm.llm_engine.engine_core.engine_core
        for _ in range(MOST_EMPTY_STEPS):
            if not core.scheduler.has_requests() and not core.batch_queue:
                return
            self.llm.llm_engine.step()
        raise ModelError(f"vLLM still holds requests after {MOST_EMPTY_STEPS} empty steps")


def model_over(engine: Engine, dtype: torch.dtype) -> Any:
    """A Transformers causal LM whose every parameter is a view of vLLM's storage.

    Raises:
        ModelError: a layer that cannot be shared, with its name and why.
    """
    config = AutoConfig.from_pretrained(engine.path)
    with init_empty_weights(include_buffers=False):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=attention_for(config)
        )
    model.tie_weights()  # init_empty_weights unties
    theirs = dict(engine.module.named_modules(remove_duplicate=False))
    packed: dict[str, list[str]] = getattr(engine.module, "packed_modules_mapping", {})
    device = next(engine.module.parameters()).device
    for name, parameter in list(model.named_parameters(remove_duplicate=True)):
        owner, _, attribute = name.rpartition(".")
        module, part = find_owner(theirs, packed, name)
        if attribute == "weight" and nf4.is_packed(module.weight):
            _replace_linear(model, owner, module.weight, part or 0, dtype)
        else:
            view = shared_view(module, part, name, parameter.shape)
            own = nn.Parameter(view, requires_grad=False)
            setattr(model.get_submodule(owner), attribute, own)
    model.tie_weights()
    if engine.quantize == "nf4":
        model.is_loaded_in_4bit = True  # PEFT asks for it
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if left:
        raise ModelError(f"model.path={engine.path}: {left[0]} has no storage after sharing")
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model.eval()


def attention_for(config: PretrainedConfig) -> str | None:
    """Which of Transformers' attentions to ask for; None: its own choice.

    SDPA leaves out the soft-capping of attention scores that Gemma 2 was trained with.
    """
    softcap = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return None if softcap is None else "eager"


def find_owner(
    theirs: dict[str, nn.Module], packed: dict[str, list[str]], name: str
) -> tuple[Any, int | None]:
    """vLLM's module that holds parameter ``name`` of the Transformers model, and which part of it.

    Args:
        theirs: vLLM's modules by name.
        packed: which layers are fused into which, ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``.

    Returns:
        The module under vLLM's LoRA wrapper; None as part if it holds that parameter alone.

    Raises:
        ModelError: there is none.
    """
    owner = name.rpartition(".")[0]
    if (module := theirs.get(owner)) is not None:
        return _without_lora(module), None
    parent, _, leaf = owner.rpartition(".")
    for fused, parts in packed.items():
        if leaf in parts and (module := theirs.get(f"{parent}.{fused}")) is not None:
            return _without_lora(module), parts.index(leaf)
    raise ModelError(f"{name} cannot be shared: vLLM has no module of that name")


def shared_view(module: Any, part: int | None, name: str, shape: torch.Size) -> Tensor:
    """The view of vLLM's storage that is parameter ``name`` of the Transformers model.

    Raises:
        ModelError: vLLM's module has no such tensor, or it has another shape.
    """
    attribute = name.rpartition(".")[2]
    tensor = getattr(module, attribute, None)
    if tensor is None:
        raise ModelError(
            f"{name} cannot be shared: vLLM's {type(module).__name__} has no {attribute}"
        )
    view: Tensor = tensor.data
    if part is not None:
        sizes = list(module.output_sizes)
        view = view.narrow(0, sum(sizes[:part]), sizes[part])
    elif view.dim() > 0 and view.shape[1:] == shape[1:] and view.shape[0] > shape[0]:
        view = view.narrow(0, 0, shape[0])  # vLLM pads the vocabulary
    if view.shape != shape:
        raise ModelError(
            f"{name} cannot be shared: vLLM holds {tuple(tensor.shape)}, {tuple(shape)} is needed"
        )
    return view


def _replace_linear(model: Any, owner: str, weight: Any, part: int, dtype: torch.dtype) -> None:
    """Put a 4-bit layer over vLLM's bytes in the place of a linear layer without storage."""
    linear = model.get_submodule(owner)
    layer = nf4.linear_over(weight, part, linear.weight.shape, linear.bias, dtype)
    if layer is None:
        raise ModelError(
            f"{owner}.weight cannot be shared: vLLM holds NF4 blocks of another shape than "
            f"{tuple(linear.weight.shape)}"
        )
    model.set_submodule(owner, layer)


def verify(model: nn.Module, path: str) -> int:
    """Compare every parameter with the checkpoint, bit by bit; the number of tensors compared.

    4-bit layers are compared with the checkpoint's tensor quantised once more.

    Raises:
        ModelError: the first tensor that differs: vLLM repacked or changed it; or one that the
            checkpoint does not hold.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left = {id(parameter): name for name, parameter in parameters.items()}
    compared = 0
    for file in _checkpoint_files(path):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if name in parameters:
                    if not _is_stored(model, name, parameters[name], opened.get_tensor(name)):
                        raise ModelError(f"{name} differs from {file}: it cannot be shared")
                    left.pop(id(parameters[name]), None)
                    compared += 1
    if left:
        raise ModelError(
            f"model.path={path}: {next(iter(left.values()))} is not in its checkpoint, so sharing "
            "it cannot be verified; set sample.engine to transformers"
        )
    return compared


def _is_stored(model: nn.Module, name: str, found: nn.Parameter, stored: Tensor) -> bool:
    layer = model.get_submodule(name.rpartition(".")[0])
    if isinstance(layer, nf4.Linear4bit) and found is layer.weight:
        return nf4.matches(layer, stored)
    return torch.equal(stored.to(found.device, found.dtype), found.data)


def _checkpoint_files(path: str) -> list[Path]:
    """The safetensors of a folder, or of a Hub id that was downloaded by now."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    return sorted(folder.glob("*.safetensors"))


class AdapterSync:
    """Writes the policy's adapter into vLLM's slot, in place: two small copies for each layer."""

    def __init__(self, engine: Engine, policy: PeftModel) -> None:
        from vllm.lora.request import LoRARequest

        self.engine = engine
        self.request = LoRARequest("policy", LORA_ID, "mem://policy")
        manager = engine.llm.collective_rpc(lambda worker: worker.model_runner.lora_manager)[0]
        _register(manager, policy)
        self._pairs = _pair_up(manager._adapter_manager, policy)

    @torch.no_grad()
    def __call__(self) -> None:
        """Make vLLM's adapter the policy's; cached prefixes of the old one are forgotten."""
        for a, b, ours_a, ours_b, scaling in self._pairs:
            a.copy_(ours_a)
            b.copy_(ours_b).mul_(scaling)
        self.engine.llm.reset_prefix_cache()


def _register(manager: Any, policy: PeftModel) -> None:
    """Give vLLM the adapter once, from memory, so that it has a slot."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    config = policy.peft_config["default"]
    helper = PEFTHelper.from_dict(
        {
            "r": config.r,
            "lora_alpha": config.lora_alpha,
            "target_modules": sorted(config.target_modules),
            "bias": config.bias,
        }
    )
    helper.validate_legal(manager.lora_config)
    dtype = manager.lora_config.lora_dtype
    # A copy: vLLM scales lora_b in place.
    tensors = {
        name: tensor.detach().to(dtype, copy=True)
        for name, tensor in get_peft_model_state_dict(policy).items()
    }
    lora = LoRAModel.from_lora_tensors(
        LORA_ID, tensors, helper, device=str(manager.device), dtype=dtype
    )
    manager._adapter_manager.add_adapter(lora)
    manager._adapter_manager.activate_adapter(LORA_ID)


def _pair_up(
    adapters: Any, policy: PeftModel
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, float]]:
    """(their A, their B, our A, our B, scaling) for every adapted layer.

    Raises:
        ModelError: a layer of ours that vLLM does not adapt.
    """
    slot = adapters.lora_index_to_id.index(LORA_ID)
    ours = {
        name.removeprefix("base_model.model."): module
        for name, module in policy.named_modules()
        if isinstance(module, LoraLayer)
    }
    pairs, left = [], set(ours)
    for name, module in adapters.modules.items():
        for index, part in enumerate(adapters.packed_modules.get(name, [name])):
            if part in ours:
                layer = ours[part]
                a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
                rank = a.shape[0]
                pairs.append(
                    (
                        module.lora_a_stacked[index][slot, 0, :rank, :],
                        module.lora_b_stacked[index][slot, 0, :, :rank],
                        a,
                        b,
                        float(layer.scaling["default"]),
                    )
                )
                left.discard(part)
    if left:
        raise ModelError(f"vLLM does not adapt {sorted(left)[0]}; leave it out of the targets")
    return pairs


def _without_lora(module: nn.Module) -> Any:
    """The layer that holds the weights, under vLLM's LoRA wrapper."""
    return getattr(module, "base_layer", module)


def _keep_linear_weights() -> None:
    """On a CPU vLLM packs each linear layer for oneDNN and drops its weight: leave it as it is.

    vLLM 0.31 looks this function up at each call; it costs at most 8 % of the tokens per second.
    Ends when vLLM offers a switch for it.
    """
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = nn.functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain
