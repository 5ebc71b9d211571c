"""What the tests on a GPU share: a model of 0.5 B parameters made on the spot, and its phases."""

import contextlib
import gc
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from conftest import TINY
from reason_llm import memory
from reason_llm.config import Config
from reason_llm.machine import Machine
from reason_llm.memory import Plan
from reason_llm.meter import Meter
from reason_llm.model.base import Model, default_device, load_tokenizer, meta_model
from reason_llm.model.shape import Shape
from reason_llm.rollout import Group, Prompt
from reason_llm.sample import SamplingParams
from reason_llm.train.algorithms import ALGORITHMS
from reason_llm.train.phase import Learner, LearningSettings
from reason_llm.train.preparation import with_advantages

NEEDS_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA GPU with vLLM; this machine has none"
    ),
    pytest.mark.filterwarnings("default"),  # vLLM and bitsandbytes warn of their own
    pytest.mark.timeout(900),
]
HALF_BILLION = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
}
"""Qwen2.5-0.5B's shape."""
BUDGET_GIB = 12.0
PROMPT_TOKENS, COMPLETION_TOKENS = 200, 312
"""Prompts longer than a block of vLLM's cache, so that prefixes are cached."""
PROMPTS, COMPLETIONS = 16, 8
ROW = replace(ALGORITHMS["grpo"], kl="none", kl_coefficient=0.0, correction="token_truncate")


def make_model(folder: Path, sizes: dict[str, int] = HALF_BILLION) -> str:
    """A random bfloat16 model of these sizes, with the tiny model's tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        **sizes, max_position_embeddings=4096, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    with torch.device(default_device()):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # so that some tokens are far likelier than others
            torch.nn.init.normal_(parameter, std=config.hidden_size**-0.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).write_bytes((TINY / name).read_bytes())
    return str(folder)


@dataclass(slots=True)
class Stage:
    """A model under vLLM with the sizes of its plan, its learner, and a meter from before both."""

    config: Config
    plan: Plan
    meter: Meter
    model: Model
    learner: Learner
    prompts: list[Prompt]

    @property
    def engine(self) -> Any:
        assert self.model.engine is not None
        return self.model.engine

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(COMPLETIONS, COMPLETION_TOKENS)


@contextlib.contextmanager
def stage(path: str, quantize: str = "none", **train: Any) -> Iterator[Stage]:
    """Planned, loaded, and closed at the end, as ``loop`` does it."""
    config = Config.model_validate(
        {
            "model": {
                "path": path,
                "dtype": "bfloat16",
                "quantize": quantize,
                "adapter": {"rank": 8, "alpha": 16},
            },
            "data": {"train": "none.jsonl"},
            "sample": {
                "engine": "vllm",
                "prompts_per_step": PROMPTS,
                "completions_per_prompt": COMPLETIONS,
                "max_new_tokens": COMPLETION_TOKENS,
            },
            "train": {"learning_rate": 1e-4, "packing": "varlen", **train},
            "memory": {"budget_gib": BUDGET_GIB},
        }
    )
    meter = Meter(default_device())
    shape = Shape.of(meta_model(config.model))
    machine = Machine.here(config, default_device())
    plan = memory.plan(config, shape, machine, 4096, PROMPT_TOKENS)
    with Model(config.model, load_tokenizer(path), 0, plan.engine) as model:
        settings = LearningSettings(
            ROW, config.train, 1.0, COMPLETION_TOKENS, plan.micro_batch_tokens, 0, 100,
            plan.chunk_tokens,
        )  # fmt: skip
        learner = Learner(model, settings)
        yield Stage(config, plan, meter, model, learner, make_prompts(model))
    gc.collect()


def make_prompts(model: Model) -> list[Prompt]:
    """Random token ids that are no end of an answer."""
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.head.weight.shape[0]
    rows = torch.randint(8, vocabulary, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()
    return [Prompt(str(i), "", tuple(row), "") for i, row in enumerate(rows)]


def randomize(model: Model, seed: int) -> None:
    """An adapter that changes each layer's output by a tenth, another one for each seed."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.policy.named_parameters():
        if parameter.requires_grad:
            scale = 0.05 if "lora_B" in name else 0.4 * parameter.shape[1] ** -0.5
            parameter.data.copy_(scale * torch.randn(parameter.shape, generator=generator))


def scored(groups: Sequence[Group]) -> list[Group]:
    """With a reward that differs within each group, and its advantages."""
    return with_advantages(
        [
            replace(
                g,
                completions=tuple(replace(c, reward=float(i)) for i, c in enumerate(g.completions)),
            )
            for g in groups
        ],
        ROW,
    )


@torch.no_grad()
def logits(model: Model) -> torch.Tensor:
    """Of the learner, over its views of vLLM's weights, for one fixed row."""
    ids_BT = torch.arange(8, 72, device=model.device)[None]
    return model.logits(model.hidden_states(ids_BT)).clone()


def quiet(tokens: int, items: int) -> None:
    """Progress that nobody watches."""


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
