"""Roles over the one base copy: adapters and heads are all that a role adds.

1. The storages of the base are the same ones before and after, and in every role.
2. A role learns its own adapter and head, and nothing else moves.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import TINY
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model import adapters, score_head
from reason_llm.model.base import Model, meta_model
from reason_llm.model.plan import Shape
from roles import check_one_copy, saved, with_roles


@pytest.fixture
def fresh(tokenizer: Any) -> Model:
    section = ModelSection(path=str(TINY), dtype="float32", adapter=AdapterSection(rank=8))
    return Model(section, tokenizer, seed=0)


def test_roles_over_transformers_copy_no_base(fresh: Model, tmp_path: Path) -> None:
    with fresh as model:
        check_one_copy(model, tmp_path)


def test_a_role_learns_its_own_adapter_and_head(fresh: Model, tmp_path: Path) -> None:
    with fresh as model:
        with_roles(model, tmp_path)
        names = {id(p): n for n, p in model.policy.named_parameters()}
        ids = torch.tensor([[5, 6, 7, 8, 9]])
        for parameter in model.heads["critic"].parameters():
            parameter.data.fill_(0.5)
        with model.using("critic"):
            model.heads["critic"](model.hidden_states(ids).float()).sum().backward()
        moved = [p for p in model.policy.parameters() if p.grad is not None]
        assert moved
        assert {".critic." in names[id(p)] for p in moved} == {True}
        assert all(p.grad is not None for p in model.heads["critic"].parameters())
        assert {id(p) for p in model.parameters_of("critic")} >= {id(p) for p in moved}


def test_an_adapter_of_another_base_is_refused(fresh: Model, tmp_path: Path) -> None:
    with fresh as model:
        folder = saved(model, tmp_path / "other", seed=1)
        tensors = {n: t.repeat(1, 2) for n, t in model.adapter_of("policy").items()}
        adapters.save_file(tensors, str(folder / "adapter_model.safetensors"))
        with pytest.raises(ModelError, match="name the model that it was trained on"):
            model.add_role("teacher", folder)
        with pytest.raises(ModelError, match=r"no score\.safetensors: it is not a reward model"):
            score_head.check(folder, 192)
        score_head.save(score_head.state(score_head.make(192, model.device, bias=False)), folder)
        score_head.check(folder, 192)
        with pytest.raises(ModelError, match=r"score\.safetensors is damaged or the head of anoth"):
            score_head.check(folder, 96)


def test_checking_an_adapter_leaves_the_model_as_it_was(fresh: Model, tmp_path: Path) -> None:
    with fresh as model:
        folder = saved(model, tmp_path / "narrow", seed=1)
    for rank in (8, 4):
        section = ModelSection(path=str(TINY), adapter=AdapterSection(rank=rank))
        policy = meta_model(section)
        shape = Shape.of(policy)
        adapters.check_over(policy, folder, str(TINY))
        assert Shape.of(policy) == shape
        assert list(policy.peft_config) == ["default"]
    assert adapters.num_parameters(folder) == 2 * shape.adapter
