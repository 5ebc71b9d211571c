"""One copy of the weights under the real vLLM and the learner, on the CPU.

1. Every family: same storage, bitwise the checkpoint, logits bitwise those of an ordinary load.
2. Learning: gradients on the adapter alone, base bitwise unchanged after 20 phases.
3. Sync: tokens and log-probs equal the learner's after each of 20; what goes wrong is caught.
4. Phases: asleep means no sampling; any order, twice, or an exception leaves a usable state.
5. Memory: the learner over vLLM's weights adds little.
"""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conftest import ROOT, TINY
from families import (
    FAMILIES,
    MIXTURES,
    SIZES,
    TODAY,
    changed,
    make,
    make_model,
    prompts_of,
    quiet,
    randomize,
)
from learners import ROW, scored
from marks import most_are_long
from reason_llm.config import AdapterSection, ModelSection, TrainSection
from reason_llm.errors import ModelError, TrainingError
from reason_llm.model import adapters, layout as layouts
from reason_llm.model.base import Model, check_model, decode, load_tokenizer, read_config
from reason_llm.model.datum import to_data
from reason_llm.model.families import WITHOUT_VLLM
from reason_llm.model.logprobs import policy_logprobs
from reason_llm.model.plan.backends import IMPORTING
from reason_llm.model.plan.shape import Shape
from reason_llm.model.routing import routers
from reason_llm.model.vllm import engine, shared_weights
from reason_llm.rollout import Prompt
from reason_llm.sample import (
    SamplingParams,
    TransformersSampler,
    VllmSampler,
    phase,
    prove_sampler_is_policy,
    sampling,
)
from reason_llm.sample.transformers_sampler import filtered_logprobs
from reason_llm.train.learner import Learner, Learners, LearningSettings, learning
from reason_llm.train.objectives import PolicyGradient

pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")

# vLLM, not this project, warns of deprecations in what it imports.
pytestmark = pytest.mark.filterwarnings("default")


SYNCED = [("phi3", False, "float32"), ("gemma2", True, "float32"), ("llama", False, "bfloat16")]
"""Families whose weights are compared together with an adapter, in one start of the engine."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "tied", "dtype"), [each for each in FAMILIES if each not in SYNCED]
)
def test_every_family_shares_every_weight(
    family: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    path = str(make_model(tmp_path / family, family, tied, dtype))
    kind = getattr(torch, dtype)
    preloaded = os.environ.get("LD_PRELOAD")
    started = engine.start(path, kind, SIZES, seed=0)
    assert os.environ.get("LD_PRELOAD") == preloaded  # or any program started later would load it
    model = shared_weights.model_over(started, read_config(path), kind)
    storages = {p.untyped_storage().data_ptr() for p in started.module.parameters()}
    assert all(p.untyped_storage().data_ptr() in storages for p in model.parameters())
    assert shared_weights.verify(model, path) >= 12
    ordinary = AutoModelForCausalLM.from_pretrained(
        path, dtype=kind, attn_implementation=shared_weights.attention_for(model.config)
    )
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, ordinary(input_ids=ids).logits)
        next(iter(model.parameters())).view(-1)[3] += 1
    with pytest.raises(ModelError, match="differs from"):
        shared_weights.verify(model, path)
    del model
    started.close()


@pytest.mark.long
@pytest.mark.parametrize("is_copy", [False, True])
def test_a_head_in_the_file_counts_though_the_config_ties_it(is_copy: bool, tmp_path: Path) -> None:
    path = str(make_model(tmp_path / "model", "qwen2", False, "float32"))
    changed(path, tie_word_embeddings=True)
    file = tmp_path / "model" / "model.safetensors"
    stored = load_file(file)
    if is_copy:
        stored["lm_head.weight"] = stored["model.embed_tokens.weight"].clone()
        save_file(stored, file, metadata={"format": "pt"})
    started = engine.start(path, torch.float32, SIZES, seed=0)
    model = shared_weights.model_over(started, read_config(path), torch.float32)
    assert shared_weights.verify(model, path) >= 12
    head, embedding = model.lm_head.weight, model.model.embed_tokens.weight
    assert torch.equal(head, stored["lm_head.weight"])
    assert (head.data_ptr() == embedding.data_ptr()) == is_copy
    ordinary = AutoModelForCausalLM.from_pretrained(
        path, attn_implementation=shared_weights.attention_for(model.config)
    )
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).logits, ordinary(input_ids=ids).logits)
    del model, head, embedding
    started.close()


@pytest.mark.long
@pytest.mark.parametrize(("family", "tied", "dtype"), SYNCED)
def test_every_family_shares_every_weight_and_its_adapter_is_synced(
    family: str, tied: bool, dtype: str, tmp_path: Path
) -> None:
    path = str(make_model(tmp_path / family, family, tied, dtype, 320))
    adapter = AdapterSection(rank=8, alpha=16)
    section = ModelSection(path=path, dtype=dtype, adapter=adapter)  # type: ignore[arg-type]
    prompts = [Prompt(str(i), "", tuple(range(3 + i, 20 + i)), "") for i in range(4)]
    with Model(section, load_tokenizer(path), 0, SIZES) as model:  # bitwise the checkpoint
        assert model.engine is not None
        storages = {p.untyped_storage().data_ptr() for p in model.engine.module.parameters()}
        base = [p for p in model.policy.parameters() if not p.requires_grad]
        assert all(p.untyped_storage().data_ptr() in storages for p in base)
        randomize(model, seed=3)
        with sampling(model, 0) as sampler:
            prove_sampler_is_policy(sampler, model, prompts)
            randomize(model, seed=4)
            with pytest.raises(TrainingError, match="not the policy"):
                prove_sampler_is_policy(sampler, model, prompts)
        ordinary = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=getattr(torch, dtype),
            attn_implementation=shared_weights.attention_for(model.text_config),
        )
        ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
        with torch.no_grad(), adapters.reference(model.policy):
            assert torch.equal(model.policy(input_ids=ids).logits, ordinary(input_ids=ids).logits)
        del sampler, base
    gc.collect()


def other_experts(router: Any, args: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a router gives, with two other experts of four."""
    logits, weights, _ = output
    return logits, weights, logits.topk(2, largest=False).indices


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [name for name in TODAY if name not in WITHOUT_VLLM and name not in IMPORTING]
)
def test_the_families_of_today_share_and_agree(name: str, tmp_path: Path) -> None:
    """Every weight is vLLM's own and the checkpoint's, bitwise; the sampler's log-probs are the
    learner's, with an adapter that changes them."""
    path = make(tmp_path / name, name)
    section = ModelSection(path=path, dtype="float32", adapter=AdapterSection(rank=8, alpha=16))
    sizes = replace(SIZES, lora_targets=Shape.of(check_model(section)).adapted)
    tokenizer = load_tokenizer(path)
    with Model(section, tokenizer, 0, sizes) as model:
        assert model.engine is not None
        storages = {p.untyped_storage().data_ptr() for p in model.engine.module.parameters()}
        named = model.policy.named_parameters()
        base = [p for n, p in named if not (p.requires_grad or n.endswith(shared_weights.DECAY))]
        assert all(p.untyped_storage().data_ptr() in storages for p in base)
        randomize(model, seed=1)
        with sampling(model, 0) as sampler:
            prompts = prompts_of(tokenizer, "What is 3 + 4?", "Why?")
            if name in MIXTURES:
                proof = prove_sampler_is_policy(sampler, model, prompts)
                assert proof["sample/route_agreement"] == 1  # in float32
                with routers(model.policy)[1].register_forward_hook(other_experts):
                    once = sampler.sample(prompts, SamplingParams(1, 8), 3, quiet)
                    assert phase._route_agreement(sampler, model, once) == 0.5  # of two layers
            rollouts = to_data(sampler.sample(prompts, SamplingParams(4, 24, 0.9), 3, quiet))
        ids, mask = layouts.collate(rollouts, model.device)
        model.policy.eval()
        reported = torch.cat([r.on_trained("sampler_logprobs") for r in rollouts])
        with torch.no_grad():
            found, _ = policy_logprobs(model, ids, mask, 0.9)
            with adapters.reference(model.policy):
                plain, _ = policy_logprobs(model, ids, mask, 0.9)
        assert (found[mask] - reported).abs().max() < 5e-5
        assert (plain[mask] - reported).abs().max() > 1e-3
        del sampler, base
    gc.collect()


@pytest.fixture(scope="module")
def shared_engine_model(tokenizer: Any) -> Iterator[Model]:
    adapter = AdapterSection(rank=8, alpha=16)
    section = ModelSection(path=str(TINY), dtype="float32", adapter=adapter)
    with Model(section, tokenizer, 0, SIZES) as model:
        yield model
    gc.collect()


@pytest.fixture
def model(shared_engine_model: Model) -> Model:
    """The tiny model under vLLM, with an adapter that changes something."""
    randomize(shared_engine_model, seed=1)
    assert shared_engine_model.engine is not None
    shared_engine_model.engine.wake()
    return shared_engine_model


@pytest.fixture
def prompts(tokenizer: Any) -> list[Prompt]:
    sums = ("3 + 4", "57 + 68", "9 + 85", "41 + 7")
    return prompts_of(tokenizer, *(f"What is {each}?" for each in sums))


@pytest.mark.parametrize("syncs", most_are_long([3, 20], [3]))
def test_after_every_sync_greedy_and_logprobs_equal_the_learner_s(
    model: Model, prompts: list[Prompt], syncs: int
) -> None:
    greedy = SamplingParams(1, 24, temperature=0.0)
    seen = set()
    for seed in range(syncs):
        randomize(model, seed)
        with sampling(model, 0) as sampler:
            theirs = sampler.sample(prompts, greedy, 0, quiet)
            difference = prove_sampler_is_policy(sampler, model, prompts)
        ours = TransformersSampler(model, 10**6).sample(prompts, greedy, 0, quiet)
        ids = [g.completions[0].token_ids for g in theirs]
        assert ids == [g.completions[0].token_ids for g in ours]
        assert difference["sample/canary_difference_max"] < 5e-5
        seen.add(tuple(ids))
    assert len(seen) > syncs // 2, "the adapters hardly change anything"


def test_a_skipped_sync_is_caught(model: Model, prompts: list[Prompt]) -> None:
    with sampling(model, 0):
        pass
    randomize(model, seed=7)
    with pytest.raises(
        TrainingError, match=r"not the policy: it reports .*learner computes -?\d.* differ by"
    ):
        prove_sampler_is_policy(VllmSampler(model), model, prompts)


def test_a_stale_prefix_cache_is_caught(
    model: Model, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tuple(tokenizer.encode("Tell me, what is 3 + 4? " * 10, add_special_tokens=False))
    assert 128 < len(ids) < 240  # longer than a block of vLLM's cache
    long = [Prompt("long", "", ids, "7")] * 2
    assert model.engine is not None
    for seed in (8, 9):  # the prefixes of the adapter before are dropped
        randomize(model, seed)
        with sampling(model, 0) as sampler:
            prove_sampler_is_policy(sampler, model, long)
    randomize(model, seed=7)
    monkeypatch.setattr(model.engine.llm, "reset_prefix_cache", lambda: True)
    with sampling(model, 0) as sampler, pytest.raises(TrainingError, match="not the policy"):
        prove_sampler_is_policy(sampler, model, long)
    monkeypatch.undo()
    model.engine.llm.reset_prefix_cache()


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 5},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"min_p": 0.3, "top_p": 0.6},
    ],
)
def test_reported_logprobs_belong_to_what_was_drawn_from(
    model: Model, prompts: list[Prompt], options: dict
) -> None:
    params = SamplingParams(4, 16, **options)
    with sampling(model, 0) as sampler:
        groups = sampler.sample(prompts, params, 5, quiet)
    for group in groups:
        for completion in group.completions:
            ids = torch.tensor([group.prompt.token_ids + completion.token_ids])
            with torch.no_grad():
                hidden = model.hidden_states(ids)[0, len(group.prompt.token_ids) - 1 : -1]
                logits = model.logits(hidden).float() / params.temperature
            targets = torch.tensor(completion.token_ids)[:, None]
            expected = filtered_logprobs(logits, params).gather(-1, targets)[:, 0]
            assert torch.allclose(torch.tensor(completion.logprobs), expected, atol=1e-4)


def test_sampler_contract(model: Model, prompts: list[Prompt]) -> None:
    told: list[tuple[int, int]] = []
    with sampling(model, 0) as sampler:
        groups = sampler.sample(
            prompts, SamplingParams(3, 12), 0, lambda tokens, items: told.append((tokens, items))
        )
    assert [g.prompt for g in groups] == prompts
    completions = [c for g in groups for c in g.completions]
    assert len(completions) == 12
    assert sum(items for _, items in told) == 12
    assert sum(tokens for tokens, _ in told) == sum(len(c.token_ids) for c in completions)
    for c in completions:
        assert (c.finish_reason == "stop") == (c.token_ids[-1] in model.end_token_ids)
        assert len(c.token_ids) <= 12
        assert "<|im_end|>" not in c.text


@pytest.mark.parametrize("strings", [("1",), ("7", "e")])
def test_stop_strings_end_a_completion_at_the_token_that_completes_one(
    model: Model, prompts: list[Prompt], strings: tuple[str, ...]
) -> None:
    with sampling(model, 0) as sampler:
        groups = sampler.sample(prompts, SamplingParams(6, 24, stop=strings), 3, quiet)
    by_string = 0
    for completion in (each for group in groups for each in group.completions):
        (one_less,) = decode(model.tokenizer, [completion.token_ids[:-1]])
        assert not any(string in one_less for string in strings)
        assert len(completion.logprobs) == len(completion.token_ids)
        holds = any(string in completion.text for string in strings)
        ended = completion.token_ids[-1] in model.end_token_ids
        assert (completion.finish_reason == "stop") == (holds or ended)
        by_string += holds
    assert by_string


@pytest.mark.long
def test_twenty_learning_phases_leave_the_base_bitwise_unchanged(
    model: Model, prompts: list[Prompt]
) -> None:
    train = TrainSection(learning_rate=1e-3, gradient_checkpointing=False)
    learner = Learner(model, LearningSettings(PolicyGradient(ROW, 16), train, 1.0, 4096, 0, 20))
    trained = {n for n, p in model.policy.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in trained)
    before = [p.detach().clone() for p in learner.parameters]
    with_gradient: set[str] = set()
    learner.optimizer.register_step_pre_hook(
        lambda *_: with_gradient.update(
            n for n, p in model.policy.named_parameters() if p.grad is not None
        )
    )
    for step in range(20):
        with sampling(model, 0) as sampler:
            prove_sampler_is_policy(sampler, model, prompts)
            groups = sampler.sample(prompts, SamplingParams(4, 16), step, quiet)
        with learning(learner):
            Learners(learner).learn(step, to_data(scored(groups)), lambda items: None)
    assert with_gradient == trained
    assert not any(torch.equal(a, b) for a, b in zip(before, learner.parameters, strict=True))
    ordinary = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = torch.tensor([prompts[0].token_ids])
    with adapters.reference(model.policy):
        found = model.logits(model.hidden_states(ids))
        assert torch.equal(found, ordinary(input_ids=ids).logits)


def test_asleep_there_is_no_sampling_and_every_order_is_usable(
    model: Model, prompts: list[Prompt]
) -> None:
    started = model.engine
    assert started is not None
    params = SamplingParams(2, 8)
    started.release()
    started.release()
    with pytest.raises(ModelError, match="asleep"):
        VllmSampler(model).sample(prompts, params, 0, quiet)
    started.wake()
    started.wake()
    with pytest.raises(ZeroDivisionError), sampling(model, 0) as sampler:
        sampler.sample(prompts, params, 0, quiet)
        raise ZeroDivisionError
    started.release()
    with sampling(model, 0) as sampler:
        assert len(sampler.sample(prompts, params, 0, quiet)) == len(prompts)


def test_sampling_from_the_base_is_told_before_the_adapter_does_much(
    model: Model, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter whose effect is within the tolerance: only the direction shows the mistake."""
    for parameter in model.policy.parameters():
        if parameter.requires_grad:
            parameter.data.mul_(0.1)
    everything = {torch.float32: (0.5, 5.0)}
    monkeypatch.setattr("reason_llm.model.canary.CANARY_TOLERANCE", everything)
    with sampling(model, 0) as sampler:
        prove_sampler_is_policy(sampler, model, prompts)
        base = type("Base", (), {"request": None})()
        monkeypatch.setattr(sampler, "sync", base)
        with pytest.raises(TrainingError, match="those of the base without the adapter"):
            prove_sampler_is_policy(sampler, model, prompts)


def test_sampling_that_is_broken_off_leaves_nothing_under_way(
    model: Model, prompts: list[Prompt]
) -> None:
    assert model.engine is not None
    params = SamplingParams(4, 64)

    def stop(tokens: int, items: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), sampling(model, 0) as sampler:
        sampler.sample(prompts, params, 0, stop)
    core = model.engine.llm.llm_engine.engine_core.engine_core
    assert not core.scheduler.has_unfinished_requests()
    model.engine.release()
    with sampling(model, 0) as sampler:
        groups = sampler.sample(prompts, params, 0, quiet)
    assert [len(g.completions) for g in groups] == [4] * len(prompts)


@pytest.mark.long
def test_sharing_adds_little_memory_and_a_sync_writes_the_adapter_alone(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "measure_sharing.py"
    shown = subprocess.run(
        [sys.executable, str(script), str(tmp_path)], capture_output=True, text=True, cwd=ROOT
    )
    assert shown.returncode == 0, shown.stderr[-2000:]
    names = {"weights_mib", "added_mib", "added_by_a_copy_mib", "lora_parameters",
             "lora_b_parameters", "written_by_a_sync"}  # fmt: skip
    values = {
        name: float(value)
        for name, _, value in (line.partition("=") for line in shown.stdout.splitlines())
        if name in names
    }
    assert values["weights_mib"] > 200e6 * 4 / 2**20
    assert values["added_mib"] < 0.15 * values["weights_mib"]
    assert values["added_by_a_copy_mib"] > 0.8 * values["weights_mib"]
    assert values["lora_parameters"] > 2.5e6
    # Each A is copied; each B is scaled, and then copied.
    written = values["lora_parameters"] + values["lora_b_parameters"]
    assert values["written_by_a_sync"] == written


def test_a_rank_beyond_vllm_s_is_refused() -> None:
    with pytest.raises(ModelError, match=r"rank=1000.*512"):
        engine.start(str(TINY), torch.float32, replace(SIZES, lora_rank=1000), 0)


def test_a_layer_whose_adapter_vllm_drops_is_refused() -> None:
    sizes = replace(SIZES, lora_targets=("q_proj", "shared_expert_gate"))
    with pytest.raises(ModelError, match=r"shared_expert_gate: vLLM .* leave it out"):
        engine.start(str(TINY), torch.float32, sizes, 0)


def test_an_expert_of_a_checkpoint_is_a_part_of_a_fused_weight() -> None:
    up, down = torch.arange(48.0).view(3, 4, 4), torch.arange(24.0).view(3, 4, 2)
    held = {"m.mlp.experts.gate_up_proj": up, "m.mlp.experts.down_proj": down, "n": down[0]}
    own = {name: torch.nn.Parameter(each) for name, each in held.items()}
    for stored, name, part in (
        ("m.mlp.experts.2.gate_proj.weight", "m.mlp.experts.gate_up_proj", up[2, :2]),
        ("m.mlp.experts.1.up_proj.weight", "m.mlp.experts.gate_up_proj", up[1, 2:]),
        ("m.block_sparse_moe.experts.1.w1.weight", "m.mlp.experts.gate_up_proj", up[1, :2]),
        ("m.block_sparse_moe.experts.0.w3.weight", "m.mlp.experts.gate_up_proj", up[0, 2:]),
        ("m.block_sparse_moe.experts.2.w2.weight", "m.mlp.experts.down_proj", down[2]),
        ("m.mlp.experts.0.down_proj.weight", "m.mlp.experts.down_proj", down[0]),
        ("n", "n", own["n"]),
    ):
        found = shared_weights._find_parameter(own, stored)
        assert found is not None and found[0] == name and torch.equal(found[1], part)
    assert shared_weights._find_parameter(own, "other") is None
    assert shared_weights._find_parameter({"n": own["n"]}, "m.mlp.experts.0.w1.weight") is None


def test_a_layer_that_cannot_be_shared_is_named() -> None:
    theirs: dict[str, Any] = {"layer": torch.nn.Linear(4, 3)}
    module, part = shared_weights.find_owner(theirs, {}, "layer.weight")
    with pytest.raises(ModelError, match=r"layer\.weight cannot be shared: vLLM holds \(3, 4\)"):
        shared_weights.shared_view(module, part, "layer.weight", torch.Size([3, 5]))
    with pytest.raises(ModelError, match=r"layer\.scale cannot be shared: .*Linear has no scale"):
        shared_weights.shared_view(module, part, "layer.scale", torch.Size([3]))
    with pytest.raises(ModelError, match=r"other\.weight cannot be shared: vLLM has no module"):
        shared_weights.find_owner(theirs, {}, "other.weight")
