"""What samples and who shares the weights: chosen by what is there, and refused in one line."""

import importlib.util
import re
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    GemmaConfig,
    GptOssConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
)

from reason_llm.config import Config
from reason_llm.errors import ConfigError, ModelError
from reason_llm.model import families
from reason_llm.model.plan import backends
from reason_llm.model.plan.backends import choose

TINY_DENSE = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32,
              "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
TINY_MIXTURE = TINY_DENSE | {"num_local_experts": 2}
TINY_LATENT = TINY_DENSE | {"first_k_dense_replace": 1, "kv_lora_rank": 4, "q_lora_rank": 4}
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def made(engine: str = "auto", **model: Any) -> Config:
    return Config.model_validate(
        {"data": {"train": "a.jsonl"}, "sample": {"engine": engine}, "model": model}
    )


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Which of the optional packages there are; a test may take some away."""
    there = {"vllm", "vllm_bnb_plugin", "unsloth", "unsloth_zoo"}
    find = importlib.util.find_spec

    def spec(name: str, *rest: Any) -> Any:
        known = "vllm" in name or name in backends.IMPORTS
        return object() if name in there else None if known else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", spec)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return there


def chosen(
    config: Config, device: torch.device, text: PretrainedConfig | None = None
) -> tuple[str, str, str]:
    found, lines = choose(config, text or Qwen2Config(), device)
    return found.sample.engine, found.model.backend, " | ".join(lines)


def test_without_a_gpu_transformers_samples(installed: set[str]) -> None:
    engine, backend, why = chosen(made(), CPU)
    assert (engine, backend) == ("transformers", "auto")
    assert why.startswith("sampling with transformers: there is no GPU | ")
    engine, backend, why = chosen(made("vllm"), CPU)
    assert (engine, backend) == ("vllm", "native")
    assert "(set in the config); without a GPU that takes 2 to 9 times as long" in why


def test_a_temperature_beyond_vllm_s_is_refused_before_it_starts(installed: set[str]) -> None:
    hot = made("vllm").with_options({"sample.temperature": 3.0})
    said = r"vLLM takes a sample\.temperature of at most 2; lower it"
    for device in (CPU, GPU):
        with pytest.raises(ConfigError, match=rf"engine=vllm: {said}, or set sample\.engine to t"):
            chosen(hot, device)
    engine, _, why = chosen(hot.with_options({"sample.engine": "auto"}), GPU)
    assert engine == "transformers" and re.search(said, why)
    assert chosen(hot.with_options({"sample.temperature": 2.0}), CPU)[0] == "vllm"


def test_folding_is_off_unless_it_is_asked_for_and_vllm_samples(installed: set[str]) -> None:
    folding = made("vllm").with_options({"sample.fold": True})
    assert choose(made("vllm"), Qwen2Config(), GPU)[0].sample.fold is False
    found, lines = choose(folding, Qwen2Config(), GPU)
    assert found.sample.fold is True
    assert "the adapter is folded into the base weights while vLLM samples" in lines
    with pytest.raises(
        ConfigError, match=r"fold=true contradicts sample\.engine=transformers \(.*"
    ):
        choose(folding.with_options({"sample.engine": "auto"}), Qwen2Config(), CPU)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MixtralConfig(**TINY_MIXTURE), "store experts in another layout; leave it out"),
        (DeepseekV3Config(**TINY_LATENT), "of kv_b_proj vLLM keeps parts in tensors of their own"),
        (Qwen2Config(**TINY_DENSE), None),
    ],
)
def test_models_that_vllm_computes_by_other_tensors_are_not_folded_into(
    text: PretrainedConfig, reason: str | None
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(text)
    folding = made("vllm").with_options({"sample.fold": True})
    backends.check_fold(made("vllm"), model)
    if reason is None:
        backends.check_fold(folding, model)
    else:
        with pytest.raises(
            ConfigError, match=rf"contradicts model_type={text.model_type}: .*{reason}"
        ):
            backends.check_fold(folding, model)


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], "lm_head|.*q_proj"])
def test_a_head_with_an_adapter_is_sampled_with_transformers(
    installed: set[str], targets: str | list[str]
) -> None:
    engine, _, why = chosen(made(adapter={"targets": targets}), GPU)
    assert engine == "transformers"
    assert "model.adapter.targets with the head" in why
    with pytest.raises(ConfigError, match=r"the head contradicts sample\.engine=vllm"):
        chosen(made("vllm", adapter={"targets": targets}), GPU)
    assert chosen(made(adapter={"targets": "["}), GPU)[0] == "vllm"  # refused by the model


def test_on_a_gpu_vllm_samples_over_our_own_views(installed: set[str]) -> None:
    assert chosen(made(), GPU)[:2] == ("vllm", "native")
    assert chosen(made(backend="unsloth"), GPU)[:2] == ("vllm", "unsloth")


@pytest.mark.parametrize(
    ("away", "model", "reason"),
    [
        ("vllm", {}, "vLLM is not installed; pip install"),
        ("", {"dtype": "float32"}, "have no float32"),
        (
            "vllm_bnb_plugin",
            {"quantize": "nf4"},
            "vllm-bnb-plugin, which model.quantize=nf4 needs, ",
        ),
    ],
)
def test_on_a_gpu_transformers_samples_where_vllm_cannot(
    installed: set[str], away: str, model: dict, reason: str
) -> None:
    installed.discard(away)
    engine, _, why = chosen(made(**model), GPU)
    assert engine == "transformers"
    assert reason in why


@pytest.mark.parametrize(
    ("engine", "device", "model", "message"),
    [
        (
            "vllm",
            GPU,
            {"dtype": "float32"},
            r"engine=vllm: .* have no float32; set model\.dtype to",
        ),
        ("vllm", CPU, {"dtype": "float32", "quantize": "nf4"}, r"vllm: .* in NF4, have no float32"),
        ("transformers", CPU, {"backend": "unsloth"}, r"backend=unsloth contradicts sample\.eng"),
    ],
)
def test_contradictions_name_both(
    installed: set[str], engine: str, device: torch.device, model: dict, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chosen(made(engine, **model), device)


@pytest.mark.parametrize(
    ("device", "away", "text", "model", "reason"),
    [
        (CPU, "", Qwen2Config(), {}, "there is no GPU"),
        (GPU, "unsloth", Qwen2Config(), {}, r"not installed; pip install -e '\.\[gpu,unsloth\]'"),
        (GPU, "", GemmaConfig(), {}, "used for llama, mistral, qwen2, qwen3, and this is gemma"),
        (GPU, "", MistralConfig(sliding_window=4096), {}, "sliding_window=4096"),
        (GPU, "", Qwen2Config(), {"adapter": {"rank": 1024}}, "rank=1024 is more than 512"),
    ],
)
def test_unsloth_asked_for_where_it_cannot_serve(
    installed: set[str], device: torch.device, away: str, text: Any, model: dict, reason: str
) -> None:
    installed.discard(away)
    with pytest.raises(ModelError, match=f"model.backend=unsloth: .*{reason}") as caught:
        chosen(made("vllm", backend="unsloth", **model), device, text)
    assert "set model.backend to native" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_plugin_that_is_missing_is_named_with_its_command(installed: set[str]) -> None:
    installed.discard("vllm_bnb_plugin")
    with pytest.raises(ConfigError, match=r"pip install vllm-bnb-plugin==0\.0\.3"):
        chosen(made("vllm", quantize="nf4"), GPU)


@pytest.mark.parametrize("away", ["torchvision", "mistral_common"])
def test_what_vllm_imports_for_a_model_that_reads_images(installed: set[str], away: str) -> None:
    """vLLM on a GPU comes with both; the list for a CPU leaves them out."""
    installed |= {"torchvision", "mistral_common"} - {away}
    described = CONFIG_MAPPING["gemma3"]()
    engine, _, why = chosen(made(), GPU, described)
    assert (engine, f"imports {away}, which is not installed; pip install " in why) == (
        "transformers",
        True,
    )
    with pytest.raises(ConfigError, match=f"model_type=gemma3 imports {away}, which is not"):
        chosen(made("vllm"), CPU, described)
    with pytest.raises(ConfigError, match=f"model_type=qwen3_5_text imports {away}, which"):
        chosen(made("vllm"), CPU, CONFIG_MAPPING["qwen3_5_text"]())
    assert chosen(made("vllm"), CPU)[0] == "vllm"  # a model of text
    installed.add(away)
    assert chosen(made(), GPU, described)[0] == "vllm"


@pytest.mark.parametrize("family", sorted(families.WITHOUT_VLLM))
def test_a_family_without_vllm_says_why(installed: set[str], family: str) -> None:
    text = Qwen2Config()
    text.model_type = family
    reason = re.escape(f"model_type={family} ({families.WITHOUT_VLLM[family]})")
    with pytest.raises(ConfigError, match=f"^{reason} contradicts sample.engine=vllm"):
        chosen(made("vllm"), CPU, text)
    engine, _, why = chosen(made(), GPU, text)
    assert engine == "transformers" and re.search(reason, why)


def test_keys_that_are_the_values_are_adapted_without_vllm(installed: set[str]) -> None:
    text = Gemma4TextConfig(attention_k_eq_v=True)
    engine, _, why = chosen(made(), GPU, text)
    assert engine == "transformers" and "attention_k_eq_v=true" in why
    others = {"targets": ["q_proj", "o_proj"]}
    assert chosen(made(adapter=others), GPU, text)[0] == "vllm"
    pattern = {"targets": r"model\.layers\.\d+\.self_attn\.[qk]_proj"}
    assert chosen(made(adapter=pattern), GPU, text)[0] == "transformers"
    assert chosen(made(), GPU, Gemma4TextConfig())[0] == "vllm"


def packed(
    asked: str, device: torch.device, text: PretrainedConfig | None = None, **model: Any
) -> tuple[str, str]:
    config = Config.model_validate(
        {"data": {"train": "a.jsonl"}, "model": model, "train": {"packing": asked}}
    )
    found, lines = choose(config, text or Qwen2Config(), device)
    return found.train.packing, lines[-1]


@pytest.mark.parametrize(
    ("asked", "device", "text", "packing", "line"),
    [
        ("auto", CPU, Qwen2Config(), "varlen", "attention: SDPA"),
        ("auto", GPU, Qwen2Config(), "varlen", "attention: FlashAttention over packed rows"),
        ("auto", GPU, Gemma2Config(), "padded", "attention: eager, the only one for gemma2"),
        ("sdpa", CPU, Qwen2Config(), "varlen", "attention: SDPA"),
        ("sdpa", GPU, Qwen2Config(), "padded", "attention: SDPA"),
        ("flash", GPU, Qwen2Config(), "varlen", "attention: FlashAttention over packed rows"),
        ("eager", CPU, Qwen2Config(), "padded", "attention: eager (set in the config)"),
        ("eager", GPU, GptOssConfig(), "padded", "attention: eager (set in the config)"),
    ],
)
def test_the_attention_is_told_in_one_line(
    installed: set[str], asked: str, device: torch.device, text: Any, packing: str, line: str
) -> None:
    found, lines = choose(made(attention=asked), text, device)
    assert (found.train.packing, lines[-2]) == (packing, line)


@pytest.mark.parametrize(
    ("asked", "device", "text", "model", "said"),
    [
        ("flash", CPU, Qwen2Config(), {}, "flash: FlashAttention needs a GPU; set it to sdpa"),
        ("flash", GPU, Qwen2Config(), {"dtype": "float32"}, "flash: .*has no float32; set it to"),
        ("flash", GPU, Gemma2Config(), {}, "flash contradicts model_type=gemma2"),
        ("sdpa", CPU, Gemma2Config(), {}, "sdpa contradicts model_type=gemma2, .*; set it to eag"),
        ("sdpa", CPU, GptOssConfig(), {}, "sdpa contradicts model_type=gpt_oss"),
    ],
)
def test_an_attention_that_cannot_be_is_one_line(
    installed: set[str], asked: str, device: torch.device, text: Any, model: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=rf"model\.attention={said}") as caught:
        choose(made(attention=asked, **model), text, device)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("model", "train"),
    [
        ({"attention": "eager"}, {"packing": "varlen"}),
        ({"attention": "flash"}, {"packing": "padded"}),
        ({"attention": "sdpa", "backend": "unsloth"}, {}),
    ],
)
def test_an_attention_contradicts_other_options(model: Any, train: Any) -> None:
    with pytest.raises(ValueError, match=rf"attention={model['attention']} contradicts .*; "):
        Config.model_validate({"data": {"train": "a.jsonl"}, "model": model, "train": train})


def test_rows_are_packed_where_the_attention_knows_how(
    installed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for device in (CPU, GPU):
        assert packed("auto", device)[0] == packed("varlen", device)[0] == "varlen"
        assert packed("padded", device) == (
            "padded", "learning from padded rows (set in the config)",
        )  # fmt: skip
    cases: list[tuple[str, torch.device, PretrainedConfig, dict[str, Any]]] = [
        ("this is gemma2", CPU, Gemma2Config(), {}),
        ("which has no float32", GPU, Qwen2Config(), {"dtype": "float32"}),
        ("has no heads of 20 numbers", GPU, MistralConfig(head_dim=20), {}),
        ("has no heads of 512 numbers", GPU, MistralConfig(head_dim=512), {}),
        ("attention_dropout=0.1 is not", GPU, Qwen2Config(attention_dropout=0.1), {}),
        ("an attention of its own", GPU, Qwen2Config(), {"backend": "unsloth"}),
    ]
    for reason, device, text, model in cases:
        found, why = packed("auto", device, text, **model)
        assert found == "padded"
        assert reason in why
        with pytest.raises(ConfigError, match=r"packing=varlen: .*; set train\.packing to padded"):
            packed("varlen", device, text, **model)
    assert packed("auto", CPU, Qwen2Config(), dtype="float32")[0] == "varlen"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    found, why = packed("auto", GPU)
    assert (found, "compute capability 8.0" in why) == ("padded", True)
