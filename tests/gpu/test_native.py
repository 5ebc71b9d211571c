"""One copy of the weights on a GPU, in bfloat16, with CUDA graphs and asynchronous scheduling.

1. Release and wake: the KV cache's memory comes back, the views stay as they are.
2. Sync: what is sampled follows the adapter under CUDA graphs; the canary, in numbers.
3. Drain: release directly after sampling, and after sampling that was broken off.
4. Learning: gradients in float32 under autocast, base unchanged; rows end to end give the gradient
   of padded ones, and how much faster.
5. The plan against what is measured; the seconds of a switch between the phases.
"""

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from gpu_runs import COMPLETIONS, NEEDS_GPU, Stage, logits, median, quiet, randomize, stage
from learners import scored
from reason_llm.errors import TrainingError
from reason_llm.model import layout as layouts
from reason_llm.model.attention import attend
from reason_llm.model.canary import CANARY_TOLERANCE, prove_packing
from reason_llm.model.datum import Datum, to_data
from reason_llm.model.vllm.engine import free_gpu_bytes
from reason_llm.sample import SamplingParams, VllmSampler, prove_sampler_is_policy, sampling
from reason_llm.train.learner import Learner, Learners, learning

pytestmark = NEEDS_GPU


@pytest.fixture(scope="module")
def shared_stage(half_billion: str) -> Iterator[Stage]:
    with stage(half_billion) as made:
        yield made


@pytest.fixture
def run(shared_stage: Stage) -> Stage:
    randomize(shared_stage.model, seed=1)
    shared_stage.engine.wake()
    return shared_stage


def test_the_memory_comes_back_and_the_views_stay_bitwise(run: Stage) -> None:
    expected = logits(run.model)
    for cycle in range(3):
        with sampling(run.model, 0) as sampler:
            sampler.sample(run.prompts, SamplingParams(2, 32), cycle, quiet)
        torch.cuda.empty_cache()
        free = free_gpu_bytes()
        run.engine.release()
        gained = free_gpu_bytes() - free
        print(f"cycle {cycle}: {gained:,} of {run.engine.kv_cache_bytes:,} bytes came back")
        assert gained >= 0.9 * run.engine.kv_cache_bytes
        assert torch.equal(logits(run.model), expected)
        # What came back can be used, and using it harms no weight.
        used = torch.full((int(0.8 * gained),), 255, dtype=torch.uint8, device=run.model.device)
        assert torch.equal(logits(run.model), expected)
        del used
        torch.cuda.empty_cache()
        run.engine.wake()
        assert torch.equal(logits(run.model), expected)


def test_what_is_sampled_follows_the_adapter_under_cuda_graphs(run: Stage) -> None:
    config = run.engine.llm.llm_engine.vllm_config
    print(config.compilation_config.cudagraph_mode, config.scheduler_config.async_scheduling)
    assert not config.model_config.enforce_eager
    greedy = SamplingParams(1, 32, temperature=0.0)
    seen = set()
    for seed in range(4):
        randomize(run.model, seed)
        with sampling(run.model, 0) as sampler:
            groups = sampler.sample(run.prompts, greedy, 0, quiet)
            print(prove_sampler_is_policy(sampler, run.model, run.prompts))
        seen.add(tuple(group.completions[0].token_ids for group in groups))
    assert len(seen) == 4
    for parameter in run.learner.parameters[1::2]:  # every B
        parameter.data.mul_(-1)
    with pytest.raises(TrainingError, match="not the policy"):
        prove_sampler_is_policy(VllmSampler(run.model), run.model, run.prompts)
    with sampling(run.model, 0) as sampler:
        prove_sampler_is_policy(sampler, run.model, run.prompts)


def test_the_canary_in_bfloat16(run: Stage) -> None:
    """How far the tolerance is from what rounding gives, over several adapters."""
    found = []
    for seed in range(8):
        randomize(run.model, seed)
        with sampling(run.model, 0) as sampler:
            found.append(prove_sampler_is_policy(sampler, run.model, run.prompts))
    means = [values["sample/canary_difference"] for values in found]
    largest = [values["sample/canary_difference_max"] for values in found]
    print(f"mean {max(means):.4f} of {CANARY_TOLERANCE[torch.bfloat16][0]}")
    print(f"largest {max(largest):.4f} of {CANARY_TOLERANCE[torch.bfloat16][1]}")
    assert max(means) < 0.8 * CANARY_TOLERANCE[torch.bfloat16][0]


def test_release_directly_after_sampling(run: Stage) -> None:
    for seed in range(3):
        with sampling(run.model, 0) as sampler:
            sampler.sample(run.prompts, SamplingParams(8, 16), seed, quiet)
        run.engine.release()
        assert not run.engine.awake


def test_release_after_sampling_that_was_broken_off(run: Stage) -> None:
    def stop(tokens: int, items: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sampling(run.model, 0) as sampler:
        # Twice what is decoded at once: the first half ends while the other is under way.
        twice = SamplingParams(2 * COMPLETIONS, 64)
        sampler.sample(run.prompts, twice, 0, stop)
    expected = logits(run.model)
    run.engine.release()
    assert torch.equal(logits(run.model), expected)
    with sampling(run.model, 0) as sampler:
        prove_sampler_is_policy(sampler, run.model, run.prompts)
        groups = sampler.sample(run.prompts, SamplingParams(8, 16), 0, quiet)
    assert [len(group.completions) for group in groups] == [8] * len(run.prompts)


def test_learning_moves_the_adapter_in_float32_and_nothing_else(run: Stage) -> None:
    frozen = [p for p in run.model.policy.parameters() if not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16}
    base = [p.detach().cpu() for p in frozen]
    before = [p.detach().clone() for p in run.learner.parameters]
    seen: list[tuple[set[torch.dtype], float]] = []
    run.learner.optimizer.register_step_pre_hook(
        lambda *_: seen.append(
            (
                {p.grad.dtype for p in run.learner.parameters},
                min(float(p.grad.norm()) for p in run.learner.parameters),
            )
        )
    )
    for step in range(2):
        with sampling(run.model, 0) as sampler:
            groups = sampler.sample(run.prompts, SamplingParams(4, 64), step, quiet)
        with learning(run.learner):
            metrics = Learners(run.learner).learn(step, to_data(scored(groups)), lambda items: None)
    assert {p.dtype for p in run.learner.parameters} == {torch.float32}
    assert [kinds for kinds, _ in seen] == [{torch.float32}] * 2
    assert all(smallest > 0 for _, smallest in seen)
    assert not any(torch.equal(a, b) for a, b in zip(before, run.learner.parameters, strict=True))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(base, frozen, strict=True))
    print(f"mismatch of a step's log-probs {metrics['train/sampler_mismatch_max']:.3f}")


@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize(("heads", "size"), [((14, 2), 64), ((8, 8), 96), ((4, 1), 256)])
def test_flash_attention_of_segments_is_that_of_the_reference(
    window: int | None, heads: tuple[int, int], size: int
) -> None:
    """torch's varlen operator in bfloat16 against each segment by itself in float32: shared
    prompts are aligned to the end of their keys, a window counts a token's own key."""
    generator = torch.Generator().manual_seed(0)
    prompt, other = tuple(range(130)), (7,)
    rows = [Datum.of(p, (5,) * n) for p, n in ((prompt, 70), (other, 300), (prompt, 1),
                                                           (prompt, 129), (other, 64))]  # fmt: skip
    gpu = torch.device("cuda")
    here, there = (layouts.lay_out(rows, device).segments for device in (torch.device("cpu"), gpu))
    tokens = sum(here.query_lengths)
    made = [
        torch.randn(1, n, tokens, size, generator=generator).bfloat16()
        for n in (heads[0], heads[1], heads[1])
    ]
    ours = [x.to(gpu).requires_grad_() for x in made]
    theirs = [x.float().requires_grad_() for x in made]
    found = attend(*ours, there, size**-0.5, window)
    expected = attend(*theirs, here, size**-0.5, window)
    assert (found.float().cpu() - expected).abs().max() < 0.03
    weights = torch.randn(expected.shape, generator=generator)
    (found.float() * weights.to(gpu)).sum().backward()
    (expected * weights).sum().backward()
    for mine, other_ in zip(ours, theirs, strict=True):
        assert mine.grad is not None
        assert other_.grad is not None
        # With one key a query, what its weight is does not follow from it: then both are rounding.
        size_of_both = max(other_.grad.norm(), 0.001 * weights.norm())
        assert (mine.grad.float().cpu() - other_.grad).norm() / size_of_both < 0.02


def test_rows_end_to_end_give_the_gradient_of_padded_ones(run: Stage) -> None:
    with sampling(run.model, 0) as sampler:
        groups = scored(sampler.sample(run.prompts, run.params, 0, quiet))
    found: dict[str, torch.Tensor] = {}
    seconds: dict[str, list[float]] = {"padded": [], "varlen": []}
    prove_packing(run.model)
    for name in ("padded", "varlen", "padded", "varlen", "padded", "varlen"):
        train = run.learner.settings.train.model_copy(
            update={"packing": name, "learning_rate": 0.0, "max_grad_norm": 1e9}
        )
        learner = Learner(run.model, replace(run.learner.settings, train=train))
        seen: list[torch.Tensor] = []
        learner.optimizer.register_step_pre_hook(
            lambda *_, learner=learner, seen=seen: seen.append(
                torch.cat([p.grad.flatten() for p in learner.parameters]).clone()
            )
        )
        with learning(learner):
            free_gpu_bytes()  # waits for the GPU
            started = time.perf_counter()
            Learners(learner).learn(0, to_data(groups), lambda items: None)
            free_gpu_bytes()
            seconds[name].append(time.perf_counter() - started)
        found[name] = seen[0]
    print({name: f"{median(values):.2f} s" for name, values in seconds.items()})
    difference = (found["varlen"] - found["padded"]).norm() / found["padded"].norm()
    print(f"gradients differ by {float(difference):.4f}")
    assert difference < 0.05


def test_the_plan_is_what_is_measured(run: Stage) -> None:
    assert run.plan.machine.kind == run.model.device.type
    with sampling(run.model, 0) as sampler, run.meter.phase() as sampled:
        groups = sampler.sample(run.prompts, run.params, 0, quiet)
    with learning(run.learner), run.meter.phase() as learned:
        Learners(run.learner).learn(0, to_data(scored(groups)), lambda items: None)
    planned = (run.plan.peak.sampling / 2**30, run.plan.peak.learning / 2**30)
    for line in run.plan.table():
        print(line)
    print(f"sampling: {sampled.gib:.2f} GiB of {planned[0]:.2f} planned")
    print(f"learning: {learned.gib:.2f} GiB of {planned[1]:.2f} planned")
    # The plan's constants are those of 7 B, where it is within 4 %: a small model takes less.
    for measured, wanted in zip((sampled.gib, learned.gib), planned, strict=True):
        assert wanted - 1 < measured < 1.05 * wanted


def test_a_switch_of_the_phases_takes_less_than_three_seconds(run: Stage) -> None:
    seconds: dict[str, list[float]] = {"release": [], "wake": [], "sync": []}
    assert run.model.sync is not None
    for _ in range(5):
        for name, act in (
            ("release", run.engine.release),
            ("wake", run.engine.wake),
            ("sync", run.model.sync),
        ):
            free_gpu_bytes()  # waits for the GPU
            started = time.perf_counter()
            act()
            free_gpu_bytes()
            seconds[name].append(time.perf_counter() - started)
    print({name: f"{median(values):.3f} s" for name, values in seconds.items()})
    assert sum(median(values) for values in seconds.values()) < 3
