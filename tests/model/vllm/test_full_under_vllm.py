"""All weights trained where the real vLLM holds them, on the CPU.

A step changes vLLM's own storage in place, and vLLM samples by it at once: the same addresses, the
learner's log-probs, no adapter.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import TINY
from families import SIZES, prompts_of, quiet
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import Config, ModelSection
from reason_llm.model.base import Model
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling

pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")

# vLLM, not this project, warns of deprecations in what it imports.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.mark.long
def test_the_learner_s_parameters_are_vllm_s_storage(tokenizer: Any) -> None:
    from dataclasses import replace

    section = ModelSection(path=str(TINY), dtype="float32", train="full")
    prompts = prompts_of(tokenizer, *(f"What is {a} + 8? " * 20 for a in (3, 57, 91)))
    greedy = SamplingParams(1, 16, temperature=0.0)

    def sampled(model: Model) -> list[tuple[int, ...]]:
        with sampling(model, 0) as sampler:
            found = prove_sampler_is_policy(sampler, model, prompts)
            assert found["sample/canary_difference_max"] < 1e-4
            groups = sampler.sample(prompts, greedy, 0, quiet)
        return [group.completions[0].token_ids for group in groups]

    with Model(section, tokenizer, 0, replace(SIZES, lora_rank=0)) as model:
        assert model.engine is not None
        theirs = {p.untyped_storage().data_ptr() for p in model.engine.module.parameters()}
        own = model.parameters_of("policy")
        places = [each.data_ptr() for each in own]
        assert {each.untyped_storage().data_ptr() for each in own} == theirs
        before = sampled(model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for each in own:
                each.mul_(1 + 0.2 * torch.randn(each.shape, generator=generator))
        after = sampled(model)  # of prompts whose prefixes vLLM had cached
        assert after != before
        with model.using("reference"):
            assert sampled(model) == before
        assert sampled(model) == after
        assert [each.data_ptr() for each in model.parameters_of("policy")] == places
    gc.collect()


@pytest.mark.long
def test_a_run_over_vllm_learns_all_weights(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    model = {"path": str(TINY), "dtype": "float32", "train": "full"}
    config = small_run(model=model, sample__engine="vllm", train__learning_rate=2e-4)
    training.run_training(config, Console("quiet"))
    gc.collect()
    records = metrics.read(tmp_path / "runs" / "small")[1:]
    assert len(records) == 3
    assert all(record["sample/canary_difference_max"] < 1e-4 for record in records)
    assert (tmp_path / "runs" / "small" / "model" / "model.safetensors").is_file()
