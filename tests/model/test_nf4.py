"""QLoRA: a base in NF4, by bitsandbytes alone and under the real vLLM, on the CPU.

1. Under vLLM every packed byte is shared, and is what quantising the checkpoint gives.
2. Logits are bitwise those of Transformers' own quantised load.
3. Sampler and learner agree after each sync; learning leaves the packed base as it is.
4. Without vLLM: evaluating first and training then works (it does not in bitsandbytes as it is).
5. A checkpoint that bitsandbytes quantised already loads, or is refused with the cause.
"""

import gc
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen2Config

from conftest import TINY
from families import SIZES, make_model, prompts_of, quiet, randomize, with_tokenizer
from learners import ROW, scored
from marks import most_are_long
from reason_llm.config import AdapterSection, Config, DataSection, ModelSection, TrainSection
from reason_llm.config.sections import SampleSection
from reason_llm.errors import ConfigError, ModelError, TrainingError
from reason_llm.model import nf4
from reason_llm.model.base import Model, check_model, load_tokenizer, read_config
from reason_llm.model.datum import to_data
from reason_llm.model.plan.backends import choose
from reason_llm.model.vllm import engine, shared_weights
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling
from reason_llm.train.learner import Learner, Learners, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient

pytestmark = pytest.mark.filterwarnings("default")  # vLLM and bitsandbytes warn of their own

NF4_SIZES = replace(SIZES, quantize="nf4")


def need_vllm() -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    pytest.importorskip("vllm_bnb_plugin")


def ordinary(path: str, dtype: torch.dtype) -> Any:
    """Transformers' own load, quantised while loading."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, quantization_config=nf4.config_for(dtype)
    )
    nf4.keep_layouts(model, dtype)
    return model


@pytest.mark.parametrize(
    ("family", "tied"),
    most_are_long(
        [
            ("qwen2", True),
            ("qwen3", False),
            ("llama", False),
            ("phi3", False),
            ("gemma3_text", True),
        ],
        [],
    ),
)
def test_every_packed_byte_is_shared_and_the_checkpoint_s(
    family: str, tied: bool, tmp_path: Path
) -> None:
    need_vllm()
    path = str(make_model(tmp_path / family, family, tied, "bfloat16"))
    started = engine.start(path, torch.bfloat16, NF4_SIZES, seed=0)
    model = shared_weights.model_over(started, read_config(path), torch.bfloat16)
    storages = {p.untyped_storage().data_ptr() for p in started.module.parameters()}
    assert all(p.untyped_storage().data_ptr() in storages for p in model.parameters())
    assert shared_weights.verify(model, path) >= 12
    theirs = ordinary(path, torch.bfloat16)
    packed = [name for name, m in model.named_modules() if isinstance(m, Linear4bit)]
    assert packed == [n for n, m in theirs.named_modules() if isinstance(m, Linear4bit)]
    assert len(packed) == (8 if family == "phi3" else 14)
    for name in packed:
        assert torch.equal(
            model.get_submodule(name).weight.data.view(-1),
            theirs.get_submodule(name).weight.data.view(-1),
        )
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, theirs(input_ids=ids).logits)
    layer = model.get_submodule(packed[3])
    layer.quant_state.absmax[2] *= 1.01
    with pytest.raises(ModelError, match=f"{packed[3]}.weight differs from"):
        shared_weights.verify(model, path)
    layer.quant_state.absmax[2] /= 1.01
    layer.weight.data[5] ^= 1
    with pytest.raises(ModelError, match=f"{packed[3]}.weight differs from"):
        shared_weights.verify(model, path)
    del model, layer
    started.close()


@pytest.mark.long
def test_sampler_and_learner_agree_while_the_packed_base_stays(tmp_path: Path) -> None:
    need_vllm()
    tiny = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    tiny.save_pretrained(tmp_path)
    path, tokenizer = with_tokenizer(tmp_path), load_tokenizer(str(tmp_path))
    section = ModelSection(path=path, quantize="nf4", adapter=AdapterSection(rank=8, alpha=16))
    prompts = prompts_of(tokenizer, *(f"What is {n} + 68?" for n in (3, 57, 41, 9)))
    train = TrainSection(learning_rate=1e-3, gradient_checkpointing=False)
    with Model(section, tokenizer, 0, NF4_SIZES) as model:
        randomize(model, 1)
        learner = Learner(model, LearningSettings(PolicyGradient(ROW, 16), train, 1.0, 4096, 0, 6))
        trained = {n for n, p in model.policy.named_parameters() if p.requires_grad}
        assert all("lora_" in name for name in trained)
        assert len(trained) == 2 * 7 * model.text_config.num_hidden_layers
        base = {
            n: p.detach().clone() for n, p in model.policy.named_parameters() if n not in trained
        }
        before = [p.detach().clone() for p in learner.parameters]
        for step in range(2):
            with sampling(model, 0) as sampler:
                prove_sampler_is_policy(sampler, model, prompts)
                groups = sampler.sample(prompts, SamplingParams(4, 16), step, quiet)
            with learning(learner):
                Learners(learner).learn(step, to_data(scored(groups)), lambda items: None)
        assert not any(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))
        after = dict(model.policy.named_parameters())
        assert all(torch.equal(tensor, after[name]) for name, tensor in base.items())
        with sampling(model, 0) as sampler:
            randomize(model, 4)
            with pytest.raises(TrainingError, match="not the policy"):
                prove_sampler_is_policy(sampler, model, prompts)
        del sampler, learner, base, after, before
    gc.collect()


def test_without_vllm_it_samples_then_learns(tokenizer: Any) -> None:
    section = ModelSection(
        path=str(TINY), dtype="float32", quantize="nf4", adapter=AdapterSection(rank=8, alpha=16)
    )
    prompts = prompts_of(tokenizer, "What is 3 + 4?", "What is 5 + 6?")
    train = TrainSection(learning_rate=1e-3)
    with Model(section, tokenizer, 0) as model:
        layers = [m for m in model.decoder.modules() if isinstance(m, Linear4bit)]
        assert len(layers) == 7 * model.text_config.num_hidden_layers
        assert all(layer.weight.quant_state.nested for layer in layers)  # double quantisation
        packed = [layer.weight.data.clone() for layer in layers]
        learner = Learner(model, LearningSettings(PolicyGradient(ROW, 16), train, 1.0, 4096, 0, 20))
        losses = []
        for step in range(2):
            with sampling(model, 10**6) as sampler:
                groups = sampler.sample(prompts, SamplingParams(2, 8), step, quiet)
            with learning(learner):
                data = to_data(scored(groups))
                losses.append(Learners(learner).learn(step, data, lambda items: None))
        assert losses[0]["train/grad_norm"] > 0, losses
        assert losses[1]["train/sampler_mismatch_max"] < 1e-4, losses
        assert all(torch.equal(a, b.weight.data) for a, b in zip(packed, layers, strict=True))


def test_float32_under_vllm_is_refused_before_anything_is_read() -> None:
    need_vllm()
    data = DataSection(train="nowhere.jsonl")
    section = ModelSection(dtype="float32", quantize="nf4")
    config = Config(data=data, model=section, sample=SampleSection(engine="vllm"))
    with pytest.raises(ConfigError, match=r"have no float32; set model\.dtype to"):
        choose(config, Qwen2Config(), torch.device("cpu"))


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as bitsandbytes quantises it, saved so, to compute in float16."""
    folder = tmp_path_factory.mktemp("quantized")
    model = ordinary(str(TINY), torch.bfloat16)
    model.config.quantization_config.bnb_4bit_compute_dtype = torch.float16
    model.save_pretrained(folder)
    with_tokenizer(folder)
    return folder


def section_of(folder: Path, quantize: str = "nf4") -> ModelSection:
    adapter = AdapterSection(rank=8, alpha=16)
    return ModelSection(
        path=str(folder),
        quantize=quantize,  # type: ignore[arg-type]
        dtype="bfloat16",
        adapter=adapter,
    )


@pytest.mark.parametrize("under_vllm", most_are_long([False, True], [False]))
def test_a_checkpoint_that_is_nf4_already_loads_as_it_is(
    under_vllm: bool, quantized: Path, tokenizer: Any
) -> None:
    if under_vllm:
        need_vllm()
    section, ids = section_of(quantized), torch.tensor([[5, 6, 7, 8]])
    assert check_model(section) is not None
    plain = ordinary(str(TINY), torch.bfloat16)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
    with Model(section, tokenizer, 0, NF4_SIZES if under_vllm else None) as model:
        layers = [m for m in model.decoder.modules() if isinstance(m, Linear4bit)]
        assert len(layers) == 7 * model.text_config.num_hidden_layers
        assert {layer.compute_dtype for layer in layers} == {torch.bfloat16}
        with torch.no_grad():
            assert torch.allclose(model.logits(model.hidden_states(ids)), expected, atol=0.05)
        base = model.policy.get_base_model()
        named = [(n, m) for n, m in base.named_modules() if isinstance(m, Linear4bit)]
        dict(named)["model.layers.1.mlp.up_proj.base_layer"].weight.quant_state.absmax[1] += 1
        dict(named)["model.layers.2.mlp.up_proj.base_layer"].weight.data.view(-1)[5] ^= 1
        tensors, odd = load_file(quantized / "model.safetensors"), []
        for name, layer in named:
            own = name.replace(".base_layer", ".weight")
            parts = {n: t for n, t in tensors.items() if n.startswith(f"{own}.")}
            odd += [own] if not nf4.matches(layer, tensors[own], parts) else []
            assert nf4.matches(layer, tensors[own]) is (".2.mlp.up_proj" not in name)
        assert odd == [f"model.layers.{i}.mlp.up_proj.weight" for i in (1, 2)]
        del base, named, layer, layers
    gc.collect()


@pytest.mark.parametrize(
    ("changes", "quantize", "said"),
    [
        ({}, "none", r"NF4 already; set model\.quantize to nf4"),
        ({"bnb_4bit_quant_type": "fp4"}, "nf4", r"4-bit fp4 in uint8 .*take the unquantised"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "nf4", r"are 8-bit by bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "nf4", r"quantised by gptq.*take the unquantised"),
        ({"llm_int8_skip_modules": ["lm_head", "model.layers.2.mlp"]}, "nf4",
         r"leaves model\.layers\.2\.mlp\.\w+ unquantised"),
        ({"llm_int8_skip_modules": ["o_proj"]}, "nf4", r"self_attn\.o_proj unquantised"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "nf4", r"4-bit nf4 in bfloat16"),
    ],
)  # fmt: skip
def test_other_quantised_checkpoints_are_refused_with_the_cause(
    changes: dict[str, Any], quantize: str, said: str, quantized: Path, tmp_path: Path
) -> None:
    for file in quantized.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=said) as told:
        check_model(section_of(tmp_path, quantize))
    assert "\n" not in str(told.value)
