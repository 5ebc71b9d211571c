"""A process that compares answers with sympy, and may hang or run out of memory doing so.
``judge.py`` starts it, limits it and replaces it.

It imports only its own folder and ``workers``, so that it starts in half a second. It is asked
``[gold, answer, seconds]``, two trees of ``answer_tree.py`` and processor time, and answers true or
false; null asks whether it is ready. It ends with its input.

Numbers are exact: a decimal is a rational. Where one side is a decimal and the other has no end
in decimals, they are equal within ``RELATIVE_TOLERANCE``. Expressions with variables are equal if
they are at points drawn from a fixed seed, to 30 digits.
"""

import contextlib
import json
import operator
import random
import resource
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from typing import Any

import sympy
from sympy import Expr, ImmutableMatrix, MatrixBase, Rational, Set, Symbol

from reason_llm.score.math.answer_tree import Tree, holds, literal, mapped, subtrees, with_sign
from reason_llm.score.math.units import word_set
from reason_llm.workers import serve

MEMORY_BYTES = 2 * 2**30
RELATIVE_TOLERANCE = Rational(1, 10**6)
SAME_DECIMALS = Rational(1, 2 * 10**6)
"""Tolerance of two numbers that agree in 6 decimals."""
_SMALL = Rational(1, 1000)
_DIGITS = 30
_POINTS = 5
_MAX_ITEMS = 100
_NOT_COMPUTED = (MemoryError, RuntimeError, ArithmeticError, ValueError, TypeError, AttributeError,
                 LookupError)  # fmt: skip
"""Errors of sympy, deep recursion and the memory limit, after which answers count as different."""
Value = Any
"""A sympy expression or matrix."""

_FUNCTIONS: dict[str, Callable[..., Value]] = {
    **{
        name: getattr(sympy, name)
        for name in [
            "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "coth", "exp", "gcd",
            "lcm", "factorial", "floor", "sign", "arg", "det", "re", "im",
        ]
    },
    **{"arc" + name: getattr(sympy, "a" + name) for name in [
        "sin", "cos", "tan", "cot", "sec", "csc",
    ]},
    "binom": sympy.binomial, "abs": sympy.Abs, "ceil": sympy.ceiling, "Re": sympy.re,
    "Im": sympy.im, "sgn": sympy.sign, "max": sympy.Max, "min": sympy.Min,
    "tr": lambda matrix: matrix.trace(), "rank": lambda matrix: sympy.Integer(matrix.rank()),
    "det": lambda matrix: matrix.det(),
    "norm": lambda of: of.norm() if isinstance(of, MatrixBase) else abs(of),
}  # fmt: skip
_TRIGONOMETRIC = word_set("sin cos tan cot sec csc")
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "oo": sympy.oo}
_SETS = {
    "empty": sympy.S.EmptySet,
    "set R": sympy.S.Reals,
    "set Z": sympy.S.Integers,
    "set N": sympy.S.Naturals,
    "set Q": sympy.S.Rationals,
    "set C": sympy.S.Complexes,
    "set Z+": sympy.S.Naturals,
}
_RAYS: dict[str, Callable[[Value], Set]] = {
    "<": lambda end: sympy.Interval.open(-sympy.oo, end),
    ">": lambda end: sympy.Interval.open(end, sympy.oo),
    "<=": lambda end: sympy.Interval(-sympy.oo, end),
    ">=": lambda end: sympy.Interval(end, sympy.oo),
    "!=": lambda end: sympy.S.Reals - sympy.FiniteSet(end),
}
_FLIPPED = {"<": ">", ">": "<", "<=": ">=", ">=": "<=", "=": "=", "!=": "!="}
_FINITE = ("list", "set")
_SET_KINDS = word_set("cup cap setminus backslash interval")


class UnknownError(ValueError):
    """The tree has no value that can be computed here."""


def same(gold: Tree, answer: Tree) -> bool:
    """Whether two trees are the same mathematical object. It sets no time limit."""
    if gold == answer:
        return True
    if gold[0] == answer[0] == "cases":
        return _same_functions(gold, answer)
    if answer[0] == "approx" and _decimals(gold):
        exact, answer = _resolved(answer), answer[2]
        if same(gold, exact):
            return True
    gold, answer = _resolved(gold), _resolved(answer)
    if ["set"] in (gold, answer) or _is_set(gold) or (_is_set(answer) and gold[0] in _FINITE):
        return _same_sets(gold, answer)
    if gold[0] in _FINITE or answer[0] in _FINITE:
        return _same_items(gold, answer)
    if gold[0] == answer[0] == "rel" and (
        gold[1] in ("=", "!=") or (len(gold) > 4 and set(gold[1].split()) == {"="})
    ):
        return _same_equations(gold, answer)
    if "rel" in (gold[0], answer[0]):
        return _same_relations(gold, answer)
    if _is_set(gold) or _is_set(answer):
        return _same_sets(gold, answer)
    if gold[0] in ("tuple", "ratio") and answer[0] == gold[0]:
        is_same = _pairwise(gold[1:], answer[1:])
        has_parts = gold[0] == "ratio" and (holds(gold, "frac", "mixed") or _decimals(gold) > 0)
        return is_same or (has_parts and _is_proportion(gold, answer))
    if {"tuple", "based"} & {gold[0], answer[0]}:
        return False  # numerals of a base are the same only as they are written
    return _same_scalars(gold, answer)


def _resolved(tree: Tree) -> Tree:
    """The tree without chains and approximations, and with plus-minus as a list of both signs;
    UnknownError if the members of a chain differ."""
    if tree[0] == "chain":
        last = _resolved(tree[-1])
        others = (same, _is_angle, _is_proportion)
        if not all(any(are_one(member, last) for are_one in others) for member in tree[1:-1]):
            raise UnknownError("a false equation")
        return last
    if tree[0] == "approx":
        exact = _resolved(tree[1])
        first, shown = value(exact), value(tree[2])
        if not abs(sympy.N(first - shown)) < Rational(1, 10 ** _decimals(tree[2])):
            raise UnknownError("a false approximation")
        return exact
    if tree[0] in ("list", "set"):
        items = [_resolved(member) for member in tree[1:]]
        is_flat = any(item[0] == "list" and len(item) > 2 and item[1][0] != "rel" for item in items)
        flat = [i for item in items for i in (item[1:] if item[0] == "list" else [item])]
        return [tree[0], *(flat if is_flat else items)]
    if tree[0] != "rel" and not _is_set(tree) and holds(tree, "pm", "mp"):
        return ["list", with_sign(tree, True), with_sign(tree, False)]
    return tree


def _is_angle(first: Tree, second: Tree) -> bool:
    """Whether one is in degrees what the other is in radians."""
    degrees, radians = (first, second) if first[0] == "deg" else (second, first)
    if degrees[0] != "deg" or holds(radians, "deg"):
        return False
    return same(["frac", ["mul", degrees[1], ["const", "pi"]], ["num", "180"]], radians)


def _same_functions(gold: Tree, answer: Tree) -> bool:
    """Whether two functions by cases have the same values wherever either has one."""
    golds, answers = (_domains(tree) for tree in (gold, answer))
    wholes = [reduce(sympy.Union, (domain for _, domain in cases)) for cases in (golds, answers)]
    if wholes[0] != wholes[1] or len(golds) * len(answers) > _MAX_ITEMS:
        return False
    for one, domain in golds:
        for other, another in answers:
            common = domain.intersect(another)
            if isinstance(common, sympy.FiniteSet):
                names = _symbols_of(gold) | _symbols_of(answer)
                if len(names) != 1:
                    return False
                symbol = Symbol(names.pop(), real=True)
                difference = value(one) - value(other)
                if any(sympy.simplify(difference.subs(symbol, at)) != 0 for at in common):
                    return False
            elif common != sympy.S.EmptySet and not same(one, other):
                return False
    return True


def _domains(cases: Tree) -> list[tuple[Tree, Set]]:
    """Values and domains of a function by cases; UnknownError for several variables."""
    domains: list[tuple[Tree, Set]] = []
    names = {name for case in cases[1:] for name in _symbols_of(case[2])}
    if len(names) != 1:
        raise UnknownError("conditions on several variables")
    left: Set = sympy.S.Reals
    for _, one, condition in cases[1:]:
        match condition:
            case ["const", "else"]:
                domain = left
            case ["rel", "=", ["var", _], at]:
                domain = sympy.FiniteSet(value(at))
            case _:
                domain = as_set(condition)
        left = left - domain
        domains.append((one, domain))
    return domains


def _is_proportion(first: Tree, second: Tree) -> bool:
    """Whether two ratios are the same in other terms, ``2/3 : 1`` and ``2 : 3``."""
    if not first[0] == second[0] == "ratio" or len(first) != len(second):
        return False
    pairs = zip(first[2:], second[2:], strict=True)
    return all(same(["mul", one, second[1]], ["mul", first[1], other]) for one, other in pairs)


def _pairwise(golds: Sequence[Tree], answers: Sequence[Tree]) -> bool:
    return len(golds) == len(answers) and all(map(same, golds, answers))


def _same_items(gold: Tree, answer: Tree) -> bool:
    """Whether lists or sets have the same items in any order. A tuple may stand for a list, but not
    for a set; a single item may stand for a set of one."""
    golds, answers = (
        tree[1:] if tree[0] in ("list", "set", "tuple") else [tree] for tree in (gold, answer)
    )
    if gold[0] == "set" and answer[0] == "tuple":
        answers = [answer]  # of \\{(1, 2)\\}, its one point
    if gold[0] == "tuple" or holds(gold, "dots"):
        return answer[0] != "set" and _pairwise(golds, answers)
    if len(golds) != len(answers) or len(golds) > _MAX_ITEMS:
        return False
    left = list(answers)
    for one in golds:
        index = next((i for i, other in enumerate(left) if same(one, other)), None)
        if index is None:
            return False
        del left[index]
    return True


# relations and sets


def _same_equations(gold: Tree, answer: Tree) -> bool:
    if gold[1] != answer[1] or len(gold) != len(answer):
        return False
    if _pairwise(gold[2:], answer[2:]):
        return True
    if len(gold) > 4:
        return False
    is_complex = _is_complex(gold, answer)
    first, second = (value(t[2], is_complex) - value(t[3], is_complex) for t in (gold, answer))
    symbols = first.free_symbols
    if not symbols or symbols != second.free_symbols:
        return False
    return _constant_ratio(first, second) is not None


def _constant_ratio(first: Expr, second: Expr) -> Expr | None:
    """The one number that ``first / second`` is at all points; None if it varies."""
    ratios = []
    for point in _points(first.free_symbols | second.free_symbols):
        a, b = (_number(side, point) for side in (first, second))
        if a is None or b is None or b == 0 or a == 0:
            continue
        ratios.append(sympy.N(a / b, _DIGITS))
    if len(ratios) < 2 or not all(_is_close(ratios[0], ratio, 10**-15) for ratio in ratios):
        return None
    return ratios[0]


def _same_relations(gold: Tree, answer: Tree) -> bool:
    if gold[0] == answer[0] == "rel":
        if gold[1] == answer[1] and _pairwise(gold[2:], answer[2:]):
            return True
        if len(gold) == len(answer) == 4 and gold[1] in _FLIPPED and answer[1] in _FLIPPED:
            first, second = (value(tree[2]) - value(tree[3]) for tree in (gold, answer))
            ratio = _constant_ratio(first, second)
            if ratio is not None and ratio.is_real:
                return bool(answer[1] == (gold[1] if ratio > 0 else _FLIPPED[gold[1]]))
        if _symbols_of(gold) != _symbols_of(answer):
            return False
    return _same_sets(gold, answer)


def _is_set(tree: Tree) -> bool:
    is_known = tree[0] == "const" and (tree[1] == "empty" or tree[1].startswith("set "))
    return tree[0] in _SET_KINDS or is_known


def _symbols_of(tree: Tree) -> set[str]:
    return {part[1] for part in subtrees(tree) if part[0] == "var"}


def _same_sets(gold: Tree, answer: Tree) -> bool:
    if {gold[0], answer[0]} == {"tuple", "interval"}:
        return False
    if gold[0] == answer[0] == "interval":
        return gold[1:3] == answer[1:3] and _pairwise(gold[3:], answer[3:])
    first, second = as_set(gold), as_set(answer)
    return first == second or first.symmetric_difference(second).is_empty is True


def as_set(tree: Tree) -> Set:
    """The set of numbers that a tree is."""
    match tree:
        case ["interval", left_open, right_open, first, last]:
            ends = value(first), value(last)
            # sympy silently opens a closed end at infinity, which is a mistake in an answer.
            if not (
                (ends[0].is_infinite and not left_open) or (ends[1].is_infinite and not right_open)
            ):
                return sympy.Interval(*ends, left_open, right_open)
        case ["tuple", first, last]:
            interval = sympy.Interval.open(value(first), value(last))
            if interval != sympy.S.EmptySet:
                return interval
        case ["set" | "list", *members]:
            return sympy.FiniteSet(*map(value, _resolved(["list", *members])[1:]))
        case ["cup", first, second]:
            return sympy.Union(as_set(first), as_set(second))
        case ["cap", first, second]:
            return sympy.Intersection(as_set(first), as_set(second))
        case ["setminus" | "backslash", first, second]:
            return as_set(first) - as_set(second)
        case ["const", name] if name in _SETS:
            return _SETS[name]
        case ["rel", *_]:
            return _solutions(tree)
    return _unknown(tree)


def _solutions(tree: Tree) -> Set:
    """Solutions of a relation whose variable is alone on one side, or between two."""
    signs, members = tree[1].split(), tree[2:]
    alone = [index for index, member in enumerate(members) if member[0] == "var"]
    if len(alone) != 1 or len(_symbols_of(tree)) != 1 or len(signs) > 2:
        return _unknown(tree)
    if signs == ["in"]:
        return as_set(members[1]) if alone == [0] else _unknown(tree)
    numbers: Set = sympy.S.Reals
    for index, sign in enumerate(signs):
        left, right = members[index : index + 2]
        # Of ``x \neq \pm 2`` both points are excluded; any other relation needs a single end.
        if sign == "!=" and left[0] == "var" and holds(right, "pm", "mp"):
            points = [value(point) for point in _resolved(right)[1:]]
            numbers = sympy.Intersection(numbers, sympy.S.Reals - sympy.FiniteSet(*points))
            continue
        if left[0] == "var":
            end = value(right)
        elif right[0] == "var":
            end, sign = value(left), _FLIPPED.get(sign, "")
        else:
            return _unknown(tree)
        if _symbols_of(left) == _symbols_of(right) or sign not in _RAYS or not end.is_real:
            return _unknown(tree)
        numbers = sympy.Intersection(numbers, _RAYS[sign](end))
    return numbers


# numbers and expressions


def _same_scalars(gold: Tree, answer: Tree) -> bool:
    if gold[0] == "pct" and answer[0] != "pct" and _same_scalars(gold[1], answer):
        return True
    gold, answer = (
        ["frac", *tree[1:]] if tree[0] == "ratio" and len(tree) == 3 else tree
        for tree in (gold, answer)
    )
    is_complex = _is_complex(gold, answer)
    first, second = value(gold, is_complex), value(answer, is_complex)
    if isinstance(first, MatrixBase) or isinstance(second, MatrixBase):
        if not (isinstance(first, MatrixBase) and isinstance(second, MatrixBase)):
            return False
        if first.shape != second.shape:
            return False
        return all(_same_values(a, b) for a, b in zip(first.flat(), second.flat(), strict=True))
    return _same_values(first, second, _tolerates(gold, first, answer, second))


def _tolerates(gold: Tree, first: Expr, answer: Tree, second: Expr) -> bool:
    """Whether one side is a decimal and the other a number that such decimals only come near."""
    if _is_numeral(gold) and _is_numeral(answer):
        return False
    for tree, exact in ((answer, first), (gold, second)):
        if places := _decimals(tree):
            return not (isinstance(exact, Rational) and (exact * 10**places).is_integer)
    return False


def _same_values(first: Expr, second: Expr, tolerates: bool = False) -> bool:
    if first == second:
        return first not in (sympy.nan, sympy.zoo)
    if isinstance(first, Rational) and isinstance(second, Rational):
        return tolerates and _is_near(first, second)
    symbols = first.free_symbols | second.free_symbols
    if not symbols:
        return _same_numbers(first, second, tolerates)
    equal = 0
    for point in _points(symbols):
        a, b = (_number(side, point) for side in (first, second))
        if a is None or b is None:
            continue
        if not (_is_close(a, b, 10**-20) or (tolerates and _is_near(a, b))):
            return False
        equal += 1
    return equal > 1 or bool(sympy.simplify(first - second) == 0)


def _same_numbers(first: Expr, second: Expr, tolerates: bool) -> bool:
    a, b = _number(first), _number(second)
    if a is None or b is None:
        return False
    if tolerates and _is_near(a, b):
        return True
    if not _is_close(a, b, 10**-20):
        return False
    difference = abs(sympy.N(first - second, 2, maxn=400))
    return bool(difference <= Rational(1, 10**100) * max(abs(a), abs(b), Rational(1, 10**100)))


def _number(expression: Expr, point: dict[Symbol, Rational] | None = None) -> Expr | None:
    """Its value, at a point where it has symbols, as a finite number; None if it has none. It is
    never exact: rational powers of rational numbers would fill the memory."""
    number = sympy.N(expression, _DIGITS, subs=point)
    real, imaginary = number.as_real_imag()
    is_number = real.is_number and imaginary.is_number
    if not is_number or number.has(sympy.nan, sympy.zoo, sympy.oo, -sympy.oo):
        return None
    return number if all(part.is_Float or part.is_Rational for part in (real, imaginary)) else None


def _is_close(first: Expr, second: Expr, tolerance: float | Rational) -> bool:
    """Whether two numbers differ by at most ``tolerance``, relative to the larger one."""
    return bool(abs(first - second) <= tolerance * max(abs(first), abs(second)))


def _is_near(first: Expr, second: Expr) -> bool:
    """Whether a decimal is near the exact value: in six digits, or in six decimals."""
    if _is_close(first, second, RELATIVE_TOLERANCE):
        return True
    return bool(abs(first - second) <= SAME_DECIMALS and max(abs(first), abs(second)) >= _SMALL)


def _points(symbols: Iterable[Symbol]) -> list[dict[Symbol, Rational]]:
    """Values of the symbols, positive at first, later of either sign."""
    ordered = sorted(symbols, key=str)
    draw = random.Random(20)
    return [
        {
            symbol: Rational(
                draw.randrange(1000, 9000) * (draw.choice((1, -1)) if late else 1), 2003
            )
            for symbol in ordered
        }
        for late in range(_POINTS)
    ]


# a tree's value


def value(tree: Tree, is_complex: bool = False) -> Value:
    """The sympy object that a tree is; UnknownError if it is none."""
    match tree:
        case ["num" | "mixed" | "rep", *_]:
            return Rational(literal(tree))
        case ["var", name]:
            return Symbol(name, real=None if is_complex else True)
        case ["const", name] if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ["call", *_]:
            return _call(tree, is_complex)
        case ["matrix", *rows]:
            return ImmutableMatrix([[value(entry, is_complex) for entry in row] for row in rows])
        case [kind, *members] if kind in _ARITHMETIC:
            return _ARITHMETIC[kind](*(value(member, is_complex) for member in members))
    return _unknown(tree)


def _root(radicand: Expr, index: Expr) -> Expr:
    """The real root of a negative number where the index is odd."""
    if radicand.is_negative and index.is_odd:
        return -((-radicand) ** (1 / index))
    return radicand ** (1 / index)


_ARITHMETIC: dict[str, Callable[..., Value]] = {
    "add": lambda *terms: reduce(operator.add, terms),
    "mul": lambda *factors: reduce(operator.mul, factors),
    "neg": operator.neg,
    "frac": operator.truediv,
    "pow": operator.pow,
    "root": _root,
    "deg": operator.pos,
    "pct": lambda number: number / 100,
}


def _call(tree: Tree, is_complex: bool) -> Value:
    name, argument = tree[1], tree[2]
    if name.startswith("?"):
        return Symbol(f"{name[1:]}({json.dumps(argument)})", real=None if is_complex else True)
    if argument[0] in ("tuple", "set", "list", "interval"):
        arguments = [value(part, is_complex) for part in argument[1:] if isinstance(part, list)]
    else:
        arguments = [value(argument, is_complex)]
    if name == "binom":
        arguments = [value(member, is_complex) for member in tree[2:]]
    elif name in ("log", "ln"):
        return sympy.log(arguments[0], *(value(member, is_complex) for member in tree[3:]))
    elif len(tree) > 3 or name not in _FUNCTIONS:
        return _unknown(tree)
    if name in _TRIGONOMETRIC and holds(argument, "deg"):
        arguments = [angle * sympy.pi / 180 for angle in arguments]
    return _FUNCTIONS[name](*arguments)


def _unknown(tree: Tree) -> Any:
    raise UnknownError(str(tree[0]))


def _is_complex(*trees: Tree) -> bool:
    return any(["const", "i"] in subtrees(tree) for tree in trees)


def _is_numeral(tree: Tree) -> bool:
    return tree[0] == "num" or (tree[0] in ("neg", "deg", "pct") and _is_numeral(tree[1]))


def _decimals(tree: Tree) -> int:
    """The largest number of decimals of a numeral in a tree."""
    numerals = [part[1] for part in subtrees(tree) if part[0] == "num"]
    return max((len(numeral.partition(".")[2]) for numeral in numerals), default=0)


def _limit_this_process() -> None:
    """Leave Ctrl-C to the parent, and keep to ``MEMORY_BYTES`` of address space."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _with_base_ten(tree: Tree) -> Tree:
    """Read ``\\log`` without a base as the logarithm to base ten."""
    tree = mapped(tree, _with_base_ten)
    return [*tree, ["num", "10"]] if tree[:2] == ["call", "log"] and len(tree) == 3 else tree


def main() -> None:
    """Answer until the input ends."""
    _limit_this_process()
    serve(compare)


def compare(question: tuple[Tree, Tree, float] | None) -> bool:
    """The verdict on a question; True for None. The kernel ends the process at the time limit."""
    if question is None:
        return True
    gold, answer, timeout_seconds = question
    verdict = False
    signal.setitimer(signal.ITIMER_PROF, timeout_seconds)
    with contextlib.suppress(*_NOT_COMPUTED):
        verdict = same(gold, answer)
    others = [_with_base_ten(tree) for tree in (gold, answer)]
    if not verdict and others != [gold, answer]:
        with contextlib.suppress(*_NOT_COMPUTED):
            verdict = same(*others)
    signal.setitimer(signal.ITIMER_PROF, 0)
    return verdict
