"""Products of float32 matrices by either library: the same numbers, and which one is asked.

1. oneDNN's products are torch's but for rounding, with batches, views and a bias.
2. oneDNN is asked on AMD with AVX-512 alone, and not for what is small or not float32.
3. Learning through an adapted layer, a plain one and the head gives PEFT's and torch's gradients.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from reason_llm.model import adapted_linear, decoding, products, target_logprobs


@pytest.fixture
def onednn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every product is oneDNN's, wherever this runs; a word for each."""
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    monkeypatch.setattr(products, "SMALL", 1)
    heard: list[str] = []
    theirs = products.by_onednn

    def asked(inputs: Tensor, weight: Tensor) -> bool:
        heard.append("asked")
        return theirs(inputs, weight)

    monkeypatch.setattr(products, "by_onednn", asked)
    return heard


@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_numbers_are_torchs(onednn: list[str], rows: int, has_bias: bool) -> None:
    torch.manual_seed(rows)
    weight_OI, bias = torch.randn(40, 24), torch.randn(40) if has_bias else None
    inputs = torch.randn(rows, 2, 24)
    for given in (inputs, inputs[:, 0], inputs.transpose(0, 1), torch.randn(24, rows).t()):
        found = products.linear(given, weight_OI, bias)
        expected = torch.nn.functional.linear(given, weight_OI, bias)
        assert found.is_contiguous() or given.shape[0] == 1
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    strided = torch.randn(80)[::2]
    found = products.linear(inputs, weight_OI, strided)
    expected = torch.nn.functional.linear(inputs, weight_OI, strided)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    left = torch.randn(rows, 40)
    for transposed in (False, True):
        given = left.t().contiguous().t() if transposed else left
        torch.testing.assert_close(
            products.matmul(given, weight_OI), left @ weight_OI, rtol=1e-5, atol=1e-5
        )
    assert products.linear(torch.empty(0, 24), weight_OI).shape == (0, 40)
    assert onednn


def test_what_is_small_or_not_float32_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "prefers_onednn", lambda: True)
    weight, inputs = torch.randn(64, 64), torch.randn(511, 64)
    assert not products.by_onednn(inputs, weight)
    assert products.by_onednn(torch.randn(512, 64), weight)
    assert not products.by_onednn(torch.randn(512, 64).bfloat16(), weight)
    assert not products.by_onednn(torch.randn(512, 64).double(), weight.double())
    assert torch.equal(products.matmul(inputs, weight), inputs @ weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not products.by_onednn(torch.randn(512, 64), weight)
    learned = torch.randn(512, 64, requires_grad=True)
    assert not products.by_onednn(learned, weight)
    with torch.no_grad():
        assert products.by_onednn(learned, weight)
    doubled = products.linear(torch.ones(512, 64).double(), weight.double())
    assert doubled.dtype == torch.float64


def test_which_cpus_ask_onednn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(products, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(products, "is_amd", products.is_amd.__wrapped__)
    asks = products.prefers_onednn.__wrapped__
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert not asks()  # no such file
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n")
    assert not asks()
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: AuthenticAMD\n")
    assert asks()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert not asks()


class Base(nn.Module):
    """An adapted layer, a plain one with and one without a bias, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.adapted = nn.Linear(24, 40)
        self.plain = nn.Linear(40, 32)
        self.last = nn.Linear(32, 16, bias=False)
        self.head = nn.Linear(16, 300, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.plain(self.adapted(inputs).tanh()).tanh())
        return result


def policy() -> Any:
    torch.manual_seed(0)
    made = get_peft_model(Base(), LoraConfig(r=4, lora_alpha=8, target_modules=["adapted"]))
    for name, parameter in made.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)
    return made


def learned(made: Any) -> list[Tensor]:
    """Log-probs and all gradients of a pass."""
    inputs = torch.randn(7, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
    made.zero_grad()
    head = made.get_base_model().head
    logprobs, entropies = target_logprobs(
        made(inputs), torch.arange(7), head.weight, None, 0.9, 3, entropy_gradient=True
    )
    (logprobs.sum() + 0.1 * entropies.sum()).backward()
    found = [p.grad.clone() for p in made.parameters() if p.grad is not None]
    assert inputs.grad is not None and len(found) == 2
    return [logprobs.detach(), entropies.detach(), inputs.grad, *found]


def test_gradients_are_pefts_and_torchs(onednn: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    made = policy()
    with monkeypatch.context() as without:
        without.setattr(products, "prefers_onednn", lambda: False)
        expected = learned(made)
        with made.disable_adapter(), torch.no_grad():
            base_expected = made(torch.ones(2, 24))
    onednn.clear()
    with adapted_linear.fused(made):
        found = learned(made)
        with made.disable_adapter(), torch.no_grad():
            base_found = made(torch.ones(2, 24))
    assert len(onednn) > 20
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(base_found, base_expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad(), decoding.lean(made):
        torch.testing.assert_close(made(torch.ones(2, 24)), made(torch.ones(2, 24)))


def test_a_plain_layer_that_learns_is_torchs(onednn: list[str]) -> None:
    made = policy()
    made.get_base_model().plain.bias.requires_grad_(True)
    with adapted_linear.fused(made):
        made(torch.ones(2, 24)).sum().backward()
    bias = made.get_base_model().plain.bias
    assert bias.grad is not None and float(bias.grad.abs().sum()) > 0
