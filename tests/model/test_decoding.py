"""Decoding without lookups: the same numbers as PEFT's layers, and everything back afterwards.

1. Within the context PEFT's layers are not called, and the bits are the same.
2. Layers that it does not know stay as they are, and so does an adapter that is off.
"""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from reason_llm.model import adapted_linear, adapters
from reason_llm.model.base import Model


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
        with adapted_linear.lean(policy):
            assert "forward" in vars(layer)
        change(layer)
        with adapted_linear.lean(policy):
            assert "forward" not in vars(layer)
