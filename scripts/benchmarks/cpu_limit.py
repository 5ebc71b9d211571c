"""Distance from the machine's limit: the products that a step cannot do without, by matmul's peak,
which is that of the faster one of torch's two libraries.

Useful floating-point operations of a step: each prompt once, each completion token once; two for
each weight and token forward, two more backward (the gradient of the inputs; the base's weights
have none), the head on completion tokens alone, and attention's products with the tokens before.
What a system computes again, pads or masks does not count.
"""

import time
from dataclasses import dataclass

import torch
from transformers import AutoConfig

from benchmarks.cpu_workloads import Workload
from reason_llm.model import products

PEAK_SIZE = 1024
PEAK_REPEATS = 50


@dataclass(frozen=True, slots=True)
class Useful:
    """Floating-point operations of one step."""

    sampling: float
    learning: float


def matmul_peak(threads: int) -> float:
    """Operations a second of a large float32 product, the best of some and of both libraries."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        one = torch.ones(PEAK_SIZE, PEAK_SIZE)
        seconds = []
        for product in (torch.matmul, products.matmul):
            for _ in range(PEAK_REPEATS):
                started = time.perf_counter()
                product(one, one)
                seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * PEAK_SIZE**3 / min(seconds)


def useful(workload: Workload) -> Useful:
    """Of the workload's first counted step, whose lengths are given."""
    assert workload.lengths is not None
    text = AutoConfig.from_pretrained(workload.model)
    hidden, wide = text.hidden_size, text.intermediate_size
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    queries, keys = (n * head_size for n in (text.num_attention_heads, text.num_key_value_heads))
    shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden),
              (hidden, wide), (hidden, wide), (wide, hidden)]  # fmt: skip
    layers = text.num_hidden_layers
    weights = layers * sum(a * b for a, b in shapes)
    adapter = layers * sum((a + b) * workload.rank for a, b in shapes)
    head = text.vocab_size * hidden
    prompts = [len(prompt.token_ids) for prompt in workload.steps[-1]]
    rows = list(enumerate(workload.lengths))
    answers, asked = sum(workload.lengths), sum(prompts)
    tokens = answers + asked
    seen = sum(n * n / 2 for n in prompts)  # pairs of a token and one before it
    seen += sum(
        prompts[i // workload.completions_per_prompt] * length + length * length / 2
        for i, length in rows
    )
    attention = 4 * layers * queries * seen
    sampling = 2 * (weights + adapter) * tokens + 2 * head * answers + attention
    # Backward, attention's products are twice the forward ones, an adapter's too.
    learning = (4 * weights + 6 * adapter) * tokens + 4 * head * answers + 3 * attention
    return Useful(0.0 if workload.learner_only else float(sampling), float(learning))
