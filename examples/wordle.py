"""Wordle of three letters out of eight, 512 words and six guesses: an environment.

    sample:
      environment: examples/wordle.py:Wordle

A reply says each letter again, with G for one in its place, Y for one that stands elsewhere, and -
for one that does not occur again: ``aYbYc-``. ``WordleTool`` is the same game as a tool, for
``environment_factory`` of TRL's GRPOTrainer or for a model that calls tools.
"""

from collections import Counter
from itertools import product
from typing import Any

LETTERS, LENGTH, GUESSES = "abcdefgh", 3, 6
WORDS = ["".join(word) for word in product(LETTERS, repeat=LENGTH)]


def feedback(guess: str, word: str) -> str:
    """``('abb', 'bab') -> 'YYG'``: a letter is marked as often as the word has it, first in its
    place, then from the left."""
    pairs = list(zip(guess, word, strict=True))
    left = Counter(there for here, there in pairs if here != there)
    marks = ""
    for here, there in pairs:
        mark = "G" if here == there else "Y" if left[here] > 0 else "-"
        left[here] -= mark == "Y"
        marks += mark
    return marks


class Wordle:
    """One game.

    ``notes`` has what may be paid or watched beside the win: the guesses that it saved, and the
    part of the guesses after the first that agree with all replies before them.
    """

    def reset(self, answer: str, **row: Any) -> None:
        """Begin with the row's word."""
        self.word = answer
        self.seen: list[tuple[str, str]] = []
        self.agreeing: list[bool] = []
        self.is_won = False

    @property
    def is_over(self) -> bool:
        """Whether it is won or lost."""
        return self.is_won or len(self.agreeing) == GUESSES

    @property
    def notes(self) -> dict[str, float]:
        """Of the game so far."""
        later = self.agreeing[1:]
        notes = {"saved": float(self.is_won * (GUESSES - len(self.agreeing)))}
        return notes | ({"agreeing": sum(later) / len(later)} if later else {})

    def step(self, text: str) -> tuple[str, bool]:
        """A guess -> the reply, and whether the game is over."""
        guess = text.strip()
        is_word = len(guess) == LENGTH and set(guess) <= set(LETTERS)
        self.agreeing.append(
            is_word and all(feedback(old, guess) == marks for old, marks in self.seen)
        )
        if not is_word:
            return "no word", self.is_over
        marks = feedback(guess, self.word)
        self.seen.append((guess, marks))
        self.is_won = guess == self.word
        reply = "".join(map("".join, zip(guess, marks, strict=True)))
        return reply, self.is_over

    def get_reward(self) -> float:
        """1 for a game that is won."""
        return float(self.is_won)


class WordleTool:
    """The same game in TRL's form, as one tool."""

    def reset(self, answer: str, **row: Any) -> None:
        """Begin with the row's word."""
        self._game = Wordle()
        self._game.reset(answer)

    def guess(self, word: str) -> str:
        """Guess the secret word. The reply has G after a letter in its place, Y after one that
        stands elsewhere, and - after one that does not occur again.

        Args:
            word: Three letters of abcdefgh.
        """
        if self._game.is_over:
            return "the game is over"
        return self._game.step(word)[0]

    def get_reward(self) -> float:
        """1 for a game that is won."""
        return self._game.get_reward()
