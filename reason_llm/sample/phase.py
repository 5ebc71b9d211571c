"""The sampling phase, and the check that the sampler samples from the policy."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from reason_llm.model import Model, prove_logprobs, routing
from reason_llm.rollout import Group, Prompt
from reason_llm.sample.protocol import Sampler, SamplingParams
from reason_llm.sample.transformers_sampler import TransformersSampler
from reason_llm.sample.vllm_sampler import VllmSampler

CANARY_PROMPTS, CANARY_COMPLETIONS, CANARY_TOKENS = 4, 2, 16


@contextmanager
def sampling(model: Model, cache_tokens: int) -> Iterator[Sampler]:
    """Context of the sampling phase: the policy is in evaluation mode and the GPU belongs to the
    sampler. With vLLM the KV cache is brought back and vLLM's adapter becomes the policy's, or the
    policy's is folded into the base weights until the end; ``cache_tokens`` are what the
    Transformers sampler's KV cache may hold."""
    model.policy.eval()
    with model.folded():
        if model.engine is not None and model.sync is not None:
            model.engine.wake()
            model.sync()
        yield sampler_of(model, cache_tokens)


def sampler_of(model: Model, cache_tokens: int) -> Sampler:
    """The model's sampler, which samples in the sampling phase alone."""
    if model.engine is None or model.sync is None:
        return TransformersSampler(model, cache_tokens)
    return VllmSampler(model)


def prove_sampler_is_policy(
    sampler: Sampler, model: Model, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Sample a few tokens of the shortest prompts and compare their log-probs with the learner's.

    Returns:
        ``sample/canary_difference`` and ``sample/canary_difference_max``, in nats; of a mixture of
        experts ``sample/route_agreement``, too, the share of tokens and layers for which sampler
        and learner choose the same experts; with ``sample.fold`` ``sample/folded_fraction``, the
        share of elements of the adapted weights that the adapter changes, and
        ``memory/folded_kept_mib``, host memory of those that are kept.

    Raises:
        TrainingError: they differ by more than rounding.
    """
    # The check is of weights, not of prompts: the shortest ones cost least.
    short = sorted(prompts, key=lambda prompt: len(prompt.token_ids))[:CANARY_PROMPTS]
    params = SamplingParams(CANARY_COMPLETIONS, CANARY_TOKENS)
    sampled = sampler.sample(short, params, seed=0, progress=lambda tokens, items: None)
    metrics = prove_logprobs(model, sampled)
    if model.folding is not None:
        metrics["sample/folded_fraction"] = model.folding.changed_fraction
        metrics["memory/folded_kept_mib"] = model.folding.kept_bytes / 2**20
    if model.engine is None or not routing.routers(model.policy):
        return metrics
    return metrics | {"sample/route_agreement": _route_agreement(sampler, model, sampled)}


def _route_agreement(sampler: Sampler, model: Model, sampled: Sequence[Group]) -> float:
    """Agreement, measured by reading each rollout once more, which the prefix cache lacks."""
    seen, same = routing.Routing(model.policy), list[torch.Tensor]()
    assert model.engine is not None
    for group in sampled:
        for completion in group.completions:
            ids = (*group.prompt.token_ids, *completion.token_ids[:-1])
            model.engine.llm.reset_prefix_cache()
            with model.engine.routes() as theirs:
                once = SamplingParams(1, 1)
                sampler.sample(
                    [replace(group.prompt, token_ids=ids)], once, 0, lambda *progress: None
                )
            with torch.no_grad(), seen.hooked(), model.as_sampled():
                model.hidden_states(torch.tensor([ids], device=model.device))
            for ours, passes in zip(seen.experts, theirs, strict=True):
                same.append(routing.agreement(ours, torch.cat(passes)[: len(ids)]))
    return float(torch.cat(same).mean())
