"""Sampling with vLLM over the shared weights: the whole wave at once, token ids in and out.
Log-probs are ``processed``: after temperature and filters, of the distribution that was drawn from.

Not here: the engine and its memory (``model/vllm``).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch

from reason_llm.errors import ModelError
from reason_llm.model import Model, decode
from reason_llm.rollout import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    shortest_decimals,
)
from reason_llm.sample.protocol import Ended, Progress, SamplingParams, ignore_ended


class VllmSampler:
    """The Sampler over a Model that vLLM holds."""

    def __init__(self, model: Model) -> None:
        assert model.engine is not None and model.sync is not None
        self.model = model
        self.engine = model.engine
        self.sync = model.sync

    def sample(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        seed: int,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[Group]:
        """See ``Sampler.sample``. On a GPU the same seed need not give the same tokens."""
        (groups,) = self.sample_in_one_batch([(prompts, seed)], params, progress, ended)
        return groups

    def sample_in_one_batch(
        self,
        waves: Sequence[tuple[Sequence[Prompt], int]],
        params: SamplingParams,
        progress: Progress,
        ended: Ended = ignore_ended,
    ) -> list[list[Group]]:
        """Several prompts with a seed, all in one batch: the groups of each, as of ``sample``. The
        places that ``ended`` gets are those among all prompts."""
        requests = list[tuple[Prompt, int]]()
        for prompts, seed in waves:
            numbers = random.Random(seed)
            requests += [(prompt, numbers.getrandbits(62)) for prompt in prompts]
        completed: dict[int, Group] = {}
        with self.batch() as batch:
            for place, (prompt, number) in enumerate(requests):
                batch.add(place, prompt, params, number)
            while batch.keys:
                for place, completions in batch.step(progress):
                    completed[place] = Group(requests[place][0], completions)
                    ended(place, completed[place])
        groups = (completed[place] for place in range(len(requests)))
        return [list(islice(groups, len(prompts))) for prompts, _ in waves]

    @contextmanager
    def batch(self) -> Iterator["VllmBatch"]:
        """Context of a batch. What is under way at its end is dropped, also after Ctrl-C."""
        if not self.engine.awake:
            raise ModelError("vLLM is asleep: sample within the sampling phase")
        batch = VllmBatch(self)
        on_cpu = self.model.device.type == "cpu"
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            try:
                yield batch
            finally:
                batch.keep(lambda key: False)

    def prompts_at_once(self, prompts: Sequence[Prompt], params: SamplingParams) -> int:
        """Number of all prompts: vLLM queues what does not fit."""
        return len(prompts)

    def _request(self, prompt: Prompt) -> Any:
        """vLLM's input: ids that it takes as they are, or the embedder's for attachments."""
        from vllm.inputs import tokens_input

        if self.model.embedder is None or not prompt.attachments:
            return tokens_input(list(prompt.token_ids))
        return self.model.embedder.request(prompt)

    def _vllm_params(self, params: SamplingParams, seed: int) -> Any:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

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
            flat_logprobs=True,  # one list of numbers, not a dict for each token
            # vLLM looks for the strings in the text, which here has all tokens.
            detokenize=bool(params.stop),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, choice: Any) -> Completion:
        ids = tuple(choice.token_ids)
        assert tuple(choice.logprobs.token_ids) == ids
        (text,) = decode(self.model.tokenizer, [ids], self.model.end_token_ids)
        why: FinishReason = "stop" if choice.finish_reason == "stop" else "length"
        return Completion(ids, text, tuple(shortest_decimals(choice.logprobs.logprobs)), why)


class VllmBatch:
    """Requests that vLLM decodes together, each with a key; they come and go at any time."""

    joins = True
    """Whether requests join what is under way."""

    def __init__(self, sampler: VllmSampler) -> None:
        self._sampler = sampler
        self._llm = sampler.engine.llm
        self.keys: dict[Any, str] = {}
        """vLLM's name of each request under way."""
        self._by_number: dict[str, Any] = {}

    def add(
        self, key: Any, prompt: Prompt, params: SamplingParams, seed: int, fixed: bool = False
    ) -> None:
        """Add a request, at any time; each has its seed, fixed or not."""
        sampler = self._sampler
        name = self._llm.llm_engine.add_request(
            str(next(self._llm.request_counter)),
            sampler._request(prompt),
            sampler._vllm_params(params, seed),
            lora_request=sampler.sync.request,
        )
        self.keys[key], self._by_number[name.partition("-")[0]] = name, key

    def keep(self, is_wanted: Callable[[Any], bool]) -> None:
        """Drop the requests of all other keys."""
        dropped = [key for key in self.keys if not is_wanted(key)]
        names = [self.keys.pop(key) for key in dropped]
        self._llm.llm_engine.abort_request(names, internal=True)

    def step(self, progress: Progress) -> list[tuple[Any, tuple[Completion, ...]]]:
        """Decode a token of each; keys and completions of what ended."""
        ended = []
        for output in self._llm.llm_engine.step():
            if output.finished:
                key = self._by_number.pop(output.request_id)
                completions = tuple(map(self._sampler._completion, output.outputs))
                progress(
                    sum(len(completion.token_ids) for completion in completions), len(completions)
                )
                ended.append((key, completions))
                del self.keys[key]
        return ended
