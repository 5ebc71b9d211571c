"""A reward model's export scores as it was trained, for every family, padded or not; a head that is
lost, another one, or a padding token that ends answers is refused."""

from pathlib import Path

import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_merging import make_adapter, make_base
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from reason_llm.app.export import merging, reward_model
from reason_llm.errors import ModelError
from reason_llm.model import Datum

ROWS = [Datum.of([5, 6, 7][: 1 + i % 3], [8 + i, *range(10, 11 + 2 * i), 2]) for i in range(8)]


def make_head(adapter: Path, seed: int = 3) -> Path:
    generator = torch.Generator().manual_seed(seed)
    save_file({"weight": torch.randn(1, 32, generator=generator)}, adapter / "score.safetensors")
    return adapter


def exported(base: Path, adapter: Path, out: Path, dtype: torch.dtype, pad: int = 0) -> Path:
    out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "SHARD_BYTES", 20_000)
        merging.merge(base, adapter, out, dtype, reward_model.head_of(adapter))
    config = merging.read_json(out / "config.json")
    content = orjson.dumps(reward_model.configured(config, base, pad))
    (out / "config.json").write_bytes(content)
    return out


@pytest.mark.parametrize(
    ("family", "tied"),
    [("qwen2", True), ("qwen2", False), ("llama", False), ("gemma2", True), ("mistral", False)],
)
def test_it_scores_as_it_was_trained(family: str, tied: bool, tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", family, tied)
    adapter = make_head(make_adapter(base, tmp_path / "adapter"))
    out = exported(base, adapter, tmp_path / "out", torch.float32)
    found = reward_model.check_scores(base, adapter, out, ROWS, torch.float32)
    found.check(torch.float32)
    assert found.largest < 1e-4 < 0.1 < found.spread
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert model.config.num_labels == 1
    assert model.score.weight.shape == (1, 32)
    weights = {k for file in out.glob("*.safetensors") for k in load_file(file)}
    assert "score.weight" in weights
    assert "lm_head.weight" not in weights
    index = orjson.loads((out / "model.safetensors.index.json").read_bytes())
    assert set(index["weight_map"]) == weights


def test_what_is_not_the_same_is_refused(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base", "qwen2", True)
    adapter = make_head(make_adapter(base, tmp_path / "adapter"))
    other = make_head(make_adapter(base, tmp_path / "other"), seed=4)
    wrong_head = exported(base, other, tmp_path / "wrong", torch.float32)
    unmerged = make_head(make_adapter(base, tmp_path / "zero"))
    tensors = load_file(unmerged / "adapter_model.safetensors")
    save_file({k: v * 0 for k, v in tensors.items()}, unmerged / "adapter_model.safetensors")
    for number, (out, dtype) in enumerate(
        [
            (wrong_head, torch.float32),
            (wrong_head, torch.bfloat16),
            (exported(base, unmerged, tmp_path / "bare", torch.float32), torch.float32),
            (exported(base, adapter, tmp_path / "pad", torch.float32, pad=2), torch.float32),
        ]
    ):
        found = reward_model.check_scores(base, adapter, out, ROWS, dtype)
        with pytest.raises(ModelError, match="does not score as"):
            found.check(dtype)
        assert number < 4
    narrow = exported(base, adapter, tmp_path / "narrow", torch.bfloat16)
    reward_model.check_scores(base, adapter, narrow, ROWS, torch.bfloat16).check(torch.bfloat16)


def test_a_head_that_is_none_is_refused(tmp_path: Path) -> None:
    for name, content in (
        ("critic", {"weight": torch.ones(1, 4), "bias": torch.ones(1)}),
        ("wide", {"weight": torch.ones(2, 4)}),
        ("flat", {"weight": torch.ones(4)}),
    ):
        (tmp_path / name).mkdir()
        save_file(content, tmp_path / name / "score.safetensors")
        with pytest.raises(ModelError, match="not a reward model's head"):
            reward_model.head_of(tmp_path / name)
    (tmp_path / "flat" / "score.safetensors").write_bytes(b"{}")
    with pytest.raises(ModelError, match="is damaged"):
        reward_model.head_of(tmp_path / "flat")


def tokenizer_of(*special: str, **named: str) -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["a", *special])}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token=None)),
        additional_special_tokens=list(special), **named,
    )  # fmt: skip


def test_no_answer_ends_with_the_padding_token() -> None:
    """Where padding is the end token, as in many a tokenizer, the end token would be taken for
    padding and the score read before it."""
    same = tokenizer_of("<end>", "<x>", eos_token="<end>", pad_token="<end>")
    assert reward_model.padding_token(same, {1}) == "<x>"
    own = tokenizer_of("<end>", "<pad>", "<x>", eos_token="<end>", pad_token="<pad>")
    assert reward_model.padding_token(own, {1}) == "<pad>"
    assert reward_model.padding_token(own, {1, 2}) == "<x>"
    with pytest.raises(ModelError, match="no special token other than"):
        reward_model.padding_token(tokenizer_of("<end>", eos_token="<end>"), {1})


def test_a_family_without_such_a_model_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_base(tmp_path / "base", "qwen2", True)
    monkeypatch.setattr(reward_model, "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", {})
    with pytest.raises(ModelError, match="take --adapter-only"):
        reward_model.configured({}, base, 0)
