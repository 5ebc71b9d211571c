"""Log-probs of texts as vLLM serves them, with an adapter from disk and without it. This is a
program, since a process that has started vLLM keeps its memory: it reads the names of base and
adapter and the texts' ids as JSON, and writes both vectors."""

import sys
from pathlib import Path
from typing import Any

import orjson
import torch

from reason_llm.model import adapters
from reason_llm.model.sizes import EngineSizes
from reason_llm.model.vllm import engine

MAX_TOKENS = 256
"""Longest text."""
KV_CACHE_BYTES = 256 << 20


def logprobs(base: str, adapter: str, texts: list[list[int]]) -> list[list[float]]:
    """Log-probs of the texts' tokens, with the adapter and without it. Raises ModelError: vLLM
    cannot load one of them."""
    rank = int(adapters.read_config(Path(adapter)).r)
    dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
    sizes = EngineSizes(2 * MAX_TOKENS, KV_CACHE_BYTES, max_sequences=1, lora_rank=rank)
    started = engine.start(base, dtype, sizes, seed=0)
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)

    def of(request: Any) -> list[float]:
        values = []
        for ids in texts:  # one at a time, so that both passes compute the same shapes
            prompt = {"prompt_token_ids": ids[:MAX_TOKENS]}
            (out,) = started.llm.generate([prompt], params, lora_request=request, use_tqdm=False)
            pairs = zip(out.prompt_logprobs[1:], ids[1:MAX_TOKENS], strict=True)
            values += [float(candidates[token].logprob) for candidates, token in pairs]
        return values

    try:
        return [of(LoRARequest("exported", 1, adapter)), of(None)]
    finally:
        started.close()


if __name__ == "__main__":
    sys.stdout.write(orjson.dumps(logprobs(*orjson.loads(sys.stdin.buffer.read()))).decode())
