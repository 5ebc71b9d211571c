"""Decoding without lookups: the same numbers as PEFT's layers, and everything back afterwards.

1. Products equal ``linear``; with more rows than few to the last bit.
2. Within the context PEFT's layers are not called, and the bits of small layers are the same.
3. Layers that it does not know stay as they are, and so does an adapter that is off.
4. A large head gives the same tokens.
"""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from families import prompts_of
from reason_llm.model import adapters, decoding
from reason_llm.model.base import Model
from reason_llm.sample import SamplingParams, TransformersSampler


@pytest.mark.parametrize("shape", [(6000, 128), (400, 400), (256, 1600), (16, 16)])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.usefixtures("mkl")
def test_product_is_linear(
    shape: tuple[int, int], rows: int, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "is_amd", lambda: True)
    generator = torch.Generator().manual_seed(rows)
    weight, inputs = (torch.randn(n, shape[1], generator=generator) for n in (shape[0], rows))
    bias = torch.randn(shape[0], generator=generator) if has_bias else None
    for given in (inputs, inputs[:, None]):
        found, expected = decoding.product(given, weight, bias), linear(given, weight, bias)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
        is_small = weight.numel() < decoding.LARGE_WEIGHT
        if is_small or rows > decoding.FEW_ROWS:
            assert torch.equal(found, expected)


@pytest.mark.usefixtures("mkl")
def test_sums_are_pefts_without_its_layers(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids_BT = torch.arange(30, 60).view(3, 10)

    def computed() -> Tensor:
        with torch.inference_mode():
            hidden_BTD = model.hidden_states(ids_BT)
            return model.logits(hidden_BTD[:, -1])

    expected = computed()

    def called(*args: Any) -> None:
        raise AssertionError("PEFT's layer was called")

    with monkeypatch.context() as within:
        within.setattr(peft.tuners.lora.Linear, "forward", called)
        with model.decoding():
            assert torch.equal(computed(), expected)
        with pytest.raises(AssertionError, match="PEFT's"):
            computed()
    assert torch.equal(computed(), expected)
    assert not [m for m in model.policy.modules() if "forward" in vars(m)]
    with torch.inference_mode(), adapters.reference(model.policy):  # an adapter that is off
        expected = model.hidden_states(ids_BT)
        with model.decoding():
            assert torch.equal(model.hidden_states(ids_BT), expected)


def test_layers_that_stay() -> None:
    changes: tuple[Callable[[Any], Any], ...] = (
        lambda layer: layer.merge(),
        lambda layer: layer.lora_dropout.update({"default": nn.Dropout(0.5).train()}),
        lambda layer: setattr(layer.lora_B["default"], "bias", nn.Parameter(torch.zeros(8))),
    )
    for change in changes:
        base = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        policy = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"])).eval()
        (layer,) = (m for m in policy.modules() if isinstance(m, peft.tuners.lora.Linear))
        with decoding.lean(policy):
            assert "forward" in vars(layer)
        change(layer)
        with decoding.lean(policy):
            assert "forward" not in vars(layer)


def test_large_head_gives_the_same_tokens(
    model: Model, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of torch's products, in a batch whose rows leave one by one."""
    adapters.clear(model.policy)  # a trained model's answers end
    prompts = prompts_of(tokenizer, "What is 3 + 4?") * 2
    sampler = TransformersSampler(model, 10**6)

    def tokens() -> list[tuple[int, ...]]:
        groups = sampler.sample(prompts, SamplingParams(3, 30), 0, lambda tokens, ended: None)
        return [c.token_ids for group in groups for c in group.completions]

    expected = tokens()
    monkeypatch.setattr(decoding, "LARGE_WEIGHT", 1)
    monkeypatch.setattr(decoding, "BLOCK_LINES", 50)
    monkeypatch.setattr(decoding, "is_amd", lambda: True)
    assert tokens() == expected
    assert len({len(each) for each in expected}) > 1
