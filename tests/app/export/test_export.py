"""The parts of an export without a model: what is read, refused, compared and told of."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from reason_llm.app.export import model_card, parity
from reason_llm.app.export.model_card import ModelCard, is_hub_id
from reason_llm.app.export.parity import ScoreParity
from reason_llm.config import Config
from reason_llm.errors import ModelError
from reason_llm.model import Datum

exporting: Any = importlib.import_module("reason_llm.app.export.export")


@pytest.mark.parametrize(
    ("dtype", "largest", "mean"), [(torch.float32, 1e-3, 1e-4), (torch.bfloat16, 0.3, 0.1)]
)
def test_what_rounding_explains_of_a_score_is_in_deviations(
    dtype: torch.dtype, largest: float, mean: float
) -> None:
    for spread, unit in ((4.0, 4.0), (0.0, 1e-3)):
        ScoreParity(9, largest * unit, mean * unit, spread).check(dtype)
        for off in ((1.01, 1.0), (1.0, 1.01)):
            worse = ScoreParity(9, largest * unit * off[0], mean * unit * off[1], spread)
            with pytest.raises(ModelError, match="does not score as base, adapter and head do"):
                worse.check(dtype)


def test_a_gap_is_of_sizes_and_is_told_with_its_tokens() -> None:
    gap = parity.Gap.between(torch.tensor([0.0, 0.0, 1.0]), torch.tensor([0.5, -1.0, 1.0]))
    assert gap == parity.Gap(3, 1.0, 0.5)
    assert str(gap) == "max 1, mean 0.5 nats over 3 tokens"


def test_rollouts_are_chosen_from_all_within_their_bounds() -> None:
    rows = [Datum.of([1], [number % 90]) for number in range(99)]
    found = parity.chosen(rows, 90)
    assert [row.ids[1] for row in found] == [3 * n % 90 for n in range(32)]
    with pytest.raises(ModelError, match="hold token 87 and the model knows 87"):
        parity.chosen(rows, 87)
    parity.chosen(rows[:88], 88)
    long = [Datum.of([1], [2] * 8191) for _ in range(3)]
    assert parity.chosen(long, 9) == long[:2]
    longer = Datum.of([1], [2] * 20_000)
    assert parity.chosen([longer, *long], 9) == [longer]


@pytest.mark.parametrize(
    ("source", "is_one"),
    [("org/name", True), ("org/name:main", True), ("org/rows.JSONL", False), ("name", False),
     ("a/b/c", False), ("-org/name", False), ("tests/app", False), ("org/name.csv", False)],
)  # fmt: skip
def test_a_hub_id_is_no_file(source: str, is_one: bool, monkeypatch: Any) -> None:
    monkeypatch.chdir(Path(__file__).parents[3])
    assert is_hub_id(source) is is_one


@pytest.mark.parametrize(
    ("merged", "is_reward", "library", "task"),
    [("float32", False, "transformers", "text-generation"),
     (None, False, "peft", "text-generation"),
     ("float32", True, "transformers", "text-classification")],
)  # fmt: skip
def test_a_card_s_header_is_what_the_hub_reads(
    merged: str | None, is_reward: bool, library: str, task: str
) -> None:
    tree = {"data": {"train": ["org/rows:main", "mine.jsonl"]}, "run": {"name": "a", "steps": 9}}
    config = Config.model_validate(tree)
    card = ModelCard(
        "mine", "me/mine", "org/base", merged, "the gap", config, None, Path("a"), is_reward
    )
    text = model_card.render(card)
    assert ("AutoModelForSequenceClassification" in text) == is_reward
    for line in (
        "base_model: org/base", f"library_name: {library}", f"pipeline_tag: {task}",
        "- reason_llm\n- grpo\n", "datasets:\n- org/rows\n", "- steps: unknown of 9 planned",
        ": the gap.", "- data: org/rows:main, mine.jsonl", '"me/mine"',
    ):  # fmt: skip
        assert line in text, line
    local = model_card.render(replace(card, base="./here", config=None))
    assert "base_model" not in local
    assert "datasets" not in local and "## Training" not in local


def test_a_card_tells_the_held_out_scores_of_the_last_adapter_alone(tmp_path: Path) -> None:
    summary = {"judged_by": "mine", "accuracy_before": 0.25, "accuracy_after": 0.5,
               "accuracy_of_sets": {"hard": [0.25, 0.5]}, "accuracy_samples": 2,
               "accuracy_problems": 48, "held_out_loss": [1.5, 1.25],
               "held_out_pair_accuracy": [0.5, 0.75], "held_out_pairs": None}  # fmt: skip
    (tmp_path / "summary.json").write_bytes(orjson.dumps(summary))
    config = Config.model_validate({"data": {"train": "x"}})

    def lines(adapter: str) -> list[str]:
        card = ModelCard("a", "a", "b", None, None, config, tmp_path, tmp_path / adapter)
        evaluation = model_card.render(card).partition("## Evaluation\n\n")[2]
        return evaluation.partition("\n\n")[0].splitlines()

    assert lines("adapter") == [
        "- held-out mine 0.250 -> 0.500 on 48 problems (mean of 2 samples)",
        "- hard 0.250 -> 0.500",
        "- held-out loss 1.5 -> 1.25",
        "- held-out pairs 50.0% -> 75.0%",
    ]
    assert lines("adapter_best") == ["Not evaluated, as far as the run's files say."]
    (tmp_path / "summary.json").write_bytes(b'{"accuracy_before": 1}')
    with pytest.raises(ModelError, match=r"/summary.json is damaged \(KeyError"):
        lines("adapter")


def test_a_card_names_the_held_out_problems() -> None:
    tree = {"data": {"train": "mine.jsonl", "eval": "5%"},
            "eval": {"sets": {"hard": "hard.jsonl"}}}  # fmt: skip
    card = ModelCard("a", "a", "b", None, None, Config.model_validate(tree), None, Path("a"))
    assert "- data: mine.jsonl; held out: 5%, hard.jsonl\n" in model_card.render(card)


def test_a_card_of_a_run_that_trained_all_weights_names_no_lora() -> None:
    config = Config.model_validate({"data": {"train": "x"}, "model": {"train": "full"}})
    card = ModelCard("a", "a", "b", "float32", None, config, None, Path("model"))
    assert "LoRA" not in (text := model_card.render(card))
    assert "- all weights, without an adapter; learning rate" in text
