"""Weight sharing with vLLM: vLLM owns the base weights, and the learner's model is made of views of
them.

vLLM keeps q, k and v (gate and up) of a layer in one fused tensor. A Transformers model is built
without storage, and each of its parameters becomes a view of the right rows; 4-bit layers through
``nf4``. The experts of a mixture are one tensor (experts, rows, columns) on both sides.
"""

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
)

from reason_llm.errors import ModelError
from reason_llm.files import regular
from reason_llm.model import attention, families, folder, multimodal, nf4
from reason_llm.model.vllm.engine import Engine, on_default_stream

EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight",
           "gate_up_proj_bias": "w13_bias", "down_proj_bias": "w2_bias"}  # fmt: skip
"""vLLM's names of the experts' fused weights, by Transformers'."""
RENAMED = [(".mlp", ".block_sparse_moe"), (".self_attn", ".attn"),
           (".embed_tokens", ".embedding"), (".router", ".gate")]  # fmt: skip
"""Parts of names that are others in vLLM: Mixtral's from before Transformers 5, gpt-oss's, and
Granite 4's."""
EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight")
"""A weight of one expert in a checkpoint; Mixtral's names are of its paper."""
DECAY = "A_log"
"""Decays of Mamba's states, a number for each head, which vLLM holds as ``A = -exp(A_log)``."""
VERIFIED_ROWS = 8192
"""Rows of a checkpoint tensor that are compared at once."""


def model_over(
    engine: Engine,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str = "auto",
    is_whole: bool = False,
) -> Any:
    """A Transformers causal LM whose every parameter is a view of vLLM's storage, but for the
    decays of Mamba's states (``DECAY``), which are read from the checkpoint.

    Args:
        config: read before the engine started, since vLLM registers its own classes for some.
        attention: ``model.attention``.
        is_whole: with the parts that text does not pass.

    Raises:
        ModelError: a layer that cannot be shared, with its name and why.
    """
    model = _empty_model(engine, config, dtype, attention)
    if not is_whole:
        multimodal.drop_towers(model)
    model.tie_weights()  # init_empty_weights unties
    decays = _share_parameters(model, engine, dtype)
    device = next(engine.module.parameters()).device
    for opened, key, name in _stored(model, engine.path) if decays else ():
        if name in decays:
            own = opened.get_tensor(key).to(device, dtype)
            setattr(decays[name], DECAY, nn.Parameter(own, requires_grad=False))
    model.tie_weights()
    if any(isinstance(module, nf4.Linear4bit) for module in model.modules()):
        model.is_loaded_in_4bit = True  # PEFT asks for it
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to(device), persistent=False)
    return model.eval()


def _empty_model(
    engine: Engine, config: PretrainedConfig, dtype: torch.dtype, attention: str
) -> Any:
    """The Transformers model of the config, whose parameters have no storage."""
    from vllm.config import CompilationMode, set_current_vllm_config

    if _has_own_head(engine.module):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    # vLLM may sample with Transformers' own class, which it compiles in place; ours is not.
    uncompiled = copy.copy(engine.llm.llm_engine.vllm_config)
    uncompiled.compilation_config = copy.copy(uncompiled.compilation_config)
    uncompiled.compilation_config.mode = CompilationMode.NONE
    with init_empty_weights(include_buffers=False), set_current_vllm_config(uncompiled):
        return multimodal.auto_class(config).from_config(
            config,
            dtype=dtype,
            attn_implementation=attention_for(config, attention),
            trust_remote_code=False,
        )


def _share_parameters(model: Any, engine: Engine, dtype: torch.dtype) -> dict[str, Any]:
    """Make each parameter a view of vLLM's storage; return the modules of the parameters that vLLM
    holds in another form (``DECAY``), by the parameters' names."""
    vllm_name = vllm_names(engine.module)
    vllm_modules = dict(engine.module.named_modules(remove_duplicate=False))
    packed: dict[str, list[str]] = {}
    for module in engine.module.modules():  # InternVL's table is its language model's
        packed |= getattr(module, "packed_modules_mapping", None) or {}
    parameters = dict(model.named_parameters(remove_duplicate=True))
    decays: dict[str, Any] = {}
    for name, parameter in parameters.items():
        owner_name, _, attribute = name.rpartition(".")
        module, before = find_owner(vllm_modules, packed, vllm_name(name))
        owner = model.get_submodule(owner_name)
        if attribute == "weight" and hasattr(module.weight, "bnb_quant_state"):  # its plugin's mark
            layer = nf4.linear_over(module.weight, len(before or ()), owner_name, owner, dtype)
            model.set_submodule(owner_name, layer)
        elif attribute == DECAY and not hasattr(module, DECAY):
            decays[name] = owner
        else:
            is_transposed = parameter.dim() == 3 and getattr(owner, "is_transposed", False)
            start, parent = None, owner_name.rpartition(".")[0]
            if before is not None:  # vLLM may cut a fused layer into more parts, as Qwen3.5's
                start = sum(len(parameters[f"{parent}.{part}.{attribute}"]) for part in before)
            view = shared_view(module, start, name, parameter.shape, is_transposed)
            setattr(owner, attribute, nn.Parameter(view, requires_grad=False))
    return decays


def _has_own_head(module: nn.Module) -> bool:
    """Whether vLLM holds a head that is not the embedding: so it does, as Transformers does, where
    a checkpoint stores one that differs, though its config ties the two."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    tables = [m for m in module.modules() if isinstance(m, VocabParallelEmbedding)]
    heads = [table.weight for table in tables if isinstance(table, ParallelLMHead)]
    embeddings = [table.weight for table in tables if not isinstance(table, ParallelLMHead)]
    return bool(heads) and all(head is not embedding for head in heads for embedding in embeddings)


def attention_for(config: PretrainedConfig, requested: str = "auto") -> str:
    """Attention implementation for Transformers: SDPA with our additions. It is eager if requested
    (``model.attention``, checked by ``plan.backends``), for Gemma 2, which soft-caps its attention
    scores, and for gpt-oss, which has sinks. Falcon, Bloom and GPT-J have their own."""
    text = config.get_text_config(decoder=True)
    if requested == "eager" or getattr(text, "attn_logit_softcapping", None) is not None:
        return "eager"
    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    takes_any = text.model_type in families.PACKED  # Qwen3.5 does not say so
    if known is None or takes_any or (known._supports_attention_backend and known._supports_sdpa):
        return attention.register()
    return "sdpa" if known._supports_sdpa else "eager"


def vllm_names(module: nn.Module) -> Callable[[str], str]:
    """vLLM's name of a parameter, by the name in Transformers: with the table of prefixes by which
    vLLM reads a checkpoint of this model."""
    from vllm.model_executor.models.utils import WeightsMapper

    table = getattr(module, "hf_to_vllm_mapper", None) or WeightsMapper()
    prefixes = WeightsMapper(orig_to_new_prefix=dict(table.orig_to_new_prefix))
    return lambda name: prefixes.map_name(name) or name


def names_in_vllm(name: str) -> list[str]:
    """Names that vLLM may have for a module: Transformers' own first."""
    return [name, *(name.replace(*pair) for pair in RENAMED if pair[0] in name)]


def find_owner(
    theirs: dict[str, nn.Module], packed: dict[str, list[str]], name: str
) -> tuple[Any, list[str] | None]:
    """vLLM's module, under its LoRA wrapper, that holds parameter ``name`` of the Transformers
    model, and the layers whose rows come before it there; None if it holds that one alone. Raises
    ModelError: there is none.

    Args:
        theirs: vLLM's modules by name.
        packed: which layers are fused into which, ``{"qkv_proj": ["q_proj", "k_proj", "v_proj"]}``.
    """
    for owner in names_in_vllm(name.rpartition(".")[0]):
        if (module := theirs.get(owner)) is not None:
            holder = _without_lora(module)
            return getattr(holder, "routed_experts", holder), None
        parent, _, leaf = owner.rpartition(".")
        for fused, parts in packed.items():
            if leaf in parts and (module := theirs.get(f"{parent}.{fused}")) is not None:
                return _without_lora(module), parts[: parts.index(leaf)]
    raise ModelError(f"{name} cannot be shared: vLLM has no module of that name")


def shared_view(
    module: Any, start: int | None, name: str, shape: torch.Size, is_transposed: bool = False
) -> Tensor:
    """The view of vLLM's storage that is parameter ``name`` of the Transformers model.

    Args:
        start: its first row in a fused layer; None if the layer is not fused.
        is_transposed: experts (E, in, out), as gpt-oss has them; vLLM's are (E, out, in).

    Raises:
        ModelError: vLLM's module has no such tensor, or it has another shape.
    """
    attribute = name.rpartition(".")[2]
    tensor = getattr(module, EXPERTS.get(attribute, attribute), None)
    if tensor is None:
        raise ModelError(
            f"{name} cannot be shared: vLLM's {type(module).__name__} has no {attribute}"
        )
    view: Tensor = tensor.data.transpose(-1, -2) if is_transposed else tensor.data
    if start is not None:
        view = view.narrow(0, start, shape[0])
    elif view.dim() > 0 and view.shape[1:] == shape[1:] and view.shape[0] > shape[0]:
        view = view.narrow(0, 0, shape[0])  # vLLM pads the vocabulary
    if view.shape != shape:
        raise ModelError(
            f"{name} cannot be shared: vLLM holds {tuple(tensor.shape)}, {tuple(shape)} is needed"
        )
    return view


def verify(model: nn.Module, path: str) -> int:
    """Compare every parameter with the checkpoint, bit by bit, 4-bit layers with its tensor
    quantised once more, and return the number of tensors compared. Raises ModelError: the first
    tensor that differs: vLLM repacked or changed it; or one that the checkpoint does not hold."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    left = {id(parameter): parameter.numel() for parameter in parameters.values()}
    compared = 0
    with on_default_stream():
        for opened, key, name in _stored(model, path):
            if (held := _find_parameter(parameters, name)) is not None:
                own, parameter = held
                if not _is_stored(model, own, parameter, opened, key):
                    raise ModelError(f"{key} differs from {path}: it cannot be shared")
                left[id(parameters[own])] -= parameter.numel()
                compared += 1
    if missing := [name for name, parameter in parameters.items() if left[id(parameter)] > 0]:
        raise ModelError(
            f"model.path={path}: {missing[0]} is not in its checkpoint, so sharing "
            "it cannot be verified; set sample.engine to transformers"
        )
    return compared


def _stored(model: nn.Module, path: str) -> Iterator[tuple[Any, str, str]]:
    """An open file, a tensor's name in it, and its name in Transformers, for each tensor of a
    checkpoint."""
    named = folder.names_of(model)
    for file in checkpoint_files(path):
        with safe_open(regular(file), framework="pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - not a dict
                yield opened, key, named(key)


def _find_parameter(parameters: dict[str, nn.Parameter], stored: str) -> tuple[str, Tensor] | None:
    """Transformers' name of a tensor in a checkpoint, and the part of that parameter which it is:
    one expert's of (E, rows, columns), of which the gate's rows come first. None if there is
    none."""
    name = stored if stored in parameters else stored.replace(".block_sparse_moe.", ".mlp.")
    if (match := EXPERT.fullmatch(name)) is None:
        return (name, parameters[name].data) if name in parameters else None
    is_down = match[3] in ("w2", "down_proj")
    name = f"{match[1]}.{'down_proj' if is_down else 'gate_up_proj'}"
    if name not in parameters:
        return None
    expert = parameters[name].data[int(match[2])]
    half = 0 if match[3] in ("w1", "gate_proj") else 1
    return name, expert if is_down else expert.chunk(2)[half]


def _is_stored(model: nn.Module, name: str, parameter: Tensor, opened: Any, key: str) -> bool:
    layer = model.get_submodule(name.rpartition(".")[0])
    if isinstance(layer, nf4.Linear4bit) and name.endswith(".weight"):
        parts = {
            name: opened.get_tensor(name)
            for name in opened.keys()  # noqa: SIM118
            if name.startswith(f"{key}.")
        }
        return nf4.matches(layer, opened.get_tensor(key), parts)
    stored = opened.get_slice(key)
    if tuple(stored.get_shape()) != tuple(parameter.shape):
        return False
    return all(
        torch.equal(
            stored[row : row + VERIFIED_ROWS].to(parameter.device, parameter.dtype),
            parameter[row : row + VERIFIED_ROWS],
        )
        for row in range(0, len(parameter), VERIFIED_ROWS)
    )


def checkpoint_files(path: str) -> list[Path]:
    """Safetensors of a folder, or of an already downloaded Hub id."""
    place = Path(path)
    if not place.is_dir():
        place = Path(snapshot_download(path, allow_patterns=["*.safetensors", "*.json"]))
    whole = sorted(place.glob("model*.safetensors"))  # a checkpoint has others, too
    return whole or sorted(place.glob("*.safetensors"))


def _without_lora(module: nn.Module) -> Any:
    """The layer that holds the weights, under vLLM's LoRA wrapper."""
    return getattr(module, "base_layer", module)
