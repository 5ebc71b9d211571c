#!/usr/bin/env bash
# Observed: for rows that are packed into one (positions that begin again, or cu_seq_lens and seq_idx
# as a packing collator gives them), Transformers' torch path for Qwen3.5 separates the rows in its
# attention layers and carries the state of its linear-attention layers from one row into the next,
# without an error or a warning.
# Expected: a model either separates packed rows in all its layers, or refuses them.
# Affected: users who train Qwen3.5 or Qwen3-Next with packing or without padding, and without
# flash-linear-attention and causal-conv1d (on a CPU, on AMD, or because they failed to build): each
# row is trained as if the row before it were its context.
# Versions: transformers 5.17.0, torch 2.13.0, Python 3.11. Date: 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.17.0 torch==2.13.0
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import logging
import platform

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

logging.getLogger("transformers").setLevel(logging.ERROR)
print(f"Python {platform.python_version()}, torch {torch.__version__}, "
      f"transformers {transformers.__version__}")
SIZES = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    intermediate_size=96, vocab_size=320, max_position_embeddings=512,
)
LINEAR = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32,
)


def largest_difference(layers: list[str], with_lengths: bool) -> float:
    """Between the log-probs of a row alone and of the same row behind another, in nats."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_5_text", **SIZES, **LINEAR, layer_types=layers)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    for parameter in model.parameters():  # random weights as large as trained ones
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    first, second = torch.randint(3, 320, (1, 40)), torch.randint(3, 320, (1, 40))
    together = torch.cat([first, second], 1)
    positions = torch.cat([torch.arange(40), torch.arange(40)])[None]
    lengths = {}
    if with_lengths:
        ends = torch.tensor([0, 40, 80], dtype=torch.int32)
        lengths = dict(
            cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=40, max_length_k=40,
            seq_idx=torch.tensor([[0] * 40 + [1] * 40], dtype=torch.int32),
        )
    with torch.no_grad():
        alone = model(input_ids=second).logits.log_softmax(-1)
        packed = model(
            input_ids=together, position_ids=positions, use_cache=False, **lengths
        ).logits[:, 40:].log_softmax(-1)
    return float((alone - packed).abs().max())


attention = largest_difference(["full_attention"] * 2, False)
hybrid = largest_difference(["linear_attention", "full_attention"], False)
named = largest_difference(["linear_attention", "full_attention"], True)
print(f"attention layers alone, positions begin again: {attention:.1e} nats")
print(f"with a linear-attention layer, positions begin again: {hybrid:.2f} nats")
print(f"with a linear-attention layer, cu_seq_lens and seq_idx given: {named:.2f} nats")
raise SystemExit(not (attention < 1e-4 and hybrid > 0.05 and named > 0.05))
PYTHON
# Seen:
# Python 3.11.7, torch 2.13.0+cpu, transformers 5.17.0
# attention layers alone, positions begin again: 0.0e+00 nats
# with a linear-attention layer, positions begin again: 5.20 nats
# with a linear-attention layer, cu_seq_lens and seq_idx given: 5.20 nats
