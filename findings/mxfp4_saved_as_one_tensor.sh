#!/usr/bin/env bash
# Observed: a gpt-oss checkpoint in MXFP4 that Transformers loads dequantised and save_pretrained
# writes again holds the experts of all its layers under two names that end in a dollar sign, so all
# layers but one are lost; saving gives no error or warning.
# Expected: from_pretrained with Mxfp4Config(dequantize=True) and save_pretrained make a bfloat16
# copy of the model, as for every other architecture.
# Affected: users who convert gpt-oss to bfloat16 to fine-tune it, or merge an adapter into it, and
# then delete the source.
# Versions: transformers 5.17.0, torch 2.13.0, accelerate 1.15.0, Python 3.11. Date: 2026-11-27.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.17.0 torch==2.13.0 accelerate==1.15.0
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - <<'PYTHON'
import json
import logging
import platform
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, Mxfp4Config

logging.getLogger("transformers").setLevel(logging.ERROR)
print(f"Python {platform.python_version()}, torch {torch.__version__}, "
      f"transformers {transformers.__version__}")
config = AutoConfig.for_model(
    "gpt_oss", hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, intermediate_size=64, vocab_size=320, num_local_experts=4, num_experts_per_tok=2,
    sliding_window=16, layer_types=["sliding_attention", "full_attention"],
    max_position_embeddings=512,
)
torch.manual_seed(0)
made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
made.save_pretrained("plain")

# The published layout: blocks of 32 four-bit numbers with a power of two each, for the experts.
VALUES = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
stored = {}
for name, weight in made.state_dict().items():
    if not (".experts." in name and name.endswith("_proj")):
        stored[name] = weight.contiguous()
        continue
    rows = weight.float().transpose(1, 2)
    rows = rows.reshape(*rows.shape[:2], -1, 32)
    power = torch.floor(torch.log2(rows.abs().amax(-1).clamp(min=1e-8))) - 2
    code = ((rows / power.exp2()[..., None])[..., None] - VALUES).abs().argmin(-1).byte()
    stored[f"{name}_blocks"] = code[..., ::2] | (code[..., 1::2] << 4)
    stored[f"{name}_scales"] = (power + 127).byte()
Path("mxfp4").mkdir()
save_file(stored, "mxfp4/model.safetensors", metadata={"format": "pt"})
described = json.loads(Path("plain/config.json").read_text())
described["quantization_config"] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}
Path("mxfp4/config.json").write_text(json.dumps(described))

model = AutoModelForCausalLM.from_pretrained(
    "mxfp4", dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
)
model.save_pretrained("again")
of_experts = [name for name in load_file("again/model.safetensors") if "_proj" in name
              and "self_attn" not in name and "bias" not in name]
expected = [name for name in made.state_dict() if ".experts." in name and name.endswith("_proj")]
print(f"expert weights of the loaded model: {len(expected)}")
print(f"names of expert weights in the saved file: {of_experts}")
raise SystemExit(sorted(of_experts) == sorted(expected) or len(of_experts) >= len(expected))
PYTHON
# Seen:
# Python 3.11.7, torch 2.13.0+cpu, transformers 5.17.0
# expert weights of the loaded model: 4
# names of expert weights in the saved file: ['down_proj$', 'gate_up_proj$']
