"""What the sampler reports is what the learner computes, for the policy and for the reference."""

from typing import Any

import pytest
import torch

from conftest import TINY
from families import prompts_of
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.model import adapters, layout as layouts
from reason_llm.model.base import Model
from reason_llm.model.datum import to_data
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.rollout import Group
from reason_llm.sample import SamplingParams, sampling


def sampled(model: Model, tokenizer: Any, temperature: float) -> list[Group]:
    prompts = prompts_of(tokenizer, "What is 3 + 4?", "What is 57 + 68?", "Why?")
    with sampling(model, 10**6) as sampler:
        return sampler.sample(
            prompts, SamplingParams(6, 40, temperature), 3, lambda tokens, items: None
        )


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.5])
def test_sampler_and_learner_agree(model: Model, tokenizer: Any, temperature: float) -> None:
    rollouts = to_data(sampled(model, tokenizer, temperature))
    ids, mask = layouts.collate(rollouts, model.device)
    with torch.no_grad():
        logprobs, _ = policy_logprobs(model, ids, mask, temperature)
    reported = torch.cat([r.on_trained("sampler_logprobs") for r in rollouts])
    assert (logprobs[mask] - reported).abs().max() < 1e-4
    assert reported.min() < -0.5, "nothing but certain tokens proves nothing"


def test_with_an_adapter_on_the_head_too(tokenizer: Any) -> None:
    """And one that is off is the base."""
    adapter = AdapterSection(rank=4, alpha=8, targets=["q_proj", "lm_head"])
    section = ModelSection(path=str(TINY), dtype="float32", adapter=adapter)
    generator = torch.Generator().manual_seed(1)
    with Model(section, tokenizer, seed=0) as model:
        for parameter in model.policy.parameters():
            if parameter.requires_grad:
                parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
        model.policy.eval()
        rollouts = to_data(sampled(model, tokenizer, 0.8))
        ids, mask = layouts.collate(rollouts, model.device)
        with torch.no_grad():
            logprobs, _ = policy_logprobs(model, ids, mask, 0.8)
            theirs = model.policy(input_ids=ids).logits
            torch.testing.assert_close(model.logits(model.hidden_states(ids)), theirs)
            with adapters.reference(model.policy):
                base, _ = policy_logprobs(model, ids, mask, 0.8)
                plain = model.policy.get_base_model()(input_ids=ids).logits / 0.8
        reported = torch.cat([r.on_trained("sampler_logprobs") for r in rollouts])
        assert (logprobs[mask] - reported).abs().max() < 1e-4
        expected = plain.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
        assert torch.allclose(base[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], atol=1e-5)
        assert (base - logprobs)[mask].abs().max() > 0.1


def test_a_sampler_without_the_adapter_would_be_noticed(model: Model, tokenizer: Any) -> None:
    rollouts = to_data(sampled(model, tokenizer, 1.0))
    ids, mask = layouts.collate(rollouts, model.device)
    with adapters.reference(model.policy):
        logprobs, _ = policy_logprobs(model, ids, mask, 1.0)
    reported = torch.cat([r.on_trained("sampler_logprobs") for r in rollouts])
    assert (logprobs[mask] - reported).abs().max() > 1e-2


def test_adapter_off_is_the_base(model: Model, tokenizer: Any) -> None:
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.path, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("What is 12 + 34?")])
    with torch.no_grad():
        expected = base(input_ids=ids).logits
    with adapters.reference(model.policy):
        found = model.logits(model.hidden_states(ids))
    assert torch.equal(found, expected)
    with torch.no_grad():
        assert not torch.allclose(model.logits(model.hidden_states(ids)), expected, atol=1e-3)


def test_padding_changes_no_logprob(model: Model, tokenizer: Any) -> None:
    rollouts = to_data(sampled(model, tokenizer, 1.0))
    ids, mask = layouts.collate(rollouts, model.device)
    with torch.no_grad():
        together, _ = policy_logprobs(model, ids, mask, 1.0)
        for row, rollout in enumerate(rollouts):
            one_ids, one_mask = layouts.collate([rollout], model.device)
            alone, _ = policy_logprobs(model, one_ids, one_mask, 1.0)
            assert torch.allclose(alone[one_mask], together[row][mask[row]], atol=1e-5)
