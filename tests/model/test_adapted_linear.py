"""An adapted layer as one step of autograd: PEFT's numbers without PEFT's passes.

1. Outputs and gradients equal PEFT's to the last bit where the scaling is a power of two.
2. Whatever else there is on a layer is PEFT's: dropout, an adapter that is off, two adapters.
3. In a learning phase PEFT's layers are not called, and everything is back afterwards.
4. The same over a base in NF4.
"""

from typing import Any

import bitsandbytes
import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from reason_llm.model import adapted_linear, adapters, nf4
from reason_llm.model.base import Model


class Base(nn.Module):
    """Two layers, the second of which gets the gradient of the first's outputs."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(24, 40, bias=bias)
        self.second = nn.Linear(40, 8, bias=bias)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.second(self.first(inputs).tanh())
        return result


def adapted(bias: bool = False, base: Base | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    chosen = {"r": 4, "lora_alpha": 8, "target_modules": ["first", "second"], **options}
    policy = get_peft_model(base or Base(bias), LoraConfig(**chosen))
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return policy


def passed(
    policy: Any,
    wants_inputs: bool = True,
    recomputed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Outputs and all gradients of a forward and a backward pass."""
    policy.zero_grad()
    inputs = torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1)).to(dtype)
    inputs.requires_grad_(wants_inputs)
    torch.manual_seed(2)  # of dropout
    outputs = checkpoint(policy, inputs, use_reentrant=False) if recomputed else policy(inputs)
    (outputs.float() * torch.linspace(-1, 1, 8)).sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    return [outputs.detach(), *gradients, *([inputs.grad] if inputs.grad is not None else [])]


def assert_same(first: list[Tensor], second: list[Tensor]) -> None:
    assert len(first) == len(second) > 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each call of PEFT's own forward pass."""
    heard: list[str] = []
    for kind in (peft.tuners.lora.Linear, peft.tuners.lora.Linear4bit):

        def forward(layer: Any, *args: Any, theirs: Any = kind.forward, **kwargs: Any) -> Tensor:
            heard.append("called")
            result: Tensor = theirs(layer, *args, **kwargs)
            return result

        monkeypatch.setattr(kind, "forward", forward)
    return heard


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("wants_inputs", [False, True])
@pytest.mark.parametrize("recomputed", [False, True])
def test_bits_are_pefts(bias: bool, wants_inputs: bool, recomputed: bool, calls: list[str]) -> None:
    policy = adapted(bias)
    expected = passed(policy, wants_inputs)
    calls.clear()
    with adapted_linear.fused(policy):
        assert_same(passed(policy, wants_inputs, recomputed), expected)
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_scaling_is_close(dtype: torch.dtype, calls: list[str]) -> None:
    """In bfloat16 as under autocast, where the base is in bfloat16 and the adapter is not."""
    policy = adapted(lora_alpha=5)
    for name, parameter in policy.named_parameters():
        if "lora" not in name:
            parameter.data = parameter.data.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = passed(policy)
        calls.clear()
        with adapted_linear.fused(policy):
            found = passed(policy)
    assert not calls
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        error = (one - other).float().norm() / other.float().norm()
        assert error < (1e-6 if dtype == torch.float32 else 2e-2)


def test_a_base_of_another_type_under_autocast(calls: list[str]) -> None:
    """Such as a layer that a model keeps in float32; while decoding, too."""
    policy = adapted()
    inputs = torch.randn(3, 24)
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        expected = policy(inputs)
        with adapted_linear.fused(policy):
            assert torch.equal(policy(inputs), expected)
        calls.clear()
        with adapted_linear.lean(policy):
            torch.testing.assert_close(policy(inputs), expected, rtol=2e-2, atol=2e-2)
    assert not calls


def test_one_row_without_a_batch_and_a_base_that_learns(calls: list[str]) -> None:
    policy = adapted()
    inputs = torch.randn(24)

    def gradients() -> list[Tensor]:
        policy.zero_grad()
        policy(inputs).sum().backward()
        return [p.grad for p in policy.parameters() if p.grad is not None]

    for learns in (False, True):
        policy.get_base_model().first.base_layer.weight.requires_grad_(learns)
        expected = gradients()
        calls.clear()
        with adapted_linear.fused(policy):
            found = gradients()
        assert len(found) == len(expected) == 4 + learns
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(found, expected, strict=True))
        assert len(calls) == learns


def test_what_it_does_not_know_is_pefts(calls: list[str]) -> None:
    dropping = adapted(lora_dropout=0.5)
    two = adapted()
    two.add_adapter("other", LoraConfig(r=2, target_modules=["first"]))
    two.base_model.set_adapter(["default", "other"])
    for policy in (dropping, two):
        expected = passed(policy)
        with adapted_linear.fused(policy):
            assert_same(passed(policy), expected)
    assert calls
    policy = adapted()
    with adapted_linear.fused(policy), policy.disable_adapter(), torch.no_grad():
        inputs = torch.ones(1, 24)
        base = policy.get_base_model()
        plain = [layer.base_layer for layer in (base.first, base.second)]
        assert torch.equal(policy(inputs), plain[1](plain[0](inputs).tanh()))


def test_factors_are_those_of_the_adapter_that_is_on() -> None:
    policy, inputs = adapted(), torch.randn(3, 24)
    policy.add_adapter("other", LoraConfig(r=2, lora_alpha=6, target_modules=["first"]))
    base = policy.get_base_model()
    for name, scaling in (("default", 2.0), ("other", 3.0)):
        policy.base_model.set_adapter(name)
        low, up = adapters.factors(base.first, inputs)
        torch.testing.assert_close(low, scaling * inputs @ base.first.lora_A[name].weight.T)
        assert up is base.first.lora_B[name].weight
    assert adapters.factors(base.second, torch.randn(3, 40)) is None
    assert adapters.factors(base.first.base_layer, inputs) is None
    with policy.disable_adapter():
        assert adapters.factors(base.first, inputs) is None


def test_adapters_are_switched_within(model: Model, calls: list[str]) -> None:
    ids_BT = torch.arange(30, 60).view(3, 10)
    model.add_role("teacher")
    for parameter in model.parameters_of("teacher"):
        nn.init.normal_(parameter, std=0.02)
    roles = ("policy", "teacher", "reference", "policy")

    def hidden() -> list[Tensor]:
        found = []
        for role in roles:
            with model.using(role):
                found.append(model.hidden_states(ids_BT).detach())
        return found

    expected = hidden()
    calls.clear()
    with model.fused_adapters():
        found = hidden()
    num_adapted = sum(type(m) is peft.tuners.lora.Linear for m in model.policy.modules())
    assert len(calls) == num_adapted  # of the reference, whose adapter is off
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[1])
    assert not [m for m in model.policy.modules() if "forward" in vars(m)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_over_a_packed_base(bias: bool, dtype: torch.dtype, calls: list[str]) -> None:
    """PEFT's bits in float32; in bfloat16 fewer roundings than PEFT's."""
    torch.manual_seed(0)
    base = Base(bias)
    for name in ("first", "second"):
        dense = getattr(base, name)
        packed = bitsandbytes.nn.Linear4bit(
            dense.in_features, dense.out_features, bias=bias, compute_dtype=dtype, quant_type="nf4"
        )
        packed.weight.data = torch.randn(dense.out_features, dense.in_features) * 0.2
        packed.to("cpu")  # which packs it
        assert packed.weight.dtype == torch.uint8
        nf4.keep_layouts(packed, dtype)
        setattr(base, name, packed)
    base.is_loaded_in_4bit = True  # type: ignore[assignment]
    policy = adapted(base=base)
    assert {type(m) for m in policy.modules()} > {peft.tuners.lora.Linear4bit}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
        expected = passed(policy, dtype=dtype)
        assert calls
        calls.clear()
        with adapted_linear.fused(policy):
            found = passed(policy, dtype=dtype)
    assert not calls
    assert len(found) == len(expected) == 6
    if dtype == torch.float32:
        assert_same(found, expected)
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert (one - other).float().norm() < 2e-2 * other.float().norm()
