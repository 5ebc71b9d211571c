"""Evaluation by samples (eval.samples).

1. Mean, interval and pass@k are those of the rewards.   2. Accuracy, best and headline go by them.
3. A resumed run evaluates with the same bits.           4. Greedy stays as it is.
5. What the samples are drawn with is part of what a best evaluation is compared by.
6. A reward model's length is that of the answer.
"""

import gzip
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from conftest import ROOT
from reason_llm.app import lines
from reason_llm.app.training import train
from reason_llm.config import Config
from reason_llm.model import Datum
from reason_llm.rollout import Completion, Group, Prompt, Span, TokenRow
from reason_llm.run import SILENT, collect, held_out as held_out_module
from reason_llm.run.held_out import HeldOut, judge, of_samples, sampling_params
from reason_llm.run.store import metrics
from reason_llm.sample import SamplingParams
from reason_llm.score.statistics import proportion
from reason_llm.train import length_bias

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
    told = lines.accuracy(record | {"eval/easy/accuracy": 0.25}, "accuracy")
    assert told == (
        "held-out accuracy 50.0% (18.8% to 81.2%, mean of 2 samples; pass@2 75.0%; easy 25.0%)"
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
    assert first["eval/samples"] == 3
    assert len({each["completion"] for each in kept[:3]}) > 1
    assert summary["accuracy_before"] == first["eval/accuracy"]
    assert "(mean of 3 samples)" in lines.of_summary(summary)[0]
    best = max(each["eval/accuracy"] for each in records_of(config))
    assert summary["best"]["value"] == best

    stopped = options | {"run__name": "again", "run__steps": 1}
    train(small_run(**stopped))
    assert records_of(small_run(**stopped)) == records_of(config)[:2]
    went_on = small_run(**stopped | {"run__steps": 2})
    train(went_on)
    assert records_of(went_on) == records_of(config)

    other = small_run(**options | {"run__name": "other", "run__seed": 1, "run__steps": 1})
    train(other)
    assert records_of(other)[0] != first


def test_a_reward_model_that_pays_by_the_token_goes_by_length_whatever_the_prompts() -> None:
    lengths = [(90, 4), (90, 2), (3, 7), (3, 5), (50, 1), (50, 9)]
    data = [Datum.of(range(asked), range(answer)) for asked, answer in lengths]
    settings = SimpleNamespace(
        objective=SimpleNamespace(unit="pair", output="scores"), role="policy"
    )
    learner: Any = SimpleNamespace(
        settings=settings, judge=lambda data: {}, scores=lambda data, role: [a for _, a in lengths]
    )
    assert judge(learner, data)["eval/length_correlation"] == pytest.approx(1.0)


def test_what_is_measured_of_held_out_rows() -> None:
    """Chosen and rejected by turns: 4 and 1 with 2 and 1 tokens, 3 and 0 with 3 and 1."""
    data = [Datum.of(range(5), range(answer)) for answer in (2, 1, 3, 1)]
    settings = SimpleNamespace(
        objective=SimpleNamespace(unit="pair", output="scores"), role="the role"
    )
    learner: Any = SimpleNamespace(
        settings=settings, judge=lambda data: {"loss": 0.5, "nll": 2.0},
        scores=lambda data, role: {"the role": [4.0, 1.0, 3.0, 0.0]}[role],
    )  # fmt: skip
    found = judge(learner, data)
    assert (found["eval/pairs"], found["eval/loss"]) == (2, 0.5)
    assert found["eval/perplexity"] == pytest.approx(math.exp(2))
    assert (found["eval/reward_mean"], found["eval/reward_std"]) == (
        2.0, pytest.approx(math.sqrt(10 / 3)),
    )  # fmt: skip
    bias = length_bias([4.0, 3.0], [1.0, 0.0], [2, 3], [1, 1])
    assert found == found | {f"eval/{k}": v for k, v in bias.items() if not math.isnan(v)}
    settings.objective = SimpleNamespace(unit="row", output="logits")
    learner.judge = lambda data: {"nll": 1e9}
    assert judge(learner, data) == {"eval/nll": 1e9, "eval/perplexity": math.exp(200.0)}


def test_what_is_measured_of_completions_and_kept_of_them() -> None:
    """By the first reward; tokens are those that the model wrote."""
    asked: list[Any] = []

    def made(first: float, reason: Any) -> Completion:
        rewards = {"other": 9.0, "first": first}
        return Completion(
            (1, 2, 3), "text", (-1.0,) * 3, reason, rewards, first + 9, spans=(Span(1, 2),)
        )

    ends = [(1.0, "stop"), (0.0, "length"), (0.5, "turns"), (0.5, "stop")]
    completions = [made(*each) for each in ends]
    groups = [Group(PROMPT, tuple(completions[n : n + 2])) for n in (0, 2)]

    def sample(*given: Any, **named: Any) -> str:
        asked.append((given, named))
        return "sampled"

    def score(sampled: str, only_first: bool) -> list[Group]:
        assert (sampled, only_first) == ("sampled", True)
        return groups

    scorer: Any = SimpleNamespace(score=score, rewards=[SimpleNamespace(name="first")])
    sampler: Any = SimpleNamespace(sample=sample)
    for temperature in (0.0, 0.7):
        params = SamplingParams(2, 3, temperature)
        given = sampler, ["prompts"], scorer, params, "progress", 5
        found, scored = held_out_module.evaluate(*given)  # type: ignore[arg-type]
        assert scored == groups
        values = {"accuracy": 0.5, "completion_tokens": 2.0, "truncated_fraction": 0.25}
        more = of_samples([[1.0, 0.0], [0.5, 0.5]]) if temperature else {}
        assert found == {f"eval/{name}": value for name, value in values.items()} | more
        assert asked.pop() == ((["prompts"], params), {"seed": 5, "progress": "progress"})
    lines = [orjson.loads(each) for each in held_out_module.to_lines("set", groups).splitlines()]
    assert lines[1] == {
        "set": "set", "id": "a", "prompt": "", "answer": "3", "completion": "text", "score": 9.0,
        "tokens": 2, "finish_reason": "length",
    }  # fmt: skip
    assert [line["score"] for line in lines] == [10.0, 9.0, 9.5, 9.5]


PROMPT, ROW = Prompt("a", "", (1, 2), "3"), TokenRow("r", (4, 5), (False, True), 0, 1.0)


def held_out(config: Config, prompt: Prompt = PROMPT, row: TokenRow = ROW, **others: Any) -> Any:
    """The evaluations of a run with two sets of this prompt, and of this row."""
    sets = [SimpleNamespace(name=name, prompts=[prompt]) for name in ("", "again")]
    data = SimpleNamespace(
        held_out=sets, held_out_prompts=[prompt] * 2, held_out_rows=SimpleNamespace(rows=[row])
    )
    job: Any = SimpleNamespace(config=config, data=SimpleNamespace(**vars(data) | others))
    job.plan, job.run = SimpleNamespace(cache_tokens=7), SimpleNamespace(environments=None)
    job.scorer, job.folder = "the scorer", Path("run")
    nothing: Any = SimpleNamespace(model="the model", dealing=lambda sampler: sampler)
    return HeldOut(job, nothing, nothing, nothing)


def test_a_best_evaluation_is_compared_with_those_of_the_same_questions(
    small_run: Callable[..., Config],
) -> None:
    small_run = partial(small_run, **HELD_OUT)
    one = held_out(small_run()).digest
    assert (
        held_out(small_run(run__seed=3), replace(PROMPT, id="b"), replace(ROW, name="s")).digest
        == one
    )
    others = [
        held_out(small_run(eval__max_new_tokens=5)),
        held_out(small_run(eval__samples=2)),
        held_out(small_run(), replace(PROMPT, token_ids=(2, 1))),
        held_out(small_run(), replace(PROMPT, answer="4")),
        held_out(small_run(), row=replace(ROW, ids=(5, 4))),
        held_out(small_run(), row=replace(ROW, value=0.5)),
        held_out(small_run(), held_out=[]),
        held_out(small_run(), held_out_rows=None),
    ]
    assert len({one, *(each.digest for each in others)}) == 9
    assert not held_out(small_run(), held_out=[], held_out_rows=None).exists
    assert all(each.exists for each in others)
    for every, due in ((2, [0, 2, 4, 5]), (0, [5])):
        asked = held_out(small_run(eval__every=every, run__steps=5))
        assert [step for step in range(6) if asked.is_due(step)] == due


def test_each_set_has_numbers_of_its_own(
    small_run: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first set's count for the run."""
    asked: list[Any] = []

    def evaluate(*given: Any) -> Any:
        asked.append(given)
        return {"eval/accuracy": float(len(asked))}, []

    def sampling(model: str, tokens: int) -> Any:
        assert (model, tokens) == ("the model", 7)
        return nullcontext("the sampler")

    monkeypatch.setattr(held_out_module, "evaluate", evaluate)
    monkeypatch.setattr(held_out_module, "sampling", sampling)
    config = small_run(**HELD_OUT, run__seed=3)
    nothing: Any = SimpleNamespace(submit=lambda write: None)
    record = held_out(config, held_out_rows=None).evaluate(1, SILENT, nothing)
    assert record == {"eval/accuracy": 1.0, "eval/again/accuracy": 2.0}
    params = sampling_params(config)
    assert [(*each[:4], each[5]) for each in asked] == [
        ("the sampler", [PROMPT], "the scorer", params,
         random.Random(f"3/held_out/{name}").getrandbits(63)) for name in ("", "again")
    ]  # fmt: skip
