"""The rewards of configs/countdown_tiny.yaml: a checker of expressions, and the number of tries.

    score:
      rewards:
        - custom: examples/countdown.py:countdown
        - custom: examples/countdown.py:tries # a metric: it has weight 0

The checker reads the expression as Python's grammar does and works it out itself: nothing that a
completion says is executed.
"""

import ast
import operator
import re

FORM = re.compile(r"<think>.*</think><answer>([0-9+\-*()]{1,40})</answer>\s*", re.DOTALL)
TRY = re.compile(r"^(?:<think>)?[0-9+\-*()]+=[^\n]* (?:no|yes)\b", re.MULTILINE)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def value(node: ast.expr, used: list[int]) -> int:
    """The value of an expression of whole numbers, +, - and *; its numbers are added to ``used``.

    Raises:
        ValueError: there is something else in it.
    """
    match node:
        case ast.BinOp(left, sign, right) if type(sign) in OPERATORS:
            return int(OPERATORS[type(sign)](value(left, used), value(right, used)))
        case ast.Constant(int(number)):
            used.append(number)
            return number
    raise ValueError(ast.dump(node))


def countdown(completion: str, numbers: list[int], target: int) -> float:
    """1 for an answer that uses each of ``numbers`` once and makes ``target``, else 0."""
    found = FORM.fullmatch(completion)
    if found is None:
        return 0.0
    used: list[int] = []
    try:
        made = value(ast.parse(found[1], mode="eval").body, used)
    except (SyntaxError, ValueError):
        return 0.0
    return float(made == target and sorted(used) == sorted(numbers))


def tries(completion: str) -> int:
    """How many expressions were tried before the answer."""
    return len(TRY.findall(completion.partition("</think>")[0]))
