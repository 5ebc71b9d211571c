"""A reward model of its own: planned by its files, the same scores in any batch, and never a text
that it does not read whole."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForSequenceClassification, Qwen2Config

from conftest import ROOT, TINY
from reason_llm.config import Config
from reason_llm.errors import ConfigError, ModelError, RewardError
from reason_llm.model import SequenceClassifier, meta_model, sequence_classifier
from reason_llm.model.plan import GIB, Machine, memory, outside_models
from reason_llm.model.plan.shape import Shape
from reason_llm.model.sequence_classifier import ClassifierShape, look_at

TEXTS = ["What is 3 + 4?", "a", "It is 7, or seven, as everybody knows by now.", "b c"]


def make(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=284, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_labels=1,
        **{"pad_token_id": 0, "max_position_embeddings": 64} | options,
    )  # fmt: skip
    model = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    for file in TINY.glob("*"):
        if file.name.startswith(("tokenizer", "chat")):
            shutil.copy(file, folder)
    return folder


def scores(classifier: SequenceClassifier, budget: int, texts: list[str]) -> list[float]:
    rows = [classifier.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with classifier.on_device():
        found = dict(classifier.scores(rows, budget))
    return [found[i] for i in range(len(texts))]


@pytest.mark.parametrize("pad", [0, None])
def test_scores_do_not_depend_on_the_batch(pad: int | None, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", pad_token_id=pad)
    classifier = SequenceClassifier(folder, torch.device("cpu"))
    alone = scores(classifier, 1, TEXTS)
    assert len({round(each, 4) for each in alone}) == 4
    for budget in (20, 1000):
        assert scores(classifier, budget, TEXTS) == pytest.approx(alone, abs=1e-5)
    assert scores(classifier, 1000, TEXTS[::-1])[::-1] == pytest.approx(alone, abs=1e-5)


def test_a_text_that_is_too_long_is_refused_and_not_cut(tmp_path: Path) -> None:
    classifier = SequenceClassifier(make(tmp_path / "model"), torch.device("cpu"))
    with pytest.raises(RewardError, match=r"for the reward model .* which reads 64"):
        scores(classifier, 1000, ["3 + 4 = 7 " * 20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_bytes_are_those_of_its_weights(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make(tmp_path / "model", dtype)
    classifier = SequenceClassifier(folder, torch.device("cpu"))
    parameters = list(classifier._model.parameters())
    assert {each.dtype for each in parameters} == {dtype}
    assert look_at(folder).weight_bytes == sum(each.nbytes for each in parameters)
    assert look_at(folder).max_tokens == 64


@pytest.mark.parametrize(
    ("family", "labels", "said"),
    [("qwen2", 2, "has 2 labels"), ("granite", 1, "granite has no sequence-classification model")],
)
def test_a_model_of_another_kind_is_refused(
    family: str, labels: int, said: str, tmp_path: Path
) -> None:
    CONFIG_MAPPING[family](num_labels=labels).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=said):
        look_at(tmp_path)


def planned(folder: Path, kind: str, gib: float, **train: Any) -> memory.Plan:
    options = {"path": str(folder), "normalize": "none"}
    config = Config.model_validate(
        {
            "model": {"path": str(TINY)},
            "data": {"train": str(ROOT / "data" / "arithmetic_train.jsonl")},
            "sample": {"engine": "vllm" if kind == "cuda" else "transformers"},
            "train": train,
            "score": {
                "rewards": [
                    {"name": "boxed", "weight": 0},
                    {"name": "reward_model", "label": "a", "options": options},
                    {"name": "reward_model", "label": "b", "options": options},
                ]
            },
        }
    )
    shape = Shape.of(meta_model(config.model))
    machine = Machine(kind, int(gib * GIB), 64 * GIB)
    outside = [*outside_models(config, machine)]
    return memory.plan(config, shape, machine, 4096, 18, outside=outside)


def test_it_is_on_a_gpu_in_the_scoring_phase_alone(tmp_path: Path) -> None:
    folder = make(tmp_path / "model")
    size = look_at(folder).weight_bytes
    a_layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48
    assert look_at(folder).passed_weights == 2 * a_layer + 32
    assert look_at(folder).query_elements == 2 * 32
    gpu, cpu = planned(folder, "cuda", 24), planned(folder, "cpu", 24)
    own = [line for line in gpu.lines if line.name.startswith("reward model")]
    assert [(line.sampling, line.learning, line.scoring) for line in own] == [(0, 0, size)]
    both = [line for line in cpu.lines if line.name.startswith("reward model")]
    assert [(line.sampling, line.learning, line.scoring) for line in both] == 2 * [(size,) * 3]
    assert gpu.host_bytes == memory.HOST_BYTES + 2 * size
    resident = {line.name: line for line in gpu.lines if line.sampling == line.learning > 0}
    assert all(line.scoring == line.learning for line in resident.values())
    assert {line.scoring for line in gpu.lines if line.name == "KV cache"} == {0}
    assert size < gpu.peak.scoring < gpu.peak.learning
    names = [phase.name for phase in gpu.phases]
    assert names == ["sampling", "the reward model a", "the reward model b", "learning"]


def test_one_that_does_not_fit_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make(tmp_path / "model")
    assert planned(folder, "cuda", 8).peak.scoring < 3 * GIB
    large = ClassifierShape(7 * GIB, 1000, 2, 10**9, 1000, None)
    monkeypatch.setattr(sequence_classifier, "look_at", lambda path: large)
    with pytest.raises(ConfigError, match=r"scoring needs 7\.\d GiB.*reward model b? ?a? ?7\.0"):
        planned(folder, "cuda", 8)


def test_a_micro_batch_fits_where_it_is_scored_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, large = make(tmp_path / "model"), ClassifierShape(GIB, 4 << 20, 2, 10**9, 1000, None)
    monkeypatch.setattr(sequence_classifier, "look_at", lambda path: large)
    plan = planned(folder, "cuda", 24)
    assert 0.9 * 24 * GIB < plan.peak.scoring < 0.95 * 24 * GIB
    with pytest.raises(ConfigError, match=rf"8192 needs 3.*; set it to {plan.micro_batch_tokens} "):
        planned(folder, "cuda", 24, micro_batch_tokens=8192)
