"""The parts of an export without a model: what is read, refused, compared and told of."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch

from reason_llm.app.export import model_card, parity, reward_model
from reason_llm.app.export.model_card import ModelCard, is_hub_id, licence_of
from reason_llm.app.export.parity import ScoreParity
from reason_llm.config import Config
from reason_llm.errors import ConfigError, ModelError
from reason_llm.model import Datum, digests

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
    ("gib", "size"), [("1", 2**30), (0.5, 2**29), ("1e-12", 1), ("999999", 999999 * 2**30)]
)
def test_a_shard_s_size_is_in_bytes(gib: Any, size: int) -> None:
    assert exporting.shard_bytes(gib) == size


@pytest.mark.parametrize("gib", ["0", "-1", "big", "nan", "1e6", "inf"])
def test_a_shard_of_no_size_is_refused(gib: str) -> None:
    with pytest.raises(ConfigError, match=f"--max-shard-gib {gib} is not a size"):
        exporting.shard_bytes(gib)


@pytest.mark.parametrize(
    ("text", "licence"),
    [("---\nlicense: mit\n---\n", "mit"), ("---\r\na: b\r\nlicense: mit\r\n---\r\n", "mit"),
     ("license: mit\n", None), ("---\nlicense: [a]\n---\n", None), ("---\na: b\n---\n", None),
     ("x\n---\nlicense: mit\n---\n", None), (None, None)],
)  # fmt: skip
def test_a_licence_is_that_of_the_card_s_header(
    text: str | None, licence: str | None, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "README.md").write_bytes(text.encode())
    assert licence_of(tmp_path) == licence


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
    card = ModelCard("mine", "org/base", "mit", merged, "the gap", config, None, Path("a"))
    text = model_card.render(reward_model.on_card(card) if is_reward else card)
    assert ("AutoModelForSequenceClassification" in text) == is_reward
    for line in (
        "base_model: org/base", f"library_name: {library}", f"pipeline_tag: {task}", "license: mit",
        "- reason_llm\n- grpo\n", "datasets:\n- org/rows\n", "- unknown of 9 planned steps",
        ": the gap.", "- data: org/rows:main, mine.jsonl", "names `mit`",
    ):  # fmt: skip
        assert line in text, line
    assert ('"mine"' in text, "# this folder" in text) == (True, False)
    local = model_card.render(replace(card, base="./here", config=None, folder=Path("out/mine")))
    assert '"out/mine"' in local and "  # this folder\n" in local
    assert "base_model" not in local
    assert "datasets" not in local and "## Training" not in local


@pytest.mark.parametrize(
    ("judged_by", "shown"),
    [("accuracy", ("25.0% before training, 50.0%", "25.0% before training, 50.0% after")),
     ("mine", ("0.25 before training, 0.5 after", "0.25 before training, 0.5 after"))],
)  # fmt: skip
def test_a_card_tells_what_the_run_was_judged_by(
    judged_by: str, shown: tuple[str, str], tmp_path: Path
) -> None:
    """Only an accuracy is a percentage, also that of a named set."""
    summary = {"judged_by": judged_by, "accuracy_before": 0.25, "accuracy_after": 0.5,
               "accuracy_of_sets": {"hard": [0.25, 0.5]}, "accuracy_samples": 2,
               "accuracy_problems": 48,
               "held_out_loss": [1.5, 1.25], "held_out_pair_accuracy": [0.5, 0.75]}  # fmt: skip
    (tmp_path / "summary.json").write_bytes(orjson.dumps(summary))
    config = Config.model_validate({"data": {"train": "x"}})
    adapter = tmp_path / "adapter"
    text = model_card.render(ModelCard("a", "b", None, None, None, config, tmp_path, adapter))
    assert f"Held-out {judged_by}, 48 problems, mean of 2 samples: {shown[0]}" in text
    assert f"- hard: {shown[1]}" in text
    assert "Held-out loss: 1.5 before training, 1.25 after." in text
    assert "Held-out pairs in order: 50.0% before training, 75.0% after." in text
    other = model_card.render(
        ModelCard("a", "b", None, None, None, config, tmp_path, tmp_path / "adapter_best")
    )
    assert "Not evaluated" in other


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("5%", "- held out from training: 5% of the rows of this data"),
        ("test.jsonl", "- held out from training: test.jsonl"),
        (None, None),
    ],
)
def test_a_card_names_the_held_out_problems(source: str | None, line: str | None) -> None:
    tree = {"data": {"train": "mine.jsonl", "eval": source},
            "eval": {"sets": {"hard": "hard.jsonl"}}}  # fmt: skip
    config = Config.model_validate(tree)
    lines = model_card.render(
        ModelCard("a", "b", None, None, None, config, None, Path("adapter"))
    ).splitlines()
    assert lines.index("- held out from training, hard: hard.jsonl") > lines.index(
        "- data: mine.jsonl"
    )
    assert (line in lines) == (line is not None)
    assert sum(each.startswith("- held out from training:") for each in lines) == bool(line)
    rows = {"stage": "sft", "data": {"train": "mine.jsonl"}, "eval": {"rows": "2.5%"}}
    card = ModelCard("a", "b", None, None, None, Config.model_validate(rows), None, Path("a"))
    assert "- held out from training, rows: 2.5% of the rows of this data\n" in (
        model_card.render(card)
    )


@pytest.mark.parametrize("kind", ["adapter", "model"])
def test_a_card_shows_no_evaluation_of_another_model_of_the_run(kind: str, tmp_path: Path) -> None:
    """The last one was evaluated, beside the base; the best has other weights."""
    base, names = tmp_path / "base", {"adapter": kind, "best": f"{kind}_best"}
    for name in ("base", *names.values()):
        (tmp_path / name).mkdir()
        is_adapter = name.startswith("adapter")
        config = "adapter_config.json" if is_adapter else "config.json"
        (tmp_path / name / config).write_text("{}")
        weights = "adapter_model.safetensors" if is_adapter else "model.safetensors"
        (tmp_path / name / weights).write_text(name)

    def model(label: str) -> dict[str, Any]:
        folder = tmp_path / names.get(label, "base")
        adapter = folder if label in names and kind == "adapter" else None
        path = str(folder if adapter is None else base)
        return {"path": path, "adapter": adapter and str(adapter),
                "sha256": digests.weights_digest(path, adapter)}  # fmt: skip

    def rows(which: str, *evaluated: str) -> list[str]:
        """Models in the card's table, after these models were evaluated."""
        (tmp_path / "evaluation").mkdir(exist_ok=True)
        scores = {"held_out": {"problems": 9, "greedy": {"value": 0.5, "low": 0.25, "high": 0.75}}}
        for name, content in (
            ("evaluation", {"models": {label: model(label) for label in evaluated}}),
            ("summary", {"results": dict.fromkeys(evaluated, scores)}),
        ):
            (tmp_path / "evaluation" / f"{name}.json").write_bytes(orjson.dumps(content))
        config = Config.model_validate({"data": {"train": "x"}})
        adapter = tmp_path / names[which]
        text = model_card.render(ModelCard("a", "b", None, None, None, config, tmp_path, adapter))
        table = [line.split(" | ") for line in text.splitlines() if "| greedy |" in line]
        assert ("Not evaluated" in text) == (not table)
        return [line[3] for line in table]

    assert rows("adapter", "adapter", "base") == ["adapter", "base"]
    assert rows("best", "adapter", "base") == []
    assert rows("best", "best", "adapter") == ["best"]


def test_a_card_of_a_run_that_trained_all_weights_names_no_lora() -> None:
    config = Config.model_validate({"data": {"train": "x"}, "model": {"train": "full"}})
    card = ModelCard("a", "b", None, "float32", None, config, None, Path("model"))
    assert "LoRA" not in (text := model_card.render(card))
    assert "- all weights, without an adapter (model.adapter was not used); learning rate" in text
