"""The value of a tree as a floating-point number, at one point where it has variables.

It is fast and approximate: it can show that two formulas differ, or may be equal, and whether a
function of a number has a plain value.
"""

import cmath
import math
import zlib
from collections.abc import Callable
from typing import TypeGuard

from reason_llm.score.math.answer_tree import Tree, holds, literal, subtrees
from reason_llm.score.math.units import word_set

Value = complex | tuple["Value", ...]
TOLERANCE = 1e-9
_APART = 0.01
_CONSTANTS = {"pi": math.pi, "e": math.e, "i": 1j}
_FUNCTIONS: dict[str, Callable[..., complex]] = {
    "sin": cmath.sin, "cos": cmath.cos, "tan": cmath.tan, "sinh": cmath.sinh, "cosh": cmath.cosh,
    "tanh": cmath.tanh, "arcsin": cmath.asin, "arccos": cmath.acos, "arctan": cmath.atan,
    "ln": cmath.log, "log": cmath.log, "exp": cmath.exp, "abs": abs,
    "cot": lambda x: 1 / cmath.tan(x), "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x), "floor": lambda x: math.floor(x.real + TOLERANCE),
    "ceil": lambda x: math.ceil(x.real - TOLERANCE), "factorial": lambda x: math.gamma(x.real + 1),
}  # fmt: skip
_OF_ANGLES = word_set("sin cos tan cot sec csc")
_COLLECTIONS = word_set("tuple list set interval matrix ratio")


def value_of(tree: Tree, point: str = "") -> Value | None:
    """The value of a tree, of a collection its members' values; None if it has none. The values of
    the variables are drawn from the text ``point``."""
    if tree[0] in _COLLECTIONS:
        rows = [member for member in tree[1:] if isinstance(member, list)]
        entries = [entry for row in rows for entry in (row if tree[0] == "matrix" else [row])]
        values = [value_of(entry, point) for entry in entries]
        members = tuple(value for value in values if value is not None)
        return members if len(members) == len(values) else None
    try:
        number = _number(tree, point)
    except (ArithmeticError, ValueError, KeyError, TypeError, IndexError):
        return None
    return number if cmath.isfinite(number) else None


def is_near(first: Value | None, second: Value | None) -> bool:
    """Whether two values are the same but for rounding."""
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(map(is_near, first, second))
    if not (is_scalar(first) and is_scalar(second)):
        return False
    return cmath.isclose(first, second, rel_tol=TOLERANCE, abs_tol=1e-300)


def is_scalar(value: Value | None) -> TypeGuard[complex]:
    """Whether a value is a single number."""
    return value is not None and not isinstance(value, tuple)


def are_far_apart(first: Tree, second: Tree) -> bool:
    """Whether two expressions have values too far apart for any rounding."""
    if any(holds(tree, "pct", "pm", "mp") for tree in (first, second)):
        return False
    if any(part[:2] == ["call", "log"] for part in subtrees(second)):  # of which base?
        return False
    one, other = value_of(first), value_of(second)
    if not (is_scalar(one) and is_scalar(other)):
        return False
    return abs(one - other) > _APART * max(abs(one), abs(other))


def direction_of(relation: Tree) -> Value | None:
    """A number that is the same for all multiples of a relation with two sides."""
    differences = []
    for point in ("", "another"):
        left, right = (value_of(side, point) for side in relation[2:4])
        if not (is_scalar(left) and is_scalar(right)):
            return None
        differences.append(left - right)
    return differences[0] / differences[1] if abs(differences[1]) > TOLERANCE else None


def _number(tree: Tree, point: str) -> complex:
    match tree:
        case ["num" | "mixed" | "rep", *_]:
            return float(literal(tree) or 0)
        case ["var", name]:
            return 1.2 + 2 * zlib.crc32(f"{name} {point}".encode()) / 2**32
        case ["const", name]:
            return _CONSTANTS[name]
        case ["call", *_]:
            return _call(tree, point)
    return _ARITHMETIC[tree[0]](*(_number(member, point) for member in tree[1:]))


def _root(radicand: complex, index: complex) -> complex:
    """The real root of a negative number where the index is odd."""
    if radicand.imag == 0 and radicand.real < 0 and index.real % 2 == 1:
        return -((-radicand) ** (1 / index))
    return complex(radicand) ** (1 / index)


_ARITHMETIC: dict[str, Callable[..., complex]] = {
    "add": lambda *terms: sum(terms),
    "mul": lambda *factors: math.prod(factors),
    "neg": lambda number: -number,
    "frac": lambda above, below: above / below,
    "deg": lambda number: number,
    "pct": lambda number: number / 100,
    "pow": lambda base, exponent: complex(base) ** exponent,
    "root": _root,
}


def _call(tree: Tree, point: str) -> complex:
    name, argument = tree[1], tree[2]
    if name.startswith("?"):
        return _number(["var", str(tree[1:])], point)
    if name == "binom":
        upper, lower = (_number(member, point).real for member in tree[2:])
        logs = math.lgamma(upper + 1) - math.lgamma(lower + 1) - math.lgamma(upper - lower + 1)
        return math.exp(logs)
    number = _number(argument, point)
    if name in _OF_ANGLES and holds(argument, "deg"):
        number *= math.pi / 180
    if name in ("log", "ln") and len(tree) > 3:
        return cmath.log(number) / cmath.log(_number(tree[3], point))
    return complex(_FUNCTIONS[name](number))
