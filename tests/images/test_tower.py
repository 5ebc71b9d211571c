"""Rows with images through the frozen tower, against Transformers' whole model.

1. The ids are those of the text with all places of the image.
2. Positions are Transformers' own.
3. Log-probs of padded and of packed rows are the whole model's, and gradients reach the adapter.
4. The sampler's log-probs are the learner's; a sampled image token is text.
5. Features are computed once for an image, and two images of one size are two prompts.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.nn import Linear4bit
from digits import image_rows, images_of, make_model, section_of
from transformers import AutoModelForImageTextToText

from conftest import config_of
from reason_llm.data import Data, load_data
from reason_llm.images.tower import positions_of
from reason_llm.model import Datum, Model, collate, lay_out, placed, policy_logprobs, to_data
from reason_llm.model.base import load_tokenizer
from reason_llm.sample import SamplingParams, TransformersSampler

FAMILIES = ["qwen3_vl", "qwen3_vl nf4", "qwen2_5_vl", "qwen3_5"]


@pytest.fixture(scope="module", params=FAMILIES)
def opened(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, Data]]:
    """A random model with an adapter that changes something, and prompts with images of several
    sizes."""
    folder = tmp_path_factory.mktemp("digits")
    family, _, quantize = request.param.partition(" ")
    path = make_model(folder / "model", family)
    tree = {
        "model": section_of(path) | {"quantize": quantize or "none"},
        "data": {"train": str(image_rows(folder)), "system_prompt": "none"},
        "score": {"rewards": [{"name": "think_answer_tags"}]},
        "sample": {"max_new_tokens": 16},
    }
    config = config_of(tree)
    tokenizer = load_tokenizer(path)
    data = load_data(config, tokenizer, 256)
    with Model(config.model, tokenizer, seed=0, attachments=data.attachments) as model:
        torch.manual_seed(1)
        for parameter in model.parameters_of("policy"):
            parameter.data.copy_(0.05 * torch.randn(parameter.shape))
        model.policy.eval()
        yield model, data


def whole_logprobs(model: Model, data: Data, row: Datum) -> torch.Tensor:
    """Log-probs of a row's trained tokens by the whole model, given pixels."""
    made = [data.attachments.pixels(image) for image in images_of(row)]
    ids = torch.tensor(row.ids[None])
    types = torch.zeros_like(ids)
    for image in images_of(row):
        types[0, image.start : image.start + image.length] = 1
    options = {}
    if made:
        options = {
            "pixel_values": torch.cat([pixels for pixels, _ in made]),
            "image_grid_thw": torch.cat([grid for _, grid in made]),
            "mm_token_type_ids": types,
        }
    with torch.no_grad():
        logits = model.policy(input_ids=ids, use_cache=False, **options).logits[0]
    found = logits[:-1].log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return found[torch.tensor(row.trained[1:])]


def rows_of(data: Data, end: int = 9) -> list[Datum]:
    """Two completions of each prompt."""
    return [
        replace(Datum.of(prompt.token_ids, completion), attachments=prompt.attachments)
        for prompt in data.prompts
        for completion in ((5, 6, 7, end), (8, end))
    ]


def test_ids_are_those_of_all_places(opened: tuple[Model, Data]) -> None:
    model, data = opened
    assert [len(images_of(prompt)) for prompt in data.prompts] == [1, 1, 2, 1, 0]
    for prompt in data.prompts:
        text = prompt.text
        for image in images_of(prompt):
            text = text.replace("<|image_pad|>", "<|X|>" * image.length, 1)
        text = text.replace("<|X|>", "<|image_pad|>")
        assert list(prompt.token_ids) == model.tokenizer.encode(text, add_special_tokens=False)


def test_positions_are_those_of_transformers(opened: tuple[Model, Data]) -> None:
    model, data = opened
    whole = model.policy.base_model.model.model
    for row in rows_of(data):
        ids, types = torch.tensor(row.ids[None]), torch.zeros(1, row.num_tokens, dtype=torch.long)
        for image in images_of(row):
            types[0, image.start : image.start + image.length] = 1
        grids = torch.tensor([image.grid for image in images_of(row)]) if images_of(row) else None
        theirs, delta = whole.get_rope_index(ids, types, image_grid_thw=grids)
        ours = positions_of(images_of(row), row.num_tokens, 2)
        assert torch.equal(ours, theirs[:, 0])
        assert model.embedder is not None and model.embedder.shift(row.attachments) == int(delta)


@pytest.mark.parametrize("packed", [False, True])
def test_logprobs_are_the_whole_models(opened: tuple[Model, Data], packed: bool) -> None:
    model, data = opened
    rows = rows_of(data)
    ids_BT, mask_BT = collate(rows, model.device)
    layout = lay_out(rows, model.device) if packed else None
    width = (ids_BT if layout is None else layout.ids_1N).shape[1]
    with model.attached(placed(rows, layout), width):
        ours_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0, layout=layout)
    theirs = torch.cat([whole_logprobs(model, data, row) for row in rows])
    assert float((ours_BT.detach()[mask_BT] - theirs).abs().max()) < 1e-5
    without, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
    assert float((without.detach()[mask_BT] - theirs).abs().max()) > 0.1
    if packed:
        prompts = sum(len(prompt.token_ids) for prompt in data.prompts)
        assert width == prompts + sum(row.num_trained for row in rows)
    model.policy.zero_grad()
    ours_BT.sum().backward()
    got = [name for name, each in model.policy.named_parameters() if each.grad is not None]
    assert got and all("lora" in name and "visual" not in name for name in got)
    assert not any(
        "visual" in name for name, _ in model.policy.named_parameters() if "lora" in name
    )


def test_sampler_is_the_learner(opened: tuple[Model, Data]) -> None:
    model, data = opened
    params = SamplingParams(3, 16)
    groups = TransformersSampler(model, 4096).sample(data.prompts, params, 0, lambda *_: None)
    apart = [
        float((whole_logprobs(model, data, row) - row.on_trained("sampler_logprobs")).abs().max())
        for row in to_data(groups)
        if data.attachments.token_id not in row.ids[len(row.prompt_ids) :]
    ]
    assert len(apart) > 5 and max(apart) < 1e-5


def test_a_sampled_image_token_is_text(opened: tuple[Model, Data]) -> None:
    model, data = opened
    rows = rows_of(data, data.attachments.token_id)
    ids_BT, mask_BT = collate(rows, model.device)
    with torch.no_grad(), model.attached(placed(rows, None), ids_BT.shape[1]):
        padded_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0)
    # Its embedding is the token's own: a token with the same embedding gives the same log-probs.
    with pytest.raises(ValueError, match="do not match"):
        whole_logprobs(model, data, rows[0])
    assert bool(torch.isfinite(padded_BT).all())
    layout = lay_out(rows, model.device)
    with torch.no_grad(), model.attached(placed(rows, layout), layout.ids_1N.shape[1]):
        packed_BT, _ = policy_logprobs(model, ids_BT, mask_BT, 1.0, layout=layout)
    assert float((packed_BT - padded_BT).abs().max()) < 1e-5


def test_two_images_of_one_size_are_two_prompts(opened: tuple[Model, Data]) -> None:
    model, data = opened
    first, second = data.prompts[:2]
    assert first.token_ids == second.token_ids and images_of(first) != images_of(second)
    rows = rows_of(data)
    assert rows[0].prompt_key == rows[1].prompt_key != rows[2].prompt_key
    assert lay_out(rows[:4], model.device).skipped == (0, len(first.token_ids)) * 2


def test_nf4_packs_the_decoder_and_not_the_tower(opened: tuple[Model, Data]) -> None:
    model, _ = opened
    packed = {name for name, each in model.policy.named_modules() if type(each) is Linear4bit}
    assert all(".language_model." in name for name in packed)
    assert bool(packed) == hasattr(model.policy.config, "quantization_config")


def test_features_are_computed_once(opened: tuple[Model, Data]) -> None:
    model, data = opened
    tower: Any = model.embedder
    calls = []
    hook = tower._model.visual.register_forward_hook(lambda *_: calls.append(1))
    tower._known.clear()
    params = SamplingParams(2, 2)
    for _ in range(2):
        TransformersSampler(model, 4096).sample(data.prompts, params, 0, lambda *_: None)
    hook.remove()
    assert len(calls) == len({i.sha256 for prompt in data.prompts for i in images_of(prompt)})


def test_the_saved_adapter_loads_over_the_whole_model(opened: tuple[Model, Data]) -> None:
    model, _ = opened
    whole = AutoModelForImageTextToText.from_pretrained(model.path)
    names = {name for name, _ in whole.named_modules()}
    for name in model.snapshot().tensors:
        layer = name.removeprefix("base_model.model.").partition(".lora_")[0]
        assert layer in names


def test_pixels_are_not_in_the_record(opened: tuple[Model, Data]) -> None:
    _, data = opened
    (image,) = images_of(data.prompts[0])
    assert Path(image.path).is_file() and len(image.sha256) == 64
    assert images_of(data.prompts[3])[0].path == ""  # the row itself holds it
    assert set(data.prompts[0].extra) == {"@attachments"}
