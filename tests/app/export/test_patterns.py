"""rank_pattern and alpha_pattern become one rank and one scale, which vLLM reads, too."""

from pathlib import Path

import orjson
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_merging import logits_of, make_adapter, make_base
from transformers import AutoModelForCausalLM

import reason_llm
from conftest import TINY
from reason_llm.app.export import patterns
from reason_llm.errors import ModelError

PATTERNS = {
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "rank_pattern": {"q_proj": 2, r"^model\.layers\.1\.mlp\.down_proj": 6},
    "alpha_pattern": {"layers.0.self_attn.q_proj": 10, "q_proj": 3, "v_proj": 1},
}
SCALES = {  # alpha / r by hand; elsewhere 12 / 4
    "model.layers.0.self_attn.q_proj": 10 / 2, "model.layers.1.self_attn.q_proj": 3 / 2,
    "model.layers.0.self_attn.v_proj": 1 / 4, "model.layers.1.self_attn.v_proj": 1 / 4,
    "model.layers.0.mlp.down_proj": 12 / 4, "model.layers.1.mlp.down_proj": 12 / 6,
}  # fmt: skip


@pytest.mark.parametrize("rslora", [False, True])
def test_each_layer_adds_what_it_added(rslora: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", True)
    adapter = make_adapter(base, tmp_path / "adapter", **PATTERNS, use_rslora=rslora)
    (plain := tmp_path / "plain").mkdir()
    assert patterns.are_in(adapter)
    assert patterns.write_plain(adapter, plain) == 6
    assert not patterns.are_in(plain)
    before, after = (load_file(each / "adapter_model.safetensors") for each in (adapter, plain))
    assert after.keys() == before.keys()
    for layer, scale in SCALES.items():
        a, b = (f"base_model.model.{layer}.lora_{each}.weight" for each in "AB")
        rank = len(before[a])
        scale = scale * rank**0.5 if rslora else scale
        assert (len(after[a]), after[b].shape[1]) == (6, 6)
        torch.testing.assert_close(after[b] @ after[a], scale * before[b] @ before[a])
    config = orjson.loads((plain / "adapter_config.json").read_bytes())
    assert config["lora_alpha"] / config["r"] == 1.0  # by which vLLM scales all layers
    assert not config["use_rslora"]


def test_it_is_exported_alone_and_merged(tmp_path: Path) -> None:
    base = Path(TINY)
    adapter = make_adapter(base, tmp_path / "adapter", **PATTERNS)
    reason_llm.export(adapter, tmp_path / "alone", adapter_only=True)
    reason_llm.export(adapter, tmp_path / "merged", dtype="float32")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    without = logits_of(model)
    expected = logits_of(PeftModel.from_pretrained(model, adapter))
    fresh = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    alone = logits_of(PeftModel.from_pretrained(fresh, tmp_path / "alone"))
    merged = logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))
    assert (expected - without).abs().max() > 1e-2
    assert (alone - expected).abs().max() < 1e-4
    assert (merged - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank_pattern": {"q_proj": 3}}, "q_proj.lora_A.weight is not of rank 3"),
        ({"alpha_pattern": {"q_proj": "large"}}, "'q_proj' is 'large'"),
        ({"alpha_pattern": {"(q_proj": 2}}, "missing )"),
        ({"use_dora": True}, "use_dora=True"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    changes: dict[str, object], named: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", "qwen2", True)
    adapter = make_adapter(base, tmp_path / "adapter", **PATTERNS)
    config = orjson.loads((adapter / "adapter_config.json").read_bytes())
    (adapter / "adapter_config.json").write_bytes(orjson.dumps(config | changes))
    with pytest.raises(ModelError) as refused:
        reason_llm.export(adapter, tmp_path / "out", adapter_only=True)
    assert named in str(refused.value)
    assert not (tmp_path / "out").exists()
