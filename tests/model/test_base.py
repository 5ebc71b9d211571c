"""The base: what ends an answer, what may be adapted, and what is refused."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

import families
from conftest import TINY
from families import changed
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import attention
from reason_llm.model.base import (
    KEPT_KERNELS,
    Model,
    check_model,
    context_limit,
    end_token_ids,
    load_tokenizer,
    meta_model,
)
from reason_llm.model.datum import Datum
from reason_llm.model.families import UNADAPTED
from reason_llm.model.layout import collate
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.plan.shape import Shape
from reason_llm.model.vllm.shared_weights import attention_for


def refused(section: ModelSection, said: str | None = None) -> None:
    with pytest.raises(ModelError, match=said) as caught:
        check_model(section)
    assert section.path in str(caught.value) or "model.adapter" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_end_token_ends_an_answer(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    for theirs, ends in (([0], [0, 2]), (7, [2, 7]), (None, [2]), ([], [2]), ([2, 0], [0, 2])):
        path = changed(folder, "generation_config.json", eos_token_id=theirs)
        tokenizer = load_tokenizer(path)
        assert end_token_ids(path, tokenizer) == ends
    with Model(ModelSection(path=path), tokenizer, seed=0) as model:
        assert model.end_token_ids == [0, 2]
    (folder / "generation_config.json").unlink()
    assert end_token_ids(path, tokenizer) == [2]


@pytest.mark.parametrize("name", ["ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"])
@pytest.mark.parametrize(("given", "kept"), [(None, str(KEPT_KERNELS)), ("7", "7")])
def test_number_of_kept_kernels(
    name: str, given: str | None, kept: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """oneDNN is told it before its first product, and who tells it otherwise is heard."""
    if given is None:
        monkeypatch.delenv(name, raising=False)
    else:
        monkeypatch.setenv(name, given)
    with Model(ModelSection(path=str(TINY)), tokenizer, seed=0):
        assert os.environ[name] == kept


def test_how_a_family_attends() -> None:
    """Soft-capped scores, as Gemma 2's, and sinks are in the eager attention alone."""
    own, uncapped = attention.register(), {"attn_logit_softcapping": None}
    for expected, families_ in ((own, "qwen2 llama gemma3_text opt"), ("sdpa", "falcon"),
                                ("eager", "gemma2 gpt_oss bloom gptj")):  # fmt: skip
        for name in families_.split():
            assert attention_for(CONFIG_MAPPING[name]()) == expected, name
    assert attention_for(CONFIG_MAPPING["gemma2"](**uncapped)) == own
    assert attention_for(CONFIG_MAPPING["qwen2"](), "sdpa") == own
    assert attention_for(CONFIG_MAPPING["qwen2"](), "eager") == "eager"


def test_eager_attention_gives_the_same_log_probs(tmp_path: Path) -> None:
    found, tokenizer = {}, load_tokenizer(str(TINY))
    rows = [Datum.of(tuple(range(5, 95)), (7, 8, 9 + i)) for i in range(8)]
    for asked in ("auto", "eager"):
        section = ModelSection(path=str(TINY), attention=asked)
        with Model(section, tokenizer, seed=0) as model, torch.no_grad():
            ids, mask = collate(rows, model.device)
            found[asked], _ = policy_logprobs(model, ids, mask, 1.0)
    assert (found["auto"] - found["eager"]).abs().max() < 1e-5
    assert Shape.of(meta_model(section), "eager").kept.score_bytes > 0
    assert Shape.of(meta_model(section)).kept.score_bytes == 0


def test_context_limit() -> None:
    assert context_limit(ModelSection(path=str(TINY))) == 4096
    assert context_limit(ModelSection(path=str(TINY), context_tokens=100)) == 100
    assert context_limit(ModelSection(path=str(TINY), context_tokens=5000)) == 5000  # by YaRN


def test_a_model_without_a_limit_asks_for_one(tmp_path: Path) -> None:
    CONFIG_MAPPING["bloom"]().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"no max_position_embeddings; set model\.context_tokens"):
        context_limit(ModelSection(path=str(tmp_path)))
    assert context_limit(ModelSection(path=str(tmp_path), context_tokens=100)) == 100


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("tokenizer_config.json", {"eos_token": None}, "its tokenizer has no eos_token"),
        (
            "config.json",
            {"final_logit_softcapping": 0.5},
            r"changes its logits after the head \(by",
        ),
        ("", {}, r"its weights lack 1 tensors, model\.norm\.weight among them; save it whole"),
    ],
)
def test_a_model_that_cannot_be_used_is_one_line(
    name: str, changes: dict, said: str, tmp_path: Path
) -> None:
    path = changed(tmp_path / "copy", *([name] if name else []), **changes)
    if not name:
        tensors = load_file(TINY / "model.safetensors")
        del tensors["model.norm.weight"]
        save_file(tensors, tmp_path / "copy" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=said) as caught:
        Model(ModelSection(path=path, dtype="float32"), load_tokenizer(path), seed=0)
    assert "\n" not in str(caught.value)


IMPOSSIBLE: list[tuple[str, dict[str, Any]]] = [
    ("", {"num_hidden_layers": 7}),
    ("", {"hidden_size": "big"}),
    ("", {"num_attention_heads": 0}),
    ("", {"model_type": "t5"}),
    ("", {"num_hidden_layers": 10**9}),
    ("", {"attn_implementation": "flash_attention_2"}),
    ("", {"hidden_size": -1}),
    ("", {"dtype": "load"}),
    ("gpt2", {"n_head": -1}),  # -1 stands for whatever fits where a shape is made of it
    ("gpt2", {"n_embd": -64}),
    ("bloom", {"n_head": -1}),
    ("gptj", {"rotary_dim": 0}),
    ("gptj", {"rotary_dim": 3}),
    ("gptj", {"rotary_dim": 999}),
    ("opt", {"num_attention_heads": -1}),
    ("falcon_new", {"num_kv_heads": 3}),
]


@pytest.mark.parametrize(("family", "changes"), IMPOSSIBLE, ids=str)
def test_a_config_that_cannot_be_is_one_line(tmp_path: Path, family: str, changes: dict) -> None:
    path = families.make(tmp_path, family) if family else tmp_path / "copy"
    refused(ModelSection(path=changed(path, **changes), dtype="float32"))


@pytest.mark.parametrize(
    "kind", [{"quant_method": "own"}, {"quant_method": "gptq", "bits": 4}, {}, {"x": 1}, "own"]
)
def test_a_base_that_others_quantised_is_refused(tmp_path: Path, kind: Any) -> None:
    path = changed(tmp_path / "copy", quantization_config=kind)
    refused(ModelSection(path=path), "are quantised by|cannot be read")


@pytest.mark.parametrize(
    ("family", "method", "advice"),
    [
        (
            "gpt_oss",
            "mxfp4",
            "write them in bfloat16 once, by python scripts/export.py MODEL --out ",
        ),
        ("qwen3_moe", "fp8", "take the same weights in bfloat16 "),
        ("mistral3", "fp8", "take the unquantised model and set model.quantize to nf4"),
        ("gemma3", "compressed-tensors", "take the unquantised model and set model.quantize to "),
    ],
)
def test_only_what_nf4_can_pack_is_advised_to_be_packed(
    tmp_path: Path, family: str, method: str, advice: str
) -> None:
    """The weights of experts stay as they are in NF4, so that advice would lead nowhere."""
    path = families.make(tmp_path, family)
    changed(path, quantization_config={"quant_method": method})
    refused(ModelSection(path=path), f"quantised by {method}, which .*; {advice}")


def test_a_text_model_that_carries_a_vision_config_is_taken(tmp_path: Path) -> None:
    path = changed(families.make(tmp_path, "qwen3_5_text"), vision_config={"depth": 2})
    policy = check_model(ModelSection(path=path, dtype="float32"))
    text = policy.config.get_text_config(decoder=True)
    assert attention.unfit(text, torch.float32, torch.device("cpu")) is None


@pytest.mark.parametrize("family", [*families.OLDER, *families.TODAY, *families.MULTIMODAL])
def test_families_whose_numbers_fit_pass(tmp_path: Path, family: str) -> None:
    check_model(ModelSection(path=families.make(tmp_path, family), dtype="float32"))


def test_what_only_a_real_pass_can_tell_is_one_line(tmp_path: Path) -> None:
    """A table of fewer positions than the pass has tokens: a pass of shapes reads no table."""
    path = families.make(tmp_path, "opt", max_position_embeddings=1)
    section = ModelSection(path=path, dtype="float32")
    check_model(section)
    with pytest.raises(ModelError, match="no forward pass is possible") as caught:
        Model(section, load_tokenizer(path), seed=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("family", UNADAPTED)
def test_a_layer_that_kernels_read_past_is_left_out_or_refused(tmp_path: Path, family: str) -> None:
    section = ModelSection(path=families.make(tmp_path, family), dtype="float32")
    adapted = Shape.of(check_model(section)).adapted
    assert "in_proj" in adapted and "out_proj" not in adapted
    named = section.with_options({"adapter.targets": ["in_proj", "out_proj"]})
    refused(named, "kernels of .* read the weight of .*out_proj past the layer")


def test_targets_are_linear_layers_that_are_there() -> None:
    for targets in (["foo"], ["q_proj", "foo"], "[", ["lm_head", "foo"], ["embed_tokens"]):
        section = ModelSection(path=str(TINY), adapter=AdapterSection(targets=targets))
        refused(section, r"model\.adapter\.targets=")
    for targets in ("all-linear", ["q_proj", "v_proj"], r".*\.mlp\..*_proj", ["lm_head"]):
        check_model(ModelSection(path=str(TINY), adapter=AdapterSection(targets=targets)))
