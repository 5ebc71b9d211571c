"""The base: what ends an answer, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

import families
from conftest import TINY
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import attention
from reason_llm.model.base import (
    Model,
    check_model,
    context_limit,
    end_token_ids,
    load_tokenizer,
    meta_model,
)
from reason_llm.model.datum import Datum
from reason_llm.model.layout import collate
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.plan.shape import Shape
from reason_llm.model.vllm.shared_weights import attention_for


def copy(folder: Path, name: str, **changes: Any) -> str:
    shutil.copytree(TINY, folder / "copy")
    path = folder / "copy" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder / "copy")


def test_every_end_token_of_the_generation_config_ends_an_answer(tmp_path: Path) -> None:
    path = copy(tmp_path, "generation_config.json", eos_token_id=[2, 0])
    with Model(ModelSection(path=path), load_tokenizer(path), seed=0) as model:
        assert model.end_token_ids == [0, 2]


def test_the_tokenizer_s_end_is_among_the_ends(tmp_path: Path) -> None:
    path, file = copy(tmp_path, "generation_config.json"), tmp_path / "copy/generation_config.json"
    tokenizer = load_tokenizer(path)
    for theirs, ends in (([2, 0], [0, 2]), ([0], [0, 2]), (7, [2, 7]), (None, [2]), ([], [2])):
        file.write_text(json.dumps({"eos_token_id": theirs}))
        assert end_token_ids(path, tokenizer) == ends
    file.unlink()
    assert end_token_ids(path, tokenizer) == [2]


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
    """Also where prompts are long enough to be kept once for their rows, which it cannot do."""
    found, tokenizer = {}, load_tokenizer(str(TINY))
    rows = [Datum.of(tuple(range(5, 95)), (7, 8, 9 + i)) for i in range(8)]
    for asked in ("auto", "eager"):
        section = ModelSection(path=str(TINY), attention=asked)
        with Model(section, tokenizer, seed=0) as model, torch.no_grad():
            assert model.takes_shared_prompts == (asked == "auto")
            ids, mask = collate(rows, model.device)
            found[asked], _ = policy_logprobs(model, ids, mask, 1.0)
    assert (found["auto"] - found["eager"]).abs().max() < 1e-5
    assert Shape.of(meta_model(section), "eager").kept.score_bytes > 0
    assert Shape.of(meta_model(section)).kept.score_bytes == 0


def test_context_limit(tmp_path: Path) -> None:
    assert context_limit(ModelSection(path=str(TINY))) == 4096
    assert context_limit(ModelSection(path=str(TINY), context_tokens=100)) == 100
    with pytest.raises(ModelError, match=r"context_tokens=5000 exceeds the 4096"):
        context_limit(ModelSection(path=str(TINY), context_tokens=5000))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 7},
        {"hidden_size": "big"},
        {"num_attention_heads": 0},
        {"model_type": "t5"},
    ],
)
def test_a_config_that_cannot_be_is_one_line(tmp_path: Path, changes: dict) -> None:
    path = copy(tmp_path, "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        check_model(ModelSection(path=path))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


NONSENSE: list[tuple[str, dict[str, Any]]] = [
    ("gpt2", {"n_head": -1}),  # -1 stands for whatever fits where a shape is made of it
    ("gpt2", {"n_embd": -64}),
    ("bloom", {"n_head": -1}),
    ("gptj", {"rotary_dim": 0}),
    ("gptj", {"rotary_dim": 3}),
    ("gptj", {"rotary_dim": 999}),
    ("opt", {"num_attention_heads": -1}),
    ("falcon_new", {"num_kv_heads": 3}),
]


@pytest.mark.parametrize(("family", "changes"), NONSENSE, ids=str)
def test_numbers_with_which_no_pass_is_possible_are_one_line(
    tmp_path: Path, family: str, changes: dict
) -> None:
    """Before the weights are read."""
    path = families.make(tmp_path, family)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with pytest.raises(ModelError) as caught:
        check_model(ModelSection(path=path, dtype="float32"))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["gemma3", "gemma4", "llava", "mistral3", "qwen2_5_vl", "qwen3_5", "qwen3_vl"]
)
def test_models_that_read_images_are_refused(name: str, tmp_path: Path) -> None:
    path = copy(tmp_path, "config.json")
    CONFIG_MAPPING[name]().save_pretrained(path)
    with pytest.raises(ModelError, match=f"{name} reads images, too"):
        check_model(ModelSection(path=path))


def test_a_text_model_that_carries_a_vision_config_is_taken(tmp_path: Path) -> None:
    path = families.make(tmp_path, "qwen3_5_text")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vision_config": {"depth": 2}}))
    policy = check_model(ModelSection(path=path, dtype="float32"))
    text = policy.config.get_text_config(decoder=True)
    reason = attention.unfit(text, torch.float32, torch.device("cpu"))
    assert reason is not None and "recurrent layers" in reason


@pytest.mark.parametrize("family", [*families.OLDER, *families.TODAY])
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


@pytest.mark.parametrize(
    "targets", [["foo"], ["q_proj", "foo"], "[", ["lm_head", "foo"], ["embed_tokens"]]
)
def test_targets_that_are_not_there_or_not_linear(targets: Any) -> None:
    section = ModelSection(path=str(TINY), adapter=AdapterSection(targets=targets))
    with pytest.raises(ModelError, match=r"model\.adapter\.targets="):
        check_model(section)


def test_targets_that_are_there() -> None:
    for targets in ("all-linear", ["q_proj", "v_proj"], r".*\.mlp\..*_proj", ["lm_head"]):
        adapter = AdapterSection(targets=targets)
        check_model(ModelSection(path=str(TINY), adapter=adapter))
