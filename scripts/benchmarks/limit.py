"""Distance from the machine's limit: the products that a step cannot do without, by matmul's peak,
which is that of the faster one of torch's two libraries.

Useful floating-point operations of a step: each prompt once, each completion token once; two for
each weight and token forward, two more backward (the gradient of the inputs; the base's weights
have none), the head on completion tokens alone, and attention's products with the tokens before.
What a system computes again, pads or masks does not count.
"""

import time

import torch
from transformers import AutoConfig

from benchmarks.work import Work, lengths, prompts

PEAK_SIZE = 1024
PEAK_REPEATS = 50


def matmul_peak(threads: int) -> float:
    """Operations a second of a large float32 product, the best of some."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        one = torch.ones(PEAK_SIZE, PEAK_SIZE)
        seconds = []
        for _ in range(PEAK_REPEATS):
            started = time.perf_counter()
            torch.matmul(one, one)
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * PEAK_SIZE**3 / min(seconds)


def useful(work: Work) -> dict[str, float]:
    """Floating-point operations of sampling and learning in the last step, by phase; the lengths
    are given."""
    given = lengths(work)
    assert given is not None
    text = AutoConfig.from_pretrained(work.model)
    hidden, wide = text.hidden_size, text.intermediate_size
    head_size = getattr(text, "head_dim", None) or hidden // text.num_attention_heads
    queries, keys = (n * head_size for n in (text.num_attention_heads, text.num_key_value_heads))
    shapes = [(hidden, queries), (hidden, keys), (hidden, keys), (queries, hidden),
              (hidden, wide), (hidden, wide), (wide, hidden)]  # fmt: skip
    layers = text.num_hidden_layers
    weights = layers * sum(a * b for a, b in shapes)
    adapter = layers * sum((a + b) * work.rank for a, b in shapes)
    head = text.vocab_size * hidden
    asked = [len(prompt.token_ids) for prompt in prompts(work, work.steps - 1)]
    tokens = sum(given) + sum(asked)
    seen = sum(n * n / 2 for n in asked)  # pairs of a token and one before it
    seen += sum(
        asked[row // work.completions] * length + length * length / 2
        for row, length in enumerate(given)
    )
    attention = 4 * layers * queries * seen
    # Backward, attention's products are twice the forward ones, an adapter's too.
    return {
        "sampling": 2 * (weights + adapter) * tokens + 2 * head * sum(given) + attention,
        "learning": (4 * weights + 6 * adapter) * tokens + 4 * head * sum(given) + 3 * attention,
    }
