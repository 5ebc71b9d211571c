"""The byte plan of every role against the tensors really allocated, and PPO's models on a card.

1. Adapters, heads, gradients and moments of start, critic, teacher and reward model: within 5 %.
2. A pair is planned as one micro-batch, and its pass takes no more.
3. PPO at 7B in NF4 fits 24 GiB, with less than 1.2 GiB more than GRPO.
4. A stage that samples nothing starts no vLLM; --plan prints the plans of stages.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from allocations import peak_allocated
from conftest import TINY
from reason_llm.app.cli import call
from reason_llm.config import AdapterSection, Config, ModelSection
from reason_llm.model import adapters, score_head
from reason_llm.model.base import Model, load_tokenizer, meta_model
from reason_llm.model.datum import Datum
from reason_llm.model.plan import GIB, Machine, Plan, look_at, memory, plan_only, with_start
from reason_llm.model.plan.shape import Shape
from reason_llm.readers import Base, Reader, open_readers
from reason_llm.readers.reference import START
from reason_llm.run.opening import make_learners
from reason_llm.run.store import checkpoint
from reason_llm.train.step_metrics import Tally
from shapes import write_config

CPU = Machine("cpu", 8 * GIB, 8 * GIB)


def saved_adapter(folder: Path, rank: int, head: bool = False) -> str:
    """An adapter over the tiny model, with a head if it is a reward model's."""
    section = ModelSection(path=str(TINY), dtype="float32", adapter=AdapterSection(rank=rank))
    with Model(section, load_tokenizer(str(TINY)), 0) as model:
        adapters.snapshot(model.policy).write(folder)
        if head:
            width = model.head.weight.shape[1]
            save_file({"weight": torch.ones(1, width)}, folder / score_head.FILE)
    return str(folder)


def planned(config: Config) -> tuple[Config, Plan]:
    if config.model.start is not None:
        config = with_start(config, config.model.start)
    shape = Shape.of(meta_model(config.model))
    return config, memory.plan(config, shape, CPU, limit=256, longest_prompt=16, longest_row=40)


def made(folder: Path, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": str(TINY), "dtype": "float32"},
        "data": {"train": "some.jsonl"},
        "sample": {"max_new_tokens": 32, "engine": "transformers"},
        "train": {"gradient_checkpointing": False, "packing": "varlen"},
    }
    for name, options in sections.items():
        tree[name] = tree.get(name, {}) | options if isinstance(options, dict) else options
    return Config.model_validate(tree)


def of_stage(stage: str, folder: Path) -> Config:
    start = {"start": saved_adapter(folder / "adapter-16", 16)}
    match stage:
        case "ppo":
            critic = saved_adapter(folder / "adapter-64", 64, head=True)
            return made(folder, model=start, algorithm={"name": "ppo"}, critic={"start": critic})
        case "opd":
            teacher = saved_adapter(folder / "adapter-4", 4)
            return made(folder, algorithm={"name": "opd"}, teacher={"adapter": teacher})
        case "reward":
            return made(folder, stage="reward")
        case _:
            return made(folder, stage="preference", model=start)


def readers_of(config: Config) -> list[Reader]:
    return open_readers(config, look_at(config), Base("", ""))


def num_bytes(tensors: Any) -> int:
    """Of the distinct storages behind tensors."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(found.values())


@pytest.mark.parametrize("stage", ["ppo", "opd", "reward", "irpo"])
def test_what_the_roles_take_is_what_was_planned(stage: str, tmp_path: Path) -> None:
    config, plan = planned(of_stage(stage, tmp_path))
    lines = {line.name: line.learning for line in plan.lines}
    folder = tmp_path / "run"
    if config.model.start is not None:
        shutil.copytree(config.model.start, folder / START)
    state = checkpoint.fresh("run", {})
    with Model(config.model, load_tokenizer(str(TINY)), 0) as model:
        both = make_learners(config, folder, state, plan, model, readers_of(config))
        learned = [both.policy] if both.critic is None else [both.policy, both.critic]
        for role in config.roles:
            found = num_bytes(model.parameters_of(role))
            assert found == pytest.approx(lines[f"adapter of the role {role}"], rel=0.05), role
        rank = config.model.adapter.rank
        found = num_bytes(model.parameters_of("policy"))
        assert found == pytest.approx(lines[f"adapter, rank {rank}"], rel=0.05)
        moments = [
            value
            for each in learned
            for state_of in each.optimizer.state.values()
            for value in state_of.values()
            if value.dim()
        ]
        assert num_bytes(moments) == pytest.approx(lines["optimizer state"], rel=0.05)
        largest = max(num_bytes(each.parameters) for each in learned)
        assert largest == pytest.approx(lines["gradients"], rel=0.05)
        saved = sum(3 * num_bytes(each.parameters) for each in learned)
        assert saved == pytest.approx(plan.checkpoint_bytes, rel=0.05)
    assert set(config.roles) == {"ppo": {"start", "critic"}, "opd": {"teacher"},
                                 "reward": set(), "irpo": {"start"}}[stage]  # fmt: skip
    assert ("log-prob chunk", 0) in lines.items() or stage != "reward"


@pytest.mark.parametrize("stage", ["reward", "irpo"])
def test_a_pass_over_the_longest_pair_takes_no_more_than_planned(
    stage: str, tmp_path: Path
) -> None:
    config, plan = planned(of_stage(stage, tmp_path))
    assert plan.micro_batch_tokens >= 80  # both sides of 40
    folder = tmp_path / "run"
    shutil.copytree(tmp_path / "adapter-16", folder / START)
    pair = [Datum.of(range(3, 11), range(20 + side, 52 + side), group=0) for side in (0, 1)]
    with Model(config.model, load_tokenizer(str(TINY)), 0) as model:
        state = checkpoint.fresh("run", {})
        learner = make_learners(config, folder, state, plan, model, readers_of(config)).policy
        learner.micro_batches.tokens = 8  # which a pair does not heed
        rows = learner.prepared(pair)
        model.policy.train()
        objective = learner.settings.objective
        assert learner.micro_batches.run(rows, list, 2) == [[0, 1]]
        for parameter in learner.parameters:
            parameter.grad = torch.zeros_like(parameter)
        counts = objective.count(rows)

        def call() -> None:
            learner._backward(rows, [0, 1], counts, Tally())

        call()
        found = peak_allocated(call)
    shape = Shape.of(meta_model(config.model))
    activations = shape.activation_bytes(80, 40, 4, checkpointing=False, is_packed=True)
    logits = 0 if stage == "reward" else 64 * 4 * 4 * shape.vocabulary
    assert 0.5 * activations < found <= 1.02 * (activations + logits)


def seven_billion(folder: Path, **sections: Any) -> Plan:
    """A plan of Qwen2.5-7B in NF4 with rank 32 on an imagined card of 24 GiB."""
    path = write_config("Qwen/Qwen2.5-7B-Instruct", folder / "model")
    model = {"path": path, "dtype": "bfloat16", "quantize": "nf4", "context_tokens": 2048}
    tree = {
        "model": model | sections.pop("model", {}),
        "data": {"train": "some.jsonl"},
        "sample": {"engine": "vllm", "max_new_tokens": 1024},
        "memory": {"budget_gib": 24},
    } | sections
    return plan_only(Config.model_validate(tree))


ADAPTER = 80_740_352
"""Parameters of rank 32 on every linear layer of Qwen2.5-7B."""


def fixed(plan: Plan) -> int:
    """Learning bytes that do not depend on how large a micro-batch is."""
    return sum(line.learning for line in plan.lines if line.name != "activations")


def test_ppo_s_models_at_7b_fit_24_gib(tmp_path: Path) -> None:
    grpo = seven_billion(tmp_path)
    start = {"start": str(tmp_path / "to be made")}
    ppo = seven_billion(tmp_path, model=start, algorithm={"name": "ppo"})
    lines = {line.name: line for line in ppo.lines}
    for role in ("start", "critic"):
        line = lines[f"adapter of the role {role}"]
        assert line.learning == line.sampling == pytest.approx(4 * ADAPTER, rel=0.001)
    reward_model = 4 * ADAPTER  # a third role's, of a learned reward
    assert ppo.peak.learning + reward_model < 24 * GIB
    assert ppo.peak.sampling + reward_model < 24 * GIB
    assert fixed(ppo) + reward_model - fixed(grpo) < 1.2 * GIB
    # The idle one's moments wait on the host.
    assert lines["optimizer state"].learning == pytest.approx(8 * ADAPTER, rel=0.001)
    assert ppo.host_bytes - grpo.host_bytes == pytest.approx(8 * ADAPTER, rel=0.001)
    assert ppo.checkpoint_bytes == pytest.approx(2 * grpo.checkpoint_bytes, rel=0.001)
    assert ppo.micro_batch_tokens >= 2048
    assert ppo.cache_tokens >= 8 * 2048


def test_a_stage_that_samples_nothing_starts_no_vllm(tmp_path: Path) -> None:
    for stage in ("sft", "reward"):
        assert seven_billion(tmp_path, stage=stage).engine is None
    evaluated = {"train": "some.jsonl", "eval": "other.jsonl"}
    assert seven_billion(tmp_path, stage="sft", data=evaluated).engine is not None


@pytest.mark.parametrize("stage", ["ppo", "sft"])
def test_plan_prints_the_plan_of_a_stage(
    stage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = saved_adapter(tmp_path / "adapter", 16)
    options = {"ppo": ["--algorithm.name", "ppo", "--model.start", start],
               "sft": ["--stage", "sft"]}  # fmt: skip
    (tmp_path / "some.jsonl").write_text("{}\n")  # rows are not read
    text = f"data: {{train: {tmp_path}/some.jsonl}}\nmodel: {{path: {TINY}}}\n"
    (tmp_path / "c.yaml").write_text(text)
    assert call("train", "train", [str(tmp_path / "c.yaml"), "--plan", *options[stage]]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("memory on a ")
    assert ("adapter of the role critic" in shown) is (stage == "ppo")
    assert ("adapter, rank 16" in shown) is (stage == "ppo")  # its start's
