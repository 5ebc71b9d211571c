"""Conditional SFT: rows say their score, and whoever samples asks for the best: the run's own
evaluation, evaluate and chat."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from reason_llm.app import chat as chat_module
from reason_llm.app.chat import Chat, Options, find_subject
from reason_llm.app.data_check import check_data
from reason_llm.config import Config
from reason_llm.data import read_conditioning
from reason_llm.evaluate import evaluation
from reason_llm.evaluate.request import Request, Target
from reason_llm.files import read_object
from reason_llm.loop import train
from reason_llm.rollout import Prompt
from reason_llm.run import held_out
from reason_llm.score import Scorer

SCORES = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]  # mean 2.5, deviation sqrt(3.5) = 1.8708
FIRST = "What is 0 + 1?"


@pytest.fixture
def conditional(small_run: Callable[..., Config], tmp_path: Path) -> Callable[..., Config]:
    """A run of one step on six scored rows, with two problems held out."""
    rows = [
        {"prompt": f"What is {n} + 1?", "completion": f"{n + 1}", "score": score}
        for n, score in enumerate(SCORES)
    ]
    problems = [{"question": f"What is {n} + 9?", "answer": str(n + 9)} for n in range(2)]
    for name, content in (("rows", rows), ("problems", problems)):
        text = "".join(json.dumps(row) + "\n" for row in content)
        (tmp_path / f"{name}.jsonl").write_text(text)

    def make(**more: Any) -> Config:
        return small_run(
            stage="sft", run__steps=1, algorithm={}, sample={"max_new_tokens": 4},
            data__train=str(tmp_path / "rows.jsonl"), data__eval=str(tmp_path / "problems.jsonl"),
            train__rows_per_step=6, **{"sft__condition": "reward"} | more,
        )  # fmt: skip

    return make


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts of the prompts that a run is judged by."""
    texts: list[str] = []
    original = held_out.evaluate

    def evaluate(sampler: Any, prompts: list[Prompt], *more: Any) -> Any:
        texts.extend(prompt.text for prompt in prompts)
        return original(sampler, prompts, *more)

    monkeypatch.setattr(held_out, "evaluate", evaluate)
    return texts


@pytest.mark.parametrize(
    ("options", "rewards", "asked"),
    [
        ({}, ["-1.34", "-0.80", "-0.27", "0.27", "0.80", "1.34"], "5.00"),
        ({"sft__condition_target": "2.50"}, ["-1.34", "-0.80", "-0.27"], "2.50"),
        ({"sft__condition": "bins", "sft__condition_bins": 3}, ["0", "0", "1", "1", "2", "2"], "2"),
        (
            {"sft__condition": "bins", "sft__condition_target": "1",
             "sft__condition_text": "[{reward}] {input}"},
            [], "1",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_evaluation_asks_for_the_best(
    conditional: Callable[..., Config], sampled: list[str], options: dict, rewards: list[str],
    asked: str,
) -> None:  # fmt: skip
    config = conditional(**options)
    train(config)
    text = str(options.get("sft__condition_text", "{input} <rm_score>: {reward} "))
    expected = [
        text.replace("{reward}", asked).replace("{input}", f"What is {n} + 9?") for n in range(2)
    ]
    assert sampled == [
        f"<|im_start|>user\n{each}<|im_end|>\n<|im_start|>assistant\n" for each in expected
    ] * 2  # fmt: skip
    if rewards:
        trained = [f"What is {n} + 1? <rm_score>: {reward} " for n, reward in enumerate(rewards)]
        assert trained[0] in "\n".join(check_data(config, []).lines)


def test_adapter_and_run_say_how_they_are_asked(
    conditional: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file's numbers; evaluate and chat read it, of the adapter and of a checkpoint; the base
    is asked plainly."""
    config = conditional()
    train(config)
    folder = config.run.directory / str(config.run.name)
    for place in (folder, folder / "adapter"):
        found = read_object(place / "conditioning.json")
        assert found == {
            "template": "{input} <rm_score>: {reward} ", "mean": 2.5,
            "deviation": pytest.approx(3.5**0.5), "edges": None, "target": "5.00",
        }  # fmt: skip
    asked = "What is 0 + 9? <rm_score>: 5.00 "
    checkpoint = folder / "checkpoints" / "step-00000001"
    for what in (folder, folder / "adapter", checkpoint):
        texts: list[str] = []
        monkeypatch.setattr(
            chat_module, "stream", lambda model, prompt, *_, t=texts: t.append(prompt.text) or ()
        )
        talk = Chat(find_subject(str(what), None), Options(max_new_tokens=1))
        list(talk.answer("What is 0 + 9?"))
        talk.uses_adapter = False
        list(talk.answer("Sure?"))
        assert asked in texts[0]
        assert "<rm_score>" not in texts[1]
        assert talk.messages[0]["content"] == "What is 0 + 9?"
    targets = (
        Target("adapter", config.model.path, folder / "adapter"),
        Target("base", config.model.path, None),
    )
    asking = Request(
        config, targets, num_samples=0, generate_only=False, out=folder / "out", afresh=False,
        may_move_aside=False,
    )  # fmt: skip
    with Scorer(asking.config.score, 4) as scorer:
        stages, _ = evaluation._prepare(asking, scorer)
    by_label = {
        target.label: stage.sets[0].prompts[0].text for stage in stages for target in stage.targets
    }
    assert asked in by_label["adapter"]
    assert "<rm_score>" not in by_label["base"]


def test_without_a_condition_nothing_is_asked(
    conditional: Callable[..., Config], sampled: list[str]
) -> None:
    config = conditional(sft__condition="none")
    train(config)
    assert not any("rm_score" in text for text in sampled)
    assert read_conditioning(config.run.directory / "small" / "adapter") is None


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sft__condition": "none", "sft__condition_target": "5"}, "would be ignored"),
        ({"sft__condition": "bins", "sft__condition_target": "5"}, "no bin; set it to 0 .. 4"),
        ({"sft__condition": "bins", "sft__condition_target": "-1"}, "no bin"),
    ],
)
def test_a_target_that_means_nothing(
    conditional: Callable[..., Config], options: dict, named: str
) -> None:
    with pytest.raises(ValueError, match=named):
        conditional(**options)
