"""What the backward pass computes again gives the gradients of what is kept.

1. Tiles of feed-forwards and norms, and inputs of every second layer alone: to rounding, in each
   family, with an adapter, over NF4, and of all weights; rows padded and end to end.
2. Which inputs are kept changes no bit, so a run may resume where fewer fit.
3. With dropout in the adapter, the same values are dropped.
4. The inputs of layers that are not kept are freed in the forward pass, the others in the backward
   pass.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import families
from learners import ROW, groups, learn, watch
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection, TrainSection
from reason_llm.model import attention, recompute
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.train.learner import Learner, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient

OF_TODAY = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "mistral"]
UNTILED = {
    "opt", "bloom", "gemma4_text", "gemma4", *families.MIXTURES,
    "qwen3_5_text", "qwen3_5", "qwen3_5_moe_text", "qwen3_5_moe", "qwen3_next", "nemotron_h",
    "granitemoehybrid", "granitemoehybrid_experts", "lfm2", "lfm2_vl", "olmo_hybrid", "falcon_h1",
}  # fmt: skip
"""Without feed-forwards of linear layers alone, or with recurrent or other layers around them."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "TILE_TOKENS", {"cpu": 16})


def gradient(
    model: Model, checkpointing: bool | str = True, skip_every: int = 0, packing: str = "padded"
) -> Tensor:
    """Of one optimizer step over passes of 60 tokens at most."""
    train = TrainSection.model_validate({
        "learning_rate": 0.0, "max_grad_norm": 1e9, "gradient_checkpointing": checkpointing,
        "packing": packing,
    })  # fmt: skip
    made = Learner(
        model,
        LearningSettings(PolicyGradient(ROW, 32), train, 1.0, 60, 0, 8, skip_every=skip_every),
    )
    seen = watch(made)
    learn(made, groups())
    if checkpointing:
        model.policy.gradient_checkpointing_disable()
    return seen[0][1].float()


def model_of(folder: Path, family: str, **options: Any) -> Model:
    """Of a family in float32, whose adapter changes something."""
    if family in OF_TODAY:
        sizes = families.SIZES_TODAY | families.HEADS
        config = CONFIG_MAPPING[family](**sizes, **families.ENDS, vocab_size=512)
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        path = families.with_tokenizer(folder)
    else:
        path = families.make(folder, family)
    adapter = AdapterSection(rank=4, dropout=options.pop("dropout", 0.0))
    made = Model(ModelSection(path=path, adapter=adapter, **options), load_tokenizer(path), 0)
    if not made.is_full:
        families.randomize(made, 1)
    return made


def differ(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "family",
    most_are_long(
        [*OF_TODAY, *families.OLDER, *families.TODAY, *families.MULTIMODAL],
        ["qwen3", "gpt2", "opt", "olmoe"],
    ),
)
def test_tiles_and_skipped_inputs_give_the_same_gradients(family: str, tmp_path: Path) -> None:
    with model_of(tmp_path, family) as model:
        assert recompute.has_tiles(model.decoder) == (family not in UNTILED)
        text = model.policy.config.get_text_config(decoder=True)
        packs = attention.unfit(text, torch.float32, model.device) is None
        for packing in ("padded", "varlen") if packs else ("padded",):
            kept = gradient(model, False, packing=packing)
            for ways in ({}, {"skip_every": 3}, {"skip_every": 2}, {"checkpointing": "offload"}):
                assert differ(gradient(model, packing=packing, **ways), kept) < 2e-6, ways


@pytest.mark.parametrize("options", [{"train": "full"}, {"quantize": "nf4"}], ids=str)
def test_they_do_over_nf4_and_in_all_weights(options: dict[str, str], tmp_path: Path) -> None:
    """NF4 computes in bfloat16, where sums of other tiles are rounded otherwise."""
    with model_of(tmp_path, "qwen3", **options) as model:
        kept = gradient(model, False)
        found = [gradient(model, True, each) for each in (0, 3, 2)]
        bound = 2e-6 if model.is_full else 2e-2
        assert max(differ(each, kept) for each in found) < bound
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_dropout_in_the_adapter_drops_the_same_values(tmp_path: Path) -> None:
    with model_of(tmp_path, "qwen3", dropout=0.3) as model:
        kept = gradient(model, False)
        for skip_every in (0, 2):
            assert differ(gradient(model, True, skip_every), kept) < 2e-6


@pytest.mark.parametrize("skip_every", [0, 3, 2])
@pytest.mark.parametrize("moves", [False, True])
def test_the_inputs_of_layers_are_freed(moves: bool, skip_every: int, tmp_path: Path) -> None:
    """In the forward pass all but those that are kept and not moved, as to host memory; in the
    backward pass the others, even of the first layer, while the results are still there."""
    kept = {0: [0, 1, 2, 3], 3: [0, 1, 3], 2: [0, 2]}[skip_every]
    given: list[tuple[int, Any]] = []

    def alive() -> list[int]:
        return sorted({place for place, each in given if each() is not None})

    with model_of(tmp_path, "smollm3") as model:  # four layers
        settings = LearningSettings(
            PolicyGradient(ROW, 32), TrainSection(), 1.0, 600, 0, 8, skip_every=skip_every
        )
        made = Learner(model, settings)
        for place, layer in enumerate(model.decoder.layers):
            layer.register_forward_pre_hook(
                lambda _, args, place=place: given.append((place, ref(args[0])))
            )
        ids_BT = torch.arange(3, 83).view(2, 40)
        mask_BT = torch.arange(40).expand(2, 40) > 4
        with learning(made):
            made._make_gradients()
            with saved_tensors_hooks(torch.clone, torch.clone) if moves else nullcontext():
                logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
            assert alive() == ([] if moves else kept)
            logprobs_BT.sum().backward()
            assert alive() == []
