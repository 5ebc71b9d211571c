"""The lesson's game: its replies, what it tells, and that its tool is the same game."""

import importlib.util
import json
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from conftest import ROOT
from reason_llm import train
from reason_llm.config import file as config_file
from reason_llm.environments.data_side import tool_schemas

PATH = ROOT / "examples" / "wordle.py"


@pytest.fixture(scope="module")
def game() -> Any:
    spec = importlib.util.spec_from_file_location("wordle", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("guess", "word", "marks"),
    [
        ("abc", "abc", "GGG"),
        ("abb", "bab", "YYG"),
        ("aab", "bca", "Y-Y"),
        ("aaa", "bab", "-G-"),
        ("abc", "def", "---"),
        ("baa", "aab", "YGY"),
    ],
)
def test_replies(game: Any, guess: str, word: str, marks: str) -> None:
    assert game.feedback(guess, word) == marks


def test_replies_count_each_letter_as_often_as_it_stands(game: Any) -> None:
    """For every pair of words over three letters: the marked ones are the letters in common."""
    words = ["".join(each) for each in product("abc", repeat=3)]
    for guess, word in product(words, words):
        marks = game.feedback(guess, word)
        common = sum(min(guess.count(each), word.count(each)) for each in "abc")
        assert len(marks) - marks.count("-") == common
        assert [m == "G" for m in marks] == [a == b for a, b in zip(guess, word, strict=True)]


def test_a_game(game: Any) -> None:
    played = game.Wordle()
    played.reset("bad", question="?")
    assert played.notes == {"saved": 0.0}
    assert played.step("abc") == ("aYbYc-", False)
    assert played.step(" bah\n") == ("bGaGh-", False)
    assert played.step("abc") == ("aYbYc-", False)
    assert played.step("it is bad") == ("no word", False)
    assert played.notes == {"saved": 0.0, "agreeing": 1 / 3}
    assert played.step("bad") == ("bGaGdG", True)
    assert (played.get_reward(), played.notes) == (1.0, {"saved": 1.0, "agreeing": 0.5})
    played.reset("bad")
    replies = [played.step(guess) for guess in ("hhh", "", "aaa", "bbb", "bac", "bae")]
    assert replies[-1] == ("bGaGe-", True) and [over for _, over in replies].count(True) == 1
    assert (played.get_reward(), played.notes["saved"]) == (0.0, 0.0)


def test_the_tool_is_the_same_game(game: Any) -> None:
    (schema,) = tool_schemas(f"{PATH}:WordleTool")
    assert schema["function"]["name"] == "guess"
    tool = game.WordleTool()
    tool.reset(answer="bad", prompt="?")
    assert [tool.guess("abc"), tool.guess("bad"), tool.guess("bad")] == [
        "aYbYc-", "bGaGdG", "the game is over"
    ]  # fmt: skip
    assert tool.get_reward() == 1.0


TRL_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ call.function.arguments }}"
    "{% endfor %}{% else %}<|user|>{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""What TRL asks of a template with tools, for the tokens that model/wordle knows."""
TRL_RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open_pattern": "(?=[a-h]{3})",
            "close_pattern": r"<\|im_end\|>",
            "repeats": True,
            "content": "text",
            "transform": {
                "type": "function",
                "function": {"name": "guess", "arguments": {"word": "{content}"}},
            },
        },
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}


@pytest.mark.long
@pytest.mark.filterwarnings("default")  # TRL warns of its own
def test_trl_trains_in_it(game: Any, tmp_path: Path) -> None:
    """The file in GRPOTrainer, over the lesson's model: its games are as long and as good."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model" / "wordle")
    tokenizer.chat_template, tokenizer.response_template = TRL_TEMPLATE, TRL_RESPONSES
    ends: list[Any] = []

    class Watched(game.WordleTool):  # type: ignore[misc]
        def get_reward(self) -> float:
            ends.append(self._game)
            return float(super().get_reward())

    text = (ROOT / "data" / "wordle_train.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()[:32]]
    asked = [
        {"prompt": [{"role": "user", "content": row["question"]}], "answer": row["answer"]}
        for row in rows
    ]
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(ROOT / "model" / "wordle"),
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), max_steps=1, per_device_train_batch_size=128,
            num_generations=4, max_completion_length=64, use_cpu=True, report_to="none", bf16=False,
            max_tool_calling_iterations=6, logging_steps=1, gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list(asked),
        processing_class=tokenizer,
        environment_factory=Watched,
    )  # fmt: skip
    trainer.train()
    assert len(ends) == 128
    assert mean(len(each.agreeing) for each in ends) > 4
    assert 0.2 < mean(each.is_won for each in ends) < 0.7


@pytest.mark.long
def test_the_lesson_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six of its steps: more games are won, and more guesses agree."""
    monkeypatch.chdir(ROOT)
    options = {"run.directory": str(tmp_path), "run.buffer": str(tmp_path / "buffer.json")}
    config = config_file.load(
        Path("configs/wordle_tiny.yaml"), {**options, "run.steps": 6, "eval.every": 0}
    )
    train(config)
    lines = (tmp_path / "wordle_tiny" / "metrics.jsonl").read_text().splitlines()
    records = [each for each in map(json.loads, lines) if "score/agreeing" in each]
    for key in ("score/environment", "score/agreeing"):
        first, *_, fifth, sixth = (record[key] for record in records)
        assert 0.35 < first < 0.55 and (fifth + sixth) / 2 > first + 0.05
    assert records[0]["sample/environment_error_fraction"] == 0.0
