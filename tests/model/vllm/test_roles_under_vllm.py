"""Roles over the weights that the real vLLM holds, on the CPU.

1. The policy, its start, a critic and a teacher: one copy of the base, vLLM's.
2. vLLM samples with the policy's adapter, whatever the others hold, and with its scale: here that
   of rank-stabilised LoRA.
3. PPO learns from what vLLM samples.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import TINY
from families import SIZES, prompts_of, quiet
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.model.base import Model
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling
from roles import ROLES, base_storages, check_one_copy

pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")

# vLLM, not this project, warns of deprecations in what it imports.
pytestmark = pytest.mark.filterwarnings("default")


def randomize(model: Model, role: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters_of(role):
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


@pytest.mark.long
def test_one_base_copy_and_the_policy_s_adapter_alone(tokenizer: Any, tmp_path: Path) -> None:
    section = ModelSection(
        path=str(TINY), dtype="float32", adapter=AdapterSection(rank=8, alpha=6, rslora=True)
    )
    prompts = prompts_of(tokenizer, *(f"What is {a} + 8?" for a in (3, 57, 91)))
    greedy = SamplingParams(1, 24, temperature=0.0)

    def sampled(model: Model) -> list[tuple[int, ...]]:
        with sampling(model, 0) as sampler:
            prove_sampler_is_policy(sampler, model, prompts)
            groups = sampler.sample(prompts, greedy, 0, quiet)
        return [group.completions[0].token_ids for group in groups]

    with Model(section, tokenizer, 0, SIZES) as model:
        assert model.engine is not None
        theirs = {p.untyped_storage().data_ptr() for p in model.engine.module.parameters()}
        check_one_copy(model, tmp_path)
        assert set(base_storages(model)) <= theirs
        randomize(model, "policy", seed=5)
        before = sampled(model)
        for seed, role in enumerate(ROLES[1:]):
            randomize(model, role, seed)
            with model.using(role):
                pass
        assert sampled(model) == before
        randomize(model, "policy", seed=6)
        assert sampled(model) != before
    gc.collect()


@pytest.mark.long
def test_ppo_learns_from_what_vllm_samples(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    config = small_run(
        run__steps=3,
        sample__engine="vllm",
        algorithm={"name": "ppo"},
        critic={"updates": 2, "warmup_steps": 1, "learning_rate": 2e-3},
    )
    training.run_training(config, Console("quiet"))
    gc.collect()
    folder = tmp_path / "runs" / "small"
    records = metrics.read(folder)[1:]
    assert len(records) == 3
    values = [record["critic/value"] for record in records]  # from 0 to the mean return
    assert 0 < values[0] < values[1] < values[2]
    assert all(record["sample/canary_difference_max"] < 1e-3 for record in records)
    assert ["train/loss" in record for record in records] == [False, True, True]
    second, third = (
        load_file(folder / "checkpoints" / f"step-0000000{step}" / "adapter_model.safetensors")
        for step in (2, 3)
    )
    assert any(tensor.any() for name, tensor in second.items() if "lora_B" in name)
    assert not all(second[name].equal(third[name]) for name in second)
