"""The lesson's game: its replies, what it tells, and that its tool is the same game."""

import importlib.util
from itertools import product
from typing import Any

import pytest

from conftest import ROOT
from reason_llm.data.tools import tool_schemas

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
