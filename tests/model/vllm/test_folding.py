"""The adapter in the base weights while vLLM samples, on the CPU.

1. Which elements come back by subtraction and which are kept, by hand.
2. After 50 phases with other adapters each, after nesting and after errors: the same bits.
3. The policy that samples is the rounded one; the learner does not read in between.
4. A run over the real vLLM: the policy's log-probs without its adapter kernels.
"""

import copy
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from allocations import peak_allocated
from conftest import TINY, small_config
from families import prompts_of, quiet
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError, TrainingError
from reason_llm.model import adapters, prove_logprobs
from reason_llm.model.base import Model
from reason_llm.model.vllm import folding
from reason_llm.model.vllm.folding import Folding
from reason_llm.rollout import Group
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, TransformersSampler

# vLLM, not this project, warns of deprecations in what it imports.
pytestmark = pytest.mark.filterwarnings("default")

ROWS, COLUMNS, RANK = 48, 40, 4


def adapted(dtype: torch.dtype) -> Any:
    """Two linear layers with adapters."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(COLUMNS, ROWS), nn.Linear(ROWS, COLUMNS, bias=False)).to(dtype)
    config = LoraConfig(r=RANK, lora_alpha=3 * RANK, target_modules=["0", "1"])
    return get_peft_model(base, config, autocast_adapter_dtype=True)


def bits(policy: Any) -> list[Tensor]:
    """Copies of the frozen parameters, as integers."""
    frozen = [each for each in policy.parameters() if not each.requires_grad]
    kinds = {2: torch.int16, 4: torch.int32}
    return [each.detach().clone().view(kinds[each.element_size()]) for each in frozen]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(map(torch.equal, found, expected))


def change(policy: Any, scale: float, seed: int) -> None:
    """Draw the policy's adapter."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in policy.named_parameters():
        if f".{adapters.POLICY}." in name:
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def test_what_comes_back_by_subtraction_and_what_is_kept() -> None:
    """bfloat16 has 8 significant bits: from 1 to 2 its step is 2^-7, from 1/2 to 1 2^-8."""
    table = [  # W, D, W + D rounded, whether that less D is rounded to W
        (1.5, 2**-9, 1.5, True),  # less than half a step: nothing changes
        (1.5, 2**-8, 1.5, True),  # half a step, to even; back the same
        (1.5, 2**-7, 1.5 + 2**-7, True),
        (1.0, 3 * 2**-10, 1.0, False),  # 1 - 0.75 * 2^-8 is nearer to 1 - 2^-8
        (2**-10, 1.0, 1.0, False),  # all of it is lost
        (-0.0, 0.0, 0.0, False),  # the sign, too
        (1.5, 3 * 2**-8, 1.5 + 2**-6, True),  # one and a half steps, to even, and so back
    ]
    old, delta, new = (torch.tensor([row[i] for row in table]) for i in range(3))
    base = nn.Sequential(nn.Linear(len(table), 1, bias=False)).bfloat16()
    base[0].weight.data.copy_(old)
    policy = get_peft_model(base, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    policy.base_model.model[0].lora_A["default"].weight.data.copy_(delta)
    policy.base_model.model[0].lora_B["default"].weight.data.fill_(1)
    before, fold = bits(policy), Folding(policy)
    with fold.on():
        assert torch.equal(base[0].weight[0].float(), new)
        assert fold.kept_bytes == sum(not row[3] for row in table) * (4 + 2)
        assert fold.changed_fraction == 3 / len(table)
    assert same(bits(policy), before)
    assert fold.kept_bytes == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("elements", [folding.TILE_ELEMENTS, 7 * COLUMNS])
def test_fifty_phases_leave_every_bit(
    dtype: torch.dtype, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "TILE_ELEMENTS", elements)
    policy = adapted(dtype)
    before, fold, folded = bits(policy), Folding(policy), []
    for phase in range(50):
        change(policy, 10 ** (phase % 5 - 3), seed=phase)  # from no change to nothing but adapter
        with fold.on():
            folded.append(bits(policy))
            with fold.off():
                assert same(bits(policy), before)
            assert same(bits(policy), folded[-1])
        assert same(bits(policy), before)
    by_hand = copy.deepcopy(policy).merge_and_unload()
    assert (by_hand[0].weight - policy.base_model.model[0].base_layer.weight).abs().max() > 1
    with fold.on(), adapters.reference(policy):
        rounding = torch.finfo(dtype).eps
        for ours, theirs in zip((policy.base_model.model[i].weight for i in (0, 1)),
                                (by_hand[i].weight for i in (0, 1)), strict=True):  # fmt: skip
            atol = rounding * float(theirs.abs().max())
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=atol)
    assert len({tuple(each[0].flatten().tolist()) for each in folded}) > 40


def test_errors_leave_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = adapted(torch.bfloat16)
    change(policy, 0.1, seed=0)
    before, fold = bits(policy), Folding(policy)
    with pytest.raises(KeyboardInterrupt), fold.on():
        assert not same(bits(policy), before)
        raise KeyboardInterrupt
    assert same(bits(policy), before)
    product = folding.Tile.product

    def fails_once(tile: folding.Tile) -> Tensor:  # as where memory ends, in the second layer
        if tile.name.endswith("1"):
            monkeypatch.undo()
            raise MemoryError
        return product(tile)

    monkeypatch.setattr(folding.Tile, "product", fails_once)
    with pytest.raises(MemoryError), fold.on():
        pass
    assert same(bits(policy), before)
    assert not fold.is_on
    fold.check()
    lost = pytest.raises(ModelError, match=r"1: unfolding the adapter did not restore .* resumes")
    with lost, fold.on():
        policy.base_model.model[1].lora_B["default"].weight.data.mul_(2)
    with pytest.raises(ModelError, match="is folded into the base weights"):
        fold.check()  # and never sampled from or learned with again


def test_layers_that_cannot_be_folded_are_refused() -> None:
    policy = adapted(torch.float16)
    with pytest.raises(ModelError, match=r"a Linear in torch\.float16, into .*fold to false"):
        Folding(policy)


def test_the_memory_of_folding_is_a_tile_s_and_that_of_what_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(folding, "TILE_ELEMENTS", 2**14)
    base = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(8))).bfloat16()
    policy = get_peft_model(base, LoraConfig(r=8, target_modules=[str(i) for i in range(8)]))
    change(policy, 0.005, seed=0)
    fold, kept = Folding(policy), [0]

    def phases() -> None:
        with fold.on():
            kept[0] = fold.kept_bytes

    peak = peak_allocated(phases)
    weights = 2 * 8 * 512 * 512
    assert 1000 < kept[0] < 0.02 * weights
    assert kept[0] <= peak < 2 * kept[0] + 40 * 2**14 < 0.2 * weights


@pytest.fixture
def model(tokenizer: Any) -> Iterator[Model]:
    """In bfloat16, with the adapter in its base weights while it samples, with Transformers."""
    section = ModelSection(
        path=str(TINY), dtype="bfloat16", adapter=AdapterSection(rank=8, alpha=16)
    )
    with Model(section, tokenizer, 0) as made:
        made.policy.eval()
        made.folding = Folding(made.policy)
        yield made


def sampled(model: Model) -> list[Group]:
    prompts = prompts_of(model.tokenizer, *(f"What is {a} + 8?" for a in (3, 57, 91)))
    with model.as_sampled():
        return TransformersSampler(model, 10**6).sample(prompts, SamplingParams(4, 12), 3, quiet)


def test_the_policy_that_samples_is_the_rounded_one(model: Model) -> None:
    """Bit by bit a Transformers model that is folded by hand; the canary counts what rounding
    changed, and the learner may not read in between, or the adapter would count twice."""
    before, ids = bits(model.policy), torch.tensor([[1, 2, 3, 4]])
    by_hand = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    change(model.policy, 0.05, seed=1)
    for name, layer in model.policy.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            weight = by_hand.get_submodule(name).weight
            weight.data = (weight.float() + 2.0 * b @ a).bfloat16()
    with torch.no_grad(), model.folded():
        for name, weight in by_hand.named_parameters():
            own = name.replace("proj.", "proj.base_layer.")
            assert torch.equal(model.policy.get_base_model().get_parameter(own), weight)
        with model.as_sampled():
            found = model.logits(model.hidden_states(ids))
        torch.testing.assert_close(found, by_hand(input_ids=ids).logits, rtol=0, atol=1e-5)
        measured = prove_logprobs(model, sampled(model))
        assert 1e-4 < measured["sample/canary_difference"] < 0.05
        for role in ("policy", "reference"):
            with model.using(role), pytest.raises(ModelError, match="folded into the base weights"):
                model.hidden_states(ids)
        with pytest.raises(ModelError, match="is folded"):
            model.load_adapter("policy", model.adapter_of("policy"))
    assert same(bits(model.policy), before)
    model.load_adapter("policy", model.adapter_of("policy"))


@pytest.mark.long
@pytest.mark.parametrize("scale", [1e-5, 3e-4, 0.05])
def test_an_adapter_below_the_last_bit_is_no_sampler_without_it(model: Model, scale: float) -> None:
    """The canary takes the rounded policy for the sampler's, and finds one that is the base."""
    change(model.policy, scale, seed=0)
    with model.unfolded(), model.using("reference"):
        of_base = TransformersSampler(model, 10**6).sample(
            prompts_of(model.tokenizer, "What is 3 + 8?"), SamplingParams(16, 24), 3, quiet
        )
    with model.folded():
        assert model.folding is not None
        assert (model.folding.changed_fraction < 0.02) == (scale < 0.05)
        prove_logprobs(model, sampled(model))
        if scale < 0.05:
            return
        with pytest.raises(
            TrainingError, match=r"not the policy.* with sample\.fold=true, which rounds"
        ):
            prove_logprobs(model, of_base)


@pytest.mark.long
def test_a_run_samples_without_vllm_s_adapters(tmp_path: Path) -> None:
    """In float32 vLLM's log-probs are the adapter's to rounding."""
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    config = small_config(
        tmp_path, run__steps=2, sample__engine="vllm", sample__fold=True, train__learning_rate=3e-3,
        data__limit=256,
    )  # fmt: skip
    training.run_training(config, Console("quiet"))
    gc.collect()
    records = metrics.read(tmp_path / "runs" / "small")[1:]
    assert [record["sample/folded_fraction"] > 0.5 for record in records] == [False, True]
    assert all(record["sample/canary_difference"] < 1e-5 for record in records)
    assert all(record["train/sampler_mismatch_max"] < 5e-5 for record in records)
