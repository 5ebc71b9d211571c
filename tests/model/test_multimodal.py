"""Text training of models that also read images, with Transformers.

1. The towers are not loaded, the plan does not count them, and one line says so.
2. Packed rows give the log-probs of padded ones; every factor of the adapter has a gradient.
3. PEFT loads the adapter over the whole model, towers included, and adapts the text part alone.
4. A run's plan; a run that is killed; what stays out is one line.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

import families
from conftest import TINY
from marks import most_are_long
from reason_llm.app.console import Console
from reason_llm.app.export.export import ExportRequest, export
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import adapters, attention, layout as layouts
from reason_llm.model.base import Model, check_model, load_tokenizer, meta_model
from reason_llm.model.datum import Datum
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.plan.shape import Shape

SECTION = {"dtype": "float32", "adapter": AdapterSection(rank=4)}
PROMPT = tuple(range(5, 250)) * 2
"""Longer than the window of Gemma, and than the positions that Ministral 3 began with."""
ROWS = [Datum.of(PROMPT[: 140 + n % 2], (7, 8, 9 + n, 30)[: 2 + n % 3]) for n in range(6)]


def text_only(path: str) -> ModelSection:
    return ModelSection(path=path, **SECTION)


@pytest.mark.parametrize("name", most_are_long(families.MULTIMODAL, ["gemma3"]))
def test_the_text_part_trains_under_the_names_of_the_whole(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = families.make(tmp_path / "base", name)
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
    ids_BT, mask_BT = layouts.collate(ROWS, torch.device("cpu"))
    caplog.set_level(logging.WARNING)
    with Model(text_only(path), load_tokenizer(path), seed=0) as model:
        assert [each for each in caplog.messages if f"{path}: " in each and "images" in each]
        base = model.policy.get_base_model()
        left = {n: p.shape for n, p in whole.named_parameters() if n.startswith(kept(base))}
        own = {n: p.shape for n, p in base.named_parameters() if not p.requires_grad}
        assert {n.replace(".base_layer", ""): shape for n, shape in own.items()} == left
        shape = Shape.of(check_model(text_only(path)))
        counted = sum(size.numel() for size in left.values())
        assert (
            sum(shape.packable) + shape.dense
            == counted
            < sum(p.numel() for p in whole.parameters())
        )
        families.randomize(model, seed=1)
        model.policy.eval()
        padded_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.9)
        padded_BT[mask_BT].sum().backward()
        trained = model.parameters_of("policy")
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in trained)
        is_packed = attention.unfit(model.text_config, torch.float32, model.device) is None
        assert is_packed == (name not in families.HYBRIDS)
        if is_packed:
            with torch.no_grad():
                layout = layouts.lay_out(ROWS, model.device)
                packed_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 0.9, layout=layout)
            assert (packed_BT[mask_BT] - padded_BT[mask_BT]).abs().max() < 1e-5
        model.snapshot().write(tmp_path / "adapter")
    with torch.no_grad():
        plain_V = whole(input_ids=ids_BT[:1]).logits[0, -1]
        policy = PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
        logits_TV = policy(input_ids=ids_BT[:1]).logits[0] / 0.9
    logprobs_T = logits_TV.log_softmax(-1)[:-1].gather(-1, ids_BT[0, 1:, None])[:, 0]
    own_T = padded_BT.detach()[0, 1:][mask_BT[0, 1:]]
    assert (logprobs_T[mask_BT[0, 1:]] - own_T).abs().max() < 1e-5
    assert (logits_TV[-1] * 0.9 - plain_V).abs().max() > 1e-2


def kept(base: Any) -> tuple[str, ...]:
    """Prefixes of the parameters of decoder and head."""
    decoder = base.get_decoder()
    name = next(name for name, module in base.named_modules() if module is decoder)
    return f"{name}.", "lm_head."


def test_over_the_whole_model_the_towers_are_not_adapted(tmp_path: Path) -> None:
    """Of more than 20 layers PEFT writes the last names alone, which SigLIP's layers have, too."""
    path = families.make(tmp_path / "base", "gemma3", num_hidden_layers=4, layer_types=None)
    with Model(text_only(path), load_tokenizer(path), seed=0) as model:
        model.snapshot().write(tmp_path / "adapter")
    whole = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    policy = PeftModel.from_pretrained(whole, str(tmp_path / "adapter"))
    adapted = [n for n, m in policy.named_modules() if isinstance(m, LoraLayer)]
    assert len(adapted) == 4 * 7
    assert all(".language_model." in name for name in adapted)
    again = meta_model(ModelSection(path=path, adapter=adapters.section_of(tmp_path / "adapter")))
    assert len([m for m in again.modules() if isinstance(m, LoraLayer)]) == 4 * 7


def test_an_adapter_under_the_names_of_another_class_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = families.make(tmp_path / "base", "qwen3_vl")
    with Model(text_only(path), load_tokenizer(path), seed=0) as model:
        model.snapshot().write(tmp_path / "adapter")
    file = tmp_path / "adapter" / adapters.WEIGHTS
    whole = ExportRequest(
        source=tmp_path / "adapter", out=tmp_path / "out", base=path, adapter_only=True,
        dtype="float32", push=None, gguf=None,
    )  # fmt: skip
    export(whole, Console("plain"))
    assert (
        "serves the adapter is not proven: it is untrained and changes" in capsys.readouterr().out
    )
    renamed = {n.replace(".language_model.", "."): t for n, t in load_file(file).items()}
    save_file(renamed, file)
    for request, said in (
        (
            replace(whole, out=tmp_path / "no"),
            r"model\.layers\.\d\S+ is not a layer of .*serve the base",
        ),
        (
            replace(whole, out=tmp_path / "no", adapter_only=False),
            r"model\.layers\S+ .* it is missing",
        ),
    ):
        with pytest.raises(ModelError, match=said):
            export(request, Console("quiet"))
        assert not request.out.exists()
    with pytest.raises(ModelError, match="no adapter of"):
        adapters.check_over(meta_model(text_only(path)), tmp_path / "adapter", path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llava", "and its text part was not tried; of such models the text part of gemma3, "),
        ("llama4", "vLLM permutes its weights"),
        ("qwen2_vl", "was not tried"),
    ],
)
def test_families_whose_text_part_stays_out_are_refused(
    name: str, said: str, tmp_path: Path
) -> None:
    path = families.changed(tmp_path / "copy")
    CONFIG_MAPPING[name]().save_pretrained(path)
    with pytest.raises(
        ModelError, match=f"model_type={name} also reads images, .*{said}"
    ) as caught:
        check_model(ModelSection(path=path))
    assert "\n" not in str(caught.value)


def test_a_weight_under_an_earlier_name_is_checked(tmp_path: Path) -> None:
    path = families.make(tmp_path / "base", "gemma3")
    check_model(text_only(path))
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    name = "language_model.model.layers.0.self_attn.q_proj.weight"
    save_file(tensors | {name: tensors[name][:8].clone()}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"layers\.0\.self_attn\.q_proj\.weight is of shape \[8, "):
        check_model(text_only(path))


def test_the_plan_of_a_run(tmp_path: Path, script: Callable[..., tuple[int, str, str]]) -> None:
    path = families.make(tmp_path / "base", "qwen3_vl")
    code, shown, error = script("train.py", *families.options(tmp_path / "runs", path), "--plan")
    assert code == 0, error
    assert "base weights" in shown
    assert "model_type=qwen3_vl also reads images; only its text part is trained" in shown + error


@pytest.mark.long
def test_a_run_that_is_killed_resumes_from_its_buffer(
    tmp_path: Path, script: Callable[..., tuple[int, str, str]]
) -> None:
    path = families.make(tmp_path / "base", "gemma3")
    families.killed_and_resumed(tmp_path, path, script)


def test_all_weights_of_a_part_are_not_trained(tmp_path: Path) -> None:
    path = families.make(tmp_path / "base", "gemma3")
    with pytest.raises(ModelError, match=r"model\.train=full contradicts .*model_type=gemma3"):
        meta_model(ModelSection(path=path, train="full"))
    assert meta_model(ModelSection(path=str(TINY), train="full")) is not None
