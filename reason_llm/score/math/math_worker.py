"""A process that asks math-verify, and may hang or run out of memory doing so. ``judge.py`` starts
it, limits it and replaces it.

Run by its path and importing nothing of ours, so that it starts in half a second and never loads
torch. Protocol: a line of JSON ``[gold, answer]`` in, a line of JSON true or false out; the first
line out says that it is ready. It ends with its input.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable
from typing import TextIO

import math_verify
from latex2sympy2_extended.math_normalization import NormalizationConfig
from sympy import Basic, Float, MatrixBase, Number

MEMORY_BYTES = 2 * 2**30
RELATIVE_TOLERANCE = 1e-6
_PR_SET_PDEATHSIG = 1
_EXTRACTION = (
    math_verify.LatexExtractionConfig(
        boxed_match_priority=0,
        # units are taken off before: the pattern here makes 5t equal 5
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all"
        ),
    ),
    math_verify.ExprExtractionConfig(),
)


def same(gold: str, answer: str) -> bool:
    """Whether math-verify reads the same mathematical object in both.

    Without a time limit of its own.
    """
    golds, answers = _parse(gold), _parse(answer)
    if not golds or not answers:
        return False
    are_same = math_verify.verify(
        golds, answers, timeout_seconds=None, allow_set_relation_comp=True
    )
    return bool(are_same) and not _differs_in_size(golds[0], answers[0])


def _parse(answer: str) -> list[object]:
    return list(math_verify.parse(answer, _EXTRACTION, parsing_timeout=None))


def _differs_in_size(gold: object, answer: object) -> bool:
    """math-verify rounds to 6 decimals, which makes all tiny numbers equal; this looks at their
    ratio."""
    if not isinstance(gold, Basic) or not isinstance(answer, Basic):
        return False
    if isinstance(gold, MatrixBase) or not (gold.is_number and answer.is_number):
        return False
    first, second = gold.doit().evalf(15), answer.doit().evalf(15)
    if not isinstance(first, Number) or not isinstance(second, Number):
        return False
    largest = max(abs(first), abs(second))
    is_tiny = largest < Float(1e-3)
    return bool(is_tiny and abs(first - second) > RELATIVE_TOLERANCE * largest)


def _limit_this_process() -> None:
    """Die with the parent, leave Ctrl-C to it, and keep to ``MEMORY_BYTES`` of address space."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def main() -> None:
    """Answer until the input ends."""
    _limit_this_process()
    with os.fdopen(os.dup(1), "w", buffering=1) as replies:
        os.dup2(2, 1)  # whatever a library prints is no reply
        replies.write("true\n")
        serve(sys.stdin, replies)


def serve(questions: Iterable[str], replies: TextIO) -> None:
    """Answer line by line."""
    for line in questions:
        gold, answer = json.loads(line)
        verdict = False
        # a deep recursion or the memory limit: what cannot be computed is not equal
        with contextlib.suppress(MemoryError, RecursionError, ArithmeticError, ValueError):
            verdict = same(gold, answer)
        replies.write(f"{json.dumps(verdict)}\n")


if __name__ == "__main__":
    main()
