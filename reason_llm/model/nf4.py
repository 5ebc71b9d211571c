"""Base weights of QLoRA: linear layers but the head in 4-bit NormalFloat with double quantisation,
by bitsandbytes, which vLLM's plugin calls while loading, or else Transformers. Source:
arXiv:2305.14314, section 3.

Differs: under vLLM the second quantisation is undone once, while loading (the plugin does so for
speed): its values are kept in float32, 0.0625 bytes a weight instead of 0.0159. Of a checkpoint
that is quantised already, it rounds their common offset to bfloat16: scales are off by up to 0.2 %,
the same for sampler and learner.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from bitsandbytes.functional import (
    QuantState,
    create_dynamic_map,
    dequantize_blockwise,
    name2qmap,
    quantize_4bit,
)
from bitsandbytes.nn import Linear4bit, Params4bit
from torch import Tensor, nn
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from reason_llm.config import installation
from reason_llm.errors import ModelError
from reason_llm.model import adapters
from reason_llm.model.families import NO_NF4


def config_for(dtype: torch.dtype, unpacked: Sequence[str] = ()) -> BitsAndBytesConfig:
    """Quantisation config for Transformers.

    Args:
        unpacked: modules that keep their dtype, the head among them; empty: the head alone.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*unpacked] or None,
    )


def make_tables(device: torch.device) -> None:
    """Create bitsandbytes' table of the second quantisation before vLLM starts. bitsandbytes keeps
    it for the whole process; created at its first use, it would be in vLLM's pool of weights, which
    vLLM requires to be empty when it starts again."""
    if "dynamic" not in name2qmap:
        name2qmap["dynamic"] = create_dynamic_map().to(device)


def unfit(
    quantized: Mapping[str, Any], linear: Collection[str], quantize: str, is_mixture: bool
) -> str | None:
    """Reason why an already quantised checkpoint cannot be used, with the fix; None if it can.

    Args:
        quantized: ``quantization_config`` of its config.json.
        linear: names of the linear layers but the head.
        is_mixture: it has experts, which ``check`` refuses in NF4.
    """
    method = str(quantized.get("quant_method"))[:40]
    # Each kind of model has another way to weights that can be trained over.
    other = "take the unquantised model and set model.quantize to nf4"
    if is_mixture:
        other = "take the same weights in bfloat16 (the experts of a mixture have no NF4 here)"
    if method == "mxfp4":
        export = installation.command("export")
        other = f"write them in bfloat16 once, by {export} MODEL --out FOLDER"
    if method != "bitsandbytes":
        return f"its weights are quantised by {method}, which cannot be trained over; {other}"
    kind = quantized.get("bnb_4bit_quant_type", "fp4")
    storage = quantized.get("bnb_4bit_quant_storage", "uint8")
    if not quantized.get("load_in_4bit") or kind != "nf4" or storage != "uint8":
        bits = f"4-bit {kind} in {storage}" if quantized.get("load_in_4bit") else "8-bit"
        return (
            f"its weights are {bits[:60]} by bitsandbytes, and only NF4 in uint8 is known; {other}"
        )
    for skipped in quantized.get("llm_int8_skip_modules") or ():
        inside = (name for name in linear if f".{skipped}." in f".{name}.")
        if (name := next(inside, None)) is not None:
            return f"its checkpoint leaves {name} unquantised, next to layers in NF4; {other}"
    if quantize != "nf4":
        return "its weights are NF4 already; set model.quantize to nf4"
    return None


def can_pack(module: nn.Module) -> bool:
    """Whether Transformers 5.19 packs this layer; layers of other classes, as Falcon's, it does
    not."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def check(model: Any, path: str) -> None:
    """Check that a model on the meta device has layers to pack besides its head. Raises ModelError:
    it has none."""
    head = model.get_output_embeddings()
    if adapters.expert_weights(model):
        raise ModelError(f"model.quantize=nf4: {path} ({model.config.model_type}) {NO_NF4}")
    if not any(can_pack(module) and module is not head for module in model.modules()):
        raise ModelError(
            f"model.quantize=nf4: {path} ({model.config.model_type}) has linear layers of its own "
            "kind, which Transformers does not pack; set model.quantize to none"
        )


def linear_over(
    weight: Any, part: int, name: str, linear: nn.Linear, dtype: torch.dtype
) -> Linear4bit:
    """The 4-bit layer that replaces ``linear``, which has no storage: a view of the bytes of one
    part of vLLM's fused, packed weight, which computes in ``dtype``. Raises ModelError: the part is
    of another shape."""
    state, offsets = weight.bnb_quant_state[part], weight.bnb_shard_offsets.tolist()
    rows, columns = linear.weight.shape
    if state.shape != (rows, columns):
        raise ModelError(
            f"{name}.weight cannot be shared: vLLM holds NF4 blocks of another shape than "
            f"{(rows, columns)}"
        )
    layer = Linear4bit(columns, rows, bias=False, compute_dtype=dtype, device="meta")
    view = weight.data[offsets[part] : offsets[part + 1]]
    state = copy.copy(state)  # bitsandbytes may write into it, and this one is vLLM's
    layer.weight = Params4bit(
        view, quant_state=state, quant_type="nf4", module=layer, bnb_quantized=True
    )
    layer.quant_state = state
    layer.register_parameter("bias", linear.bias)
    keep_layouts(layer, dtype)
    return layer


def keep_layouts(model: nn.Module, dtype: torch.dtype) -> None:
    """Have every 4-bit layer compute in ``dtype``, as a checkpoint may not, and stop it from
    repacking: on a CPU with AVX512-BF16, bitsandbytes 0.50.2 moves its bytes into new storage in
    its first forward pass without gradient, and can no longer train afterwards."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.support_avx512bf16_for_cpu = False
            module.compute_dtype = dtype


def matches(layer: Linear4bit, stored: Tensor, parts: Mapping[str, Tensor] | None = None) -> bool:
    """Whether the layer equals the quantised tensor of the checkpoint, bit by bit.

    Args:
        stored: the checkpoint's (out, in) weight in its own dtype, or, where the checkpoint is
            quantised already, its packed bytes.
        parts: of such a checkpoint, the tensors that say how the bytes are meant, by their names;
            empty where they lie in another file, and only the bytes are compared.
    """
    weight: Any = layer.weight  # it holds the state under every loader, the layer does not
    packed = weight.data.view(-1)
    if stored.dtype == torch.uint8:
        if not torch.equal(stored.to(packed.device).view(-1), packed):
            return False
        if not any(".quant_state." in name for name in parts or ()):
            return True
        state = QuantState.from_dict(dict(parts or {}), device=packed.device)
        ours = _scales(weight.quant_state)
        if torch.equal(_scales(state), ours):
            return True
        if not state.nested:
            return False
        # vllm-bnb-plugin 0.0.3 reads the offset while torch's default dtype is the model's.
        state.offset = state.offset.to(layer.compute_dtype).float()
        return torch.equal(_scales(state), ours)
    expected, state = quantize_4bit(
        stored.to(packed.device), compress_statistics=True, quant_type="nf4"
    )
    return torch.equal(expected.view(-1), packed) and torch.equal(
        _scales(state), _scales(weight.quant_state)
    )


def _scales(state: QuantState) -> Tensor:
    """Scales of all blocks in float32, with the second quantisation undone."""
    scales: Tensor = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    return scales.float()
