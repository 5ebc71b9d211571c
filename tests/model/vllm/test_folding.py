"""The adapter in the base weights while vLLM samples, on the CPU.

1. Which elements come back by subtraction and which are kept, by hand.
2. After 50 phases with other adapters each, after nesting and after errors: the same bits.
3. The real vLLM: the policy's log-probs without vLLM's adapter kernels; nobody reads in between.
4. A run: two steps, killed within the sampling phase, resumed to the same bits.
"""

import copy
import gc
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from allocations import peak_allocated
from conftest import TINY, small_config
from families import SIZES, prompts_of, quiet, randomize
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.config.file import to_yaml
from reason_llm.errors import ModelError
from reason_llm.model import adapters, layout as layouts
from reason_llm.model.base import Model
from reason_llm.model.datum import to_data
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.vllm import folding
from reason_llm.model.vllm.folding import Folding
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling

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
            torch.testing.assert_close(ours, theirs, rtol=rounding, atol=1e-5)
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
    with pytest.raises(ModelError, match=r"1: unfolding the adapter did not restore .* resumes"):
        with fold.on():
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

    assert 0 < kept[0] + 1
    peak = peak_allocated(phases)
    weights = 2 * 8 * 512 * 512
    assert 1000 < kept[0] < 0.02 * weights
    assert kept[0] <= peak < 2 * kept[0] + 40 * 2**14 < 0.2 * weights


PROMPTS = [f"What is {a} + 8? " * 12 for a in (3, 57, 91)]


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Iterator[Model]:
    """Over vLLM without adapters."""
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    section = ModelSection(
        path=str(TINY), dtype="bfloat16", adapter=AdapterSection(rank=8, alpha=16)
    )
    with Model(section, tokenizer, 0, replace(SIZES, lora_rank=0)) as made:
        yield made
    gc.collect()


def reported_and_read(model: Model, reading: Any) -> tuple[Tensor, Tensor]:
    """Log-probs of samples as vLLM reports them, and as the learner reads them in a context of
    ``reading``."""
    with sampling(model, 0) as sampler:
        prompts = prompts_of(model.tokenizer, *PROMPTS)
        rollouts = to_data(sampler.sample(prompts, SamplingParams(4, 24), 3, quiet))
        ids_BT, mask_BT = layouts.collate(rollouts, model.device)
        with reading(), torch.no_grad():
            logprobs_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
    reported_N = torch.cat([row.on_trained("sampler_logprobs") for row in rollouts])
    return reported_N, logprobs_BT[mask_BT]


def test_vllm_samples_from_the_rounded_policy(model: Model) -> None:
    """In bfloat16: its weights are those of a Transformers model that is folded by hand."""
    assert model.engine is not None
    assert model.engine.llm.llm_engine.vllm_config.lora_config is None
    prompts, before = prompts_of(model.tokenizer, *PROMPTS), bits(model.policy)
    by_hand = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.bfloat16)
    randomize(model, seed=1)
    for name, layer in model.policy.get_base_model().named_modules():
        if hasattr(layer, "lora_A"):
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            weight = by_hand.get_submodule(name).weight
            weight.data = (weight.float() + 2.0 * b @ a).bfloat16()
    with sampling(model, 0) as sampler:
        for name, weight in by_hand.named_parameters():
            found = model.policy.get_base_model().get_parameter(
                name.replace("proj.", "proj.base_layer.")
            )
            assert torch.equal(found, weight)
        found = prove_sampler_is_policy(sampler, model, prompts)
        assert found["sample/folded_fraction"] > 0.9
        assert 0 < found["sample/canary_difference"] < 0.05
        with pytest.raises(ModelError, match="is folded into the base weights"):
            model.hidden_states(torch.tensor([[1, 2]]))
        with model.using("reference"), pytest.raises(ModelError, match="is folded"):
            model.hidden_states(torch.tensor([[1, 2]]))
        with pytest.raises(ModelError, match="is folded"):
            model.load_adapter("policy", model.adapter_of("policy"))
    reported_N, rounded_N = reported_and_read(model, model.as_sampled)
    _, exact_N = reported_and_read(model, model.unfolded)
    assert (reported_N - rounded_N).abs().mean() < (reported_N - exact_N).abs().mean()
    assert same(bits(model.policy), before)


def test_an_adapter_below_the_last_bit_samples_as_the_base(model: Model) -> None:
    """And the canary does not take that for a sampler without the adapter."""
    prompts, before = prompts_of(model.tokenizer, *PROMPTS), bits(model.policy)
    change(model.policy, 1e-5, seed=0)
    with sampling(model, 0) as sampler:
        found = prove_sampler_is_policy(sampler, model, prompts)
        assert found["sample/folded_fraction"] < 1e-3
    change(model.policy, 0.05, seed=0)
    with sampling(model, 0) as sampler:
        assert prove_sampler_is_policy(sampler, model, prompts)["sample/folded_fraction"] > 0.9
    assert same(bits(model.policy), before)


def folded_run(folder: Path, **more: Any) -> Config:
    return small_config(
        folder, run__steps=2, sample__engine="vllm", sample__fold=True,
        run__keep_buffers="none", **more,
    )  # fmt: skip


@pytest.mark.long
def test_a_run_killed_within_the_phase_ends_with_the_same_bits(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")
    killed = folded_run(tmp_path / "killed")
    path = tmp_path / "killed.yaml"
    path.write_text(to_yaml(killed.as_written))
    die_at = Path(__file__).parents[2] / "fixtures" / "die_at.py"
    place = ["reason_llm.model.vllm.folding:Folding._unfold", "6"]  # a canary within each phase
    command = [sys.executable, str(die_at), *place, str(path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    assert [record["step"] for record in metrics.read(tmp_path / "killed" / "runs" / "small")] == [
        0, 1
    ]  # fmt: skip
    for config in (killed, folded_run(tmp_path / "whole")):
        training.run_training(config, Console("quiet"))
        gc.collect()
    first, second = (
        tmp_path / name / "runs" / "small" / "adapter" / "adapter_model.safetensors"
        for name in ("killed", "whole")
    )
    assert first.read_bytes() == second.read_bytes()
    records = metrics.read(tmp_path / "whole" / "runs" / "small")[1:]
    assert len(records) == 2
    assert all(record["sample/canary_difference_max"] < 1e-4 for record in records)
    assert [record["sample/folded_fraction"] > 0.5 for record in records] == [False, True]
