"""Prompts become completions: what a sampler takes and gives. The engines are beside this file."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from reason_llm.rollout import Group, Prompt

if TYPE_CHECKING:
    from reason_llm.model.base import Model


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw. Applied in this order: temperature, top-k, top-p, min-p."""

    num_completions: int
    max_new_tokens: int
    temperature: float = 1.0
    """0: greedy, always the likeliest token."""
    top_k: int = 0
    """0: all tokens."""
    top_p: float = 1.0
    """1: all tokens."""
    min_p: float = 0.0
    """0: all tokens."""


Progress = Callable[[int, int], None]
"""Told of every decoding step: (tokens sampled in it, completions that ended in it)."""


class Sampler(Protocol):
    """One engine over the resident base and its current adapter."""

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: int, progress: Progress
    ) -> list[Group]:
        """A Group of ``params.num_completions`` completions for each prompt, in the prompts' order.

        The same prompts, params, seed and weights give the same tokens on the same machine.
        """
        ...

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """How many of these prompts fit into memory together with all their completions; at least
        1."""
        ...


@contextmanager
def sampling(model: "Model", cache_tokens: int) -> Iterator[Sampler]:
    """The sampling phase: within it the policy is in evaluation mode and the GPU is the sampler's.

    With vLLM the KV cache is brought back and vLLM's adapter becomes the policy's.

    Args:
        cache_tokens: how many tokens the Transformers sampler's KV cache may hold.
    """
    from reason_llm.sample.transformers_sampler import TransformersSampler
    from reason_llm.sample.vllm_sampler import VllmSampler

    model.policy.eval()
    if model.engine is None or model.sync is None:
        yield TransformersSampler(model, cache_tokens)
        return
    model.engine.wake()
    model.sync()
    yield VllmSampler(model)
