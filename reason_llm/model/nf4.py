"""Base weights of QLoRA: linear layers in 4-bit NormalFloat with double quantisation, by
bitsandbytes.

Under vLLM its plugin (vllm-bnb-plugin) quantises while loading and owns the packed bytes; the
layers here are views of them. Without vLLM, Transformers quantises. Embeddings, norms and the head
stay as they are. Source: arXiv:2305.14314, section 3.

Differs: under vLLM the second quantisation is undone once, while loading (the plugin does so for
speed): its values are kept in float32, 0.0625 bytes a weight instead of 0.0159. Of a checkpoint
that is quantised already, it rounds their common offset to bfloat16: scales are off by up to 0.2 %,
the same for sampler and learner.
"""

import copy
from collections.abc import Collection, Mapping
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

from reason_llm.errors import ModelError
from reason_llm.model import adapters

BLOCK_ELEMENTS = 64
"""Number of weights that share one scale."""


def config_for(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Quantisation config for Transformers."""
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
    )


def make_tables(device: torch.device) -> None:
    """Create the table of the second quantisation, which bitsandbytes keeps for the whole process.

    Made at its first use, it would lie in vLLM's pool of weights, and vLLM refuses to start again
    while anything is in there: so it is made before vLLM starts.
    """
    if "dynamic" not in name2qmap:
        name2qmap["dynamic"] = create_dynamic_map().to(device)


def unfit(quantized: Mapping[str, Any], linear: Collection[str], quantize: str) -> str | None:
    """Reason why an already quantised checkpoint cannot be used, with the fix; None if it can.

    Args:
        quantized: ``quantization_config`` of its config.json.
        linear: names of the linear layers but the head.
        quantize: ``model.quantize``.
    """
    method = str(quantized.get("quant_method"))[:40]
    other = "take the unquantised model and set model.quantize to nf4"
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
            return f"its checkpoint leaves {name} unquantised beside NF4; {other}"
    if quantize != "nf4":
        return "its weights are NF4 already; set model.quantize to nf4"
    return None


def can_pack(module: nn.Module) -> bool:
    """Whether Transformers 5.17 packs this layer; layers of other classes, as Falcon's, it does
    not."""
    return type(module) is nn.Linear or isinstance(module, Conv1D)


def check(model: Any, path: str) -> None:
    """Check that a model on the meta device has layers to pack beside its head.

    Raises:
        ModelError: it has none, so it would stay as it is.
    """
    head = model.get_output_embeddings()
    if adapters.expert_weights(model):
        raise ModelError(
            f"model.quantize=nf4: {path} ({model.config.model_type}) is a mixture, and the weights "
            "of its experts are no linear layers, which would stay as they are; set model.quantize "
            "to none"
        )
    if not any(can_pack(module) and module is not head for module in model.modules()):
        raise ModelError(
            f"model.quantize=nf4: {path} ({model.config.model_type}) has linear layers of its own "
            "kind, which Transformers does not pack; set model.quantize to none"
        )


def is_packed(weight: Tensor) -> bool:
    """Whether a weight of vLLM's is packed by its bitsandbytes plugin, which marks it so."""
    return hasattr(weight, "bnb_quant_state")


def linear_over(
    weight: Any, part: int, shape: torch.Size, bias: nn.Parameter | None, dtype: torch.dtype
) -> Linear4bit | None:
    """A 4-bit linear layer that views the bytes of one part of vLLM's fused, packed weight.

    Args:
        part: which of the fused layers.
        shape: (out, in) that the layer must have.
        dtype: that it computes in.

    Returns:
        None if the part is not of that shape.
    """
    state, offsets = weight.bnb_quant_state[part], weight.bnb_shard_offsets.tolist()
    if state.shape != shape:
        return None
    rows, columns = shape
    layer = Linear4bit(columns, rows, bias=False, compute_dtype=dtype, device="meta")
    view = weight.data[offsets[part] : offsets[part + 1]]
    state = copy.copy(state)  # bitsandbytes may write into it, and this one is vLLM's
    layer.weight = Params4bit(
        view, quant_state=state, quant_type="nf4", module=layer, bnb_quantized=True
    )
    layer.quant_state = state
    layer.register_parameter("bias", bias)
    _keep_layout(layer)
    return layer


def keep_layouts(model: nn.Module) -> None:
    """Stop every 4-bit layer of ``model`` from repacking itself."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            _keep_layout(module)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the compute type of every 4-bit layer to ``dtype``; a checkpoint may name another one."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = dtype


def _keep_layout(layer: Linear4bit) -> None:
    """Stop a layer from repacking: on a CPU with AVX512-BF16, bitsandbytes 0.50.2 moves a layer's
    bytes into new storage in its first forward pass without gradient, and can no longer train
    afterwards. To be removed when it no longer does."""
    layer.support_avx512bf16_for_cpu = False


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
        state, ours = (
            QuantState.from_dict(dict(parts or {}), device=packed.device),
            _scales(weight.quant_state),
        )
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


def packed_bytes(elements: int, nested: bool) -> int:
    """Memory of one packed layer in bytes: half a byte per weight, and its scales.

    Args:
        nested: the scales are quantised themselves, in 8 bits with a float32 for each 256.
    """
    blocks = -(-elements // BLOCK_ELEMENTS)
    tables = 16 * 4 + (256 * 4 if nested else 0)
    return elements // 2 + tables + (blocks + -(-blocks // 256) * 4 if nested else blocks * 4)
