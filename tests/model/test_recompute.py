"""What the backward pass computes again gives the gradients of what is kept.

1. Tiles of feed-forwards and norms, and inputs of every second layer alone: to rounding, in each
   family, with an adapter, over NF4, and of all weights; twice the same bits.
2. With dropout in the adapter, the same values are dropped.
3. The inputs of every second layer are freed in the forward pass.
"""

from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import families
from conftest import TINY
from learners import ROW, groups, learn, watch
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection, TrainSection
from reason_llm.model import recompute
from reason_llm.model.base import Model, load_tokenizer
from reason_llm.train.learner import Learner, LearningSettings
from reason_llm.train.objectives import PolicyGradient

OF_TODAY = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "mistral"]
UNTILED = {
    "opt", "bloom", "qwen3_5_moe_text", "qwen3_next", "nemotron_h", *families.MIXTURES
}  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recompute, "TILE_TOKENS", {"cpu": 16})


def gradient(model: Model, checkpointing: bool, stride: int = 1) -> Tensor:
    """Of one optimizer step over passes of 60 tokens at most."""
    train = TrainSection(
        learning_rate=0.0, max_grad_norm=1e9, gradient_checkpointing=checkpointing,
        packing="padded",
    )  # fmt: skip
    made = Learner(
        model,
        LearningSettings(PolicyGradient(ROW, 32), train, 1.0, 60, 0, 8, checkpoint_stride=stride),
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
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / name).write_bytes((TINY / name).read_bytes())
        path = str(folder)
    else:
        path = families.make(folder, family)
    targets = families.TARGETS.get(family, "all-linear")
    adapter = AdapterSection(rank=4, targets=targets, dropout=options.pop("dropout", 0.0))
    made = Model(ModelSection(path=path, adapter=adapter, **options), load_tokenizer(path), 0)
    if not made.is_full:
        families.randomize(made, 1)
    return made


def differ(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    "family",
    most_are_long([*OF_TODAY, *families.OLDER, *families.TODAY], ["qwen3", "gpt2", "opt", "olmoe"]),
)
def test_tiles_and_skipped_inputs_give_the_same_gradients(family: str, tmp_path: Path) -> None:
    with model_of(tmp_path, family) as model:
        assert recompute.is_tiled(model.decoder) == (family not in UNTILED)
        kept = gradient(model, False)
        for stride in (1, 2):
            assert differ(gradient(model, True, stride), kept) < 2e-6


@pytest.mark.parametrize("options", [{"train": "full"}, {"quantize": "nf4"}], ids=str)
def test_they_do_over_nf4_and_in_all_weights(options: dict[str, str], tmp_path: Path) -> None:
    """NF4 computes in bfloat16, where sums of other tiles are rounded otherwise."""
    with model_of(tmp_path, "qwen3", **options) as model:
        kept = gradient(model, False)
        found = [gradient(model, True, stride) for stride in (1, 2, 2)]
        bound = 2e-6 if model.is_full else 2e-2
        assert max(differ(each, kept) for each in found) < bound
        assert torch.equal(found[1], found[2])


def test_dropout_in_the_adapter_drops_the_same_values(tmp_path: Path) -> None:
    with model_of(tmp_path, "qwen3", dropout=0.3) as model:
        kept = gradient(model, False)
        for stride in (1, 2):
            assert differ(gradient(model, True, stride), kept) < 2e-6


def test_the_input_of_every_second_layer_is_freed(tmp_path: Path) -> None:
    with model_of(tmp_path, "smollm3") as model:  # four layers
        given: list[Any] = []
        hooks = [
            layer.register_forward_pre_hook(lambda module, args: given.append(ref(args[0])))
            for layer in model.decoder.layers
        ]
        ids_11 = torch.arange(3, 43)[None]
        for stride, alive in ((1, [True] * 4), (2, [True, False] * 2)):
            given.clear()
            model.policy.train().gradient_checkpointing_enable({"use_reentrant": False})
            recompute.keep_inputs(model.decoder, stride)
            with recompute.tiled(model.decoder):
                total = model.hidden_states(ids_11).sum()
                assert [each() is not None for each in given] == alive
                total.backward()
        for hook in hooks:
            hook.remove()
