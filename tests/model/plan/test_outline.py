"""The shape of a config.json without PyTorch is the one that Transformers and PEFT build."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import ROOT, TINY
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import meta_model
from reason_llm.model.base import context_limit
from reason_llm.model.plan import Shape
from reason_llm.model.plan.outline import outline
from shapes import PARAMETERS, write_config
from slices import installed

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "vocab_size": 200,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 128}  # fmt: skip
COUNTED: list[dict[str, Any]] = [
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "rope_scaling": LLAMA3},
    {"model_type": "llama", "head_dim": 32},
    {"model_type": "mistral", "head_dim": 32, "sliding_window": None},
    {"model_type": "mistral", "head_dim": 32, "sliding_window": 16},
    {"model_type": "qwen2", "tie_word_embeddings": True},
    {"model_type": "qwen3", "head_dim": 24, "attention_bias": True},
]
GPT_OSS = {"model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4,
           "num_experts_per_tok": 2}  # fmt: skip
DELTA = {"head_dim": 32, "full_attention_interval": 2, "linear_num_key_heads": 2,
         "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
         "linear_conv_kernel_dim": 3}  # fmt: skip
GEMMA4 = {"head_dim": 16, "global_head_dim": 24, "num_hidden_layers": 12}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("qwen3_5", DELTA),
    ("gemma4", GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3}),
    ("gemma4_unified", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1,
                                 "final_logit_softcapping": 30.0}),
]  # fmt: skip
LEFT: list[dict[str, Any]] = [
    {"model_type": "gpt_neox"},
    {"model_type": "qwen3"},  # its heads are of 128 by default
    {"model_type": "qwen2", "hidden_size": 66},
    {"model_type": "qwen2", "use_sliding_window": True},
    {"model_type": "qwen2", "layer_types": ["linear_attention"] * 3},
    {"model_type": ["qwen2"]},
    {"model_type": "qwen3", "head_dim": "wide"},
    {"model_type": "llama", "quantization_config": {"quant_method": "bitsandbytes"}},
    {"model_type": "llama", "num_hidden_layers": 0},
]


def section(folder: Path, described: dict[str, Any], **options: Any) -> ModelSection:
    (folder / "config.json").write_text(json.dumps(SMALL | described))
    return ModelSection(path=str(folder), **options)


def check(model: ModelSection, attention: str = "auto") -> None:
    found = outline(model, attention)
    assert found is not None
    assert found.shape == Shape.of(meta_model(model), attention)
    assert found.context_tokens == context_limit(model)


@pytest.mark.parametrize("described", COUNTED, ids=str)
@pytest.mark.parametrize("train", ["adapter", "full"])
def test_a_counted_shape_is_the_built_one(
    described: dict[str, Any], train: str, tmp_path: Path
) -> None:
    check(section(tmp_path, described, train=train), "eager" if train == "full" else "auto")


def whole(family: str, text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A config.json with a text part, of a model that also reads images."""
    ties = {"tie_word_embeddings": True}
    text = SMALL | ties | {"model_type": f"{family}_text"} | text
    return ties | {"model_type": family, "text_config": text, "vision_config": {}} | more


@pytest.mark.parametrize(("family", "text"), WHOLE, ids=[family for family, _ in WHOLE])
@pytest.mark.parametrize("attention", ["auto", "eager"])
def test_the_text_part_of_a_model_that_reads_images_is_counted(
    family: str, text: dict[str, Any], attention: str, tmp_path: Path
) -> None:
    names = ["q_proj", "up_proj", "down_proj"]
    targets = names if "attention_k_eq_v" in text or attention == "eager" else "all-linear"
    path = str(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(whole(family, text)))
    check(ModelSection(path=path, adapter=AdapterSection(rank=3, targets=targets)), attention)
    for more in ({"text_config": {}}, {"image_token_index": 3}):
        (tmp_path / "config.json").write_text(json.dumps(whole(family, text) | more))
        assert outline(ModelSection(path=path)) is None


def test_a_mixture_is_counted(tmp_path: Path) -> None:
    check(section(tmp_path, GPT_OSS))
    assert outline(section(tmp_path, GPT_OSS, train="full")) is None
    model = section(tmp_path, GPT_OSS, quantize="nf4")
    refusals = []
    for call in (outline, meta_model):
        with pytest.raises(
            ModelError, match=r"model\.quantize=nf4: .*\(gpt_oss\) is a mix"
        ) as caught:
            call(model)
        refusals.append(str(caught.value))
    assert refusals[0] == refusals[1]


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "down_proj"], ["o_proj"]], ids=str)
def test_an_adapter_is_counted_as_peft_makes_it(targets: Any, tmp_path: Path) -> None:
    adapter = AdapterSection(rank=101, targets=targets)
    check(section(tmp_path, COUNTED[0], adapter=adapter, context_tokens=100))


@pytest.mark.parametrize("described", LEFT, ids=str)
def test_what_is_not_counted_is_left_to_transformers(
    described: dict[str, Any], tmp_path: Path
) -> None:
    assert outline(section(tmp_path, described)) is None


@pytest.mark.parametrize("name", ["Qwen/Qwen2.5-1.5B-Instruct", "Qwen/Qwen3-8B"])
def test_a_shipped_shape_is_that_of_its_config(name: str, tmp_path: Path) -> None:
    assert name in PARAMETERS
    model = ModelSection(path=write_config(name, tmp_path), quantize="nf4")
    check(model)
    found = outline(ModelSection(path=name, quantize="nf4"))
    assert found == outline(model)


def test_a_model_is_planned_without_data(script: Callable[..., tuple[int, str, str]]) -> None:
    name = ["--model.path", "qwen2.5-7b-instruct", "--memory.budget_gib", "24"]
    code, one, error = script("train.py", *name, "--plan")
    assert code == 0 and "fits" in one, one + error


def heavy_after(name: str, arguments: list[list[str]]) -> str:
    """The heavy libraries that a process has after calls of a command."""
    code = f"""
import sys
from reason_llm.app.cli import call
for arguments in {arguments}:
    assert call({name!r}, "", arguments) in (0, 2), arguments  # 2: rows that a stage writes
heavy = {{"torch", "transformers", "peft", "bitsandbytes", "vllm"}}
print(sorted(heavy & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()[-1]


def test_a_plan_of_a_shipped_config_loads_no_heavy_library() -> None:
    configs = sorted(map(str, (ROOT / "configs").glob("*.yaml")))
    assert heavy_after("plan", [[config] for config in configs]) == "[]"


@pytest.mark.long
def test_a_data_check_loads_no_pytorch() -> None:
    names = ["sft_tiny", *["wordle_tiny"] * installed("environments")]
    checks = [[f"configs/{name}.yaml", "--data-check"] for name in names]
    assert heavy_after("train", checks) == "['transformers']"


def test_a_config_that_contradicts_itself_has_its_error(tmp_path: Path) -> None:
    scaled = {"model_type": "llama", "rope_parameters": LLAMA3}
    model = section(tmp_path, scaled, context_tokens=513)
    assert outline(model) is None  # Transformers' way names the limit
    assert outline(ModelSection(path=str(TINY), trust_remote_code=True)) is None
