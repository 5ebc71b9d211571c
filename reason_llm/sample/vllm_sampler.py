"""Sampling with vLLM over the shared weights: the whole wave at once, token ids in and out.

vLLM batches continuously, reads the prompt of a group once and shares it. Log-probs are
``processed``: after temperature and filters, of the distribution that was drawn from.

Not here: the engine and its memory (``model/shared_weights``).
"""

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch

from reason_llm.errors import ModelError
from reason_llm.model import Model, decode
from reason_llm.rollout import Completion, Group, Prompt, shortest_decimals
from reason_llm.sample.protocol import Progress, SamplingParams


class VllmSampler:
    """The Sampler over a Model that vLLM holds."""

    def __init__(self, model: Model) -> None:
        if model.engine is None or model.sync is None:
            raise ModelError("the vLLM sampler needs a model that vLLM holds")
        self.model = model
        self.engine = model.engine
        self.sync = model.sync

    def sample(
        self, prompts: Sequence[Prompt], params: SamplingParams, seed: int, progress: Progress
    ) -> list[Group]:
        """See ``Sampler.sample``. On a GPU the same seed need not give the same tokens."""
        (groups,) = self.sample_together([(prompts, seed)], params, progress)
        return groups

    def sample_together(
        self,
        waves: Sequence[tuple[Sequence[Prompt], int]],
        params: SamplingParams,
        progress: Progress,
    ) -> list[list[Group]]:
        """Several prompts with a seed, all in one batch: the groups of each, as ``sample`` would
        return them. Each request has a seed of its own, which follows from theirs."""
        if not self.engine.awake:
            raise ModelError("vLLM is asleep: sample within the sampling phase")
        llm = self.engine.llm
        asked = [(p, number) for prompts, seed in waves for p, number in _seeded(prompts, seed)]
        with torch.compiler.set_stance(
            "force_eager" if self.model.device.type == "cpu" else "default"
        ):
            requests = llm.enqueue(
                [{"prompt_token_ids": list(prompt.token_ids)} for prompt, _ in asked],
                [self._vllm_params(params, number) for _, number in asked],
                lora_request=self.sync.request,
                use_tqdm=False,
            )
            outputs = []
            try:
                while llm.llm_engine.has_unfinished_requests():
                    for output in llm.llm_engine.step():
                        if output.finished:
                            outputs.append(output)
                            tokens = sum(len(choice.token_ids) for choice in output.outputs)
                            progress(tokens, len(output.outputs))
            except BaseException:  # Ctrl-C too: nothing may go on while the learner learns
                llm.llm_engine.abort_request(requests, internal=True)
                raise
        outputs.sort(key=lambda output: int(output.request_id))
        groups = iter(
            Group(prompt, tuple(self._completion(choice) for choice in output.outputs))
            for (prompt, _), output in zip(asked, outputs, strict=True)
        )
        return [list(islice(groups, len(prompts))) for prompts, _ in waves]

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """Number of all prompts: vLLM queues what does not fit."""
        return len(prompts)

    def _vllm_params(self, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VllmParams

        return VllmParams(
            n=params.num_completions,
            seed=seed,  # of the first completion; the others' follow it
            max_tokens=params.max_new_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k or -1,
            min_p=params.min_p,
            stop_token_ids=self.model.end_token_ids,
            stop=list(params.stop),
            logprobs=0,  # of the sampled token alone
            # vLLM looks for the strings in the text, which here has all tokens.
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
        )

    def _completion(self, choice: Any) -> Completion:
        ids = tuple(choice.token_ids)
        logprobs = tuple(
            shortest_decimals(
                [entry[token].logprob for entry, token in zip(choice.logprobs, ids, strict=True)]
            )
        )
        (text,) = decode(self.model.tokenizer, [ids])
        return Completion(
            ids, text, logprobs, "stop" if choice.finish_reason == "stop" else "length"
        )


def _seeded(prompts: Sequence[Prompt], seed: int) -> Iterator[tuple[Prompt, int]]:
    numbers = random.Random(seed)
    for prompt in prompts:
        yield prompt, numbers.getrandbits(62)
