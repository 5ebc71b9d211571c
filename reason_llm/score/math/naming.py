"""Removal of names from answers: ``x = 5`` answers 5, and 5 answers ``x = 5``.

A name is a variable, a function of variables, or the expression that the question asks for. An
equation with any other left side stays an equation: ``x + 100 = 25`` does not answer 25.
"""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import reduce
from itertools import permutations

from reason_llm.score.math import constraints
from reason_llm.score.math.answer_form import form_of, work_left
from reason_llm.score.math.answer_tree import (
    LABELS,
    Tree,
    holds,
    mapped,
    subtrees,
    variables,
    with_sign,
)
from reason_llm.score.math.numeric import TOLERANCE, is_near, is_scalar, value_of
from reason_llm.score.math.question import read_question, words_of
from reason_llm.score.math.units import word_set

_SEVERAL = ("list", "set", "tuple")
_SETS = (*_SEVERAL, "interval", "cup", "cap", "setminus", "backslash")
_EMPTY = (["const", "empty"], ["set"])
_EQUALITIES = frozenset(["=", "~"])
_CONSTANTS = word_set("C c K k A C_1 c_1 C_0 c_0 y_0 constant const")
_PARAMETERS = word_set("n k m j l N K")
"""Names of the integer that numbers the solutions."""
_INTEGERS = [["neg", ["num", str(-n)]] if n < 0 else ["num", str(n)] for n in range(-36, 37)]
"""Values of the integer for which two families are compared."""
_OF_FAMILIES = word_set("power signs")
_LONGEST_RESIDUE = 1000
"""Digits of a number that is reduced modulo another."""
_GRAPHS = word_set("f g h f^-1 g^-1 h^-1")
_UNIT_VECTORS = ("i", "j", "k")
_ZERO = ["num", "0"]
_REALS, _INTEGER_SET = ["const", "set R"], ["const", "set Z"]
_I, _PI = ["const", "i"], ["const", "pi"]
_GRAPH_NAMES = frozenset("xyz")
_MAX_RENAMED = 3
_MAX_LETTERS = 4
"""Longest name of a polygon, such as ``ABCD``."""


def as_asked(gold: Tree, answer: Tree, question: str = "") -> tuple[Tree, Tree] | None:
    """Remove names, which may be formulas of the question; None if the answers cannot be equal."""
    answer = _with_names_of(gold, _with_unit_last(gold, answer), question)
    gold = _without_point_names(answer, gold)
    if gold[0] == "rel" and gold[2][:2] == ["call", "abs"] and not holds(answer, "call"):
        gold = _in_standard_form(["set"], gold)  # |x| < 3
    if _I in subtrees(gold):
        gold, answer = _in_exponential_form(gold), _in_exponential_form(answer)
    gold, answer = _in_radians(gold, answer, question), _in_radians(answer, gold, question)
    gold, answer = _intercepts(gold, answer, question)
    answer = _with_variable_of(gold, _in_standard_form(gold, answer))
    return _unnamed(gold, answer, question)


def _unnamed(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree] | None:
    if "mod" in (gold[0], answer[0]) or answer[:2] == ["rel", "equiv"]:
        return _congruent(gold, answer, question)
    if gold[0] != "based" or gold[2] == "10":
        gold, answer = _in_base_ten(gold), _in_base_ten(answer)
    gold, domain, name = _without_domain(gold)
    answer, answer_domain, answer_name = _without_domain(answer)
    allowed = [domain, None, *(() if domain else (_REALS, _INTEGER_SET))]
    if answer_domain not in allowed:
        return None
    is_numbered = _INTEGER_SET in (domain, answer_domain)
    if is_numbered:
        answer = _with_parameter(gold, name, answer, answer_name)
    is_numbered |= "integer" in question.lower()
    is_numbered &= bool(domain) or constraints.demands_of(question).solutions
    if is_numbered and is_same_family(gold, answer):
        shared = value_named(gold) if gold[0] == "rel" else gold
        return None if shared is None else (shared, shared)
    if gold[0] in ("list", "set") and answer[:2] == ["rel", "in"] and answer[3][0] == "tuple":
        return None  # an interval is no list of its ends
    answer = _without_exclusion(gold, answer, question)
    gold, answer = (_with_points(tree) for tree in _as_vectors(gold, answer))
    gold, answer = _set_named(gold), _set_named(answer)
    gold = ["list", *gold[1:]] if gold[0] == "either" else gold
    if is_equality(answer) and answer[-1] in _EMPTY:
        answer = list(answer[-1])
    if gold in _EMPTY or answer in _EMPTY:  # no interval without numbers, and no 0
        return (gold, gold) if gold in _EMPTY and answer in _EMPTY else None
    return _values(gold, answer, question)


def _congruent(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree] | None:
    """Remove the modulus of both answers, where one has a modulus or the answer is a congruence."""
    moduli = gold[0] == "mod", answer[0] == "mod"
    if moduli[0] != moduli[1] and answer[:2] != ["rel", "equiv"]:
        congruence, family = (gold, answer) if moduli[0] else (answer, gold)
        if _is_class(congruence, family):
            return gold, gold
    if not any(moduli) and answer[2][0] != "var":
        return _unnamed(gold, ["rel", "=", *answer[2:]], question)
    modulus = answer[2][1] if moduli == (False, True) else ""
    if moduli == (True, False) or not constraints.asks_for_remainder(question, modulus):
        return None if any(moduli) else (gold, answer)
    if all(moduli) and gold[2] != answer[2]:
        return None
    gold_residue, answer_residue = _residue(gold), _residue(answer)
    first, second = _whole_number(gold_residue), _whole_number(answer_residue)
    if all(moduli) and first is not None and second is not None:
        size = int(gold[2][1]) if gold[2][1].isdigit() else 0
        return (gold_residue, gold_residue) if size and (first - second) % size == 0 else None
    return _unnamed(gold_residue, answer_residue, question)


def _values(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree] | None:
    """Remove the name before ``=``, if both names agree or only one answer has a name."""
    if gold[0] == "rel" and answer[0] == "rel":
        if _are_one_name(gold, answer):
            return _unnamed(list(gold[3]), list(answer[3]), question)
        if len(gold) == 4 < len(answer) and _are_one_name(gold, [*answer[:1], "=", *answer[2:4]]):
            value = value_named(answer)  # y = 2(x - 1) + 5 = 2x + 3
            return None if value is None else _unnamed(list(gold[3]), value, question)
        return _plain_approximation(gold), _plain_approximation(answer)
    if gold[0] == "based" and answer[0] == "num":
        return gold, ["based", answer[1], gold[2]]
    if gold[0] == "rel":
        value = value_named(gold)
        if value is not None:
            return _unnamed(value, answer, question)
    if answer[0] == "either":  # 7/2 or 3.5: one value in two forms, or two values
        is_single = gold[0] not in (*_SETS, "rel") and not holds(gold, "pm", "mp")
        answer = ["chain" if is_single else "list", *answer[1:]]
    if gold[0] == "rel":
        return gold, answer
    if answer[0] == "rel":
        return _right_of_relation(gold, answer, question)
    return _members_of(gold, answer, question)


def _right_of_relation(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree] | None:
    """The gold value and the value of the answer's relation."""
    is_comparison = answer[1] in ("<", ">") and not variables(answer)
    if is_comparison and (sign := constraints.demands_of(question).larger):
        return gold, list(answer[2] if answer[1] == sign else answer[3])
    if not is_equality(answer):
        return gold, answer
    names = answer[2:-1]
    if gold[0] == "tuple" and len(names) > 1 and all(name[0] == "var" for name in names):
        return gold, ["tuple", *([answer[-1]] * len(names))]  # x = y = 4
    if (value := value_named(answer, question)) is None:
        return None
    if gold[0] == "list" and value[0] == "tuple" == answer[2][0]:
        pairs = sorted(zip(map(str, answer[2][1:]), value[1:], strict=False))
        return _unnamed(gold, ["tuple", *(coordinate for _, coordinate in pairs)], question)
    if gold[0] in ("list", "set") and holds(value, "pm", "mp"):
        return _unnamed(gold, last_value(value), question)
    value = _as_rounded(gold, value) if constraints.demands_of(question).rounded else value
    return gold, _with_constant_of(gold, value, question)


def _members_of(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree] | None:
    """Remove the names of points and of several values."""
    answer = _without_point_names(gold, answer)
    if gold[0] in ("tuple", "interval") and answer[0] in _SEVERAL:
        is_named = any(member[0] == "rel" for member in answer[1:])
        if answer[0] == "tuple" and not is_named:
            return gold, answer
        ordered = _in_order_of_names(answer)
        return None if ordered is None else (gold, ordered)
    if gold[0] in ("list", "set") or holds(gold, "pm", "mp"):
        if answer[0] in _SEVERAL:
            return _several(gold, answer)
        if gold[0] == "list" and holds(answer, "pm", "mp"):
            return _several(gold, ["list", answer])
    return gold, _with_constant_of(gold, answer, question)


def _whole_number(tree: Tree) -> int | None:
    """The integer that a numeral with an optional minus sign shows; None for any other tree."""
    sign, tree = (-1, tree[1]) if tree[0] == "neg" else (1, tree)
    is_whole = tree[0] == "num" and tree[1].isdigit() and len(tree[1]) < _LONGEST_RESIDUE
    return sign * int(tree[1]) if is_whole else None


def _as_rounded(gold: Tree, answer: Tree) -> Tree:
    """67 of ``\\frac{200}{3} \\approx 67``, if that is the exact value to as many places."""
    if answer[0] != "approx" or gold[0] != "num" or answer[2][0] != "num":
        return answer
    exact, rounded = value_of(last_value(answer[1])), value_of(answer[2])
    whole, _, decimals = answer[2][1].partition(".")
    place = -len(decimals) or len(whole) - len(whole.rstrip("0"))
    if not (is_scalar(exact) and is_scalar(rounded)) or abs(exact - rounded) > 0.5001 * 10.0**place:
        return answer
    return list(answer[2])


def _progression(tree: Tree, name: str) -> tuple[complex, complex] | None:
    """Start and step of a formula that is linear in a variable."""
    first, second, third = (value_of(_renamed(tree, name, ["num", str(at)])) for at in (0, 1, 2))
    if not (is_scalar(first) and is_scalar(second) and is_scalar(third)):
        return None
    if abs(third - 2 * second + first) > TOLERANCE * max(1.0, abs(third)):
        return None
    return first, second - first


def _in_standard_form(gold: Tree, answer: Tree) -> Tree:
    """The answer in the notation of the gold one: ``2^3 \\cdot 5^1`` as ``2^3 \\cdot 5``."""
    match answer:
        case ["pow", ["num", digits], ["num", "1"]] if holds(gold, "pow"):
            return ["num", digits]
        case ["add", rest, ["mul", ["num", "0"], ["const", "i"]]]:  # 5 + 0i
            return list(rest)
        case ["rel", "=", ["call", "abs", ["var", _]], number] if (
            gold[0] in ("list", "set", "pm") and number[0] != "neg"
        ):
            return ["pm", number]
        case ["mul", scale, ["tuple", *members]] if gold[0] == "tuple" and not variables(scale):
            return ["tuple", *(_scaled(scale, member) for member in members)]
        case ["either" | "list", *parts] if gold[0] == "cup" and all(map(_is_part, parts)):
            return reduce(lambda tree, part: ["cup", tree, part], parts)
        case ["pow", ["tuple" | "interval", *members], ["var", "T" | "top"]]:
            return ["matrix", *([member] for member in members if isinstance(member, list))]
        case ["rel", sign, ["call", "abs", ["var", _] as name], number] if gold[0] in _SETS:
            if sign in ("<", "<="):
                return ["rel", f"{sign} {sign}", ["neg", number], name, number]
            if sign in (">", ">="):
                ray = ["rel", sign.replace(">", "<"), name, ["neg", number]]
                return ["cup", ray, ["rel", sign, name, number]]
        case ["rel", "<= <" | "< <", first, name, ["const", "oo"]]:
            return ["rel", ">=" if answer[1] == "<= <" else ">", name, first]
        case ["rel", "< <=" | "< <", ["neg", ["const", "oo"]], name, last]:
            return ["rel", answer[1].split()[1], name, last]
        case ["mul", *factors] if holds(gold, "pow") and all(f[0] == "num" for f in factors):
            powers = Counter(digits for _, digits in factors)
            terms = [
                ["pow", ["num", base], ["num", str(times)]] if times > 1 else ["num", base]
                for base, times in powers.items()
            ]
            return ["mul", *terms] if len(terms) > 1 else terms[0]
        case ["mul", ["num", "1"], ["const", "i"] as one] if one in subtrees(gold):
            return list(one)
        case ["mul" | "rel" | "add" | "neg", *_]:
            return mapped(answer, lambda member: _in_standard_form(gold, member))
    return answer


def _in_exponential_form(tree: Tree) -> Tree:
    """``\\cos\\theta + i\\sin\\theta`` as ``e^{i\\theta}``."""
    match tree:
        case ["call", "cis", angle]:
            return _direction(angle)
        case ["add", ["call", "cos", angle], ["mul", *factors]] if (
            len(factors) == 2 and _I in factors and ["call", "sin", angle] in factors
        ):
            return _direction(angle)
        case ["pow", ["const", "e"], ["frac", ["mul", *factors], below]] if _I in factors:
            rest = [factor for factor in factors if factor != _I]
            above = rest[0] if len(rest) == 1 else ["mul", *rest]
            return _direction(["frac", above, below])
        case ["mul" | "neg" | "list" | "set", *_]:
            return mapped(tree, _in_exponential_form)
    return tree


def _direction(angle: Tree) -> Tree:
    if angle[0] == "deg" and angle[1][0] == "num" and angle[1][1].isdigit():
        part = Fraction(int(angle[1][1]), 180)
        scale = ["num", str(part.numerator)]
        above = _PI if part.numerator == 1 else ["mul", scale, _PI]
        angle = above if part.denominator == 1 else ["frac", above, ["num", str(part.denominator)]]
    return ["pow", ["const", "e"], ["mul", _I, angle]]


def _is_part(tree: Tree) -> bool:
    return (
        tree[0] == "interval"
        or (tree[0] == "tuple" and len(tree) == 3)
        or (tree[0] == "rel" and set(tree[1].split()) <= {"<", "<=", ">", ">="})
    )


def _with_names_of(gold: Tree, answer: Tree, question: str) -> Tree:
    """The answer with the gold one's names of constants and parameters, those that the question
    does not have: ``A\\cos x + B\\sin x`` as ``C_1\\cos x + C_2\\sin x``."""
    names = variables(_right_side(gold)), variables(_right_side(answer))
    missing, added = names[0] - names[1], names[1] - names[0]
    is_numbered = holds(gold, "rel") and ["const", "set Z"] in subtrees(gold)
    if is_numbered and ["const", "set Z"] not in subtrees(answer):
        return answer
    if not question or not 0 < len(missing) == len(added) <= _MAX_RENAMED:
        return answer
    known = read_question(question).letters | _GRAPH_NAMES
    if any(name.partition("_")[0] in known or name.startswith("?") for name in missing | added):
        return answer
    wanted = value_of(_right_side(gold))
    for order in permutations(sorted(missing)):
        renamed = answer
        for name, gold_name in zip(sorted(added), order, strict=True):
            renamed = _renamed(renamed, name, ["var", gold_name])
        if is_near(wanted, value_of(_right_side(renamed))):
            return renamed
    return answer


def _right_side(tree: Tree) -> Tree:
    """The right side of an equation, without the domain of its parameters."""
    tree = list(tree[1]) if tree[0] == "list" else tree
    return list(tree[-1]) if tree[0] == "rel" else tree


def _intercepts(gold: Tree, answer: Tree, question: str) -> tuple[Tree, Tree]:
    """Turn points of an axis into numbers, if the question asks for an intercept."""
    if "-intercept" not in question.replace("$", "") or (gold[0] == "tuple") == (
        answer[0] == "tuple"
    ):
        return gold, answer
    axis = 1 if "y-intercept" in question.replace("$", "") else 2
    first, second = (
        tree[3 - axis] if tree[0] == "tuple" and len(tree) == 3 and tree[axis] == _ZERO else tree
        for tree in (gold, answer)
    )
    return first, second


def _in_radians(tree: Tree, other: Tree, question: str) -> Tree:
    """``45^\\circ`` as ``\\pi/4``, if the question names no unit and ``other`` is in radians."""
    right = _right_side(other)
    if tree[0] != "deg" or not question or holds(right, "deg") or _PI not in subtrees(right):
        return tree
    is_open = not {"deg", "rad"} & words_of(question)
    return list(_direction(tree)[2][2]) if is_open else tree


def _with_unit_last(gold: Tree, answer: Tree) -> Tree:
    """``60^\\circ = \\pi/3`` for ``\\pi/3 = 60^\\circ``, where the gold answer is in radians."""
    if not (answer[0] == "either" or is_equality(answer)) or answer[-1][0] == "var":
        return answer
    is_degree = _right_side(gold)[0] == "deg"
    members = [member for member in answer if isinstance(member, list)]
    same_unit = [member for member in members if (member[0] == "deg") == is_degree]
    if not same_unit or same_unit[-1] is answer[-1] or variables(same_unit[-1]):
        return answer
    return [*(member for member in answer if member is not same_unit[-1]), same_unit[-1]]


def _with_variable_of(gold: Tree, answer: Tree) -> Tree:
    """``f(x) \\geq 1`` as ``y \\geq 1`` for a set."""
    if answer[0] != "rel" or gold[0] not in _SETS or "=" in answer[1].split():
        return answer
    return [*answer[:2], *(["var", "y"] if _is_function(part) else part for part in answer[2:])]


def _is_function(tree: Tree) -> bool:
    return tree[0] == "call" and str(tree[1]).startswith("?") and tree[2][0] == "var"


def _scaled(scale: Tree, tree: Tree) -> Tree:
    """A coordinate times a number; of ``1/5`` and 3 the fraction ``3/5``."""
    if tree[0] == "neg":
        return ["neg", _scaled(scale, tree[1])]
    match scale:
        case ["frac", ["num", _] as above, below]:
            return ["frac", _scaled(above, tree), below]
        case ["num", "1"]:
            return tree
        case ["num", digits] if tree[0] == "num" and digits.isdigit() and tree[1].isdigit():
            return ["num", str(int(digits) * int(tree[1]))]
    return ["mul", scale, tree]


def _in_base_ten(tree: Tree) -> Tree:
    """``47_{10}`` as 47, also in a list."""
    if tree[0] == "based" and tree[2] == "10":
        return ["num", tree[1]]
    return [tree[0], *map(_in_base_ten, tree[1:])] if tree[0] in ("list", "tuple") else tree


def _residue(tree: Tree) -> Tree:
    """Remainder modulo a number: 1 of ``7^{100} \\equiv 1 \\pmod{5}``."""
    tree = tree[1] if tree[0] == "mod" else tree
    if tree[0] == "list":  # x \\equiv 1, 3 \\pmod 4
        return ["list", *map(_residue, tree[1:])]
    return list(tree[-1]) if tree[0] == "rel" and set(tree[1].split()) == {"equiv"} else tree


def _is_class(congruence: Tree, family: Tree) -> bool:
    """Whether ``7k + 3`` numbers the integers of ``x \\equiv 3 \\pmod 7``."""
    family, _, name = _without_domain(family)
    value = value_named(family) if family[0] == "rel" else family
    names = variables(value) if value is not None else set()
    residue, modulus = value_of(_residue(congruence)), value_of(congruence[2])
    if value is None or len(names) != 1 or not (name or names <= _PARAMETERS):
        return False
    line = _progression(value, next(iter(names)))
    if line is None or not is_scalar(residue) or not is_scalar(modulus) or modulus == 0:
        return False
    is_step = abs(abs(line[1]) - abs(modulus)) < TOLERANCE
    return is_step and _is_whole((line[0] - residue) / modulus)


def _with_points(tree: Tree) -> Tree:
    """``(\\pm 4, 0)`` as its two points."""
    members = tree[1:] if tree[0] == "list" else [tree]
    points = [point for member in members for point in _points(member)]
    return ["list", *points] if len(points) > len(members) else tree


def _points(tree: Tree) -> list[Tree]:
    if tree[0] == "pm" and tree[1][0] == "tuple":
        return [tree[1], ["tuple", *(["neg", coordinate] for coordinate in tree[1][1:])]]
    num_signs = [part[0] for part in subtrees(tree)].count("pm")
    if tree[0] != "tuple" or num_signs != 1:
        return [tree]
    return [with_sign(tree, is_upper) for is_upper in (True, False)]


def is_same_family(gold: Tree, answer: Tree) -> bool:
    """Whether ``13\\pi/6 + 2k\\pi`` and ``\\pi/6 + 2k\\pi`` have the same values for all k."""
    names = [name for name in variables(gold) & variables(answer) if name in _PARAMETERS]
    if len(names) != 1 or form_of(answer).steps - form_of(gold).steps - _OF_FAMILIES:
        return False
    families = [_members(tree, names[0]) for tree in (gold, answer)]
    if not all(families):
        return False
    reach = min(max(abs(number) for number in family) for family in families) / 3
    first, second = ([number for number in family if abs(number) <= reach] for family in families)
    return len(first) > 2 and all(
        any(abs(a - b) < TOLERANCE * max(1, reach) for b in others)
        for numbers, others in ((first, second), (second, first))
        for a in numbers
    )


def _members(tree: Tree, name: str) -> list[complex]:
    """The solutions that a family numbers, for small integers; empty for anything else."""
    solutions: list[complex] = []
    for item in tree[1:] if tree[0] in ("list", "either") else [tree]:
        value = value_named(item) if item[0] == "rel" else item
        num_signs = [part[0] for part in subtrees(value or [""])].count("pm")
        if value is None or variables(value) != {name} or value[0] in _SEVERAL or num_signs > 1:
            return []
        for sign in (True, False)[: 1 + num_signs]:
            signed = with_sign(value, sign)
            numbers = [value_of(_renamed(signed, name, n)) for n in _INTEGERS]
            if not all(map(is_scalar, numbers)):
                return []
            solutions.extend(number for number in numbers if is_scalar(number))
    return solutions


def _is_whole(number: complex) -> bool:
    return abs(number - round(number.real)) < TOLERANCE


def _as_vectors(gold: Tree, answer: Tree) -> tuple[Tree, Tree]:
    """Columns and ``2i - 3j`` as tuples, if ``other`` is one; multiples of a tuple as columns."""
    gold, answer = (
        (_from_unit_vectors(tree) or _rows_of(tree, other) or tree)
        if other[0] in ("tuple", "matrix")
        else tree
        for tree, other in ((gold, answer), (answer, gold))
    )
    is_family = gold[0] in ("mul", "add") and bool(variables(gold))
    if is_family and answer[0] in ("mul", "add", "tuple") and holds(gold, "tuple", "matrix"):
        return _as_columns(gold), _as_columns(answer)
    if {gold[0], answer[0]} != {"matrix", "tuple"}:
        return gold, answer
    is_column = [
        tree[0] == "matrix" and (len(tree) == 2 or all(len(row) == 1 for row in tree[1:]))
        for tree in (gold, answer)
    ]
    first, second = (
        ["tuple", *(entry for row in tree[1:] for entry in row)] if column else tree
        for tree, column in zip((gold, answer), is_column, strict=True)
    )
    return first, second


def _rows_of(tree: Tree, other: Tree) -> Tree | None:
    """The matrix of ``[[1, 2], [3, 4]]``, where the other one is a matrix; None for others."""
    if other[0] != "matrix" or tree[0] not in ("tuple", "interval"):
        return None
    rows = [member for member in tree[1:] if isinstance(member, list)]
    if not all(row[0] in ("tuple", "interval") for row in rows):
        return None
    return ["matrix", *([part for part in row[1:] if isinstance(part, list)] for row in rows)]


def _as_columns(tree: Tree) -> Tree:
    if tree[0] == "tuple":
        return ["matrix", *([coordinate] for coordinate in tree[1:])]
    return mapped(tree, _as_columns)


def _from_unit_vectors(tree: Tree) -> Tree | None:
    """``(2, -3)`` of ``2\\mathbf{i} - 3\\mathbf{j}``; None for anything else."""
    parts: dict[str, Tree] = {}
    for term in tree[1:] if tree[0] == "add" else [tree]:
        factors = term[1] if term[0] == "neg" else term
        *scale, last = factors[1:] if factors[0] == "mul" else [factors]
        name = str(last[1]).rpartition(" ")[2] if last[0] in ("var", "const") else ""
        name = name.removeprefix("\\").removesuffix("math")
        if (
            name not in _UNIT_VECTORS
            or name in parts
            or {*_UNIT_VECTORS} & variables(["mul", *scale])
        ):
            return None
        one: Tree = ["num", "1"] if not scale else scale[0] if len(scale) == 1 else ["mul", *scale]
        parts[name] = ["neg", one] if term[0] == "neg" else one
    if not parts or parts.keys() == {"i"}:
        return None
    names = _UNIT_VECTORS if "k" in parts else _UNIT_VECTORS[:2]
    return ["tuple", *(parts.get(name, ["num", "0"]) for name in names)]


def _are_one_name(gold: Tree, answer: Tree) -> bool:
    """Whether ``y(x) =``, ``y_1 =`` and ``f(x) =`` stand for ``y =``."""
    if not (gold[1] == answer[1] == "=" and len(gold) == len(answer) == 4):
        return False
    names = []
    for name in (gold[2], answer[2]):
        if name[0] != "var" and not str(name[1]).startswith("?"):
            return False
        names.append(str(name[1]).lstrip("?").partition("_")[0])
    is_graph = "y" in names and bool(set(names) & _GRAPHS)
    return names[0] == names[1] or is_graph


def _without_domain(tree: Tree) -> tuple[Tree, Tree | None, str]:
    """Equations, domain, parameter of ``x = k\\pi, k \\in \\mathbb{Z}`` or several families."""
    match tree:
        case ["list", *families] if all(family[0] == "list" for family in families):
            parts = [_without_domain(family) for family in families]
            if all(part[1:] == parts[0][1:] for part in parts):
                return ["list", *(part[0] for part in parts)], *parts[0][1:]
        case ["list", *families, ["rel", "in", ["var", name], ["const", _] as domain]]:
            for family in families:
                is_about_name = family[0] == "rel" and family[2] == ["var", name]
                is_family = family[0] != "rel" or is_equality(family)
                if is_about_name or not is_family or name not in variables(family):
                    return tree, None, ""
            if families:
                solutions = families[0] if len(families) == 1 else ["list", *families]
                return solutions, domain, str(name)
    return tree, None, ""


def _without_exclusion(gold: Tree, answer: Tree, question: str) -> Tree:
    """``x + 3`` of ``x + 3, x \\neq 3``, if the question has a denominator that is 0 at 3."""
    match answer:
        case ["list", first, ["rel", ">=" | ">", ["var", name], ["num", "0" | "1"]]] if (
            name in _PARAMETERS and name in variables(first) and gold[0] not in _SETS
        ):  # 3n - 1, n \\geq 1
            return list(first)
        case ["list", first, ["rel", "!=", ["var", name], at]] if gold[0] not in _SETS:
            if not is_equality(first) and first[0] == "rel":
                return answer
            divisors = (
                part.tree[2] for part in read_question(question).parts if part.tree[0] == "frac"
            )
            values = [
                value_of(_renamed(divisor, name, at))
                for divisor in divisors
                if name in variables(divisor)
            ]
            if any(is_scalar(value) and abs(value) < TOLERANCE for value in values):
                return list(first)
    return answer


def _with_parameter(gold: Tree, name: str, answer: Tree, answer_name: str) -> Tree:
    """``k\\pi`` as ``n\\pi``: any integer may number solutions. ``name`` and ``answer_name`` are
    the parameters that the gold answer and the answer state."""
    missing, added = (variables(a) - variables(b) for a, b in ((gold, answer), (answer, gold)))
    name = name or "".join(missing & _PARAMETERS)
    answer_name = answer_name or "".join(added & _PARAMETERS)
    if name not in missing or answer_name not in added:
        return answer
    return _renamed(answer, answer_name, ["var", name])


def _renamed(tree: Tree, name: str, new: Tree) -> Tree:
    if tree == ["var", name]:
        return new
    return mapped(tree, lambda member: _renamed(member, name, new))


def _set_named(tree: Tree) -> Tree:
    """The set in ``x \\in \\{-7, 7\\}``."""
    is_in = tree[0] == "rel" and tree[1] == "in" and _is_plain_name(tree[2])
    return list(tree[3]) if is_in and (tree[3][0] in _SETS or tree[3][0] == "const") else tree


def _without_point_names(gold: Tree, answer: Tree) -> Tree:
    """The coordinates of ``C(3, -4)``, where the gold answer is coordinates; of several, too."""
    if gold[0] in ("list", "set") and answer[0] == gold[0] and len(answer) == len(gold):
        pairs = zip(gold[1:], answer[1:], strict=True)
        return [answer[0], *(_without_point_names(*pair) for pair in pairs)]
    if gold[0] not in ("tuple", "interval"):
        return answer
    match answer:
        case ["mul", ["var", name], [kind, *_] as point]:
            pass
        case ["call", name, [kind, *_] as point] if str(name).startswith("?"):
            name = name[1:]
        case _:
            return answer
    return point if kind in ("tuple", "interval") and name[:1].isupper() else answer


def is_equality(tree: Tree) -> bool:
    """Whether all its signs are those of equality or approximation."""
    return tree[0] == "rel" and set(tree[1].split()) <= _EQUALITIES


def last_value(tree: Tree) -> Tree:
    """The last of several values that are equal, or nearly: ``\\frac{3}{4} = 0.75``."""
    if tree[0] == "approx":
        return last_value(tree[1])
    return list(tree[-1]) if tree[0] == "chain" else tree


def value_named(tree: Tree, question: str = "") -> Tree | None:
    """The value that an equation names; None if it names none. Members before the value stay if
    they have no other variables, and must be equal: ``["chain", number, ..., last]``."""
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
    known = variables(members[-1])
    alike = [member for member in members[:-1] if variables(member) <= known]
    return ["chain", *alike, members[-1]] if alike else list(members[-1])


def _without_names(tree: Tree, question: str) -> list[Tree]:
    members = list(tree[2:])
    is_pair = len(members) == 2 and tree[1] == "=" and not is_name(members[0], question)
    if is_pair and is_name(members[1], question):  # 5 = x
        return members[:1]
    while len(members) > 1 and is_name(members[0], question):
        del members[0]
    is_formula = len(members) == 2 and variables(members[1]) and not variables(members[0])
    if is_formula and read_question(question).asks_for(members[0]):  # \log 12 = 2a + b
        del members[0]
    return members


def is_name(tree: Tree, question: str = "") -> bool:
    """Whether a tree can be the name of a value."""
    if tree[0] == "var" or tree == ["const", "e"]:  # the eccentricity
        return True
    if tree[0] == "call":
        members = [member for member in tree[2:] if isinstance(member, list)]
        if variables(tree) and (
            str(tree[1]).startswith("?")
            or all(_is_plain_name(member) for member in members if variables(member))
        ):
            return True
    if _is_plain_name(tree):
        return True
    if question and _is_foreign(tree, question):  # x_1 + x_2
        return True
    if tree[0] == "frac" and all(map(_is_plain_name, tree[1:])):  # a/b, the ratio of a to b
        above, below = (
            "".join(subtree[1] for subtree in subtrees(part) if subtree[0] == "var")
            for part in tree[1:]
        )
        if f"ratio of {above} to {below}" in question.replace("$", ""):
            return True
    if question and not variables(tree) and form_of(tree).is_too_large:  # i^{2023}
        return read_question(question).asks_for(tree)
    return bool(variables(tree)) and read_question(question).asks_for(tree)


def _is_foreign(tree: Tree, question: str) -> bool:
    """Whether a tree has no numbers, and only letters that the question does not have."""
    names = variables(tree)
    known = read_question(question).letters
    return (
        tree[0] in ("add", "mul", "frac", "neg")
        and bool(names)
        and not holds(tree, "num", "const", "call")
        and all(len(name.partition("_")[0]) == 1 for name in names)
        and all("_" in name or name not in known for name in names)
        and not any(name in question for name in names if "_" in name)
    )


def _is_plain_name(tree: Tree) -> bool:
    """``x``, ``AB``, ``\\Delta p``, ``P(A)``, ``(x, y)``, ``x:y``."""
    if tree[0] == "mul":
        is_side = len(tree) <= 1 + _MAX_LETTERS
        return is_side and all(part[0] == "var" for part in tree[1:]) and tree[1][1][:1].isupper()
    if tree[0] == "pow":  # of a matrix: A^{-1}, A^T
        is_inverse = tree[2] in (["neg", ["num", "1"]], ["var", "T"])
        return bool(is_inverse and tree[1][0] == "var" and tree[1][1].isupper())
    if tree[0] in ("tuple", "ratio"):
        return all(map(_is_plain_name, tree[1:]))
    return bool(tree[0] == "var" or (tree[0] == "call" and str(tree[1]).startswith("?")))


def solved_for(tree: Tree) -> set[str]:
    """The variables that are alone on one side of a relation and occur nowhere else in it."""
    alone = [member[1] for member in tree[2:] if member[0] == "var"]
    names = [part[1] for part in subtrees(tree) if part[0] == "var"]
    return {name for name in alone if names.count(name) == 1}


def _with_constant_of(gold: Tree, answer: Tree, question: str) -> Tree:
    """``x^2 + K`` as ``x^2 + C``, as constants of integration have several names. An antiderivative
    that differs from the gold answer by a number becomes the gold answer."""
    if gold[0] != answer[0] or gold[0] not in ("add", "mul"):
        return answer
    is_integral = "\\int" in question or "antiderivative" in question
    if is_integral and any(term[0] == "var" and term in gold for term in answer[1:]):
        pairs = [(value_of(gold, point), value_of(answer, point)) for point in ("", "1", "2")]
        differences = [a - b for a, b in pairs if is_scalar(a) and is_scalar(b)]
        are_equal = len(differences) == 3 and all(is_near(differences[0], d) for d in differences)
        if are_equal and abs(differences[0]) > TOLERANCE and not work_left(gold, answer):
            return gold
    (own, *more), (other, *others) = (
        sorted(variables(a) - variables(b)) or [""] for a, b in ((gold, answer), (answer, gold))
    )
    if more or others or not {own, other} <= _CONSTANTS:
        return answer
    if gold[0] == "mul" and own[:1] != "C":
        return answer
    terms = [["var", own] if member == ["var", other] else member for member in answer[1:]]
    is_term = ["var", own] in gold and ["var", other] in answer
    return [answer[0], *terms] if is_term else answer


def _plain_approximation(tree: Tree) -> Tree:
    return [tree[0], tree[1].replace("~", "="), *tree[2:]]


def _values_by_name(items: Sequence[Tree]) -> dict[str, Tree] | None:
    """The values by name; None if a value has no name or two have the same one."""
    values: dict[str, Tree] = {}
    for item in items:
        value = value_named(item) if item[0] == "rel" else None
        if value is None or not is_name(item[2]) or str(item[2]) in values:
            return None
        values[str(item[2])] = value
    return values


def _in_order_of_names(several: Tree) -> Tree | None:
    """``y = 1, x = 2`` becomes ``(2, 1)``."""
    values = _values_by_name(several[1:])
    return None if values is None else ["tuple", *(values[name] for name in sorted(values))]


def _several(gold: Tree, answer: Tree) -> tuple[Tree, Tree] | None:
    """Remove the names in two lists. Unnamed values are in the order of the gold answer's names."""
    if any(item[0] == "tuple" for item in gold[1:]):
        points = [_in_order_of_names(item) if item[0] == "list" else item for item in answer[1:]]
        answer = answer if None in points else [answer[0], *points]
    has_names = gold[0] in ("list", "set") and any(item[0] == "rel" for item in gold[1:])
    if not has_names:
        values = _item_values(answer)
        return None if values is None else (gold, [answer[0], *values])
    labels = [item[2][1] for item in gold[1:] if item[0] == "rel" and item[2][0] == "var"]
    names = _values_by_name(answer[1:]) or {}
    are_labels = set(labels) <= LABELS and len(labels) == len(gold) - 1
    if are_labels and names.keys() != {str(["var", label]) for label in labels}:  # as written
        golds, answers = _item_values(gold), _item_values(answer)
        if golds is None or answers is None:
            return None
        return ["tuple", *golds], ["tuple", *answers]
    values_of_gold = _in_order_of_names(gold)
    if any(item[0] in ("rel", "list") for item in answer[1:]):
        are_one = values_of_gold is None and not any(item[0] == "list" for item in gold[1:])
        values = _item_values(gold) if are_one else None
        if values is not None:  # of one unknown: x = 1, x = 2
            return _several([gold[0], *values], answer)
        return gold, answer
    if values_of_gold is not None:
        return values_of_gold, ["tuple", *answer[1:]]
    values = _item_values(gold)
    return None if values is None else ([gold[0], *values], answer)


def _item_values(several: Tree) -> list[Tree] | None:
    """The items without their names; None if one is a relation that names no value."""
    values = [value_named(item) if item[0] == "rel" else item for item in several[1:]]
    known = [value for value in values if value is not None]
    return known if len(known) == len(values) else None
