"""QLoRA on a GPU: the packed bytes are vLLM's, and stay as they are while the adapter learns.

1. Every packed byte is shared and the checkpoint's; release and wake leave the views as they are.
2. The canary; learning in micro-batches on the default stream, where bitsandbytes works.
3. No split into micro-batches changes the gradient.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from safetensors import safe_open

from gpu_runs import NEEDS_GPU, Stage, logits, quiet, randomize, stage
from learners import scored
from reason_llm.model import nf4
from reason_llm.model.datum import to_data
from reason_llm.model.vllm import shared_weights
from reason_llm.model.vllm.engine import on_default_stream
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling
from reason_llm.train.learner import Learner, Learners, learning

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def shared_stage(half_billion: str) -> Iterator[Stage]:
    with stage(half_billion, quantize="nf4") as made:
        yield made


@pytest.fixture
def run(shared_stage: Stage) -> Stage:
    randomize(shared_stage.model, seed=1)
    shared_stage.engine.wake()
    return shared_stage


def test_every_packed_byte_is_vllm_s_and_the_checkpoint_s(run: Stage) -> None:
    base = run.model.policy.get_base_model()
    packed = {n: m for n, m in base.named_modules() if isinstance(m, Linear4bit)}
    layers = list(packed.values())
    assert len(layers) == 7 * run.model.text_config.num_hidden_layers
    theirs = {p.untyped_storage().data_ptr() for p in run.engine.module.parameters()}
    assert all(layer.weight.untyped_storage().data_ptr() in theirs for layer in layers)
    (file,) = shared_weights.checkpoint_files(run.model.path)
    with on_default_stream(), safe_open(file, framework="pt") as opened:
        for name, layer in packed.items():
            stored = opened.get_tensor(f"{name.replace('.base_layer', '')}.weight")
            assert nf4.matches(layer, stored)


def test_the_views_outlive_release_and_wake(run: Stage) -> None:
    expected = logits(run.model)
    for _ in range(3):
        run.engine.release()
        assert torch.equal(logits(run.model), expected)
        run.engine.wake()
        assert torch.equal(logits(run.model), expected)


def test_the_canary_passes_and_learning_leaves_the_base_alone(run: Stage) -> None:
    # .data: Params4bit.cpu() would move the state that vLLM's own weight shares.
    base = [p.data.cpu() for p in run.model.policy.parameters() if not p.requires_grad]
    before = [p.detach().clone() for p in run.learner.parameters]
    for step in range(3):
        with sampling(run.model, 0) as sampler:
            print(prove_sampler_is_policy(sampler, run.model, run.prompts))
            groups = sampler.sample(run.prompts, SamplingParams(4, 64), step, quiet)
        with learning(run.learner):
            stream = torch.cuda.current_stream()
            assert stream == torch.cuda.default_stream()
            metrics = Learners(run.learner).learn(step, to_data(scored(groups)), lambda items: None)
        assert metrics["train/grad_norm"] > 0
    frozen = [p for p in run.model.policy.parameters() if not p.requires_grad]
    assert all(torch.equal(a, b.data.cpu()) for a, b in zip(base, frozen, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, run.learner.parameters, strict=True))
    with sampling(run.model, 0) as sampler:
        prove_sampler_is_policy(sampler, run.model, run.prompts)


def test_micro_batches_change_no_gradient(run: Stage) -> None:
    """A race between streams would show as another gradient, now and then."""
    with sampling(run.model, 0) as sampler:
        groups = scored(sampler.sample(run.prompts[:4], SamplingParams(4, 64), 0, quiet))
    gradients = []
    for tokens in (300, 300, 300, 4096):
        settings = replace(run.learner.settings, micro_batch_tokens=tokens)
        learner = Learner(run.model, settings)
        learner.optimizer.register_step_pre_hook(
            lambda *_, learner=learner: gradients.append(
                torch.cat([p.grad.flatten() for p in learner.parameters]).clone()
            )
        )
        values = [p.detach().clone() for p in learner.parameters]
        with learning(learner):
            Learners(learner).learn(0, to_data(groups), lambda items: None)
        for parameter, value in zip(learner.parameters, values, strict=True):
            parameter.data.copy_(value)
    for other in gradients[1:]:
        away = float((other - gradients[0]).norm() / gradients[0].norm())
        print(f"gradients differ by {away:.2e} of their norm")
        assert away < 0.02
