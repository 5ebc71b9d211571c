"""Options of a run that other trainers have, too: epochs, kept evaluations, a floor of the rewards'
deviation, a tracker's project; the labels of KTO."""

import gzip
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from conftest import ROOT
from reason_llm.config import Config, ScoreSection
from reason_llm.config.algorithms import resolve
from reason_llm.errors import ConfigError, DataError
from reason_llm.loop import train
from reason_llm.rollout import Completion, Group, Prompt
from reason_llm.run import SILENT
from reason_llm.run.start.prepare import prepare
from reason_llm.run.store import metrics
from reason_llm.run.store.folder import read_config
from reason_llm.score import Scorer
from reason_llm.train import with_advantages


def group(*rewards: float) -> Group:
    made = tuple(Completion((1,), "", (-1.0,), "stop", {"mine": r}, r) for r in rewards)
    return Group(Prompt("p", "", (1,), ""), made)


def test_rollouts_may_have_other_rewards_than_the_run() -> None:
    taught = with_advantages([group(0.0, 1.0)], resolve("grpo", {}))
    assert metrics.describe(taught, "mine")["score/first_reward_std"] == 0.5
    assert "score/first_reward_std" not in metrics.describe(taught, "another")  # run.from_buffer


@pytest.mark.parametrize(("limit", "cache"), [(100, 25), (8192, 1024), (2, 1)])
def test_soft_overlong_falls_over_a_quarter_of_the_limit(limit: int, cache: int) -> None:
    rewards = [{"name": "boxed"}, {"name": "soft_overlong"}]
    with Scorer(ScoreSection.model_validate({"rewards": rewards}), limit) as scorer:
        [scored] = scorer.score([
            Group(Prompt("p", "", (1,), "1"), tuple(
                Completion((1,) * n, "", (-1.0,) * n, "stop") for n in (limit - cache, limit)
            ))
        ])  # fmt: skip
    assert [c.rewards["soft_overlong"] for c in scored.completions] == [0.0, -1.0]


def test_epochs_say_how_many_steps(small_run: Callable[..., Config], tmp_path: Path) -> None:
    rows = (ROOT / "data" / "arithmetic_train.jsonl").read_bytes().splitlines(keepends=True)[:10]
    (tmp_path / "ten.jsonl").write_bytes(b"".join(rows))
    options = {"data__train": str(tmp_path / "ten.jsonl"), "sample__prompts_per_step": 4}
    config = small_run(run__epochs=0.5, train__schedule="linear", **options)
    assert train(config)["steps"] == 2  # 5 prompts, 4 a step
    run = tmp_path / "runs" / "small"
    written = read_config(run).run
    assert (written.steps, written.epochs) == (2, None)
    rates = [record["train/learning_rate"] for record in metrics.read(run)[1:]]
    assert rates == pytest.approx([1e-3, 5e-4])
    with pytest.raises(
        ConfigError,
        match=r"train\.warmup_steps=3 contradicts run\.steps=2, in which the policy has 2",
    ):
        train(small_run(run__epochs=0.5, train__warmup_steps=3, run__name="other", **options))
    assert not (tmp_path / "runs" / "other").exists()


def test_the_completions_of_every_evaluation_are_kept(
    small_run: Callable[..., Config], tmp_path: Path
) -> None:
    held_out = str(ROOT / "data" / "arithmetic_test.jsonl")
    options = {"data__eval": held_out, "eval__limit": 4, "eval__every": 1, "run__steps": 2}
    (tmp_path / "mine.py").write_text(
        "def odd(completion):\n    return sum(map(ord, completion)) % 64\n"
    )
    options |= {"score__rewards": [{"custom": f"{tmp_path / 'mine.py'}:odd"}]}
    other = str(ROOT / "data" / "arithmetic_train.jsonl")
    train(small_run(eval__sets={"again": other}, **options))
    folder = tmp_path / "runs" / "small"
    files = sorted((folder / "evaluations").iterdir())
    assert [file.name for file in files] == [f"step-0000000{n}.jsonl.gz" for n in range(3)]
    records = metrics.read(folder)
    for file, record in zip(files, records, strict=True):
        lines = [orjson.loads(line) for line in gzip.decompress(file.read_bytes()).splitlines()]
        assert [line["set"] for line in lines] == ["held_out"] * 4 + ["again"] * 4
        means = [sum(line["score"] for line in part) / 4 for part in (lines[:4], lines[4:])]
        assert means == [record["eval/accuracy"], record["eval/again/accuracy"]]
        assert means[0] != means[1]
        assert all(line["completion"] and line["finish_reason"] for line in lines)


def test_kto_s_weights_are_warned_of_with_the_numbers_to_set(
    small_run: Callable[..., Config], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [f'{{"prompt": "Q{n}", "completion": "A", "label": {n % 5 == 0:d}}}' for n in range(20)]
    (tmp_path / "labels.jsonl").write_text("\n".join(rows))
    (tmp_path / "one.jsonl").write_text(rows[0].replace("Q0", "Z"))
    data = {"train": str(tmp_path / "labels.jsonl"), "system_prompt": "none"}
    options = {
        "stage": "preference", "data": data, "sample": {}, "score": {}, "algorithm": {},
        "train__rows_per_step": 4,
    }  # fmt: skip
    kto = {"name": "kto"}
    prepare(small_run(**options, preference=kto), SILENT)
    assert "preference.desirable_weight=1 " in caplog.text
    assert "20 % of the rows are good ones; set it to a number from 4 to 5.33" in caplog.text
    caplog.clear()
    prepare(small_run(**options, preference=kto | {"desirable_weight": 4.0}), SILENT)
    assert "desirable_weight" not in caplog.text
    (tmp_path / "labels.jsonl").write_text("\n".join(rows[::5]))  # good ones alone
    prepare(small_run(**options, preference=kto), SILENT)
    assert "desirable_weight" not in caplog.text
    held_out = {"rows": str(tmp_path / "one.jsonl")}
    with pytest.raises(DataError, match=r"one\.jsonl holds one row.* leave eval\.rows out"):
        prepare(small_run(**options, preference=kto, eval=held_out), SILENT)
