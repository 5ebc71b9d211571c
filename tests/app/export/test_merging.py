"""Merging tensor by tensor is PEFT's own merge, for every family, and refuses what is not plain."""

import os
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from reason_llm.app.export import merging
from reason_llm.config import AdapterSection, Config
from reason_llm.errors import ConfigError, ModelError
from reason_llm.model import adapters
from reason_llm.model.plan import with_start

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])


def make_base(folder: Path, family: str, tied: bool, seed: int = 0) -> Path:
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**SMALL, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def make_adapter(base: Path, folder: Path, **options: Any) -> Path:
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    lora = LoraConfig(
        r=4, lora_alpha=12, task_type="CAUSAL_LM", **{"target_modules": "all-linear"} | options
    )
    policy = get_peft_model(model, lora)
    torch.manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    policy.save_pretrained(folder)
    return folder


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


CASES = [
    ("qwen2", True, {}),
    ("qwen2", False, {"use_rslora": True}),
    ("qwen3", True, {"target_modules": ["q_proj", "v_proj"]}),
    ("llama", False, {"target_modules": ["up_proj"], "layers_to_transform": [1]}),
    ("phi3", False, {}),
    ("gemma2", True, {}),
    ("gemma3_text", True, {}),
    ("mistral", False, {"target_modules": ["q_proj", "lm_head"]}),
    ("qwen2", True, {"target_modules": ["q_proj", "lm_head"]}),
]


@pytest.mark.filterwarnings("default")  # PEFT warns of an adapted head that is tied
@pytest.mark.parametrize(("family", "tied", "options"), CASES)
def test_it_is_peft_s_merge(
    family: str,
    tied: bool,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    base = make_base(tmp_path / "base", family, tied)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    out = tmp_path / "out"
    out.mkdir()
    monkeypatch.setattr(merging, "SHARD_BYTES", 20_000)
    merging.merge(base, adapter, out, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    plain = logits_of(model)
    expected = logits_of(PeftModel.from_pretrained(model, adapter))
    found = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert (logits_of(found) - expected).abs().max() < 1e-4
    assert (expected - plain).abs().max() > 1e-2
    files = sorted(out.glob("*.safetensors"))
    assert len(files) > 2
    index = orjson.loads((out / "model.safetensors.index.json").read_bytes())
    stored = {name: file.name for file in files for name in load_file(file)}
    assert index["weight_map"] == stored
    assert all(file.stat().st_size < 30_000 for file in files)
    adapted_head = "lm_head" in options.get("target_modules", ())
    assert found.config.tie_word_embeddings == (tied and not adapted_head)
    assert merging.merged_bytes(base, adapter, torch.float32) == index["metadata"]["total_size"]


def test_rank_stabilised_lora_is_scaled_by_the_root_of_the_rank(tmp_path: Path) -> None:
    """As a run makes it, writes it, merges it and begins from it."""
    base, folder = make_base(tmp_path / "base", "qwen2", False), tmp_path / "adapter"
    section = AdapterSection(rank=4, alpha=6, rslora=True, targets=["q_proj"])
    policy = adapters.attach(AutoModelForCausalLM.from_pretrained(base), section)
    layer: Any = next(m for n, m in policy.named_modules() if n.endswith("q_proj"))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    inputs = torch.randn(3, 32)
    with torch.no_grad():
        added = layer(inputs) - layer.base_layer(inputs)
        torch.testing.assert_close(added, 6 / 4**0.5 * inputs @ a.T @ b.T, atol=1e-5, rtol=1e-5)
    adapters.snapshot(policy).write(folder)
    assert {each.scale for each in merging.adapted(folder)[0].values()} == {3.0}
    assert adapters.section_of(folder) == section
    tree = {"model": {"start": str(folder)}, "data": {"train": "x.jsonl"}}
    assert with_start(Config.model_validate(tree), folder).model.adapter == section
    tree["model"]["adapter"] = {"rslora": False}
    with pytest.raises(ConfigError, match=r"model\.adapter\.rslora=False contradicts"):
        with_start(Config.model_validate(tree), folder)


def test_bfloat16_is_the_rounded_sum(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", False)
    adapter = make_adapter(base, tmp_path / "adapter")
    for name, dtype in (("wide", torch.float32), ("narrow", torch.bfloat16)):
        (tmp_path / name).mkdir()
        merging.merge(base, adapter, tmp_path / name, dtype)
    wide, narrow = (load_file(tmp_path / n / "model.safetensors") for n in ("wide", "narrow"))
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)
    assert orjson.loads((tmp_path / "narrow" / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_the_checkpoint_is_what_transformers_reads(tmp_path: Path) -> None:
    """A base's folder may hold its weights in a second form, under the same names or others."""
    base = make_base(tmp_path / "base", "qwen2", False)
    adapter = make_adapter(base, tmp_path / "adapter")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    weights = load_file(base / "model.safetensors")
    other = {name: tensor + 1 for name, tensor in weights.items()} | {"more": torch.ones(2)}
    save_file(other, base / "pytorch_model.safetensors")
    (tmp_path / "out").mkdir()
    merging.merge(base, adapter, tmp_path / "out", torch.float32)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == weights.keys()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (logits_of(merged) - logits_of(model)).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"use_dora": True}, "use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias='all'"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 2}}, "alpha_pattern"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
    ],
)
def test_what_is_no_plain_lora_is_refused(
    options: dict[str, Any], named: str, tmp_path: Path
) -> None:
    base = make_base(tmp_path / "base", "qwen2", False)
    adapter = make_adapter(base, tmp_path / "adapter", **options)
    with pytest.raises(ModelError, match="not a plain LoRA") as refused:
        merging.adapted(adapter)
    assert named in str(refused.value)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", False)
    adapter = make_adapter(base, tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"it is missing; .* --base"):
        merging.merged_bytes(make_base(tmp_path / "fused", "phi3", False), adapter, torch.float32)
    with pytest.raises(ModelError, match=r"\[32, 48\], and in .* it is \[32, 64\]"):
        SMALL["intermediate_size"] = 64
        try:
            other = make_base(tmp_path / "wide", "qwen2", False)
        finally:
            SMALL["intermediate_size"] = 48
        merging.merged_bytes(
            other,
            make_adapter(base, tmp_path / "down", target_modules=["down_proj"]),
            torch.float32,
        )


def test_a_quantised_base_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", False)
    config = orjson.loads((base / "config.json").read_bytes())
    config["quantization_config"] = {"quant_method": "bitsandbytes"}
    (base / "config.json").write_bytes(orjson.dumps(config))
    with pytest.raises(ModelError, match=r"quantised itself.* --base"):
        merging.base_folder(str(base))


NESTED = "(([a-z_.0-9]*)*)*!"
"""Tried against a name of 30 characters it takes years."""


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": NESTED},
        {"exclude_modules": NESTED},
        {"layers_to_transform": [0, 1], "layers_pattern": NESTED},
        {"target_modules": r".*\.(q|v)_proj"},
    ],
)
def test_no_regular_expression_of_an_adapter_is_searched_for(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Its weights tell what it adapts."""
    base = make_base(tmp_path / "base", "llama", False)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "v_proj"])
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    expected = logits_of(PeftModel.from_pretrained(model, adapter))
    file = adapter / "adapter_config.json"
    file.write_bytes(orjson.dumps(orjson.loads(file.read_bytes()) | changes))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    policy = adapters.over(model, adapter)
    assert torch.equal(logits_of(policy), expected)
    section = adapters.section_of(adapter)
    assert section.rank == 4
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    own = adapters.attach(model, section)
    adapters.load_as_is(own, adapter, str(base))
    assert torch.equal(logits_of(own), expected)


@pytest.mark.parametrize("targets", [NESTED, r".*\.(q|v)_proj", "[", "x+"])
def test_a_regular_expression_of_a_config_is_bounded(targets: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", False)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    section = AdapterSection(rank=2, targets=targets)
    assert not section.adapts_head
    if targets.endswith("proj"):
        policy = adapters.attach(model, section)
        assert sum("lora_A" in name for name, _ in policy.named_parameters()) == 4
        return
    with pytest.raises(ModelError, match=r"model\.adapter\.targets="):
        adapters.attach(model, section)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"peft_type": "LORA", "x": ' + b"[" * 100_000,
        b'{"peft_type": "LORA", "r": "x"}',
        b'{"peft_type": "LORA", "r": 0}',
        b'{"peft_type": "LORA", "r": true}',
        b'{"peft_type": "LORA", "r": 1e9}',
        b'{"peft_type": "LORA", "lora_alpha": "x"}',
        b'{"peft_type": "LORA", "lora_alpha": -1}',
        b'{"peft_type": "LORA", "lora_dropout": {}}',
        b'{"peft_type": "LORA", "target_modules": 5}',
        b'{"peft_type": "LORA", "target_modules": [5]}',
        b'{"peft_type": "LORA", "target_modules": {"a": 1}}',
        b'{"peft_type": "x"}',
        b'{"peft_type": ["x"]}',
        b'{"peft_type": "LORA", "base_model_name_or_path": 5}',
        b'{"peft_type": "LORA", "init_lora_weights": [1]}',
        b"[]",
        b"",
    ],
    ids=lambda content: content[:60].decode(),
)
def test_an_adapter_s_config_that_cannot_be_is_one_line(content: bytes, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", False)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    (adapter / "adapter_config.json").write_bytes(content)
    for read in (adapters.read_config, adapters.section_of, adapters.base_of, merging.adapted):
        try:
            read(adapter)
        except ModelError as error:
            assert "\n" not in str(error)
            assert str(adapter) in str(error)
        else:
            assert b"target_modules" in content  # the weights tell, then
            assert read is not adapters.base_of


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_fifo_in_an_adapter_is_no_file(name: str, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "llama", False)
    adapter = make_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    (adapter / name).unlink()
    os.mkfifo(adapter / name)
    with pytest.raises(ModelError):
        merging.adapted(adapter)
    with pytest.raises(ModelError):
        adapters.over(AutoModelForCausalLM.from_pretrained(base), adapter)


def test_damaged_adapters_are_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", False)
    adapter = make_adapter(base, tmp_path / "adapter")
    whole = load_file(adapter / adapters.WEIGHTS)
    half = {name: tensor for name, tensor in whole.items() if "lora_A" in name}
    save_file(half, adapter / adapters.WEIGHTS)
    with pytest.raises(ModelError, match="lacks a factor"):
        merging.adapted(adapter)
    save_file(whole | {"base_model.model.other": torch.zeros(1)}, adapter / adapters.WEIGHTS)
    with pytest.raises(ModelError, match="not a factor of a linear layer"):
        merging.adapted(adapter)
    (adapter / adapters.WEIGHTS).write_bytes(b"x" * 100)
    with pytest.raises(ModelError, match="cannot be read"):
        merging.adapted(adapter)
