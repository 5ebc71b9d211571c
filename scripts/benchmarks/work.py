"""Workloads, one row each, the same for every system.

A ``Work`` goes to a system's process as JSON, and its prompts, lengths and rows follow from it by
seeds, so that nothing but the system differs. A length is a number of completion tokens, the
end-of-sequence token included.
"""

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from reason_llm.files import read_object
from reason_llm.model import load_tokenizer
from reason_llm.rollout import Prompt

Kind = Literal["float32", "bf16", "nf4"]
Ids = tuple[int, ...]
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Adapted layers: all of a dense decoder's."""


@dataclass(frozen=True, slots=True)
class Work:
    """Steps of GRPO with LoRA, each with one optimizer step over all rollouts."""

    model: str
    """A folder that ``models.make`` wrote or, in the table, a shape."""
    prompts: int
    """Of a step."""
    completions: int
    """Of each prompt."""
    prompt_tokens: int
    completion_tokens: int
    """Max tokens; ``lengths`` sets how many."""
    kind: Kind = "bf16"
    """The base's weights; for TRL on a CPU, bf16 is autocast."""
    engine: Literal["vllm", "transformers"] = "vllm"
    """What samples; with Transformers it is the work of the CPU's benchmark."""
    min_prompt_tokens: int | None = None
    """Of the shortest prompt; None: all are equally long."""
    lengths: Literal["equal", "heavy_tail", "geometric"] = "equal"
    """Of completions."""
    is_random: bool = False
    """Completions are random ids: nothing is sampled."""
    learning_rate: float = 1e-5
    rank: int = 16
    seed: int = 0
    trl_rows: int | None = None
    """Rows of one of TRL's forward passes (pairs, for DPO); None: as many as ours holds."""
    is_chunked: bool | None = None
    """TRL's chunked log-probs; None: where liger-kernel is installed."""
    repeats: int = 1
    """Steps that are measured."""
    warmup: bool = True
    """A step before them is not."""
    budget_gib: float | None = None
    """GPU memory that may be used; None: all."""
    is_folded: bool = False
    """Ours has the adapter in the base weights while vLLM samples."""
    longest_tokens: int = 0
    """Max tokens of rows of the longest planned length, which are learned, too; 0: none."""

    @property
    def context(self) -> int:
        """Tokens of a whole rollout."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def rollouts(self) -> int:
        """Number of rollouts of a step."""
        return self.prompts * self.completions

    @property
    def steps(self) -> int:
        """Measured or not."""
        return self.repeats + int(self.warmup)

    def smallest(self) -> "Work":
        """The smallest form, which shows that all of it runs and nothing else."""
        prompts = max(1, self.prompts // 8)
        return replace(
            self,
            model="tiny",
            prompts=prompts,
            completions=min(self.completions, 4),
            rank=min(self.rank, 16),
            prompt_tokens=48,
            completion_tokens=48,
            trl_rows=min(self.trl_rows or 1, prompts),
        )


SYNTHETIC = Work(
    "25m", 4, 4, 48, 256, "float32", engine="transformers", min_prompt_tokens=16,
    lengths="heavy_tail", trl_rows=8,
)  # fmt: skip
"""``trl_rows``: 8 is TRL's default, and as fast as 2, 4 and 16; 4 where memory is short."""
WORKLOADS: dict[str, tuple[str, Work]] = {
    "mixed": ("mixed lengths", SYNTHETIC),
    "learning": ("learning alone", replace(SYNTHETIC, model="42m", is_random=True, trl_rows=4)),
    "prompts": ("long prompts", Work(
        "58m", 8, 8, 300, 384, "float32", engine="transformers", lengths="geometric", trl_rows=8
    )),
    "answers": ("long answers", Work(
        "25m", 2, 2, 64, 1500, "float32", engine="transformers", trl_rows=4
    )),
    "gpu": ("on a GPU", Work("qwen2.5-7b", 8, 8, 256, 768, rank=32)),
}  # fmt: skip
"""By name: what it is, and the work; those that sample with Transformers are for ``cpu``."""
VARIANTS: dict[str, tuple[str, str, dict[str, Kind | int | bool]]] = {
    "trl_small": ("trl", "TRL, least memory", {"trl_rows": 1}),
    "trl_chunked": ("trl", "TRL, chunked log-probs", {"is_chunked": True}),
    "trl_best": (
        "trl", "TRL, chunked log-probs, bfloat16", {"is_chunked": True, "kind": "bf16"},
    ),
}  # fmt: skip
"""Other settings of a system: system, title, and what differs."""


def prompts(work: Work, step: int) -> list[Prompt]:
    """The prompts of a step: random letters."""
    draw = random.Random(f"{work.seed}/prompts/{step}")
    tokenizer = load_tokenizer(work.model)
    random_prompts = []
    for index in range(work.prompts):
        min_tokens = work.min_prompt_tokens or work.prompt_tokens
        text = "".join(draw.choices("abcdefghij", k=draw.randint(min_tokens, work.prompt_tokens)))
        ids = tokenizer.encode(text, add_special_tokens=False)
        random_prompts.append(Prompt(f"made:{step}:{index}", text, tuple(ids), ""))
    return random_prompts


def lengths(work: Work) -> tuple[int, ...]:
    """Tokens of each completion of a step, prompt by prompt.

    heavy_tail: even quantiles of a Pareto distribution (shape 1.1), from 16 to the most, shuffled.
    geometric: even quantiles of a geometric distribution, its mean half of the most, shuffled.
    """
    max_tokens, rows = work.completion_tokens, work.rollouts
    quantiles = [(row + 0.5) / rows for row in range(rows)]
    match work.lengths:
        case "equal":
            return (max_tokens,) * rows
        case "heavy_tail":
            tokens = [min(max_tokens, int(16 * (1 - q) ** (-1 / 1.1))) for q in quantiles]
            tokens[0], tokens[-1] = 16, max_tokens
        case "geometric":
            tokens = [min(max_tokens, 1 + int(-max_tokens / 2 * math.log1p(-q))) for q in quantiles]
    random.Random(0).shuffle(tokens)
    return tuple(tokens)


def completions(work: Work, step: int) -> list[Ids]:
    """Random completions of the given lengths, in the order of the rollouts."""
    draw = random.Random(f"{work.seed}/completions/{step}")
    vocabulary = read_object(Path(work.model) / "config.json")["vocab_size"]
    return [
        (*(draw.randrange(300, vocabulary - 2) for _ in range(length - 1)), vocabulary - 1)
        for length in lengths(work)
    ]
