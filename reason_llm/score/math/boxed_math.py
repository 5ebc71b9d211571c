"""Is the final answer right? It is found in the text by ``extraction.py``, and compared with the
gold one by the text alone (``answer_text.py``) or by sympy (``judge.py``).

An answer in another form than the reward asks for (``####``, a sentence) earns nothing: the form is
part of the task. Not here: step-by-step marking, partial credit.
"""

import functools
from collections.abc import Sequence
from typing import Literal

from reason_llm.score.math.answer_form import is_plain, undone
from reason_llm.score.math.answer_text import (
    are_words,
    is_numeral,
    normalise,
    read_both,
    spelling,
    tokens_of,
    unwrapped,
)
from reason_llm.score.math.extraction import candidates
from reason_llm.score.math.judge import TIMEOUT_SECONDS, default_judge
from reason_llm.score.math.latex_tokens import tokenize

Equality = Literal["form", "value"]
MAX_QUESTION_CHARACTERS = 10_000


def matches(
    gold: str,
    answer: str | None,
    timeout_seconds: float,
    question: str = "",
    equality: Equality = "form",
) -> float:
    """1 if there is an answer, it is worked out and it equals the gold one, else 0.

    Args:
        question: what was asked; an answer copied from it is not worked out, and ``50%`` answers
            50 only where it speaks of percent.
        equality: ``value`` pays a calculation that is not worked out, too.
    """
    if not answer:
        return 0.0
    if equality == "form" and not is_worked_out(gold, answer, question):
        return 0.0
    asks_for_percent = _holds_percent(question)
    return float(_equal_as_asked(gold, answer, asks_for_percent, timeout_seconds))


def equivalent(gold: str, answer: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether two answers have the same value; False if that cannot be found out within the time
    limit.

    Either may be a whole model output, with its answer in ``\\boxed{}``, behind ``####`` or at the
    end of a sentence. Any thread may ask. Not symmetric where the gold answer sets the form:
    ``x=5`` answers 5, but 5 does not answer ``2x+y=5``.
    """
    golds, gold_number = candidates(gold)
    wanted = next((each for each in golds if read_both(each, each)), gold_number or golds[0])
    found, number = candidates(answer)
    if number and not read_both(wanted, found[0]):
        found.append(number)
    asks_for_percent = _holds_percent(gold)
    return any(_equal_as_asked(wanted, each, asks_for_percent, timeout_seconds) for each in found)


def _equal_as_asked(gold: str, answer: str, asks_for_percent: bool, seconds: float) -> bool:
    """Whether they are equal; ``50`` is ``50\\%`` only where the question asks for percent."""
    gold, answer = gold.strip(), answer.strip()
    if _equal(gold, answer, seconds):
        return True
    is_bare = asks_for_percent and is_numeral(gold) and _holds_percent(answer)
    return is_bare and _equal(f"{unwrapped(gold)}\\%", answer, seconds)


def _holds_percent(text: str) -> bool:
    return "%" in text or "percent" in text.lower()


@functools.lru_cache(maxsize=65536)
def _equal(gold: str, answer: str, timeout_seconds: float) -> bool:
    (verdict,) = default_judge().equivalent_many([(gold, answer)], timeout_seconds)
    return verdict.equivalent


def is_worked_out(gold: str, answer: str, question: str = "") -> bool:
    """Whether nothing is left to do in the answer that the gold one has done, and it is not copied
    from the question."""
    if normalise(gold) == normalise(answer) or are_words(gold, answer):
        return True
    readings = read_both(unwrapped(gold), unwrapped(answer))
    if readings is None:
        return True  # nothing that can be equal
    gold_tree, tree = readings[0].tree, readings[1].tree
    if undone(gold_tree, tree):
        return False
    return gold_tree == tree or is_plain(tree) or not _stands_in(question, answer)


def _stands_in(question: str, answer: str) -> bool:
    copied = spelling(tokens_of(answer))
    return bool(copied) and f"\x00{copied}\x00" in f"\x00{_spelled(question)}\x00"


@functools.lru_cache(maxsize=256)
def _spelled(question: str) -> str:
    return spelling(tokenize(question[:MAX_QUESTION_CHARACTERS]))


def majority(answers: Sequence[str | None]) -> str | None:
    """The answer that most of the samples gave, for maj@k: votes are counted by equivalence, not by
    spelling; None does not vote.

    Returns:
        The first spelling of the largest class; of classes of equal size, the one that came first;
        None without a vote.
    """
    spellings: dict[str, tuple[str, int]] = {}
    for answer in answers:
        if answer is not None and answer.strip():
            first, votes = spellings.get(normalise(answer), (answer, 0))
            spellings[normalise(answer)] = (first, votes + 1)
    classes: list[tuple[str, int]] = []
    for answer, votes in spellings.values():
        for index, (representative, count) in enumerate(classes):
            if _equal(representative.strip(), answer.strip(), TIMEOUT_SECONDS):
                classes[index] = (representative, count + votes)
                break
        else:
            classes.append((answer, votes))
    return max(classes, key=lambda item: item[1])[0] if classes else None
