"""What an answer to this gold answer may look like: what it names is taken off, and no work may be
left undone that the gold answer's own form does not need."""

from collections.abc import Iterator, Sequence

from reason_llm.score.math.answer_tree import Tree, subtrees, variables

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
_LITERALS = frozenset(["num", "rep", "mixed"])
_SETS = frozenset(["interval", "tuple", "cup", "cap", "setminus", "set", "list", "const"])
_SEVERAL = frozenset(["list", "set", "tuple"])
_OPERATIONS = frozenset(["add", "neg", "mul", "frac", "pow", "root", "call", "pm", "mp", "pct"])
_GROWTH, _SLACK = 4, 16
"""An answer has at most so many times the operations of the gold one, and so many more."""


def as_asked(gold: Tree, answer: Tree) -> tuple[Tree, Tree] | None:
    """Both without the names of what they are: ``x = 5`` answers 5, and 5 answers ``x = 5``; None
    where they cannot be the same.

    An equation with another left side than a name is compared as an equation.
    """
    if gold[0] == "rel" and answer[0] == "rel":
        if not variables(gold) and not variables(answer):
            return of_its_name(gold), of_its_name(answer)
        return _plain_approximation(gold), _plain_approximation(answer)
    if gold[0] == "rel":
        return (of_its_name(gold) if _is_named(gold) or not variables(gold) else gold), answer
    if answer[0] == "rel":
        return gold, (of_its_name(answer) if _is_equality(answer) else answer)
    if answer[0] in _SEVERAL and gold[0] in ("tuple", "interval"):
        return gold, _by_name(answer)
    if gold[0] in ("list", "set") and answer[0] in _SEVERAL:
        return _listed(gold, answer)
    return gold, answer


def of_its_name(tree: Tree) -> Tree:
    """The right side of a chain of equalities; what stands between as numbers goes along, since it
    must be the same: ``["chain", number, ..., last]``."""
    signs, members = tree[1].split(), tree[2:]
    if signs[-1] == "~":
        value, shown = members[-2], members[-1]
        if variables(value):
            return list(shown)
        numbers = [each for each in members[:-2] if not variables(each)]
        return ["approx", ["chain", *numbers, value] if numbers else value, shown]
    numbers = [each for each in members[:-1] if not variables(each)]
    return ["chain", *numbers, members[-1]] if numbers else members[-1]


def undone(gold: Tree, answer: Tree) -> str:
    """The operation in ``answer`` that the form of ``gold`` does not need; empty if there is none.

    Both are whole answers, as they were read.
    """
    if answer[0] == "rel" and gold[0] != "rel":
        left = answer[2:-1]
        if _is_equality(answer) and answer[1].split()[-1] == "~" and len(left) <= 2:
            left = left[:-1] if len(left) == 2 or variables(left[-1]) else []
        if _is_equality(answer) and (len(left) > 1 or (left and not variables(left[0]))):
            return "a calculation before the answer"
    if gold[0] != "rel" or answer[0] != "rel":
        gold, answer = _values(gold), _values(answer)
    unknown = variables(answer) - variables(gold)
    if answer[0] == "rel" and gold[0] in _SETS and len(unknown) == 1:
        unknown = set()  # 1 < x < 2 for (1, 2)
    if unknown:
        return f"the variable {min(unknown)}"
    allowed = set(operations(gold)) | _allowances(gold)
    for operation in operations(answer):
        if operation not in allowed:
            return operation
    if _size(answer) > _GROWTH * _size(gold) + _SLACK:
        return "too many operations"
    return ""


def operations(tree: Tree) -> Iterator[str]:
    """The operations of a tree that leave work to whoever reads it."""
    for each in subtrees(tree):
        kind = each[0]
        if kind == "call" and each[1] != "exp":
            yield _CLASSES.get(each[1], str(each[1]))
        elif kind == "root":
            yield "root"
        elif kind in ("cup", "cap", "setminus", "backslash") and kind != "cup":
            yield kind
        elif kind == "frac":
            yield from _of_fraction(each)
        elif kind == "pow":
            yield from _of_power(each)
        elif kind == "add":
            yield from _of_sum(each)
        elif kind == "mul":
            yield from _of_product(each)


def _of_fraction(tree: Tree) -> Iterator[str]:
    numerator, denominator = (_unsigned(each) for each in tree[1:])
    if _is_constant(tree):
        yield "fraction"
        inner = (each for part in (numerator, denominator) for each in subtrees(part))
        if any(each[0] in ("frac", "rep", "mixed", "pct") for each in inner):
            yield "fraction in a fraction"
        if any(each[0] == "num" and "." in each[1] for each in (numerator, denominator)):
            yield "fraction of decimals"
    elif variables(denominator):
        yield "fraction of variables"
    else:
        yield "fraction"


def _of_power(tree: Tree) -> Iterator[str]:
    base, exponent = _unsigned(tree[1]), _unsigned(tree[2])
    if base[0] == "matrix":
        yield "matrix"
    if base == ["num", "10"] and exponent[0] == "num":
        return
    if exponent[0] == "frac" and _is_constant(base):
        yield "root"
    elif _is_constant(base) and _is_constant(exponent) and base[0] != "const":
        yield "power"
    elif variables(base) and tree[2][0] == "neg":
        yield "fraction of variables"


def _of_sum(tree: Tree) -> Iterator[str]:
    terms = [_unsigned(each) for each in _terms(tree)]
    if any(_has_matrix(each) for each in terms):
        yield "matrix"
    if sum(is_rational(each) for each in terms) > 1:
        yield "sum of numbers"
    imaginary = sum(_is_imaginary(each) for each in terms)
    if imaginary > 1:
        yield "sum of numbers"
    if sum(_is_constant(each) for each in terms) > 1:
        yield "sum of constants"


def _of_product(tree: Tree) -> Iterator[str]:
    factors = [_unsigned(each) for each in _factors(tree)]
    if sum(_has_matrix(each) for each in factors) > 1:
        yield "matrix"
    if is_scientific(tree):
        return
    if sum(is_rational(each) for each in factors) > 1:
        yield "product of numbers"
    if sum(each[0] == "root" and _is_constant(each) for each in factors) > 1:
        yield "product of roots"
    if sum(each[0] == "add" and _is_constant(each) for each in factors) > 1:
        yield "product of sums"


def _terms(tree: Tree) -> Iterator[Tree]:
    """The terms of a sum, those of sums in it too."""
    for each in tree[1:]:
        inner = each[1] if each[0] == "neg" else each
        if inner[0] == "add":
            yield from _terms(inner)
        else:
            yield inner


def _factors(tree: Tree) -> Iterator[Tree]:
    for each in tree[1:]:
        inner = each[1] if each[0] == "neg" else each
        if inner[0] == "mul" and not is_scientific(inner):
            yield from _factors(inner)
        else:
            yield inner


def is_scientific(tree: Tree) -> bool:
    """Whether it is a numeral times a power of ten."""
    return (
        tree[0] == "mul"
        and len(tree) == 3
        and _unsigned(tree[1])[0] == "num"
        and tree[2][0] == "pow"
        and tree[2][1] == ["num", "10"]
        and _unsigned(tree[2][2])[0] == "num"
    )


def is_rational(tree: Tree) -> bool:
    """Whether it is a numeral, a fraction of two, or one with a percent sign."""
    tree = _unsigned(tree)
    if tree[0] in ("frac", "pct", "deg"):
        return all(is_rational(each) for each in tree[1:])
    return tree[0] in _LITERALS or is_scientific(tree)


def is_plain(tree: Tree) -> bool:
    """Whether it is a numeral, a variable or a constant, which a question may hold as well."""
    return _unsigned(tree)[0] in ("num", "var", "const")


def _is_imaginary(tree: Tree) -> bool:
    if tree == ["const", "i"]:
        return True
    return (
        tree[0] == "mul"
        and ["const", "i"] in tree
        and all(is_rational(each) for each in tree[1:] if each != ["const", "i"])
    )


def _is_constant(tree: Tree) -> bool:
    kinds = {each[0] for each in subtrees(tree)}
    return not variables(tree) and not kinds & {"matrix", "tuple", "list", "set"}


def _has_matrix(tree: Tree) -> bool:
    return any(each[0] == "matrix" for each in subtrees(tree))


def _unsigned(tree: Tree) -> Tree:
    while tree[0] in ("neg", "pm", "mp") and len(tree) == 2:
        tree = tree[1]
    return tree


def _allowances(gold: Tree) -> set[str]:
    """Operations that an answer may have beyond the gold one's own: a fraction for a decimal."""
    found = set(operations(gold))
    allowed: set[str] = set()
    decimals = (each[0] == "num" and "." in each[1] for each in subtrees(gold))
    literals = (each[0] in ("rep", "mixed", "pct") for each in subtrees(gold))
    if any(decimals) or any(literals) or "fraction of variables" in found or "root" in found:
        allowed.add("fraction")
    if {"fraction", "combinatorics"} & found and variables(gold):
        allowed.add("fraction of variables")
    if "trigonometry" in found and variables(gold):
        allowed.add("fraction of variables")
    for each in subtrees(gold):
        if each[0] == "pow" and variables(each):
            allowed |= {"fraction of variables", "power"}
        if each[0] == "ratio" or (each[0] == "pow" and each[2][0] == "neg"):
            allowed.add("fraction")
        if each[0] == "pow" and _unsigned(each[2])[0] == "frac":
            allowed.add("root")
    return allowed


def _size(tree: Tree) -> int:
    return sum(each[0] in _OPERATIONS for each in subtrees(tree))


def _values(tree: Tree) -> Tree:
    """What a tree says, without the names of its parts."""
    if tree[0] == "rel" and _is_equality(tree):
        *left, last = tree[2:]
        if tree[1].split()[-1] == "~" and not variables(left[-1]):
            return list(left[-1])
        return list(last) if _is_named(tree) or len(left) > 1 or not variables(last) else tree
    if tree[0] in _SEVERAL:
        return [tree[0], *(_values(each) for each in tree[1:])]
    return tree


def _is_equality(tree: Tree) -> bool:
    return set(tree[1].split()) <= {"=", "~", "in", "equiv"}


def _is_named(tree: Tree) -> bool:
    """Whether its left side is a name: a variable, or a function of something."""
    left = tree[2]
    return _is_equality(tree) and (
        left[0] == "var"
        or (left[0] == "call" and bool(variables(left)))
        or (left[0] in ("mul", "tuple", "ratio") and _holds_names_only(left))
    )


def _holds_names_only(tree: Tree) -> bool:
    return all(each[0] in ("var", "mul", "tuple", "ratio") for each in subtrees(tree))


def _plain_approximation(tree: Tree) -> Tree:
    return [tree[0], tree[1].replace("~", "="), *tree[2:]]


def _by_name(answer: Tree) -> Tree:
    """``y = 1, x = 2`` as ``(2, 1)``: in the order of the names, where each has its own."""
    items = answer[1:]
    named = [each for each in items if each[0] == "rel" and _is_named(each)]
    names = [str(each[2]) for each in named]
    if len(named) != len(items) or len(set(names)) != len(names):
        return [answer[0], *_without_names(items)]
    ordered = sorted(named, key=lambda each: str(each[2]))
    return ["tuple", *(of_its_name(each) for each in ordered)]


def _without_names(items: Sequence[Tree]) -> list[Tree]:
    return [
        of_its_name(each) if each[0] == "rel" and _is_equality(each) else each for each in items
    ]


def _listed(gold: Tree, answer: Tree) -> tuple[Tree, Tree]:
    """Two lists, with names where the gold one has some."""
    has_names = any(each[0] == "rel" for each in gold[1:])
    if not has_names:
        return gold, [answer[0], *_without_names(answer[1:])]
    if answer[0] == "tuple":
        return _by_name(gold), answer
    if not any(each[0] in ("rel", "list") for each in answer[1:]):
        return [gold[0], *_without_names(gold[1:])], answer
    return gold, answer
