"""Routers of a mixture of experts.

1. The balancing loss and its gradient are those of Transformers' own function: with padding, and
   with a prompt that packed rows share.
2. Micro-batches count by their tokens; the only difference is each one's own load of the experts.
3. The sampler's routes are those of the learner's own pass; replayed ones reach the experts with
   the router's own weights, in any layout and in the recomputation of a checkpoint.
4. Routes are read back as they were written; damaged, foreign or missing ones are refused.
5. A run that was killed as it learned ends with the same bits (long).
6. vLLM's routes on a GPU are taken from the layers with a router.
7. A model without experts, and checkpoints that hand on no gradient, are refused in one line.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from transformers import OlmoeConfig, Qwen2Config
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

import families
from learners import learner, scored, watch
from marks import most_are_long
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.errors import ConfigError, RolloutBufferError
from reason_llm.loop import train
from reason_llm.model import Datum, Model, load_tokenizer, routing, to_data
from reason_llm.model.layout import collate
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.plan import backends
from reason_llm.model.plan.backends import choose
from reason_llm.rollout import Group, group_from_json, routes_from_text
from reason_llm.sample import SamplingParams, VllmSampler, sampling
from reason_llm.train.learner import Learner, Learners, learning

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


def sampled(model: Model) -> list[Group]:
    prompts = families.prompts_of(model.tokenizer, "What is 3 + 4?", "Why?")
    with sampling(model, 10**6) as sampler:
        params = SamplingParams(3, 9, routes=True)
        return scored(sampler.sample(prompts, params, 3, families.quiet))


def replaying(model: Model, packing: str, **train: Any) -> Learner:
    return learner(model, router_replay=True, packing=packing, learning_rate=0.0, **train)


@pytest.mark.parametrize("model", most_are_long(families.MIXTURES, ["qwen3_moe"]), indirect=True)
def test_the_sampler_s_routes_are_replayed(model: Model) -> None:
    data = to_data(sampled(model))
    reported = torch.cat([row.on_trained("sampler_logprobs") for row in data])
    others = [replace(row, routes=(row.routes + 1) % 4) for row in data]  # type: ignore[operator]
    is_packed = model.text_config.model_type != "gpt_oss"
    changed, gradients = [], []
    for packing, checkpointing in (("padded", False), ("varlen" if is_packed else "padded", True)):
        made = replaying(model, packing, gradient_checkpointing=checkpointing)
        same, _ = made.measure(data, "policy")
        assert (torch.cat(same) - reported).abs().max() < 5e-5
        moved, _ = made.measure(others, "policy")
        assert (torch.cat(moved) - reported).abs().max() > 1e-3
        made.measure(others, "reference")  # whose routes are its own
        changed.append(torch.cat(moved))
        seen = watch(made)
        with learning(made):
            metrics = Learners(made).learn(0, others, lambda count: None)
        assert metrics["train/route_agreement"] < 0.5
        gradients.append(seen[0][1])
    assert (changed[0] - changed[1]).abs().max() < 5e-5
    assert (gradients[0] - gradients[1]).norm() < 1e-4 * gradients[0].norm()
    for row, found in zip(
        others, changed[0].split([row.num_trained for row in others]), strict=True
    ):
        with by_hand(model, row.routes):
            ids, mask = collate([row], model.device)
            expected, _ = policy_logprobs(model, ids[:, :-1], mask[:, :-1], 1.0)
        torch.testing.assert_close(found[:-1], expected[mask[:, :-1]], atol=5e-5, rtol=0)


@contextmanager
def by_hand(model: Model, routes: Any) -> Iterator[None]:
    """The experts take these routes, with the softmax over their logits alone as weights (or, where
    a router does not normalise, over all)."""
    made, hooks = routing.routers(model.policy), []
    holders = [m for m in model.policy.modules() if type(m).__name__.endswith("Experts")]
    for place, (router, experts) in enumerate(zip(made, holders, strict=True)):
        given = routes.unflatten(-1, (len(made), -1))[:, place]

        def take(module: Any, args: Any, router: Any = router, given: Any = given) -> Any:
            bias = getattr(router, "bias", None)
            logits = torch.nn.functional.linear(args[0], router.weight, bias)
            weights = logits.gather(-1, given).softmax(-1)
            if not getattr(router, "norm_topk_prob", True):
                weights = logits.softmax(-1).gather(-1, given)
            return args[0], given, weights

        hooks.append(experts.register_forward_pre_hook(take))
    try:
        with torch.no_grad():
            yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("model", ["olmoe"], indirect=True)
def test_routes_are_read_as_written_or_refused(model: Model) -> None:
    (group, *_) = sampled(model)
    first = group.completions[0]
    assert group_from_json(orjson.loads(orjson.dumps(group))) == group
    for text in ("AA==", "?", "", str(first.routes)[:-8]):
        spoilt = replace(group, completions=(replace(first, routes=text),))
        with pytest.raises(ValueError):
            group_from_json(orjson.loads(orjson.dumps(spoilt)))
    made, (row, *_) = replaying(model, "padded"), to_data([group])
    assert row.routes is not None
    for routes, said in (
        (None, "no routes"), (row.routes * 0 + 4, "another model's routes"),
        (row.routes[:, :-1], "another model's routes"),
    ):  # fmt: skip
        with pytest.raises(
            RolloutBufferError, match=rf"{said}, which train\.router_replay=true"
        ) as e:
            made.measure([replace(row, routes=routes)], "policy")
        assert "\n" not in str(e.value)


@pytest.mark.long
def test_a_killed_run_ends_with_the_same_bits(
    small_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text("def mine(token_ids):\n    return sum(token_ids) % 7 / 7\n")
    path = families.make(tmp_path / "base", "olmoe")
    options = {
        "model": {"path": path, "dtype": "float32", "context_tokens": 256},
        "train__router_replay": True, "train__optimizer_steps": 2, "sample__max_new_tokens": 8,
        "score__rewards": [{"custom": f"{reward}:mine"}], "train__learning_rate": 1e-2,
    }  # fmt: skip

    def adapter(name: str) -> bytes:
        train(small_run(**options, run__name=name, run__buffer=str(tmp_path / f"{name}.json")))
        return (tmp_path / "runs" / name / "adapter" / "adapter_model.safetensors").read_bytes()

    whole, taken = adapter("whole"), []
    original = Learner._update

    def dies(self: Learner, step: int, *rest: Any) -> Any:
        taken.append(step)
        if len(taken) == 4:  # the second update of the second step
            raise ZeroDivisionError
        return original(self, step, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(Learner, "_update", dies)
        with pytest.raises(ZeroDivisionError):
            adapter("killed")
    assert adapter("killed") == whole


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_the_routes_of_vllm_on_a_gpu(model: Model) -> None:
    """In the form of its docstring: (tokens, layers, K), layers without experts among them."""
    assert routing.layers(model.policy) == [0, 1]
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.model = model
    experts = np.arange(20).reshape(5, 2, 2) % 4
    entries = [{7: SimpleNamespace(logprob=-1.0)}, {2: SimpleNamespace(logprob=-2.0)}]
    found = sampler._completion(SimpleNamespace(
        token_ids=[7, 2], logprobs=entries, finish_reason="stop", routed_experts=experts
    ))  # fmt: skip
    assert routes_from_text(str(found.routes), 5).tolist() == experts.reshape(5, 4).tolist()


def test_what_cannot_be_replayed_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {"data": {"train": "a.jsonl"}, "train": {"router_replay": True}}
    with pytest.raises(ConfigError, match=r"replay=True contradicts model_type=qwen2: .*; leave"):
        choose(Config.model_validate(asked), Qwen2Config(), torch.device("cpu"))
    vllm = Config.model_validate(asked | {"sample": {"engine": "vllm"}})
    monkeypatch.setattr(backends, "_is_installed", lambda name: True)
    with pytest.raises(ConfigError, match=r"replay=true contradicts sample\.engine=vllm .* Triton"):
        choose(vllm, OlmoeConfig(), torch.device("cpu"))
    for more in ({"stage": "sft"}, {"sample": {"environment": "a.py:A"}}):
        with pytest.raises(ValueError, match=r"replay=true contradicts stage=.*; leave it out"):
            Config.model_validate(asked | more)


def test_what_cannot_be_balanced_is_one_line() -> None:
    asked = {"data": {"train": "a.jsonl"}, "train": {"router_aux_loss_coef": 0.01}}
    with pytest.raises(ConfigError, match=r"coef=0\.01 contradicts model_type=qwen2: .*; leave"):
        choose(Config.model_validate(asked), Qwen2Config(), torch.device("cpu"))
    asked["train"]["gradient_checkpointing"] = "offload"
    with pytest.raises(ValueError, match=r"coef=0\.01 contradicts .*offload.*; set grad"):
        Config.model_validate(asked)
