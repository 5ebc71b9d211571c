"""Gated DeltaNet under vLLM on a CPU."""

import torch
from torch import Tensor, nn


def keep_delta_rule() -> None:
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
            q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
            q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
            gates = nn.functional.softplus(a[tokens].float() + layer.dt_bias)
            g = (-layer.A_log.float().exp() * gates).unflatten(0, (last - first, -1))
            beta = b[tokens].sigmoid().unflatten(0, (last - first, -1))
            kind = "recurrent" if first < decoded else "chunk"
            outputs, after = getattr(qwen3_5, f"torch_{kind}_gated_delta_rule")(
                q,
                k,
                v,
                g=g,
                beta=beta,
                initial_state=None if is_new else states[slots],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            core_attn_out[tokens] = outputs.flatten(0, 1)
            states[slots] = after.to(states.dtype)

    gdn_attention.cpu_gdn_attention_core = core
