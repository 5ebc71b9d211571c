"""Is the final answer right? The answer is found in the text here; math-verify decides whether it
equals the gold one.

Not here: step-by-step marking, partial credit, several answers in one box.
"""

import functools
import re

from reason_llm.rollout import Completion, Prompt

_INTEGER = re.compile(r"([+-]?)0*(\d+)")
_NUMBER = re.compile(r"[+-]?\d[\d,]*(\.\d+)?")
_NAME = re.compile(r"\s*\\?[a-zA-Z]+\s*=")
_CALCULATION = re.compile(
    r"[=+]|(?<!\*)\*(?!\*)|[\w)}]\s*-|\\(times|cdot)(?!\s*10\s*\^)|\\(div|sum|binom)"
)
_ANSWER_TAGS = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_TIMEOUT_SECONDS = 5


def boxed(prompt: Prompt, completion: Completion) -> float:
    """1 if the content of the last ``\\boxed{}`` equals the gold answer, else 0."""
    answer = last_boxed(completion.text)
    return float(answer is not None and equivalent(prompt.answer, answer))


def think_answer_tags(prompt: Prompt, completion: Completion) -> float:
    """1 if the text between the last ``<answer>`` and ``</answer>`` equals the gold answer, else
    0."""
    answers = _ANSWER_TAGS.findall(completion.text)
    return float(bool(answers) and equivalent(prompt.answer, answers[-1].strip()))


def last_boxed(text: str) -> str | None:
    """The content of the last ``\\boxed{...}``, nested braces kept; None if there is none or it is
    not closed.

    Example: ``"so \\\\boxed{\\\\frac{1}{2}}" -> "\\\\frac{1}{2}"``
    """
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    start += len("\\boxed{")
    depth = 1
    for position in range(start, len(text)):
        if text[position] in "{}" and text[position - 1] != "\\":
            depth += 1 if text[position] == "{" else -1
            if depth == 0:
                return text[start:position].strip()
    return None


@functools.lru_cache(maxsize=65536)
def equivalent(gold: str, answer: str) -> bool:
    """Whether two answers are the same mathematical object.

    Integers and words are compared here, all else by math-verify. Where the gold answer is a plain
    number, a calculation that comes to it (``37+45`` for 82) is no answer.

    math-verify's own time limit (5 s, by a signal) needs the main thread.
    """
    if not gold or not answer:
        return False
    if gold == answer:
        return True
    gold_integer, integer = _INTEGER.fullmatch(gold), _INTEGER.fullmatch(answer)
    if gold_integer and integer:
        return _value(gold_integer) == _value(integer)
    if gold.isalpha() and answer.isalpha():
        return gold.casefold() == answer.casefold()  # not a product of variables
    if _NUMBER.fullmatch(gold) and _CALCULATION.search(_NAME.sub("", answer, count=1)):
        return False  # the question restated, or worked out no further
    import math_verify

    parsed = _parse(answer)
    return bool(parsed) and bool(
        math_verify.verify(list(_parse(gold)), list(parsed), timeout_seconds=_TIMEOUT_SECONDS)
    )


def _value(integer: re.Match[str]) -> tuple[bool, str]:
    """Sign and digits; not an int, which Python refuses to make of thousands of digits."""
    return integer[1] == "-" and integer[2] != "0", integer[2]


@functools.lru_cache(maxsize=65536)
def _parse(answer: str) -> tuple[object, ...]:
    """What math-verify reads in an answer, given as LaTeX mathematics and, failing that, as plain
    text."""
    import math_verify

    if "$" not in answer and "\\boxed" not in answer:
        answer = f"${answer}$"
    return tuple(math_verify.parse(answer, parsing_timeout=_TIMEOUT_SECONDS))
