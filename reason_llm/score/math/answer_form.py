"""The normal form of a tree, and the work that reaching it took.

Sums and products are flattened, sorted and computed as far as possible, without signs and brackets:
``4a + 3a + 2a`` and ``9a`` have one normal form. What had to be done on the way is named, ``like
terms`` for the first and nothing for the second. So one walk over a tree shows two things: which
expressions differ only in notation, and which work an answer leaves open. Products of sums stay
products. No sympy, no floating-point number decides a form; numbers are exact and their size is
bounded.
"""

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from math import gcd, log10
from typing import Any

from reason_llm.score.math.answer_tree import Tree, holds, literal, subtrees, variables
from reason_llm.score.math.numeric import TOLERANCE, value_of

Frozen = tuple[Any, ...]
"""A sum, a monomial or a base that can be compared and stored."""
Sum = dict[Frozen, Fraction]
"""Coefficients of monomials; a monomial is its bases with their exponents, sorted."""

_CLASSES = {
    **dict.fromkeys(["sin", "cos", "tan", "cot", "sec", "csc"], "trigonometry"),
    **dict.fromkeys([
        "arcsin", "arccos", "arctan", "arccot", "arcsec", "arccsc",
    ], "inverse trigonometry"),
    **dict.fromkeys(["sinh", "cosh", "tanh", "coth"], "hyperbolic"),
    **dict.fromkeys(["log", "ln"], "logarithm"),
    **dict.fromkeys(["factorial", "binom"], "combinatorics"),
}  # fmt: skip
"""Functions that may stand for one another."""
_OPEN = frozenset([*_CLASSES.keys() - {"factorial", "binom"}, "arg"])
"""Functions of a number that may have no other way to write their value."""
_LITERALS = frozenset(["num", "rep", "mixed"])
_NOTATIONS = {"mixed": "mixed number", "rep": "repeating decimal"}
FREE = frozenset(
    ["decimal", "percent", "mixed number", "repeating decimal", "power of ten", "reducible"]
)
"""Steps that only write a number in another way; they are not work."""
_WRITTEN_AS_FRACTIONS = frozenset([
    "decimal", "percent", "mixed number", "repeating decimal", "fraction of variables", "logarithm",
    "ratio",
])  # fmt: skip
MAX_DIGITS = 20_000
"""Longest number that is computed; of larger ones only the form is compared."""
_MAX_EXPONENT = 1000
"""Largest exponent of an expression with variables."""
_MAX_FACTORIAL = 5000
_MAX_MULTIPLIED_DIGITS = 1000
_MAX_TERMS = 100
_MAX_EXPANDED = 12
"""Most terms of a product of sums that is multiplied out."""
_MAX_PRIME = 1000
ONE: Frozen = (((), Fraction(1)),)


@dataclass(frozen=True, slots=True)
class Form:
    """The normal form of an answer, and the work that reaching it took."""

    value: Frozen
    steps: frozenset[str]
    """Steps that normalising it took: work left open."""
    operations: frozenset[str]
    """Operations that stay in it: ``root``, ``fraction``, classes of functions."""
    is_too_large: bool
    """Whether a number or an exponent in it is too large to be computed."""

    def is_same(self, other: "Form") -> bool:
        """Whether the two have the same form."""
        return (self.value, self.steps) == (other.value, other.steps)


def form_of(tree: Tree) -> Form:
    """The normal form of a tree."""
    return _form_of(json.dumps(tree))


@functools.lru_cache(maxsize=4096)
def _form_of(tree: str) -> Form:
    work = _Normalising()
    value = work.frozen(json.loads(tree))
    return Form(value, frozenset(work.steps), frozenset(work.operations), work.is_too_large)


def are_one_fraction(gold: Tree, answer: Tree) -> bool:
    """Whether two fractions are equal once expanded: ``2(x - 2)/x`` and ``(2x - 4)/x``."""
    return gold[0] == answer[0] == "frac" and all(
        _expanded(dict(form_of(one).value), _MAX_EXPANDED)
        == _expanded(dict(form_of(other).value), _MAX_EXPANDED)
        for one, other in zip(gold[1:], answer[1:], strict=True)
    )


def work_left(gold: Tree, answer: Tree, may_have_root: bool = False) -> frozenset[str]:
    """Steps and operations of ``answer`` that the form of ``gold`` lacks. If ``may_have_root``, any
    number with one root will do for another: ``\\sqrt{50}`` for ``5\\sqrt{2}``."""
    if gold[0] == answer[0] == "cases":
        return frozenset()
    unknown = variables(answer) - variables(gold)
    if unknown and (gold[0] == "rel" or not holds(answer, "rel")):
        return frozenset(["another variable"])
    of_gold, form = form_of(gold), form_of(answer)
    allowed = of_gold.steps | of_gold.operations | FREE | _allowed_steps(gold, of_gold)
    if may_have_root and "root" in of_gold.operations and has_one_root(answer):
        allowed |= {"a radical", "a product of roots", "a product of powers", "fraction"}
    if "logarithm" in of_gold.operations and _is_expanded_logarithm(gold, answer):
        allowed |= {"sum of constants", "fraction"}
    return (form.steps | form.operations) - allowed


def _is_expanded_logarithm(gold: Tree, answer: Tree) -> bool:
    """Whether a sum has one irrational term, ``1 + \\log_3 2`` for ``\\log_3 6``, or consists of
    logarithms of coprime numbers, ``\\ln 3 - \\ln 2`` for ``\\ln\\frac32``."""
    terms = [(sign, term) for sign, term in _terms(["add", answer]) if not _is_rational(term)]
    if len(terms) < 2:
        return bool(answer[0] == "add")
    calls = [part for _, term in terms for part in subtrees(term) if part[0] == "call"]
    numbers = [call[2][1] for call in calls if call[2][0] == "num" and call[2][1].isdigit()]
    return (
        len({sign for sign, _ in terms}) > 1
        and len(numbers) == len(calls) == len(terms)
        and all(gcd(int(a), int(b)) == 1 for a, b in combinations(numbers, 2))
        and any(part[0] == "call" and part[2][0] == "frac" for part in subtrees(gold))
    )


def has_one_root(tree: Tree) -> bool:
    """Whether a tree, or each item, is a number with at most one root, fraction and factor."""
    if tree[0] in ("pm", "neg", "list", "set", "tuple", "interval"):
        return all(has_one_root(member) for member in tree[1:] if isinstance(member, list))
    parts = list(subtrees(tree))
    kinds = [part[0] for part in parts]
    sides = tree[1:] if tree[0] == "frac" else [tree]
    return (
        set(kinds) <= {"num", "neg", "mul", "frac", "root", "const"}
        and max(kinds.count("root"), kinds.count("frac")) <= 1
        and all(part[1][0] in ("num", "frac") for part in parts if part[0] == "root")
        and all(
            sum(factor[0] in ("num", "frac") for factor in side[1:]) <= 1
            for side in sides
            if side[0] == "mul"
        )
    )


def _allowed_steps(tree: Tree, form: Form) -> set[str]:
    """Operations that an answer may have beyond the gold one's: another way to write the same."""
    allowed: set[str] = set()
    has_power_below = any(part[0] == "pow" and part[2][0] == "neg" for part in subtrees(tree))
    if has_power_below or (form.steps | form.operations) & _WRITTEN_AS_FRACTIONS:
        allowed.add("fraction")
    if tree[0] == "mul" and all(factor[0] in ("num", "pow") for factor in tree[1:]):  # 2 * 2 * 3
        allowed.add("a product of powers")
    if "fraction" in form.operations | allowed:
        allowed |= {"ratio", *(["root"] if "logarithm" in form.operations else [])}  # ln sqrt(2)
    if any(part[:2] == ["rel", "!="] for part in subtrees(tree)):  # a < 4, a \\neq 0
        allowed |= {"setminus", "backslash"}
    if variables(tree):
        if form.operations & {"fraction", "combinatorics", "trigonometry"}:
            allowed.add("fraction of variables")
        if "combinatorics" in form.operations:
            allowed |= {"fraction", "a value of factorial"}
        if any(part[0] == "pow" and variables(part) for part in subtrees(tree)):
            allowed |= {"fraction of variables", "power"}
    return allowed


class _Normalising:
    """One walk over a tree, which collects steps and operations."""

    def __init__(self) -> None:
        self.steps: set[str] = set()
        self.operations: set[str] = set()
        self.is_too_large = False

    def frozen(self, tree: Tree) -> Frozen:
        return _frozen(self.sum(tree))

    def sum(self, tree: Tree) -> Sum:
        """A tree as a sum of monomials."""
        if _is_literal(tree):
            return _constant(self.number(tree))
        match tree[0]:
            case "neg" | "mul" | "frac":
                return self.product(tree)
            case "add":
                return self.addition(tree)
            case "pow":
                return self.power(tree)
            case "root":
                return self.root(tree)
            case "call":
                return self.call(tree)
            case "deg":
                return self.sum(tree[1])
            case "pct":
                self.steps.add("percent")
                return {m: coefficient / 100 for m, coefficient in self.sum(tree[1]).items()}
            case "var" | "const":
                return _atom(tuple(tree))
        return _atom(self.structure(tree))

    def number(self, tree: Tree) -> Fraction:
        """The value of a literal."""
        # Each notation is a step by name, so that those of the gold answer can be allowed.
        if (number := literal(tree)) is not None:
            if tree[0] != "num":
                self.steps.add(_NOTATIONS[tree[0]])
            elif "." in tree[1] and number.denominator > 1:
                self.steps.add("decimal")
            return number
        if tree[0] == "pct":
            self.steps.add("percent")
            return self.number(tree[1]) / 100
        self.steps.add("power of ten")
        if tree[0] == "mul":
            sign = -1 if tree[1][0] == "neg" else 1
            return self.number(unsigned(tree[1])) * sign * self.number(tree[2])
        exponent = int(unsigned(tree[2])[1])
        return Fraction(10) ** (-exponent if tree[2][0] == "neg" else exponent)

    # sums

    def addition(self, tree: Tree) -> Sum:
        terms = list(_terms(tree))
        sums = [(sign, self.sum(term)) for sign, term in terms]
        parts = [_distributed({m: sign * c for m, c in inner.items()}) for sign, inner in sums]
        total: Sum = {}
        for part in parts:
            if not part:
                self.steps.add("a term of 0")
            for monomial in part.keys() & total.keys():
                self.steps.add("like terms" if monomial else "a sum of numbers")
            _add(total, part)
        bases = [base for part in parts for monomial in part for base, _ in monomial]
        if ("const", "oo") in bases:
            self.steps.add("a sum with infinity")
        if sum(not variables(term) for _, term in terms) > 1:
            self.operations.add("sum of constants")
        if any(holds(term, "matrix") for _, term in terms):
            self.operations.add("sum of matrices")
        # Products stay, but the like terms of ``2(x + 1) - 2x`` show only once it is expanded.
        expanded: list[Sum] = []
        for part in parts:
            room = _MAX_TERMS - sum(map(len, expanded)) if len(expanded) < _MAX_EXPANDED else 0
            expanded.append(_expanded(part, room))
        if sum(map(len, parts)) == len(total) and expanded != parts:
            together: Sum = {}
            for part in expanded:
                _add(together, part)
            if len(together) < sum(map(len, expanded)):
                self.steps.add("like terms")
        return total

    # products

    def product(self, tree: Tree) -> Sum:
        coefficient, powers = Fraction(1), dict[Frozen, Sum]()
        literals: dict[int, list[Tree]] = {1: [], -1: []}
        roots: dict[int, list[Frozen]] = {1: [], -1: []}
        num_signs = num_sums = num_matrices = 0
        bases = [unsigned(factor)[1] for factor, _ in _factors(tree) if factor[0] == "pow"]
        bases += [factor for factor, _ in _factors(tree) if factor[0] == "num"]
        if any(base[0] == "num" and bases.count(base) > 1 for base in bases):
            self.steps.add("a product of powers")
        # Literals and roots are noted, too: their product no longer shows the work left open.
        for factor, side in _factors(tree):
            if factor == ["neg"]:
                coefficient, num_signs = -coefficient, num_signs + 1
                continue
            if _is_literal(factor):
                literals[side].append(factor)
            is_constant = not variables(factor)
            num_sums += is_constant and factor[0] == "add"
            num_matrices += holds(factor, "matrix")
            if side < 0:
                self.operations.add("fraction" if is_constant else "fraction of variables")
                if is_constant and factor[0] == "add":
                    self.operations.add("sum in a denominator")
            part = self.sum(factor)
            if not part:
                if side < 0 or len(tree) > 2:
                    self.steps.add("a factor of 0")
                return _atom(("undefined",)) if side < 0 else {}
            scale, monomial = _as_factor(part)
            coefficient = coefficient * scale if side > 0 else coefficient / scale
            for base, exponent in monomial:
                if base[0] == "num":
                    roots[side].append(base)
                self.merge(powers, base, dict(exponent), side)
        self.check_literals(tree, literals)
        self.check_roots(roots)
        if num_signs > 1:
            self.steps.add("signs")
        if num_sums > 1:
            self.steps.add("a product of sums")
        if num_matrices > 1:
            self.operations.add("product of matrices")
        if ("const", "oo") in powers and (len(powers) > 1 or abs(coefficient) != 1):
            self.steps.add("a product with infinity")
        return {_monomial(powers): coefficient}

    def merge(self, powers: dict[Frozen, Sum], base: Frozen, exponent: Sum, side: int) -> None:
        """Multiply by a power of ``base``, or divide where ``side`` is -1."""
        exponent = {monomial: coefficient * side for monomial, coefficient in exponent.items()}
        if base in powers:
            rest = dict(powers[base])
            _add(rest, exponent)
            is_repeated_factor = base[0] == "sum" and len(rest) == 1 and min(rest.values()) > 1
            if not is_repeated_factor:
                self.steps.add("a product of powers")
            exponent = rest
        powers[base] = exponent

    def check_literals(self, tree: Tree, literals: dict[int, list[Tree]]) -> None:
        above = [literal for literal in literals[1] if literal != ["num", "1"]]
        below = literals[-1]
        if ["num", "1"] in below or (tree[0] == "mul" and ["num", "1"] in map(unsigned, tree[1:])):
            self.steps.add("a factor of 1")
        if len(above) > 1 or len(below) > 1:
            self.steps.add("a product of numbers")
        elif above and below:
            upper, lower = above[0], below[0]
            if any(end[0] != "num" or "." in end[1] for end in (upper, lower)):
                self.steps.add("a fraction of decimals")
            else:
                numerator, denominator = int(upper[1]), int(lower[1])
                if denominator and numerator % denominator == 0:
                    self.steps.add("a product of numbers")
                elif gcd(numerator, denominator) > 1:
                    self.steps.add("reducible")
        if tree[0] == "mul" and sum(map(_is_rational, tree[1:])) > 1:
            self.steps.add("a product of numbers")
        if tree[0] == "frac":
            kinds = ("frac", "rep", "mixed", "pct") if not variables(tree) else ()
            if any(unsigned(member)[0] == "frac" or holds(member, *kinds) for member in tree[1:]):
                self.steps.add("a fraction in a fraction")

    def check_roots(self, roots: dict[int, list[Frozen]]) -> None:
        above, below = (
            [root[1] for root in roots[side] if isinstance(root[1], int)] for side in (1, -1)
        )
        has_common = any(gcd(first, second) > 1 for first in above for second in below)
        if max(len(above), len(below)) > 1 or has_common:
            self.steps.add("a product of roots")

    # powers

    def power(self, tree: Tree) -> Sum:
        of_exponent = _Normalising()
        exponent, base = of_exponent.sum(tree[2]), self.sum(tree[1])
        self.steps |= of_exponent.steps
        is_constant = not variables(tree[1])
        if holds(tree[1], "matrix"):
            self.operations.add("power of a matrix")
        number = _rational(exponent)
        if number is None:
            return self.open_power(tree, base, self.sum(tree[2]))
        if number in (0, 1):
            self.steps.add(f"an exponent of {number}")
            return base if number else _constant(Fraction(1))
        if number.denominator > 1:
            self.operations.add("root")
            return self.radical(base, number)
        if is_constant and (base.keys() != {((("const", "e"), ONE),)}):
            self.steps.add("power")
        elif number < 0:
            self.operations.add("fraction" if is_constant else "fraction of variables")
        return self.whole_power(base, number)

    def open_power(self, tree: Tree, base: Sum, exponent: Sum) -> Sum:
        """A power with variables or constants in its exponent."""
        if not variables(tree):
            if ["const", "i"] in subtrees(tree[2]):
                self.operations.add("complex exponential")
            self.is_too_large |= value_of(tree) is None
        return {((_base(base), _frozen(exponent)),): Fraction(1)}

    def whole_power(self, base: Sum, exponent: Fraction) -> Sum:
        number = _rational(base)
        if number is not None:
            digits = abs(exponent) * _digits(number)
            self.is_too_large |= digits > MAX_DIGITS
            if number == 0 or digits > _MAX_MULTIPLIED_DIGITS:
                return _atom(("power", number, exponent))
            return _constant(number ** int(exponent))
        self.is_too_large |= abs(exponent) > _MAX_EXPONENT
        if abs(exponent) > _MAX_EXPONENT:
            return _atom(("power", _frozen(base), exponent))
        scale, bases = _as_factor(base)
        if scale != 1 or (len(base) == 1 and any(power != ONE for _, power in bases)):
            self.steps.add("power of a product")
        powers = {factor: {m: c * exponent for m, c in inner} for factor, inner in bases}
        exponents = [c for inner in powers.values() for c in inner.values()]
        self.is_too_large |= any(abs(c) > _MAX_EXPONENT for c in exponents)
        if abs(exponent) * _digits(scale) > _MAX_MULTIPLIED_DIGITS:
            return _atom(("power", _frozen(base), exponent))
        return {_monomial(powers): scale ** int(exponent)}

    def root(self, tree: Tree) -> Sum:
        self.operations.add("root")
        index = _rational(_Normalising().sum(tree[2]))
        radicand = self.sum(tree[1])
        if index is None or index < 2 or index.denominator > 1:
            self.steps.add("an index")
            return _atom(("root", _frozen(radicand), self.frozen(tree[2])))
        return self.radical(radicand, 1 / index)

    def radical(self, base: Sum, exponent: Fraction) -> Sum:
        """A root, or a power with a fractional exponent, with all possible factors taken out."""
        number, index = _rational(base), exponent.denominator
        if number is not None:
            inner = self.whole_power(base, Fraction(exponent.numerator))
            number = _rational(inner)
            if number is None:
                return _atom(("root", _frozen(inner), index))
            return self.root_of_number(number, index)
        if not variables_of(base) and len(base) > 1:
            self.operations.add("root of a sum")
        scale, bases = _as_factor(base)
        outside, _ = _taken_out(abs(scale.numerator), index)
        is_power = any(
            (whole := _rational(dict(power))) is not None and abs(whole) >= index
            for _, power in bases
        )
        if outside != 1 or (is_power and len(base) == 1):
            self.steps.add("a radical")
        return {((_base(base), _frozen(_constant(exponent))),): Fraction(1)}

    def root_of_number(self, number: Fraction, index: int) -> Sum:
        sign = -1 if number < 0 else 1
        above, inner_above = _taken_out(abs(number.numerator), index)
        below, inner_below = _taken_out(number.denominator, index)
        if (above, below, sign) != (1, 1, 1) or (inner_above, inner_below) == (1, 1):
            self.steps.add("a radical")
        if number.denominator > 1:
            self.operations.add("fraction")
        roots = [(inner_above, 1), (inner_below, -1), (sign, 1)]
        powers: dict[Frozen, Sum] = {
            ("num", inner): _constant(Fraction(side, index)) for inner, side in roots if inner != 1
        }
        return {_monomial(powers): Fraction(above, below)} if number else {}

    # functions and collections

    def call(self, tree: Tree) -> Sum:
        name = str(tree[1])
        if name == "exp":
            return self.power(["pow", ["const", "e"], tree[2]])
        members = [member for member in tree[2:] if isinstance(member, list)]
        if not name.startswith("?"):
            self.operations.add(_CLASSES.get(name, name))
            if not variables(tree) and (name not in _OPEN or _has_plain_value(tree)):
                self.steps.add(f"a value of {name}")
        if name in ("factorial", "binom"):
            constants = [part for m in members for part in subtrees(m) if not variables(part)]
            sizes = [value_of(constant) for constant in constants]
            if not all(
                isinstance(n, complex | float | int) and abs(n) <= _MAX_FACTORIAL for n in sizes
            ):
                self.is_too_large = True
        marks = ["deg" if member[0] == "deg" else "" for member in members]
        return _atom(("call", name, *marks, *map(self.frozen, members)))

    def structure(self, tree: Tree) -> Frozen:
        """A list, a set, a relation, a matrix and the like: its members in normal form."""
        kind = tree[0]
        is_open = kind in ("setminus", "backslash") and not _is_domain(tree)
        is_open |= kind == "ratio" and tree[2:] != [["num", "1"]]  # 3 : 1 is 3
        if is_open or (kind == "cap" and not _is_condition(tree)):
            self.operations.add(kind)
        if kind == "matrix":
            return (kind, *(tuple(map(self.frozen, row)) for row in tree[1:]))
        members = [self.frozen(member) for member in tree[1:] if isinstance(member, list)]
        plain = [member for member in tree[1:] if not isinstance(member, list)]
        if kind == "rel":
            signs = plain[0].split()
            if all(sign.startswith(">") for sign in signs):
                signs = [sign.replace(">", "<") for sign in reversed(signs)]
                members.reverse()
            plain = [" ".join(signs)]
            if set(signs) in ({"="}, {"!="}):
                members.sort(key=repr)
        elif kind in ("list", "set", "cup", "cases"):
            members.sort(key=repr)
        return (kind, *plain, *members)


# sums, monomials and bases


def _frozen(terms: Sum) -> Frozen:
    return tuple(sorted(terms.items(), key=repr))


def _constant(number: Fraction) -> Sum:
    return {(): number} if number else {}


def _atom(base: Frozen) -> Sum:
    return {((base, ONE),): Fraction(1)}


def _rational(terms: Sum) -> Fraction | None:
    """The number that a sum is equal to; None if the sum has variables or bases."""
    if not terms:
        return Fraction(0)
    return terms[()] if terms.keys() == {()} else None


def _add(total: Sum, part: Sum) -> None:
    for monomial, coefficient in part.items():
        total[monomial] = total.get(monomial, Fraction(0)) + coefficient
        if not total[monomial]:
            del total[monomial]


def _monomial(powers: dict[Frozen, Sum]) -> Frozen:
    factors = ((base, _frozen(exponent)) for base, exponent in powers.items() if exponent)
    return tuple(sorted(factors, key=repr))


def _as_factor(terms: Sum) -> tuple[Fraction, Frozen]:
    """Coefficient and bases of a product; a sum is one base, its first term positive."""
    if len(terms) == 1:
        ((monomial, coefficient),) = terms.items()
        return coefficient, monomial
    frozen = _frozen(terms)
    if frozen[0][1] < 0:
        frozen = tuple((monomial, -coefficient) for monomial, coefficient in frozen)
        return Fraction(-1), ((("sum", frozen), ONE),)
    return Fraction(1), ((("sum", frozen), ONE),)


def _base(terms: Sum) -> Frozen:
    """A sum as the base of a power."""
    if len(terms) == 1:
        ((monomial, coefficient),) = terms.items()
        if coefficient == 1 and len(monomial) == 1 and monomial[0][1] == ONE:
            return tuple(monomial[0][0])
    return ("group", _frozen(terms))


def _distributed(terms: Sum) -> Sum:
    """``3(x + 1)`` as a separate sum, so that it can be added to others."""
    if len(terms) == 1:
        ((monomial, coefficient),) = terms.items()
        if len(monomial) == 1 and monomial[0][0][0] == "sum" and monomial[0][1] == ONE:
            return {m: c * coefficient for m, c in monomial[0][0][1]}
    return terms


def _expanded(terms: Sum, max_terms: int) -> Sum:
    """Multiply out the products of sums, unless the result has more than ``max_terms`` terms."""
    total: Sum = {}
    for monomial, coefficient in terms.items():
        product: Sum = {(): coefficient}
        for base, exponent in monomial:
            times = _rational(dict(exponent))
            is_sum = base[0] == "sum" and times is not None and times in range(1, 7)
            factor = dict(base[1]) if is_sum else {((base, exponent),): Fraction(1)}
            for _ in range(int(times or 0) if is_sum else 1):
                if len(product) * len(factor) > max_terms:
                    return terms
                product = _multiplied(product, factor)
        _add(total, product)
    return total


def _multiplied(first: Sum, second: Sum) -> Sum:
    total: Sum = {}
    for left, a in first.items():
        for right, b in second.items():
            powers = {base: dict(exponent) for base, exponent in left}
            for base, exponent in right:
                powers.setdefault(base, {})
                powers[base] = dict(powers[base])
                _add(powers[base], dict(exponent))
            _add(total, {_monomial(powers): a * b})
    return total


def variables_of(terms: Any) -> bool:
    """Whether a normal form has a variable."""
    if isinstance(terms, dict):
        terms = tuple(terms.items())
    if not isinstance(terms, tuple):
        return False
    return (len(terms) == 2 and terms[0] == "var") or any(map(variables_of, terms))


# trees


def _terms(tree: Tree, sign: int = 1) -> Iterator[tuple[int, Tree]]:
    """The terms of a sum and of nested sums, with their signs."""
    for member in tree[1:]:
        inner, member_sign = (member[1], -sign) if member[0] == "neg" else (member, sign)
        if inner[0] == "add":
            yield from _terms(inner, member_sign)
        else:
            yield member_sign, inner


def _factors(tree: Tree, side: int = 1) -> Iterator[tuple[Tree, int]]:
    """Factors of a product, each with 1 or, for a divisor, -1; a minus sign is a factor."""
    if tree[0] == "neg":
        yield ["neg"], side
        yield from _factors(tree[1], side)
    elif tree[0] == "mul" and not _is_literal(tree):
        for member in tree[1:]:
            yield from _factors(member, side)
    elif tree[0] == "frac":
        yield from _factors(tree[1], side)
        yield from _factors(tree[2], -side)
    else:
        yield tree, side


def unsigned(tree: Tree) -> Tree:
    """The tree without minus signs before it."""
    while tree[0] == "neg":
        tree = tree[1]
    return tree


def _is_literal(tree: Tree) -> bool:
    """Whether it is one number as it is written: digits, a percentage, ``1.5 \\cdot 10^3``."""
    if tree[0] == "pct":
        return tree[1][0] in _LITERALS
    return tree[0] in _LITERALS or _is_power_of_ten(tree) or is_scientific(tree)


def _is_power_of_ten(tree: Tree) -> bool:
    if tree[0] != "pow" or tree[1] != ["num", "10"]:
        return False
    exponent = unsigned(tree[2])
    return bool(exponent[0] == "num" and exponent[1].isdigit() and len(exponent[1]) < 4)


def is_scientific(tree: Tree) -> bool:
    """Whether it is a numeral times a power of ten."""
    return (
        tree[0] == "mul"
        and len(tree) == 3
        and unsigned(tree[1])[0] == "num"
        and _is_power_of_ten(tree[2])
    )


def _is_rational(tree: Tree) -> bool:
    """Whether a tree is a literal or a fraction of two."""
    tree = unsigned(tree)
    return _is_literal(tree) or (tree[0] == "frac" and all(map(_is_rational, tree[1:])))


def is_plain(tree: Tree) -> bool:
    """Whether a tree is a plain number, which a question may contain by chance."""
    return _is_rational(tree[1] if tree[0] == "deg" else tree)


def _is_domain(tree: Tree) -> bool:
    """Whether a set excludes single numbers or a bounded interval from all numbers."""
    _, whole, excluded = tree
    is_interval = excluded[0] == "interval" or (excluded[0] == "tuple" and len(excluded) == 3)
    is_interval &= ["const", "oo"] not in subtrees(excluded)
    return bool(whole[0] == "const") and (excluded[0] == "set" or is_interval)


def _is_condition(tree: Tree) -> bool:
    """Whether an intersection is a relation and further relations that exclude numbers."""
    if tree[0] == "cap" and tree[1][0] == "cap":
        return tree[2][:2] == ["rel", "!="] and _is_condition(tree[1])
    return bool(tree[1][0] == "rel")


def _has_plain_value(tree: Tree) -> bool:
    """Whether a function's value is simpler: ``\\sin 30^\\circ``, ``\\log_2 8``, ``\\ln e^3``."""
    name, value = tree[1], value_of(tree)
    if not isinstance(value, (int, float, complex)):
        return False
    if _CLASSES.get(name) == "logarithm":
        is_decimal = name == "log" and len(tree) == 3
        quotients = [value, value / 2.302585092994046] if is_decimal else [value]
        return any(_is_whole(quotient * 12) for quotient in quotients)
    degrees = 180 / 3.141592653589793
    if _CLASSES.get(name) == "inverse trigonometry":
        return _is_whole(value * degrees / 15)
    if _CLASSES.get(name) == "trigonometry":
        angle = value_of(tree[2])
        scale = 1 if tree[2][0] == "deg" else degrees
        return isinstance(angle, (int, float, complex)) and _is_whole(angle * scale / 15)
    return abs(value) < TOLERANCE or abs(value - 1) < TOLERANCE


def _is_whole(number: complex) -> bool:
    number = complex(number)
    return abs(number.imag) < TOLERANCE and abs(number.real - round(number.real)) < 1e-8


def _digits(number: Fraction) -> int:
    """The digits of numerator or denominator, whichever has more."""
    size = max(abs(number.numerator), number.denominator)
    return len(str(size)) if size < 10**300 else int(log10(2) * size.bit_length()) + 1


def _taken_out(number: int, index: int) -> tuple[int, int]:
    """The factor that can be taken out of a root, and the rest: ``(2, 3)`` for the root of 12."""
    outside, divisor = 1, 2
    if index > 64:
        return 1, number
    while divisor <= _MAX_PRIME and divisor**index <= number:
        while number % divisor**index == 0:
            number //= divisor**index
            outside *= divisor
        divisor += 1
    root = round(number ** (1 / index)) if number < 10**15 else 0
    if root > 1 and root**index == number:
        return outside * root, 1
    return outside, number
