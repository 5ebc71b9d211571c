"""The real loop on the tiny model: it learns, or does not when it must not; what it leaves."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from conftest import ROOT, TINY
from marks import most_are_long
from reason_llm.app import training
from reason_llm.app.console import Console
from reason_llm.app.report.payload import examine
from reason_llm.app.report.runs import read_run
from reason_llm.config import Config
from reason_llm.config.file import load
from reason_llm.files import read_object
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams, TransformersSampler
from waves import limit_waves

QUIET = Console("quiet")


def run(config: Config) -> dict[str, Any]:
    return training.run_training(config, QUIET)


def folder_of(config: Config) -> Path:
    return config.run.directory / str(config.run.name)


@pytest.mark.long
def test_the_quick_start_s_reward_rises(small_run: Callable[..., Config]) -> None:
    """A shortened quick start: held-out accuracy rises well beyond its 95 % interval, and the
    report raises no alarm."""
    config = small_run(
        run__steps=12,
        data__limit=256,
        model__adapter={"rank": 64, "alpha": 64},
        data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"),
        sample={"prompts_per_step": 32, "completions_per_prompt": 8, "max_new_tokens": 32},
        train={"learning_rate": 1e-3, "gradient_checkpointing": False, "optimizer_steps": 2},
        eval={"every": 0},
    )
    summary = run(config)
    assert 0.2 <= summary["accuracy_before"] <= 0.5
    assert summary["accuracy_after"] >= summary["accuracy_before"] + 0.08
    found = examine(read_run(folder_of(config), "honest")).findings
    assert [title for title, each in found.items() if each.state == "alarm"] == []


def test_learning_rate_zero_stays_where_it_began(small_run: Callable[..., Config]) -> None:
    config = small_run(
        train__learning_rate=0.0, data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"),
        eval__limit=16,
    )  # fmt: skip
    summary = run(config)
    assert summary["accuracy_after"] == summary["accuracy_before"]
    before = folder_of(config) / "checkpoints" / "step-00000002" / "adapter_model.safetensors"
    after = folder_of(config) / "adapter" / "adapter_model.safetensors"
    assert before.read_bytes() == after.read_bytes()


def test_what_a_run_leaves_behind(
    small_run: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    config = small_run(
        data__limit=256, data__eval=str(ROOT / "data" / "arithmetic_test.jsonl"), eval__limit=16
    )
    summary = training.run_training(config, Console("plain"))
    folder = folder_of(config)
    resolved = load(folder / "resolved_config.yaml")
    assert (resolved.sample.engine, resolved.train.packing) == ("transformers", "varlen")
    expected = config.model_dump()  # and in it what auto came to
    expected["sample"]["engine"], expected["train"]["packing"] = "transformers", "varlen"
    expected["sample"]["fold"] = False
    assert resolved.model_dump() == expected
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert read_object(folder / "summary.json") == summary
    for key in (
        "accuracy_before",
        "accuracy_after",
        "steps",
        "sampling_seconds",
        "learning_seconds",
        "total_seconds",
        "peak_rss_mib",
        "adapter",
    ):
        assert summary[key] is not None
    assert summary["total_seconds"] > summary["sampling_seconds"] + summary["learning_seconds"]
    records = metrics.read(folder)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    for record in records[1:]:
        assert record["train/sampler_mismatch_max"] < 1e-4
        assert record["score/reward"] == record["score/think_answer_tags"]
        assert 0 < record["train/entropy"] < 3
    kept = sorted((folder / "checkpoints").iterdir())
    assert [path.name for path in kept] == ["step-00000002", "step-00000003"]
    stated = re.search(
        r"disk: writes checkpoints of ([\d.]+) MiB and keeps 2; at most ([\d.]+) MiB at once",
        capsys.readouterr().out,
    )
    assert stated is not None
    mib = sum(file.stat().st_size for file in kept[-1].iterdir()) / 2**20
    assert mib == pytest.approx(float(stated[1]), rel=0.05, abs=0.1)
    assert sum(file.stat().st_size for file in folder.rglob("*.*")) / 2**20 < float(stated[2])
    buffer = orjson.loads(config.run.buffer.read_bytes())
    assert (buffer["step"], buffer["complete"], buffer["trained"]) == (2, True, True)
    for group in buffer["groups"]:
        assert len(group["completions"]) == 4
        total = sum(completion["advantage"] for completion in group["completions"])
        assert total == pytest.approx(0, abs=1e-9)


def test_the_adapter_loads_with_peft_on_the_base(small_run: Callable[..., Config]) -> None:
    summary = run(small_run())
    base = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        plain = base(input_ids=ids).logits
        tuned = PeftModel.from_pretrained(base, summary["adapter"])(input_ids=ids).logits
    assert not torch.equal(plain, tuned)


@pytest.mark.parametrize(
    ("name", "kl"),
    most_are_long([("grpo", "k3"), ("dr_grpo", "none"), ("dapo", "k1")], [("grpo", "k3")]),
)
def test_every_row_and_kl_runs(small_run: Callable[..., Config], name: str, kl: str) -> None:
    algorithm = {"name": name, "kl": kl} | ({"kl_coefficient": 0.05} if kl != "none" else {})
    config = small_run(run__steps=2, algorithm=algorithm)
    run(config)
    last = metrics.read(folder_of(config))[-1]
    assert ("train/kl" in last) == (kl != "none")  # 0 would be a claim
    assert last.get("train/kl") != 0


def test_the_same_seed_gives_the_same_adapter_and_another_a_different_one(
    small_run: Callable[..., Config],
) -> None:
    def adapter(**overrides: Any) -> bytes:
        summary = run(small_run(run__steps=2, run__resume="never", **overrides))
        return (Path(summary["adapter"]) / "adapter_model.safetensors").read_bytes()

    first = adapter()
    assert adapter() == first
    assert adapter(run__seed=1) != first


def rollouts(config: Config) -> list[dict[str, Any]]:
    return orjson.loads(config.run.buffer.read_bytes())["groups"]


def test_the_learner_follows_the_sampler_s_temperature(small_run: Callable[..., Config]) -> None:
    config = small_run(run__steps=2, sample__temperature=0.6, train__optimizer_steps=2)
    run(config)
    for record in metrics.read(folder_of(config))[1:]:
        assert record["train/sampler_mismatch_max"] < 1e-4
        assert record["sample/tokens_per_second"] > 0


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.01}, {"min_p": 0.999}])
def test_filters_reach_the_sampler(small_run: Callable[..., Config], options: dict) -> None:
    """So narrow that every draw is the likeliest token: a group's completions are all the same."""
    config = small_run(run__steps=1, **{f"sample__{k}": v for k, v in options.items()})
    run(config)
    for group in rollouts(config):
        assert len({tuple(c["token_ids"]) for c in group["completions"]}) == 1


@pytest.mark.long
def test_seed_and_wave_decide_prompts_and_draws(
    small_run: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sampled(**options: Any) -> list[dict[str, Any]]:
        config = small_run(run__steps=1, run__resume="never", train__learning_rate=0.0, **options)
        run(config)
        return rollouts(config)

    def ids(groups: list[dict[str, Any]]) -> list[Any]:
        return [[c["token_ids"] for c in g["completions"]] for g in groups]

    first, second = sampled(), sampled(run__seed=1)
    assert [g["prompt"]["id"] for g in first] != [g["prompt"]["id"] for g in second]
    # One row alone, so that only the draws can differ: by seed, and from wave to wave.
    (tmp_path / "one.jsonl").write_text('{"question": "What is 57 + 68?", "answer": "125"}\n')
    limit_waves(2, monkeypatch.setattr)
    one = {"data__train": str(tmp_path / "one.jsonl")}
    first, second = sampled(**one), sampled(**one, run__seed=1)
    assert ids(first) != ids(second)
    assert ids(first)[:2] != ids(first)[2:]


def test_evaluation_is_greedy_and_limited(
    small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, float]] = []
    original = TransformersSampler.sample

    def sample(self: Any, prompts: Any, params: SamplingParams, *rest: Any, **named: Any) -> Any:
        asked.append((len(prompts), params.temperature))
        return original(self, prompts, params, *rest, **named)

    monkeypatch.setattr(TransformersSampler, "sample", sample)
    data = str(ROOT / "data" / "arithmetic_test.jsonl")
    run(small_run(run__steps=4, data__eval=data, eval={"every": 2, "limit": 5}))
    # Before, after two steps, at the end; the four prompts of a step are sampled at 1.
    assert [t for count, t in asked if count == 5] == [0.0, 0.0, 0.0]
    assert [t for count, t in asked if count == 4] == [1.0] * 4
