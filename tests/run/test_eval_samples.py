"""Evaluation by samples (eval.samples).

1. Mean, interval and pass@k are those of the rewards.   2. Accuracy, best and headline go by them.
3. A resumed run evaluates with the same bits.           4. Greedy stays as it is.
"""

import gzip
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

import orjson
import pytest

from conftest import ROOT
from reason_llm.app import lines
from reason_llm.app.training import train
from reason_llm.config import Config
from reason_llm.run import collect
from reason_llm.run.held_out import of_samples, sampling_params
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams
from reason_llm.score.statistics import proportion

HELD_OUT = {"data__eval": str(ROOT / "data" / "arithmetic_test.jsonl"), "eval__limit": 8}


def test_what_samples_say_beyond_their_mean() -> None:
    rewards = [[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]
    found = of_samples(rewards)
    interval = proportion([0.5, 0.0, 1.0, 0.5], 2)
    assert found["eval/samples"] == 2
    assert (found["eval/accuracy_low"], found["eval/accuracy_high"]) == (
        interval.low,
        interval.high,
    )
    assert interval.low < 0.5 < interval.high
    assert found["eval/pass_at_k"] == 0.75
    assert "eval/pass_at_k" not in of_samples([[0.5, 1.0], [0.0, 1.0]])
    assert "eval/pass_at_k" not in of_samples([[1.0], [0.0]])
    assert "eval/accuracy_low" not in of_samples([[1.0, 2.0]])  # one problem has no spread


def test_the_line_says_of_what_the_accuracy_is() -> None:
    record = {"eval/accuracy": 0.5, "eval/completion_tokens": 9.0}
    assert lines.accuracy(record, "accuracy") == "held-out accuracy 50.0%"
    record |= of_samples([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    record |= {"eval/problems": 4.0, "eval/easy/accuracy": 0.25, "eval/easy/problems": 1.0}
    assert lines.accuracy(record, "accuracy") == (
        "held-out accuracy 50.0% on 4 problems (18.8% to 81.2%, mean of 2 samples; pass@2 75.0%; "
        "easy 25.0% on 1 problem)"
    )


def test_samples_are_drawn_as_in_training(small_run: Callable[..., Config]) -> None:
    drawn = HELD_OUT | {"sample__temperature": 0.7, "sample__top_k": 9, "sample__top_p": 0.9}
    params = sampling_params(
        small_run(eval__samples=3, eval__max_new_tokens=5, sample__stop=["Q:"], **drawn)
    )
    assert params == SamplingParams(3, 5, 0.7, 9, 0.9, stop=("Q:",))
    trained = collect.sampling_params(small_run(**drawn, sample__min_p=0.1, sample__stop=["Q:"]))
    assert (trained.min_p, trained.stop) == (0.1, ("Q:",))
    greedy = sampling_params(small_run(**drawn, sample__stop=["Q:"]))
    assert greedy == SamplingParams(1, 32, temperature=0.0, stop=("Q:",))


def records_of(config: Config) -> list[metrics.Record]:
    folder = Path(config.run.directory) / str(config.run.name)
    found = metrics.read(folder)
    return [{k: v for k, v in each.items() if k.startswith("eval/")} for each in found]


@pytest.mark.long
def test_a_run_is_judged_by_its_samples(small_run: Callable[..., Config], tmp_path: Path) -> None:
    """The files and the summary agree; a resumed run has the same bits, another seed others."""
    options = HELD_OUT | {"eval__samples": 3, "eval__every": 1, "run__steps": 2}
    config = small_run(**options)
    summary = train(config)
    path = tmp_path / "runs" / "small" / "evaluations" / "step-00000000.jsonl.gz"
    kept = [orjson.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    assert len(kept) == 3 * 8
    first = records_of(config)[0]
    assert first["eval/accuracy"] == pytest.approx(fmean(each["score"] for each in kept))
    assert (first["eval/samples"], first["eval/problems"]) == (3, 8)
    assert len({each["completion"] for each in kept[:3]}) > 1
    assert summary["accuracy_before"] == first["eval/accuracy"]
    assert "% on 8 problems (mean of 3 samples)" in lines.of_summary(summary)[0]
    best = max(each["eval/accuracy"] for each in records_of(config))
    assert summary["best"]["value"] == best

    stopped = options | {"run__name": "again", "run__steps": 1}
    train(small_run(**stopped))
    assert records_of(small_run(**stopped)) == records_of(config)[:2]
    went_on = small_run(**stopped | {"run__steps": 2})
    train(went_on)
    assert records_of(went_on) == records_of(config)
    scores = []
    for step in (0, 2):
        content = gzip.decompress(path.with_name(f"step-{step:08d}.jsonl.gz").read_bytes())
        values = [orjson.loads(line)["score"] for line in content.splitlines()]
        scores.append([fmean(values[n : n + 3]) for n in range(0, 24, 3)])
    better = sum(after > before for before, after in zip(*scores, strict=True))
    assert records_of(went_on)[2]["eval/problems_better"] == better > 0
    assert "eval/problems_better" not in first

    other = small_run(**options | {"run__name": "other", "run__seed": 1, "run__steps": 1})
    train(other)
    assert records_of(other)[0] != first
