"""The best evaluation of a run, its adapter beside the last one, and the early end."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from safetensors.torch import load_file

from conftest import ROOT
from reason_llm.app.chat import find_subject
from reason_llm.app.export import model_card
from reason_llm.app.export.model_card import ModelCard
from reason_llm.app.lines import of_summary
from reason_llm.config import CommandLine, Config
from reason_llm.errors import CheckpointError, ConfigError
from reason_llm.evaluate.request import make_request
from reason_llm.files import read_object
from reason_llm.loop import train
from reason_llm.rollout import record_from_json
from reason_llm.run.store import best, folder as run_folder
from reason_llm.run.store.best import Best
from reason_llm.run.store.folder import read_config

HELD_OUT = str(ROOT / "data" / "arithmetic_test.jsonl")


def judged(*values: float, metric: str = "eval/accuracy") -> Best | None:
    found = None
    for step, value in enumerate(values):
        found = best.after(found, step, {metric: value}, "set", "accuracy")
    return found


def test_the_highest_accuracy_is_the_best_and_of_equal_ones_the_first() -> None:
    assert judged(0.2, 0.5, 0.4, 0.5) == Best(1, "eval/accuracy", 0.5, "set", "accuracy", 2)
    assert str(judged(0.2, 0.5)) == "held-out accuracy 50.0% at step 1"


def test_of_equal_accuracies_the_lower_loss_is_the_best() -> None:
    """An untrained model that is as wrong as a trained one is not the best for being the first."""
    found = None
    for step, (accuracy, loss) in enumerate([(0.0, 11.8), (0.0, 4.7), (0.0, 4.7), (0.0, 5.0)]):
        record = {"eval/accuracy": accuracy, "eval/loss": loss}
        found = best.after(found, step, record, "set", "accuracy")
    assert found == Best(1, "eval/accuracy", 0.0, "set", "accuracy", 2, 4.7)
    better = {"eval/accuracy": 0.1, "eval/loss": 9.0}
    assert best.after(found, 4, better, "set", "accuracy") == Best(
        4, "eval/accuracy", 0.1, "set", "accuracy", loss=9.0
    )


def test_the_lowest_loss_is_the_best_where_there_is_no_accuracy() -> None:
    assert judged(2.0, 1.5, 1.6, metric="eval/loss") == Best(
        1, "eval/loss", 1.5, "set", "accuracy", 1
    )
    record = {"eval/loss": 9.0, "eval/pair_accuracy": 0.9}
    assert best.after(None, 3, record, "set", "accuracy") == Best(
        3, "eval/pair_accuracy", 0.9, "set", "accuracy", loss=9.0
    )


def test_a_value_that_is_not_finite_is_never_the_best() -> None:
    assert judged(float("nan"), 1.5, float("nan"), metric="eval/loss") == Best(
        1, "eval/loss", 1.5, "set", "accuracy", 1
    )


def test_other_problems_are_judged_anew() -> None:
    found = best.after(judged(0.9), 4, {"eval/accuracy": 0.1}, "another set", "accuracy")
    assert found == Best(4, "eval/accuracy", 0.1, "another set", "accuracy")
    assert best.after(found, 5, {"eval/x": 9.0}, "another set", "accuracy") is found  # of nothing
    other = best.after(found, 5, {"eval/loss": 0.0123456}, "another set", "mine")
    assert str(other) == "held-out loss 0.01235 at step 5"
    assert str(replace(found, judged_by="mine")) == "held-out mine 0.1 at step 4"


@pytest.mark.parametrize("value", [
    {"step": -1}, {"step": True}, {"metric": "eval/speed"}, {"value": float("inf")}, {"more": 1},
])  # fmt: skip
def test_damage_in_a_state_is_noticed(value: dict[str, Any]) -> None:
    whole = {"step": 1, "metric": "eval/accuracy", "value": 0.5, "held_out": "set",
             "judged_by": "accuracy"}  # fmt: skip
    assert record_from_json(Best, whole).step == 1
    with pytest.raises(ValueError):
        record_from_json(Best, whole | value)


@pytest.fixture
def falling(small_run: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A run that evaluates every step, is best in step 2 and falls from there on."""
    (tmp_path / "even.py").write_text(
        "def even(completion):\n"
        "    digits = [int(each) for each in completion if each.isdigit()]\n"
        "    return sum(each % 2 == 0 for each in digits) / max(1, len(digits))\n"
    )
    reward = [{"custom": f"{tmp_path / 'even.py'}:even"}]
    options = {"data__eval": HELD_OUT, "eval__every": 1, "eval__limit": 8, "run__steps": 9,
               "eval__patience": 2, "train__learning_rate": 8e-3,
               "score__rewards": reward}  # fmt: skip
    return lambda **others: small_run(**(options | others))


def accuracies(run: Path) -> list[float]:
    records = map(orjson.loads, (run / "metrics.jsonl").read_bytes().splitlines())
    return [record["eval/accuracy"] for record in records]


@pytest.mark.long
def test_the_run_ends_early_and_keeps_the_adapter_of_its_best_step(
    falling: Callable[..., Config], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "small"
    summary = train(falling(run__keep_checkpoints=9))
    values = accuracies(run)
    step = values.index(max(values))
    assert 0 < step == summary["steps"] - 2 < 7
    assert summary["best"]["step"] == step
    kept = load_file(run / "adapter_best" / "adapter_model.safetensors")
    then = load_file(run / "checkpoints" / f"step-{step:08d}" / "adapter_model.safetensors")
    last = load_file(run / "adapter" / "adapter_model.safetensors")
    assert all(torch.equal(kept[name], then[name]) for name in then)
    assert not all(torch.equal(kept[name], last[name]) for name in last)
    lines = "\n".join(of_summary(summary))
    assert f"best: held-out even {max(values):.4g} at step {step}, in {run}/adapter_best" in lines
    assert f"ended early at step {step + 2} of 9: 2 evaluations in a row" in lines
    assert train(falling(run__keep_checkpoints=9)) == read_object(
        run / "summary.json"
    )  # it is finished, and says so
    assert train(falling(eval__patience=0, run__steps=step + 3))["steps"] == step + 3


@pytest.mark.long
def test_the_best_adapter_is_taken_where_it_is_asked_for(
    falling: Callable[..., Config], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "small"
    train(falling())
    own = run / "adapter_best"
    assert run_folder.find_adapter(run, "best") == own
    assert run_folder.learned_steps(run, own) == run_folder.best_step(run)
    assert find_subject(str(run), None, "best").adapter == own
    line = CommandLine(str(run), {}, set(), {"which": ["best"], "compare": ["adapter"]})
    of_best, of_last = make_request(line).targets
    assert (of_best.label, of_best.adapter) == ("best", own)
    assert (of_last.label, of_last.adapter) == ("adapter", run / "adapter")
    card = ModelCard("x", "x", "model/tiny", None, None, read_config(run), run, own)
    assert f"at step {run_folder.best_step(run)}, selected" in model_card.render(card)
    with pytest.raises(ConfigError, match="--which first is not one of last, best"):
        make_request(replace(line, values={"which": ["first"]}))
    with pytest.raises(ConfigError, match="needs a run, and model/tiny is none"):
        make_request(replace(line, what="model/tiny"))
    shutil.rmtree(own)
    with pytest.raises(CheckpointError, match=r"holds no adapter_best/.*run.keep_best=false"):
        make_request(line)


@pytest.mark.long
def test_without_keep_best_nothing_is_kept_and_the_early_end_stays(
    falling: Callable[..., Config], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "small"
    summary = train(falling(run__keep_best=False))
    assert summary["ended_early"] is not None
    assert not (run / "adapter_best").exists()
    assert not list(run.glob("checkpoints/*/best.*"))
