"""The base: what ends an answer, and what is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from conftest import TINY
from reason_llm.config import AdapterSection, ModelSection
from reason_llm.errors import ModelError
from reason_llm.model.base import Model, check_model, context_limit, load_tokenizer


def copy(folder: Path, name: str, **changes: Any) -> str:
    shutil.copytree(TINY, folder / "copy")
    path = folder / "copy" / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return str(folder / "copy")


def test_every_end_token_of_the_generation_config_ends_an_answer(tmp_path: Path) -> None:
    path = copy(tmp_path, "generation_config.json", eos_token_id=[2, 0])
    with Model(ModelSection(path=path), load_tokenizer(path), seed=0) as model:
        assert model.end_token_ids == [0, 2]


def test_context_limit(tmp_path: Path) -> None:
    assert context_limit(ModelSection(path=str(TINY))) == 4096
    assert context_limit(ModelSection(path=str(TINY), context_tokens=100)) == 100
    with pytest.raises(ModelError, match=r"context_tokens=5000 exceeds the 4096"):
        context_limit(ModelSection(path=str(TINY), context_tokens=5000))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 7},
        {"hidden_size": "big"},
        {"num_attention_heads": 0},
        {"model_type": "t5"},
    ],
)
def test_a_config_that_cannot_be_is_one_line(tmp_path: Path, changes: dict) -> None:
    path = copy(tmp_path, "config.json", **changes)
    with pytest.raises(ModelError) as caught:
        check_model(ModelSection(path=path))
    assert path in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "targets", [["foo"], ["q_proj", "foo"], "[", ["lm_head", "foo"], ["embed_tokens"]]
)
def test_targets_that_are_not_there_or_not_linear(targets: Any) -> None:
    section = ModelSection(path=str(TINY), adapter=AdapterSection(targets=targets))
    with pytest.raises(ModelError, match=r"model\.adapter\.targets="):
        check_model(section)


def test_targets_that_are_there() -> None:
    for targets in ("all-linear", ["q_proj", "v_proj"], r".*\.mlp\..*_proj", ["lm_head"]):
        adapter = AdapterSection(targets=targets)
        check_model(ModelSection(path=str(TINY), adapter=adapter))
