"""What an answer is called, taken off: ``x = 5`` answers 5, and 5 answers ``x = 5``.

A name is a variable, a function of variables, or what the question asks for. An equation with
another left side is an equation: ``x + 100 = 25`` is no 25.
"""

from collections.abc import Sequence

from reason_llm.score.math.answer_tree import Tree, subtrees, variables
from reason_llm.score.math.question import read_question
from reason_llm.score.math.units import word_set

_SEVERAL = ("list", "set", "tuple")
_EQUALITIES = frozenset(["=", "~"])
_CONSTANTS = word_set("C c K k C_1 c_1")
_MAX_LETTERS = 4
"""Longest name of a polygon, such as ``ABCD``."""


def as_asked(gold: Tree, answer: Tree, question: str = "") -> tuple[Tree, Tree] | None:
    """Both without their names; None where they cannot be the same.

    Args:
        question: a formula of its own in it may be the name.
    """
    if gold[0] == "rel" and answer[0] == "rel":
        return _plain_approximation(gold), _plain_approximation(answer)
    if gold[0] == "based" and answer[0] == "num":
        return gold, ["based", answer[1], gold[2]]
    if gold[0] == "rel":
        value = value_named(gold)
        return (gold if value is None else value), answer
    if answer[0] == "rel":
        if not is_equality(answer):
            return gold, answer
        value = value_named(answer, question)
        return None if value is None else (gold, value)
    if gold[0] in ("tuple", "interval") and answer[0] in _SEVERAL:
        is_named = any(member[0] == "rel" for member in answer[1:])
        if answer[0] == "tuple" and not is_named:
            return gold, answer
        ordered = _in_order_of_names(answer)
        return None if ordered is None else (gold, ordered)
    if gold[0] in ("list", "set") and answer[0] in _SEVERAL:
        return _several(gold, answer)
    return gold, _with_constant_of(gold, answer)


def is_equality(tree: Tree) -> bool:
    """Whether all its signs say that two sides are equal, or nearly."""
    return tree[0] == "rel" and set(tree[1].split()) <= _EQUALITIES


def is_calculation(tree: Tree, question: str = "") -> bool:
    """Whether more than names stands before the value: ``37 + 45 = 82``."""
    members = _without_names(tree, question)
    is_approximated = tree[1].split()[-1] == "~"
    return len(members) > 1 + (is_approximated and len(members) == 2)


def value_named(tree: Tree, question: str = "") -> Tree | None:
    """What an equation gives a name to; None if it does not. What stands between as numbers goes
    along, since it must be the same: ``["chain", number, ..., last]``."""
    if not is_equality(tree):
        return None
    members = _without_names(tree, question)
    if not members or (len(members) == len(tree) - 2 and variables(members[0])):
        return None
    is_pair = len(members) == 1 and len(tree) == 4 and tree[2][0] == "var"
    if is_pair and tree[2][1] in variables(members[0]):
        return None  # x = 2x is no name for 2x
    if tree[1].split()[-1] == "~" and len(members) > 1 and not variables(members[-2]):
        value = ["chain", *members[:-1]] if len(members) > 2 else members[0]
        return ["approx", value, members[-1]]
    numbers = [member for member in members[:-1] if not variables(member)]
    return ["chain", *numbers, members[-1]] if numbers else list(members[-1])


def _without_names(tree: Tree, question: str) -> list[Tree]:
    members = list(tree[2:])
    is_pair = len(members) == 2 and tree[1] == "=" and not is_name(members[0], question)
    if is_pair and is_name(members[1], question):  # 5 = x
        return members[:1]
    while len(members) > 1 and is_name(members[0], question):
        del members[0]
    return members


def is_name(tree: Tree, question: str = "") -> bool:
    """Whether it can be the name of a value."""
    if tree[0] == "var":
        return True
    if tree[0] == "call":
        members = [member for member in tree[2:] if isinstance(member, list)]
        return bool(variables(tree)) and (
            str(tree[1]).startswith("?")
            or all(_is_plain_name(each) for each in members if variables(each))
        )
    if _is_plain_name(tree):
        return True
    return bool(variables(tree)) and read_question(question).asks_for(tree)


def _is_plain_name(tree: Tree) -> bool:
    """``x``, ``AB``, ``\\Delta p``, ``P(A)``, ``(x, y)``, ``x:y``."""
    if tree[0] == "mul":
        is_side = len(tree) <= 1 + _MAX_LETTERS
        return is_side and all(part[0] == "var" for part in tree[1:]) and tree[1][1][:1].isupper()
    if tree[0] in ("tuple", "ratio"):
        return all(map(_is_plain_name, tree[1:]))
    return bool(tree[0] == "var" or (tree[0] == "call" and str(tree[1]).startswith("?")))


def solved_for(tree: Tree) -> set[str]:
    """The variables that stand alone on a side of a relation, and on no other."""
    alone = [member[1] for member in tree[2:] if member[0] == "var"]
    names = [part[1] for part in subtrees(tree) if part[0] == "var"]
    return {each for each in alone if names.count(each) == 1}


def _with_constant_of(gold: Tree, answer: Tree) -> Tree:
    """``x^2 + K`` as ``x^2 + C``: a constant of integration has any of its names."""
    if gold[0] != "add" or answer[0] != "add":
        return answer
    (own, *more), (other, *others) = (
        sorted(variables(a) - variables(b)) or [""] for a, b in ((gold, answer), (answer, gold))
    )
    if more or others or not {own, other} <= _CONSTANTS:
        return answer
    terms = [["var", own] if member == ["var", other] else member for member in answer[1:]]
    return ["add", *terms] if ["var", own] in gold and ["var", other] in answer else answer


def _plain_approximation(tree: Tree) -> Tree:
    return [tree[0], tree[1].replace("~", "="), *tree[2:]]


def _named(items: Sequence[Tree]) -> dict[str, Tree] | None:
    """The values by their names; None where one has none or two have the same."""
    values: dict[str, Tree] = {}
    for item in items:
        value = value_named(item) if item[0] == "rel" else None
        if value is None or not is_name(item[2]) or str(item[2]) in values:
            return None
        values[str(item[2])] = value
    return values


def _in_order_of_names(several: Tree) -> Tree | None:
    """``y = 1, x = 2`` becomes ``(2, 1)``."""
    values = _named(several[1:])
    return None if values is None else ["tuple", *(values[name] for name in sorted(values))]


def _several(gold: Tree, answer: Tree) -> tuple[Tree, Tree] | None:
    """Two lists. If the gold one names its values, values without names are in the same order."""
    has_names = any(each[0] == "rel" for each in gold[1:])
    if not has_names:
        if gold == ["set"] or answer == ["set"]:
            return gold, answer
        values = [value_named(each) if each[0] == "rel" else each for each in answer[1:]]
        return None if None in values else (gold, [answer[0], *values])
    if any(each[0] in ("rel", "list") for each in answer[1:]):
        return gold, answer
    values_of_gold = _in_order_of_names(gold)
    if values_of_gold is not None:
        return values_of_gold, ["tuple", *answer[1:]]
    stripped = [value_named(member) if member[0] == "rel" else member for member in gold[1:]]
    return None if None in stripped else ([gold[0], *stripped], answer)
