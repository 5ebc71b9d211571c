"""Is the final answer right? It is found in the text by ``extraction.py``, and compared with the
gold one by the text alone (``answer_text.py``) or by math-verify (``judge.py``).

An answer in another form than the reward asks for (``####``, a sentence) earns nothing: the form is
part of the task. Not here: step-by-step marking, partial credit.
"""

import functools
import re
from collections.abc import Sequence

from reason_llm.score.math.answer_text import normalise
from reason_llm.score.math.judge import TIMEOUT_SECONDS, default_judge

_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?")
_NAME = re.compile(r"\s*\\?[a-zA-Z]+\s*=")
_CALCULATION = re.compile(
    r"[=+]|(?<!\*)\*(?!\*)|[\w)}]\s*-|\\(times|cdot)(?!\s*10\s*\^)|\\(div|sum|binom)"
)


def matches(gold: str, answer: str | None, timeout_seconds: float) -> float:
    """1 if there is an answer, it is worked out and it equals the gold one, else 0."""
    if not answer:
        return 0.0
    return float(is_worked_out(gold, answer) and equivalent(gold, answer, timeout_seconds))


def equivalent(gold: str, answer: str, timeout_seconds: float = TIMEOUT_SECONDS) -> bool:
    """Whether two answers are the same mathematical object; False if that cannot be found out
    within the time limit.

    Either may be wrapped in ``$``, ``\\boxed{}``, ``####`` or a sentence. Any thread may ask.
    Not symmetric where the gold answer sets the form: ``x=5`` answers 5, but 5 does not answer
    ``2x+y=5``.
    """
    return _equivalent(gold.strip(), answer.strip(), timeout_seconds)


@functools.lru_cache(maxsize=65536)
def _equivalent(gold: str, answer: str, timeout_seconds: float) -> bool:
    (verdict,) = default_judge().equivalent_many([(gold, answer)], timeout_seconds)
    return verdict.equivalent


def is_worked_out(gold: str, answer: str) -> bool:
    """False where the gold answer is a plain number and the answer is a calculation: the question
    restated, or worked out no further."""
    gold, answer = normalise(gold), normalise(answer)
    return not (_NUMBER.fullmatch(gold) and _CALCULATION.search(_NAME.sub("", answer, count=1)))


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
            if equivalent(representative, answer):
                classes[index] = (representative, count + votes)
                break
        else:
            classes.append((answer, votes))
    return max(classes, key=lambda item: item[1])[0] if classes else None
