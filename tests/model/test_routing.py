"""Routers of a mixture of experts.

1. The balancing loss and its gradient are those of Transformers' own function: with padding, and
   with a prompt that packed rows share.
2. Micro-batches count by their tokens; the only difference is each one's own load of the experts.
3. A model without experts, and checkpoints that hand on no gradient, are refused in one line.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import families
from learners import learner, watch
from marks import most_are_long
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.errors import ConfigError
from reason_llm.model import Datum, Model, load_tokenizer
from reason_llm.model.layout import collate
from reason_llm.model.plan.backends import choose
from reason_llm.train.learner import Learners, learning

PROMPT = tuple(range(5, 25))


def rows() -> list[Datum]:
    answers = [(30, 31, 32), (40, 41), (50, 51, 52, 53), (60, 61, 62)]
    prompts = [PROMPT, PROMPT, PROMPT, PROMPT[::-1]]
    return [
        Datum.of(prompt, answer, str(i), columns={
            "sampler_logprobs": [-1.0] * len(answer), "advantages": [i - 1.5] * len(answer),
        })
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]  # fmt: skip


@pytest.fixture
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    path = families.make(tmp_path / "base", request.param)
    section = ModelSection(path=path, dtype="float32", adapter=AdapterSection(rank=4))
    with Model(section, load_tokenizer(path), seed=0) as made:
        families.randomize(made, 1)
        yield made


def gradient(
    model: Model, budget: int = 4096, **train: Any
) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of a step, and the gradient that its one optimizer step sees."""
    made = learner(model, budget=budget, learning_rate=0.0, max_grad_norm=1e9, **train)
    seen = watch(made)
    with learning(made):
        metrics = Learners(made).learn(0, rows(), lambda count: None)
    return metrics, seen[0][1]


def of_transformers(model: Model, data: list[Datum]) -> tuple[float, torch.Tensor]:
    """The loss of rows that are passed together, and its gradient, by Transformers alone."""
    ids, _ = collate(data, model.device)
    real = torch.tensor([[t < d.num_tokens for t in range(ids.shape[1])] for d in data])
    seen = model.decoder(input_ids=ids, attention_mask=real, output_router_logits=True)
    text = model.text_config
    count = getattr(text, "num_local_experts", None) or text.num_experts
    loss = load_balancing_loss_func(seen.router_logits, count, text.num_experts_per_tok, real)
    found = torch.autograd.grad(loss, model.parameters_of("policy"), allow_unused=True)
    pairs = zip(found, model.parameters_of("policy"), strict=True)
    flat = [torch.zeros_like(p) if g is None else g for g, p in pairs]
    return loss.item(), torch.cat([g.flatten() for g in flat])


@pytest.mark.parametrize("model", most_are_long(families.MIXTURES, ["olmoe"]), indirect=True)
@pytest.mark.parametrize("checkpointing", most_are_long([True, False], [True]))
def test_the_balancing_loss_is_that_of_transformers(model: Model, checkpointing: bool) -> None:
    whole, of_whole = of_transformers(model, rows())
    each = [of_transformers(model, [row]) for row in rows()]
    parts = [row.num_tokens / sum(row.num_tokens for row in rows()) for row in rows()]
    split = sum(part * loss for part, (loss, _) in zip(parts, each, strict=True))
    of_split = sum(part * found for part, (_, found) in zip(parts, each, strict=True))
    layouts = ["padded"] if model.text_config.model_type == "gpt_oss" else ["padded", "varlen"]
    for packing in layouts:
        options = {"packing": packing, "gradient_checkpointing": checkpointing}
        without, plain = gradient(model, **options)
        assert "train/router_aux_loss" not in without
        for budget, loss, expected in ((4096, whole, of_whole), (1, split, of_split)):
            _, plain = gradient(model, budget, **options)
            metrics, found = gradient(model, budget, router_aux_loss_coef=0.7, **options)
            assert metrics["train/router_aux_loss"] == pytest.approx(loss, rel=1e-4)
            difference = metrics["train/loss"] - without["train/loss"]
            assert difference == pytest.approx(0.7 * loss, rel=1e-3)
            assert (found - plain - 0.7 * expected).norm() < 1e-4 * (0.7 * expected).norm()


def test_what_cannot_be_balanced_is_one_line() -> None:
    asked = {"data": {"train": "a.jsonl"}, "train": {"router_aux_loss_coef": 0.01}}
    with pytest.raises(ConfigError, match=r"coef=0\.01 contradicts model_type=qwen2: .*; leave"):
        choose(Config.model_validate(asked), Qwen2Config(), torch.device("cpu"))
    asked["train"]["gradient_checkpointing"] = "offload"
    with pytest.raises(ValueError, match=r"coef=0\.01 contradicts .*offload.*; set grad"):
        Config.model_validate(asked)
