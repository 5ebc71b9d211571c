"""Prompts with images sampled by the real vLLM on the CPU, over the learner's own weights.

1. Every weight is vLLM's own and the checkpoint's, those of the tower among them.
2. Sampler and learner agree after a sync; an image token at another place is text.
3. Two images of one size are two prompts, also to vLLM's prefix cache.
4. NF4 of Qwen2.5-VL leaves the tower as it is; two steps of GRPO with Qwen3.5.
"""

import importlib.util
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from digits import image_rows, images_of, make_digits, make_model, section_of
from safetensors.torch import load_file
from test_image_training import write_config

from conftest import config_of
from families import SIZES, quiet, randomize
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.config import load
from reason_llm.data import Data, load_data
from reason_llm.model import Model, collate, lay_out, placed, policy_logprobs, to_data
from reason_llm.model.base import check_model, load_tokenizer
from reason_llm.model.plan.backends import IMPORTS
from reason_llm.model.plan.shape import Shape
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, prove_sampler_is_policy, sampling

pytest.importorskip("vllm", reason="the real vLLM is not installed: make test installs it")

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("default"),  # vLLM's own
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in IMPORTS),
        reason=f"{' or '.join(IMPORTS)} is not installed",
    ),
]


@contextmanager
def opened_over(
    folder: Path, family: str = "qwen3_vl", **section: Any
) -> Iterator[tuple[Model, Data]]:
    """A random model of the family over vLLM, with an adapter that changes something."""
    path = make_model(folder / "model", family)
    tree = {
        "model": section_of(path) | section,
        "data": {"train": str(image_rows(folder)), "system_prompt": "none"},
        "score": {"rewards": [{"name": "think_answer_tags"}]},
        "sample": {"max_new_tokens": 16},
    }
    config = config_of(tree)
    tokenizer = load_tokenizer(path)
    data = load_data(config, tokenizer, 256)
    adapted = Shape.of(check_model(config.model)).adapted
    sizes = replace(
        SIZES,
        lora_targets=adapted,
        attachments=data.attachments.sizes,
        quantize=config.model.quantize,
    )
    with Model(config.model, tokenizer, 0, sizes, attachments=data.attachments) as model:
        randomize(model, seed=1)
        model.policy.eval()
        yield model, data


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Data]]:
    with opened_over(tmp_path_factory.mktemp("digits")) as found:
        yield found


def compared(model: Model, prompts: Any, params: SamplingParams) -> list[float]:
    """Largest differences between the log-probs of vLLM and those of padded and packed rows."""
    with sampling(model, 0) as sampler:
        rows = to_data(sampler.sample(prompts, params, 0, quiet))
    reported_N = torch.cat([row.on_trained("sampler_logprobs") for row in rows])
    ids_BT, mask_BT = collate(rows, model.device)
    found = []
    for layout in (None, lay_out(rows, model.device)):
        width = (ids_BT if layout is None else layout.ids_1N).shape[1]
        with torch.no_grad(), model.attached(placed(rows, layout), width):
            ours_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0, layout=layout)
        found.append(float((ours_BT[mask_BT] - reported_N).abs().max()))
    with torch.no_grad():
        blind_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
    return [*found, float((blind_BT[mask_BT] - reported_N).abs().max())]


def test_the_tower_is_shared_and_the_checkpoints(opened: tuple[Model, Data]) -> None:
    model, _ = opened
    assert model.engine is not None
    storages = {each.untyped_storage().data_ptr() for each in model.engine.module.parameters()}
    base = {n: each for n, each in model.policy.named_parameters() if not each.requires_grad}
    assert all(each.untyped_storage().data_ptr() in storages for each in base.values())
    stored = load_file(Path(model.path) / "model.safetensors")
    tower = [name for name in stored if name.startswith("model.visual.")]
    assert len(tower) > 20
    assert all(torch.equal(base[f"base_model.model.{name}"], stored[name]) for name in tower)


def test_sampler_is_the_learner(opened: tuple[Model, Data]) -> None:
    model, data = opened
    assert [len(images_of(prompt)) for prompt in data.prompts] == [1, 1, 2, 1, 0]
    padded, packed, blind = compared(model, data.prompts, SamplingParams(3, 16))
    assert padded < 1e-5 and packed < 1e-5 and blind > 0.1
    randomize(model, seed=2)
    assert max(compared(model, data.prompts, SamplingParams(3, 16))[:2]) < 1e-5


def test_an_image_token_at_another_place_is_text(opened: tuple[Model, Data]) -> None:
    model, data = opened
    ids = (*data.prompts[0].token_ids, data.attachments.token_id, 5)
    prompts = [replace(data.prompts[0], token_ids=ids)]
    assert max(compared(model, prompts, SamplingParams(3, 8))[:2]) < 1e-5


def test_two_images_of_one_size_are_two_prompts(opened: tuple[Model, Data]) -> None:
    model, data = opened
    first, second = data.prompts[:2]
    assert first.token_ids == second.token_ids and images_of(first) != images_of(second)
    with sampling(model, 0) as sampler:
        found = [
            sampler.sample([prompt], SamplingParams(1, 8), 0, quiet)[0].completions[0].logprobs[0]
            for prompt in (first, second, first)
        ]
    assert abs(found[0] - found[2]) < 1e-5 and abs(found[0] - found[1]) > 1e-3


def test_nf4_packs_the_decoder_and_not_the_tower(tmp_path: Path) -> None:
    with opened_over(tmp_path, "qwen2_5_vl", quantize="nf4", dtype="auto") as (model, data):
        packed = {name for name, each in model.policy.named_modules() if type(each) is Linear4bit}
        assert packed and all(".language_model." in name for name in packed)
        with sampling(model, 0) as sampler:
            found = prove_sampler_is_policy(sampler, model, data.prompts)
        assert found["sample/canary_difference_max"] < 0.5


def test_two_steps_of_grpo(tmp_path: Path) -> None:
    """Qwen3.5, whose recurrent layers vLLM caches in another way."""
    make_model(tmp_path / "model", "qwen3_5")
    make_digits.write_images(tmp_path, "train", 8, random.Random(0))
    sample = {"engine": "vllm", "prompts_per_step": 4, "completions_per_prompt": 4,
              "max_new_tokens": 8}  # fmt: skip
    config = load(write_config(tmp_path, "vllm", sample=sample))
    training.run_training(config, Console("quiet"))
    records = metrics.read(tmp_path / "runs" / "vllm")[1:]
    assert [record["step"] for record in records] == [1, 2]
    assert all(record["sample/canary_difference_max"] < 1e-5 for record in records)
    assert all(record["train/grad_norm"] > 0 for record in records)
